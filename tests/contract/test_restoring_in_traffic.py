"""Raising counters while the gateway writes, in memory and on a NATS server."""

from decimal import Decimal

import pytest

from budget_recovery_dagster.adapters.nats import MAX_CONFLICTS
from budget_recovery_dagster.domain import ValueShape, Window, Written
from budget_recovery_dagster.errors import StoreWriteError
from tests.contract.restore_orders import (
    LIFETIME,
    NOVEMBER,
    key,
    open_after,
    order,
    raised,
    stored,
)
from tests.contract.usage_stores import Subject
from tests.identities import identity_of


@pytest.mark.parametrize(
    ("written", "outcome", "end"),
    [
        (b'{"usage":"3","by":"it"}', Written.RAISED, b'{"usage":"5","by":"it"}'),
        (b'{"usage":"5"}', Written.KEPT, b'{"usage":"5"}'),
        (b'{"usage":"7"}', Written.KEPT, b'{"usage":"7"}'),
        (b"?", Written.UNREADABLE, b"?"),
    ],
)
def test_a_counter_that_the_gateway_writes_meanwhile_is_decided_again(
    subject: Subject, written: bytes, outcome: Written, end: bytes
) -> None:
    subject.put(key("e"), b'{"usage":"1"}')
    live = subject.store.open_tenant("t")
    (result,) = live.raise_counters(
        [order("e", "5")], is_open=open_after(lambda: subject.put(key("e"), written))
    )
    assert result.written is outcome
    assert stored(subject, key("e")).data == end


def test_a_counter_created_meanwhile_is_not_overwritten(subject: Subject) -> None:
    live = subject.store.open_tenant("t")
    (result,) = live.raise_counters(
        [order("e", "5")], is_open=open_after(lambda: subject.put(key("e"), b"7"))
    )
    assert (result.written, result.before) == (Written.KEPT, Decimal(7))


def test_a_counter_removed_meanwhile_is_recreated(subject: Subject) -> None:
    subject.put(key("e"), b'{"usage":"1","by":"gateway"}')
    live = subject.store.open_tenant("t")
    (result,) = live.raise_counters(
        [order("e", "5", shape=ValueShape.BARE)],
        is_open=open_after(lambda: subject.remove(key("e"))),
    )
    assert (result.written, result.before) == (Written.RAISED, None)
    assert stored(subject, key("e")).data == b"5"


def test_a_counter_removed_before_is_recreated(subject: Subject) -> None:
    subject.put(key("e"), b"9")
    subject.remove(key("e"))
    assert raised(subject, order("e", "5", shape=ValueShape.BARE)) == [Written.RAISED]
    assert stored(subject, key("e")).data == b"5"


def test_a_window_that_closes_before_the_retry_is_not_written(subject: Subject) -> None:
    subject.put(key("e"), b"1")
    answers = iter([True, False])

    def is_open(_: Window) -> bool:
        if is_open_now := next(answers):
            subject.put(key("e"), b"2")
        return is_open_now

    (result,) = subject.store.open_tenant("t").raise_counters([order("e", "5")], is_open=is_open)
    assert (result.written, result.before) == (Written.CLOSED, Decimal(2))
    assert stored(subject, key("e")).data == b"2"


def test_a_counter_under_constant_writes_is_given_up_and_named(subject: Subject) -> None:
    subject.put(key("e"), b"1")
    asked: list[Window] = []

    def is_open(window: Window) -> bool:
        if window == NOVEMBER.window:
            asked.append(window)
            subject.put(key("e"), b"1")
        return True

    live = subject.store.open_tenant("t")
    with pytest.raises(StoreWriteError, match=r"usage\.t\.b\.2026-11\.e"):
        live.raise_counters([order("e", "5"), order("e", "5", LIFETIME)], is_open=is_open)
    assert len(asked) == MAX_CONFLICTS + 1
    assert stored(subject, key("e", LIFETIME)).data
    assert stored(subject, key("e")).data == b"1"


def test_an_exception_from_is_open_stops_the_restore(subject: Subject) -> None:
    def is_open(_: Window) -> bool:
        raise InterruptedError("the lease is lost")

    live = subject.store.open_tenant("t")
    before = identity_of(subject.store)
    with pytest.raises(InterruptedError):
        live.raise_counters([order("e", "5")], is_open=is_open)
    assert identity_of(subject.store) == before
