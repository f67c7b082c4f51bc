"""The contract of raising counters of a tenant, in memory and on a NATS server."""

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pytest

from budget_recovery_dagster.domain import BudgetWindow, ValueShape, Window, Written
from budget_recovery_dagster.errors import StoreReadError, StoreWriteError
from tests.contract.restore_orders import (
    NOVEMBER,
    always,
    key,
    never,
    open_after,
    order,
    raised,
    stored,
)
from tests.contract.usage_stores import UGLY_NAMES, Subject
from tests.identities import identity_of
from tests.nats_servers import COUNTERS, usages


def assert_just_now(text: str) -> None:
    written_at = datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
    assert abs(datetime.now(UTC) - written_at) < timedelta(seconds=60)


def test_the_reading_of_a_live_tenant_equals_that_of_the_counters(subject: Subject) -> None:
    subject.put(key("a"), b'{"usage":"1"}')
    subject.put(key("bad"), b"?")
    subject.put("usage.t.odd", b"1")
    subject.put(key("other", tenant="u"), b"1")
    subject.put(key("gone"), b"1")
    subject.remove(key("gone"))
    captured = subject.store.reader(COUNTERS).read("t")
    assert subject.store.open_tenant("t").reading == replace(captured, boards=None)


def test_a_tenant_name_that_is_invalid_in_a_key_is_refused(subject: Subject) -> None:
    with pytest.raises(StoreReadError, match="cannot occur in a key"):
        subject.store.open_tenant("")


def test_lower_and_missing_counters_are_raised_and_the_others_kept(subject: Subject) -> None:
    subject.put(key("lower"), b'{"usage":"1"}')
    subject.put(key("same"), b'{"usage":"2.50"}')
    subject.put(key("higher"), b'{"usage":"3"}')
    before = {entity: stored(subject, key(entity)) for entity in ("same", "higher")}
    orders = [order(entity, "2.5") for entity in ("higher", "missing", "same", "lower")]
    results = subject.store.open_tenant("t").raise_counters(orders, is_open=always)
    assert [(result.written, result.before) for result in results] == [
        (Written.KEPT, Decimal(3)),
        (Written.RAISED, None),
        (Written.KEPT, Decimal("2.5")),
        (Written.RAISED, Decimal(1)),
    ]
    assert usages(subject.store, "t") == {
        "lower": "2.5",
        "same": "2.5",
        "higher": "3",
        "missing": "2.5",
    }
    assert {entity: stored(subject, key(entity)) for entity in before} == before


def test_no_orders_write_nothing(subject: Subject) -> None:
    before = identity_of(subject.store)
    live = subject.store.open_tenant("t")
    assert live.raise_counters([], is_open=always) == ()
    assert live.rebuild_boards([], is_open=always) == ()
    assert identity_of(subject.store) == before


def test_a_raised_value_keeps_every_other_byte(subject: Subject) -> None:
    value = b' {"x" :[1.0e5,{"usage":9}],"usage": "1" ,\t"updated_at":7,"na\xc3\xafve":"\\u00e9"}\n'
    subject.put(key("text"), value)
    subject.put(key("number"), b'{"usage":1e-3,"n":1.10}')
    subject.put(key("bare"), b" 1 ")
    exact = "99999999999999999999.000000000000000001"
    assert (
        raised(subject, *(order(entity, exact) for entity in ("text", "number", "bare")))
        == [Written.RAISED] * 3
    )
    assert stored(subject, key("text")).data == value.replace(b'"1"', f'"{exact}"'.encode())
    assert stored(subject, key("number")).data == f'{{"usage":{exact},"n":1.10}}'.encode()
    assert stored(subject, key("bare")).data == f" {exact} ".encode()


CONTROL = {
    "Nats-Msg-Id": "17",
    "Nats-Rollup": "sub",
    "nats-expected-last-msg-id": "",
    "KV-Operation": "PUT",
}
FOREIGN = {"Team": "blue", "traceparent": "00-4bf9-01", "X": "", "By": "the: gateway"}


def test_a_raised_counter_keeps_the_gateways_headers_and_no_instruction_to_nats(
    subject: Subject,
) -> None:
    """Repeated, the instructions would drop the write as a duplicate or purge other revisions."""
    subject.put(key("e"), b"1", ttl="1h", headers={**CONTROL, **FOREIGN})
    assert raised(subject, order("e", "2")) == [Written.RAISED]
    # The second raise reads what the first one has written.
    assert raised(subject, order("e", "3")) == [Written.RAISED]
    found = stored(subject, key("e"))
    assert found.data == b"3"
    sent = {"Nats-Expected-Last-Subject-Sequence", "Nats-TTL"}
    assert {name: value for name, value in found.headers.items() if name not in sent} == FOREIGN


def test_headers_of_a_value_written_meanwhile_are_kept(subject: Subject) -> None:
    subject.put(key("e"), b"1", headers={"Team": "blue"})
    live = subject.store.open_tenant("t")
    meanwhile = open_after(
        lambda: subject.put(key("e"), b"2", ttl="1h", headers={"Team": "red", "By": "gateway"})
    )
    (result,) = live.raise_counters([order("e", "5")], is_open=meanwhile)
    found = stored(subject, key("e"))
    assert (result.written, found.data) == (Written.RAISED, b"5")
    assert (found.headers["Team"], found.headers["By"]) == ("red", "gateway")
    assert 3540 <= int(found.ttl or "0") <= 3600


def test_a_created_counter_has_no_headers_of_a_deleted_one(subject: Subject) -> None:
    subject.put(key("e"), b"1", headers={"Team": "blue"})
    subject.remove(key("e"))
    assert raised(subject, order("e", "2")) == [Written.RAISED]
    assert "Team" not in stored(subject, key("e")).headers


def test_a_raised_value_has_the_time_of_its_write(subject: Subject) -> None:
    subject.put(key("e"), b'{"updated_at":"2020-01-01T00:00:00.000Z","usage":"1","by":"gateway"}')
    raised(subject, order("e", "2"))
    content = json.loads(stored(subject, key("e")).data)
    assert_just_now(content.pop("updated_at"))
    assert content == {"usage": "2", "by": "gateway"}


@pytest.mark.parametrize("shape", ValueShape)
def test_a_missing_counter_is_created_in_the_shape_of_the_order(
    subject: Subject, shape: ValueShape
) -> None:
    raised(subject, order("e", "1.500", shape=shape), order("tiny", "1E-18", shape=shape))
    value = stored(subject, key("e")).data.decode()
    if shape is ValueShape.BARE:
        assert value == "1.5"
    else:
        usage = '"1.5"' if shape is ValueShape.TEXT else "1.5"
        start, _, end = value.partition('"updated_at":"')
        assert start == f'{{"usage":{usage},'
        assert_just_now(end.removesuffix('"}'))
    (tiny,) = [c for c in subject.counters.read("t").counters if c.entity == "tiny"]
    assert (tiny.usage, tiny.shape) == (Decimal("1E-18"), shape)


def test_an_unreadable_counter_is_never_overwritten(subject: Subject) -> None:
    subject.put(key("bad"), b'{"usage":"NaN"}')
    before = stored(subject, key("bad"))
    (result,) = subject.store.open_tenant("t").raise_counters([order("bad", "5")], is_open=always)
    assert (result.written, result.before) == (Written.UNREADABLE, None)
    assert "NaN" in result.reason
    assert stored(subject, key("bad")) == before


def test_counters_of_a_closed_window_are_not_written(subject: Subject) -> None:
    subject.put(key("lower"), b"1")
    subject.put(key("bad"), b"?")
    before = identity_of(subject.store)
    live = subject.store.open_tenant("t")
    results = live.raise_counters(
        [order(entity, "2") for entity in ("lower", "bad", "missing")], is_open=never
    )
    assert [(result.written, result.before) for result in results] == [
        (Written.CLOSED, Decimal(1)),
        (Written.CLOSED, None),
        (Written.CLOSED, None),
    ]
    assert identity_of(subject.store) == before


def test_each_window_is_checked_separately(subject: Subject) -> None:
    october = BudgetWindow("b", Window.parse("2026-10"))
    live = subject.store.open_tenant("t")
    results = live.raise_counters(
        [order("e", "1", october), order("e", "1")],
        is_open=lambda window: window.token == "2026-11",
    )
    assert [result.written for result in results] == [Written.CLOSED, Written.RAISED]
    assert subject.stored(key("e", october)) is None


def test_the_higher_of_two_orders_for_a_counter_wins(subject: Subject) -> None:
    assert raised(subject, order("e", "5"), order("e", "3")) == [Written.RAISED, Written.KEPT]
    assert raised(subject, order("e", "6"), order("e", "7")) == [Written.RAISED, Written.RAISED]
    assert usages(subject.store, "t") == {"e": "7"}


def test_raising_again_writes_nothing(subject: Subject) -> None:
    orders = [order(str(number), "5") for number in range(10)]
    raised(subject, *orders)
    before = identity_of(subject.store)
    assert raised(subject, *orders) == [Written.KEPT] * 10
    assert identity_of(subject.store) == before


def test_other_keys_are_not_touched(subject: Subject) -> None:
    others = [
        key("e", tenant="u"),
        key("e", BudgetWindow("b2", NOVEMBER.window)),
        key("e", BudgetWindow("b", Window.parse("2026-10"))),
        "usage.t.not.a.counter.at.all",
        "blocked.t.b.2026-11.e",
        "leaderboard.t.b.2026-11",
        "ratelimit.t.e",
        "__guard.x",
    ]
    for name in others:
        subject.put(name, b"1", ttl="1h")
    before = {name: stored(subject, name) for name in others}
    raised(subject, order("e", "5"), order(None, "5"))
    assert {name: stored(subject, name) for name in others} == before
    assert usages(subject.store, "u") == {"e": "1"}


def test_any_name_is_restored_to_its_own_key(subject: Subject) -> None:
    for name in UGLY_NAMES:
        of = BudgetWindow(name, NOVEMBER.window)
        orders = [order(entity, "1", of) for entity in (*UGLY_NAMES, None)]
        assert raised(subject, *orders, tenant=name) == [Written.RAISED] * len(orders)
    assert subject.counters.list_tenants().tenants == set(UGLY_NAMES)
    for name in UGLY_NAMES:
        counters = subject.counters.read(name).counters
        assert {(each.of.budget, each.entity) for each in counters} == {
            (name, entity) for entity in (*UGLY_NAMES, None)
        }


def test_a_counter_without_a_valid_key_is_refused_before_anything_is_written(
    subject: Subject,
) -> None:
    live = subject.store.open_tenant("t")
    before = identity_of(subject.store)
    with pytest.raises(StoreWriteError, match="has no valid key"):
        live.raise_counters([order("e", "1"), order("@" * 400, "1")], is_open=always)
    assert identity_of(subject.store) == before
