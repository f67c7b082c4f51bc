"""Counters that are raised while the gateway writes, in memory and on a real NATS server alike."""

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
def test_what_the_gateway_writes_meanwhile_is_decided_on_anew(
    subject: Subject, written: bytes, outcome: Written, end: bytes
) -> None:
    subject.put(key("e"), b'{"usage":"1"}')
    live = subject.store.open_tenant("t")
    (result,) = live.raise_counters(
        [order("e", "5")], is_open=open_after(lambda: subject.put(key("e"), written))
    )
    assert result.written is outcome
    assert stored(subject, key("e")).data == end


def test_a_counter_that_comes_into_being_meanwhile_is_not_overwritten(subject: Subject) -> None:
    live = subject.store.open_tenant("t")
    (result,) = live.raise_counters(
        [order("e", "5")], is_open=open_after(lambda: subject.put(key("e"), b"7"))
    )
    assert (result.written, result.before) == (Written.KEPT, Decimal(7))


def test_a_counter_that_is_removed_meanwhile_is_made_anew(subject: Subject) -> None:
    subject.put(key("e"), b'{"usage":"1","by":"gateway"}')
    live = subject.store.open_tenant("t")
    (result,) = live.raise_counters(
        [order("e", "5", shape=ValueShape.BARE)],
        is_open=open_after(lambda: subject.remove(key("e"))),
    )
    assert (result.written, result.before) == (Written.RAISED, None)
    assert stored(subject, key("e")).data == b"5"


def test_a_counter_that_was_removed_before_is_made_anew(subject: Subject) -> None:
    subject.put(key("e"), b"9")
    subject.remove(key("e"))
    assert raised(subject, order("e", "5", shape=ValueShape.BARE)) == [Written.RAISED]
    assert stored(subject, key("e")).data == b"5"


def test_a_window_that_closes_before_the_second_try_is_left(subject: Subject) -> None:
    subject.put(key("e"), b"1")
    answers = iter([True, False])

    def is_open(_: Window) -> bool:
        if is_open_now := next(answers):
            subject.put(key("e"), b"2")
        return is_open_now

    (result,) = subject.store.open_tenant("t").raise_counters([order("e", "5")], is_open=is_open)
    assert (result.written, result.before) == (Written.CLOSED, Decimal(2))
    assert stored(subject, key("e")).data == b"2"


def test_a_counter_that_others_never_stop_writing_is_given_up_by_name(subject: Subject) -> None:
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


def test_who_asks_whether_a_window_is_open_may_stop_it_all(subject: Subject) -> None:
    def is_open(_: Window) -> bool:
        raise InterruptedError("the lease is lost")

    live = subject.store.open_tenant("t")
    before = identity_of(subject.store)
    with pytest.raises(InterruptedError):
        live.raise_counters([order("e", "5")], is_open=is_open)
    assert identity_of(subject.store) == before
