"""The value of a counter: adding a cost, keeping foreign fields, remembering recent values."""

from datetime import UTC, datetime
from decimal import Decimal

import pytest

from budget_recovery_dagster.domain import UnreadableUsageError
from budget_recovery_dagster.sandbox.gateway import UNUSED, Counter, Recent, Watermark

NOON = datetime(2026, 11, 29, 12, tzinfo=UTC)


def raised(value: bytes, cost: str = "1") -> bytes:
    return Counter.parse(value).raised(Decimal(cost), Watermark("a", 3)).to_json(NOON)


def test_a_new_counter_holds_usage_time_and_mark() -> None:
    assert UNUSED.raised(Decimal("0.10"), Watermark("a", 3)).to_json(NOON) == (
        b'{"usage":"0.1","updated_at":"2026-11-29T12:00:00.000Z","applied":"a:3"}'
    )


def test_a_mark_of_each_ledger_is_kept() -> None:
    assert b'"applied":"a:3 b:7"' in raised(b'{"usage":"1","applied":"a:2 b:7"}')
    assert b'"applied":"a:3"' in raised(b'{"usage":"1","applied":7}')


@pytest.mark.parametrize(
    "field",
    [
        b'"n":1.10',
        b'"n":1E+400',
        b'"n":-0.0',
        b'"n":123456789012345678901234567890.123456789',
        b'"n":"1.10"',
        b'"\\ud800 \\"":"\\ud800"',
        b'"n":[1.0,{"a":null,"b":[true,false,[]]},{}]',
    ],
)
def test_fields_of_other_programs_are_kept_unchanged(field: bytes) -> None:
    assert raised(b'{"usage":7.50,' + field + b"}").endswith(b'"applied":"a:3",' + field + b"}")


def test_a_bare_number_becomes_an_object() -> None:
    assert raised(b"20.5").startswith(b'{"usage":"21.5",')


def test_a_sum_out_of_bounds_is_refused() -> None:
    highest = b'{"usage":"99999999999999999999.999999999999999998"}'
    assert b'"99999999999999999999.999999999999999999"' in raised(highest, "0.000000000000000001")
    with pytest.raises(UnreadableUsageError, match="20 integer digits"):
        raised(highest, "0.000000000000000002")


@pytest.mark.parametrize("depth", [100, *range(400, 1000, 50), 100_000])
def test_a_deeply_nested_value_is_kept_or_refused(depth: int) -> None:
    nested = b"[" * depth + b"]" * depth
    written = refusal = None
    try:
        written = raised(b'{"usage":"1","n":' + nested + b"}")
    except UnreadableUsageError as error:
        refusal = str(error)
    assert written is None or written.endswith(b'"n":' + nested + b"}")
    assert refusal in (None, "the value is nested too deeply")


def test_the_oldest_value_is_forgotten_first() -> None:
    recent: Recent[int] = Recent(2)
    recent["a"] = 1
    recent["b"] = 2
    recent["a"] = 3
    recent["c"] = 4
    assert [recent.get(name) for name in "abc"] == [3, None, 4]
    recent.pop("a")
    assert "a" not in recent
    assert "c" in recent
