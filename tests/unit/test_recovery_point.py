from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from budget_recovery_dagster.domain import (
    NEVER_EXPIRES,
    NO_EXPIRY,
    BudgetWindow,
    Commit,
    Drop,
    Entity,
    Expiries,
    KnownExpiry,
    NoExpiry,
    TenantUsages,
    UnlistedEntities,
    Window,
    WindowMerge,
    WindowPoint,
    covers,
    find_drops,
    max_merge,
)

MONTH = BudgetWindow("spend", Window.parse("2026-11"))
LIFETIME = BudgetWindow("spend", Window.parse("lifetime"))

usages = st.dictionaries(
    st.one_of(st.none(), st.sampled_from(["a", "b", "c"])),
    st.decimals(min_value=0, max_value=100, places=2, allow_nan=False),
)


def test_merging_keeps_the_higher_usage_of_each_entity() -> None:
    merged = max_merge(
        {None: Decimal(5), "a": Decimal(1)}, {"a": Decimal(3), "b": Decimal(2)}, {None: Decimal(4)}
    )
    assert merged == {None: Decimal(5), "a": Decimal(3), "b": Decimal(2)}


@given(usages, usages, usages)
def test_merging_is_associative_commutative_and_idempotent(
    one: dict[str | None, Decimal], two: dict[str | None, Decimal], three: dict[str | None, Decimal]
) -> None:
    assert max_merge(one, two) == max_merge(two, one)
    assert max_merge(max_merge(one, two), three) == max_merge(one, max_merge(two, three))
    assert max_merge(one, one) == one
    assert covers(max_merge(one, two), one)


def test_usages_cover_others_if_nothing_is_missing_or_lower() -> None:
    earlier = {None: Decimal(5), "a": Decimal(1)}
    assert covers({None: Decimal(5), "a": Decimal(2), "new": Decimal(0)}, earlier)
    assert not covers({None: Decimal(5)}, earlier)
    assert not covers({None: Decimal("4.99"), "a": Decimal(1)}, earlier)


def test_missing_and_lower_counters_are_drops() -> None:
    point: TenantUsages = {
        MONTH: {"gone": Decimal(5), "lower": Decimal(3), "same": Decimal(1)},
        LIFETIME: {None: Decimal(9)},
    }
    observed: TenantUsages = {MONTH: {"lower": Decimal(2), "same": Decimal(1), "new": Decimal(0)}}
    assert find_drops(point, observed, unknown=[], unlisted=[]) == (
        Drop(LIFETIME, None, Decimal(9), None),
        Drop(MONTH, "gone", Decimal(5), None),
        Drop(MONTH, "lower", Decimal(3), Decimal(2)),
    )


def test_an_unreadable_counter_is_not_a_drop() -> None:
    point: TenantUsages = {MONTH: {"a": Decimal(5), "b": Decimal(5)}}
    assert find_drops(point, {}, unknown=[(MONTH, "a")], unlisted=[]) == (
        Drop(MONTH, "b", Decimal(5), None),
    )


def test_an_unlisted_entity_is_a_drop_only_above_the_lowest_listed_usage() -> None:
    point: TenantUsages = {
        MONTH: {
            "above": Decimal("7.01"),
            "equal": Decimal(7),
            "below": Decimal("6.99"),
            "listed and lower": Decimal(9),
            "listed": Decimal(7),
            "unreadable": Decimal(99),
        },
        LIFETIME: {"below": Decimal(1)},
    }
    observed: TenantUsages = {
        MONTH: {"listed and lower": Decimal(8), "listed": Decimal(7), "new": Decimal(50)}
    }
    full = UnlistedEntities(MONTH, Decimal(7), is_truncated=True)
    assert find_drops(point, observed, unknown=[(MONTH, "unreadable")], unlisted=[full]) == (
        Drop(MONTH, "above", Decimal("7.01"), None),
        Drop(MONTH, "listed and lower", Decimal(9), Decimal(8)),
        # The board of the other window is not full, so it lists every entity.
        Drop(LIFETIME, "below", Decimal(1), None),
    )


def test_only_listed_entities_are_compared_if_unlisted_ones_are_unknown() -> None:
    point: TenantUsages = {
        MONTH: {None: Decimal(99), "gone": Decimal(99), "lower": Decimal(3), "same": Decimal(1)}
    }
    observed: TenantUsages = {MONTH: {"lower": Decimal(2), "same": Decimal(1)}}
    for is_truncated in (True, False):
        unlisted = [UnlistedEntities(MONTH, None, is_truncated)]
        assert find_drops(point, observed, unknown=[], unlisted=unlisted) == (
            Drop(MONTH, "lower", Decimal(3), Decimal(2)),
        )


@given(usages, usages)
def test_every_drop_found_in_a_board_is_a_drop_by_counters(
    earlier: dict[Entity, Decimal], held: dict[Entity, Decimal]
) -> None:
    by_counters = find_drops({MONTH: earlier}, {MONTH: held}, unknown=[], unlisted=[])
    largest = sorted(held, key=held.__getitem__, reverse=True)[:2]
    listed = {entity: held[entity] for entity in largest}
    full = len(largest) == 2
    unlisted = [UnlistedEntities(MONTH, min(listed.values()), is_truncated=True)] if full else []
    by_board = find_drops({MONTH: earlier}, {MONTH: listed}, unknown=[], unlisted=unlisted)
    assert {(drop.entity, drop.before) for drop in by_board} <= {
        (drop.entity, drop.before) for drop in by_counters
    }
    if not full:
        assert by_board == by_counters


NEWEST = datetime(2026, 11, 25, 12, tzinfo=UTC)
entities = st.one_of(st.none(), st.sampled_from(["a", "b", "c"]))
known_expiries = st.dictionaries(entities, st.integers(-9, 9) | st.sampled_from(NoExpiry))


@given(st.lists(known_expiries, max_size=5), st.data())
def test_each_key_has_its_newest_known_expiry_in_whatever_order_records_are_added(
    recorded: list[dict[Entity, KnownExpiry]], data: st.DataObject
) -> None:
    held = dict.fromkeys([None, "a", "b", "c"], Decimal(1))
    expected: dict[Entity, KnownExpiry] = {}
    for record in recorded:
        expected |= record
    newest = Commit(len(recorded), NEWEST, NEWEST)
    window = WindowMerge(MONTH, now=NEWEST, newest_at=NEWEST, shape=None, has_board=None)
    window.add(newest, held, {})
    for number, record in data.draw(st.permutations(list(enumerate(recorded)))):
        window.add_expiries(number, record)
    assert window.merged(None).expiries == expected
    assert window.lacks_expiries == (len(expected) < len(held))


@pytest.mark.parametrize(
    ("expiries", "unknown", "board"),
    [
        ({}, 86400, 86400),
        ({"a": 3600}, 86400, 86400),
        ({"a": 3600, "b": 3600}, 86400, 3600),
        ({"a": 90000}, 90000, 90000),
        ({"a": NO_EXPIRY}, 86400, NO_EXPIRY),
        ({"a": NO_EXPIRY, "b": 90000}, 90000, NO_EXPIRY),
        ({"a": NEVER_EXPIRES}, 86400, NEVER_EXPIRES),
        ({"a": NEVER_EXPIRES, "b": 90000}, 90000, NEVER_EXPIRES),
        ({"a": NO_EXPIRY, "b": NEVER_EXPIRES}, 86400, NEVER_EXPIRES),
    ],
)
def test_an_unknown_expiry_is_a_day_or_that_of_another_key(
    expiries: Expiries, unknown: KnownExpiry, board: KnownExpiry
) -> None:
    held: dict[Entity, Decimal] = {"a": Decimal(1), "b": Decimal(1)}
    month = WindowPoint(MONTH, held, NEWEST, None, expiries)
    assert (month.unknown_expiry, month.expiry_of_board) == (unknown, board)
    lifetime = replace(month, of=LIFETIME)
    assert lifetime.unknown_expiry is NO_EXPIRY
    lasts = len(expiries) == 2 or board is NEVER_EXPIRES
    assert lifetime.expiry_of_board == (board if lasts else NO_EXPIRY)
