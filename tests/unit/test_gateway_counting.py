"""A counter's value: what is added to it, what is kept of it, and what is remembered of it."""

from datetime import UTC, datetime
from decimal import Decimal

import pytest

from budget_recovery_dagster.domain import UnreadableUsageError
from budget_recovery_dagster.sandbox.gateway.counting import UNUSED, Counter
from budget_recovery_dagster.sandbox.gateway.recent import Recent
from budget_recovery_dagster.sandbox.gateway.requests import Watermark

NOON = datetime(2026, 11, 29, 12, tzinfo=UTC)


def raised(value: bytes, cost: str = "1") -> bytes:
    return Counter.parse(value).raised(Decimal(cost), Watermark("a", 3)).to_json(NOON)


def test_a_new_counter_says_what_has_been_counted_and_when() -> None:
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
def test_fields_of_others_are_written_back_as_they_were(field: bytes) -> None:
    assert raised(b'{"usage":7.50,' + field + b"}").endswith(b'"applied":"a:3",' + field + b"}")


def test_a_bare_number_becomes_an_object() -> None:
    assert raised(b"20.5").startswith(b'{"usage":"21.5",')


def test_a_sum_that_nobody_could_read_is_refused() -> None:
    highest = b'{"usage":"99999999999999999999.999999999999999998"}'
    assert b'"99999999999999999999.999999999999999999"' in raised(highest, "0.000000000000000001")
    with pytest.raises(UnreadableUsageError, match="20 integer digits"):
        raised(highest, "0.000000000000000002")


@pytest.mark.parametrize("depth", [100, *range(400, 1000, 50), 100_000])
def test_a_value_that_is_nested_deeply_is_written_back_or_refused(depth: int) -> None:
    nested = b"[" * depth + b"]" * depth
    written = refusal = None
    try:
        written = raised(b'{"usage":"1","n":' + nested + b"}")
    except UnreadableUsageError as error:
        refusal = str(error)
    assert written is None or written.endswith(b'"n":' + nested + b"}")
    assert refusal in (None, "the value is nested too deeply")


def test_what_was_put_in_first_is_forgotten_first() -> None:
    recent: Recent[int] = Recent(2)
    recent.put("a", 1)
    recent.put("b", 2)
    recent.put("a", 3)
    recent.put("c", 4)
    assert [recent.get(name) for name in "abc"] == [3, None, 4]
    recent.forget("a")
    recent.forget("never")
    assert "a" not in recent
    assert "c" in recent
