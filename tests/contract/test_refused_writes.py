"""Refused writes and their effect on others, in memory and on a NATS server."""

import functools
from decimal import Decimal

import pytest

from budget_recovery_dagster.adapters.nats import IN_FLIGHT, MAX_REJECTIONS
from budget_recovery_dagster.domain import BoardOrder, BudgetWindow, Window, Written
from budget_recovery_dagster.errors import StoreWriteError
from tests.contract import limited_stores
from tests.contract.limited_stores import MOST_BYTES, Limit
from tests.contract.restore_orders import NOVEMBER, always, board_order, key, order
from tests.nats_servers import usages

LONG = "99999999999999999999.000000000000000001"
"""A usage that makes its value too large."""

MANY: dict[str | None, str] = {f"entity-{number:02}": "1" for number in range(30)}
"""A leaderboard that is too large, unlike one of a single entity."""

NO_ROOM = "maximum bytes exceeded|The store is full"


@pytest.fixture(params=["memory", "nats"])
def limit(request: pytest.FixtureRequest) -> Limit:
    if request.param == "memory":
        return limited_stores.in_memory
    url = request.getfixturevalue("nats_server").url
    return functools.partial(limited_stores.on_nats, url)


def board_of(budget: str, usages: dict[str | None, str]) -> BoardOrder:
    return board_order(usages, BudgetWindow(budget, NOVEMBER.window))


def test_a_refused_counter_is_reported_and_does_not_affect_others(limit: Limit) -> None:
    with limit(is_limited_by_value=True) as limited:
        around = len('{"usage":"1","by":""}')
        value = b'{"usage":"1","by":"%s"}' % (b"x" * (MOST_BYTES - around))
        limited.put(key("fat"), value)
        entities = [f"e{number}" for number in range(3000)]
        entities[1500] = "fat"
        live = limited.store.open_tenant("t")
        results = live.raise_counters([order(each, LONG) for each in entities], is_open=always)
        assert [result.order.entity for result in results] == entities
        refused = results[1500]
        assert (refused.written, refused.before) == (Written.REFUSED, Decimal(1))
        assert "size exceeds maximum allowed (10054)" in refused.reason or (
            f"more than {MOST_BYTES}" in refused.reason
        )
        others = {*results} - {refused}
        assert {(each.written, each.reason) for each in others} == {(Written.RAISED, "")}
        found = usages(limited.store, "t")
        assert found.pop("fat") == "1"
        assert found == dict.fromkeys({*entities} - {"fat"}, LONG)


def test_too_large_values_do_not_count_towards_giving_up(limit: Limit) -> None:
    with limit(is_limited_by_value=True) as limited:
        fat = [str(number) for number in range(MAX_REJECTIONS + 10)]
        around = len('{"usage":"1","by":""}')
        for entity in fat:
            limited.put(key(entity), b'{"usage":"1","by":"%s"}' % (b"x" * (MOST_BYTES - around)))
        orders = [order(entity, LONG) for entity in [*fat, "last"]]
        results = limited.store.open_tenant("t").raise_counters(orders, is_open=always)
        assert [each.written for each in results] == [Written.REFUSED] * len(fat) + [Written.RAISED]


def test_a_counter_without_room_is_reported_after_the_others_are_raised(limit: Limit) -> None:
    with limit() as limited:
        live = limited.store.open_tenant("t")
        limited.leave_room_for_two(lambda: live.raise_counters([order("0", "5")], is_open=always))
        large = "x" * 250
        orders = [order(entity, "5") for entity in ("1", large, "2")]
        with pytest.raises(StoreWriteError, match=NO_ROOM) as caught:
            live.raise_counters(orders, is_open=always)
        if "maximum bytes" in caught.value.message:
            assert key(large) in caught.value.message
        assert usages(limited.store, "t") == dict.fromkeys("012", "5")


def test_a_full_store_is_given_up_with_the_first_refusal(limit: Limit) -> None:
    with limit() as limited:
        limited.fill()
        asked: list[Window] = []

        def is_open(window: Window) -> bool:
            asked.append(window)
            return True

        orders = [order(str(number), "5") for number in range(3 * IN_FLIGHT)]
        live = limited.store.open_tenant("t")
        with pytest.raises(StoreWriteError, match=NO_ROOM) as caught:
            live.raise_counters(orders, is_open=is_open)
        if "maximum bytes" in caught.value.message:
            assert f"{key('0')}:" in caught.value.message
        assert MAX_REJECTIONS <= len(asked) < IN_FLIGHT + MAX_REJECTIONS
        assert usages(limited.store, "t") == {}


def test_a_refused_board_is_reported_and_does_not_affect_others(limit: Limit) -> None:
    with limit(is_limited_by_value=True) as limited:
        orders = [board_of("a", {"x": "1"}), board_of("b", MANY), board_of("c", {"x": "1"})]
        results = limited.store.open_tenant("t").rebuild_boards(orders, is_open=always)
        assert [(each.of, each.is_written) for each in results] == [
            (orders[0].of, True),
            (orders[1].of, False),
            (orders[2].of, True),
        ]
        first, refused, last = (each.reason for each in results)
        assert (first, last) == ("", "")
        assert "exceeds maximum allowed (10054)" in refused or f"than {MOST_BYTES}" in refused


def test_a_board_without_room_is_reported_and_does_not_affect_others(limit: Limit) -> None:
    with limit() as limited:
        live = limited.store.open_tenant("t")
        small = board_of("0", {"x": "1"})
        limited.leave_room_for_two(lambda: live.rebuild_boards([small], is_open=always))
        orders = [board_of("1", {"x": "1"}), board_of("2", MANY), board_of("3", {"x": "1"})]
        results = live.rebuild_boards(orders, is_open=always)
        assert [each.of for each in results] == [each.of for each in orders]
        assert [each.is_written for each in results] == [True, False, True]
        first, refused, last = (each.reason for each in results)
        assert (first, last) == ("", "")
        assert "write of leaderboard.t.2.2026-11: maximum bytes" in refused or "is full" in refused


def test_boards_after_too_many_refusals_are_reported_as_not_tried(limit: Limit) -> None:
    with limit() as limited:
        limited.fill()
        count = IN_FLIGHT + 2 * MAX_REJECTIONS
        orders = [board_of(str(number), {"x": "1"}) for number in range(count)]
        results = limited.store.open_tenant("t").rebuild_boards(orders, is_open=always)
        assert [each.of for each in results] == [each.of for each in orders]
        assert not any(each.is_written for each in results)
        assert results[-1].reason == "Not tried: the store rejected 100 writes in a row."
        for number, result in enumerate(results[:MAX_REJECTIONS]):
            reason = result.reason
            assert f"leaderboard.t.{number}.2026-11: maximum" in reason or "is full" in reason
