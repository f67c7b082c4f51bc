from datetime import UTC, datetime
from decimal import Decimal

import pytest

from budget_recovery_dagster.domain import (
    NEVER_EXPIRES,
    NO_EXPIRY,
    BudgetWindow,
    CaptureSource,
    CounterReading,
    Drop,
    Entity,
    Expiries,
    Expiry,
    KnownExpiry,
    OmittedCounter,
    StoreIdentity,
    TenantReading,
    TenantSnapshot,
    TenantUsages,
    UnlistedEntities,
    UnreadableKey,
    Usages,
    ValueShape,
    Window,
    hash_expiries,
    hash_usages,
    take_snapshot,
)

AT = datetime(2026, 11, 29, 14, 5, tzinfo=UTC)
IDENTITY = StoreIdentity(AT, 7)
MONTH = BudgetWindow("spend", Window.parse("2026-11"))
CLOSED = BudgetWindow("spend", Window.parse("2026-10"))


def counter(
    of: BudgetWindow,
    entity: Entity,
    usage: str,
    shape: ValueShape = ValueShape.TEXT,
    expiry: Expiry = None,
) -> CounterReading:
    return CounterReading(of, entity, Decimal(usage), shape, expiry)


def snapshot(
    *counters: CounterReading,
    omitted: tuple[OmittedCounter, ...] = (),
    unreadable: tuple[UnreadableKey, ...] = (),
    point: TenantUsages | None = None,
) -> TenantSnapshot:
    reading = TenantReading(
        "acme", CaptureSource.COUNTERS, counters, omitted, unreadable, is_partial=False
    )
    return take_snapshot(reading, AT, IDENTITY, point or {})


def test_counters_become_one_record_per_budget_and_window() -> None:
    week = BudgetWindow("spend", Window.parse("2026-W48"))
    taken = snapshot(
        counter(MONTH, None, "9"), counter(week, "bob", "2"), counter(MONTH, "bob", "4")
    )
    assert [(str(record.of), dict(record.usages)) for record in taken.records] == [
        ("spend 2026-11", {None: Decimal(9), "bob": Decimal(4)}),
        ("spend 2026-W48", {"bob": Decimal(2)}),
    ]
    assert taken.entry_count == 3


def test_a_record_covers_earlier_ones_unless_something_is_missing_or_lower() -> None:
    point: TenantUsages = {MONTH: {"a": Decimal(2), "b": Decimal(2)}}
    whole = snapshot(counter(MONTH, "a", "2"), counter(MONTH, "b", "3"), point=point)
    missing = snapshot(counter(MONTH, "a", "2"), point=point)
    lower = snapshot(counter(MONTH, "a", "1"), counter(MONTH, "b", "3"), point=point)
    first = snapshot(counter(MONTH, "a", "2"))
    assert [taken.records[0].covers_earlier for taken in (whole, missing, lower, first)] == [
        True,
        False,
        False,
        True,
    ]
    assert missing.drops == (Drop(MONTH, "b", Decimal(2), None),)


def test_a_record_of_a_closed_window_never_covers_earlier_ones() -> None:
    assert not snapshot(counter(CLOSED, "a", "2")).records[0].covers_earlier


def test_an_omitted_counter_is_listed_in_its_record_and_is_not_a_drop() -> None:
    omission = OmittedCounter(MONTH, "b", "usage.acme.spend.2026-11.b", "-5 is negative")
    taken = snapshot(
        counter(MONTH, "a", "2"),
        omitted=(omission,),
        point={MONTH: {"a": Decimal(2), "b": Decimal(2)}},
    )
    assert taken.records[0].omitted == (omission,)
    assert taken.omitted_count == 1
    assert not taken.records[0].covers_earlier
    assert taken.drops == ()


def test_a_budget_with_only_unreadable_values_has_a_record() -> None:
    omission = OmittedCounter(MONTH, None, "usage.acme.spend.2026-11.=", "not JSON")
    record = snapshot(omitted=(omission,)).records[0]
    assert (dict(record.usages), record.shape, record.omitted) == ({}, None, (omission,))


def test_the_most_common_shape_and_the_expiry_of_each_key_are_recorded() -> None:
    mixed = snapshot(
        counter(MONTH, "a", "1", ValueShape.BARE, expiry=60),
        counter(MONTH, "b", "1", ValueShape.NUMBER, expiry=3600),
        counter(MONTH, None, "1", ValueShape.NUMBER, expiry=NO_EXPIRY),
    ).records[0]
    assert mixed.shape is ValueShape.NUMBER
    assert mixed.expiries == {"a": 60, "b": 3600, None: NO_EXPIRY}
    # One of them is unknown, so the source does not have them.
    unknown = snapshot(counter(MONTH, "a", "1", expiry=60), counter(MONTH, "b", "1"))
    assert unknown.records[0].expiries == {}


@pytest.mark.parametrize(
    ("found", "recorded"),
    [
        ((60, 62, 61), (62, 62, 62)),
        ((60, 63, 61), (60, 63, 61)),
        ((-5, -4, -5), (-4, -4, -4)),
        ((NO_EXPIRY, NO_EXPIRY, NO_EXPIRY), (NO_EXPIRY, NO_EXPIRY, NO_EXPIRY)),
        ((60, NO_EXPIRY, 61), (60, NO_EXPIRY, 61)),
        ((NEVER_EXPIRES,) * 3, (NEVER_EXPIRES,) * 3),
        ((60, NEVER_EXPIRES, 61), (60, NEVER_EXPIRES, 61)),
        ((NO_EXPIRY, NEVER_EXPIRES, NO_EXPIRY), (NO_EXPIRY, NEVER_EXPIRES, NO_EXPIRY)),
    ],
)
def test_expiries_that_differ_only_by_rounding_are_one(
    found: tuple[KnownExpiry, ...], recorded: tuple[KnownExpiry, ...]
) -> None:
    counters = [
        counter(MONTH, name, "1", expiry=each) for name, each in zip("abc", found, strict=True)
    ]
    record = snapshot(*counters).records[0]
    assert record.expiries == dict(zip("abc", recorded, strict=True))
    # Only differing expiries are stored with the content.
    assert (record.expiry_hash is None) == (len(set(recorded)) == 1)


def test_the_hash_of_expiries_depends_on_each_of_them() -> None:
    expiries: list[Expiries] = [
        {"a": 1, "b": 2},
        {"a": 2, "b": 1},
        {"a": 1, "b": NO_EXPIRY},
        {"a": 1, "b": NEVER_EXPIRES},
        {"a": 1, None: 2},
        {"a": 1},
        {"a=1;1:b": 2},
        {},
    ]
    assert len({hash_expiries(each) for each in expiries}) == len(expiries)
    assert hash_expiries({"b": 2, "a": 1}) == hash_expiries({"a": 1, "b": 2})


def test_a_snapshot_is_empty_only_without_keys_and_without_a_recovery_point() -> None:
    assert snapshot().is_empty
    assert not snapshot(unreadable=(UnreadableKey("usage.acme.x", "no window"),)).is_empty
    assert not snapshot(point={MONTH: {"a": Decimal(2)}}).is_empty


def test_equal_usages_have_equal_hashes_in_any_order() -> None:
    one = hash_usages({"a": Decimal("1.5"), None: Decimal(2)})
    assert one == hash_usages({None: Decimal(2), "a": Decimal("1.5")})
    different: list[Usages] = [
        {"a": Decimal("1.5"), None: Decimal(3)},
        {"a": Decimal("1.5")},
        {"b": Decimal("1.5"), None: Decimal(2)},
        {"a=1.5;0:": Decimal(2)},
        {},
    ]
    assert len({one, *map(hash_usages, different)}) == 6


def from_boards(
    *counters: CounterReading,
    omitted: tuple[OmittedCounter, ...] = (),
    unlisted: tuple[UnlistedEntities, ...] = (),
    point: TenantUsages | None = None,
) -> TenantSnapshot:
    reading = TenantReading(
        "acme",
        CaptureSource.LEADERBOARDS,
        counters,
        omitted,
        (),
        is_partial=False,
        unlisted=unlisted,
    )
    return take_snapshot(reading, AT, IDENTITY, point or {})


def listed(of: BudgetWindow, entity: Entity, usage: str) -> CounterReading:
    return CounterReading(of, entity, Decimal(usage), shape=None, expiry=None)


def test_a_snapshot_records_its_source() -> None:
    assert snapshot().source is CaptureSource.COUNTERS
    assert from_boards().source is CaptureSource.LEADERBOARDS


def test_shape_and_expiry_are_unknown_if_the_source_lacks_them() -> None:
    record = from_boards(listed(MONTH, "a", "2")).records[0]
    assert (record.shape, record.expiries) == (None, {})
    some = from_boards(
        listed(MONTH, "a", "2"), listed(MONTH, "b", "2"), counter(MONTH, "c", "2", ValueShape.TEXT)
    )
    assert some.records[0].shape is ValueShape.TEXT


def test_only_records_of_full_boards_are_truncated() -> None:
    week = BudgetWindow("spend", Window.parse("2026-W48"))
    day = BudgetWindow("spend", Window.parse("2026-11-29"))
    taken = from_boards(
        listed(MONTH, "a", "2"),
        listed(week, "a", "1"),
        omitted=(OmittedCounter(day, None, "key", "not JSON", is_entity_known=False),),
        unlisted=(
            UnlistedEntities(MONTH, Decimal(2), is_truncated=True),
            UnlistedEntities(day, None, is_truncated=False),
        ),
    )
    assert {record.of: record.is_truncated for record in taken.records} == {
        MONTH: True,
        week: False,
        day: False,
    }
    assert taken.truncated_count == 1


def test_a_truncated_record_covers_only_if_no_earlier_usage_is_missing_or_lower() -> None:
    full = (UnlistedEntities(MONTH, Decimal(2), is_truncated=True),)
    point: TenantUsages = {MONTH: {"a": Decimal(2), "b": Decimal(1)}}
    whole = from_boards(
        listed(MONTH, "a", "2"), listed(MONTH, "b", "2"), unlisted=full, point=point
    )
    unlisted = from_boards(
        listed(MONTH, "a", "2"), listed(MONTH, "c", "2"), unlisted=full, point=point
    )
    lower = from_boards(
        listed(MONTH, "a", "2"), listed(MONTH, "b", "0.5"), unlisted=full, point=point
    )
    assert [taken.records[0].covers_earlier for taken in (whole, unlisted, lower)] == [
        True,
        False,
        False,
    ]
    # Unknown is not missing: b may still have its 1.
    assert (whole.drops, unlisted.drops) == ((), ())
    assert lower.drops == (Drop(MONTH, "b", Decimal(1), Decimal("0.5")),)


def test_an_entry_without_an_entity_is_not_the_aggregate() -> None:
    unnamed = OmittedCounter(MONTH, None, "key", "entry 2: no field entity", is_entity_known=False)
    aggregate = OmittedCounter(MONTH, None, "key", "entry 2: NaN", is_entity_known=True)
    point: TenantUsages = {MONTH: {None: Decimal(5)}}
    unlisted = (UnlistedEntities(MONTH, None, is_truncated=False),)
    lower = listed(MONTH, None, "4")
    assert from_boards(lower, omitted=(unnamed,), unlisted=unlisted, point=point).drops == (
        Drop(MONTH, None, Decimal(5), Decimal(4)),
    )
    assert from_boards(lower, omitted=(aggregate,), point=point).drops == ()
