"""Restores into a bucket that deletes its oldest keys when it is full."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Self

import pytest

from budget_recovery_dagster.domain import (
    NO_EXPIRY,
    Action,
    BudgetWindow,
    Outcome,
    RaiseOrder,
    RaiseResult,
    RecoveryPlan,
    RecoveryState,
    StoreIdentity,
    ValueShape,
    Window,
    plan_restore,
)
from budget_recovery_dagster.errors import AttemptFailedError, StoreFullError
from budget_recovery_dagster.ports import LiveTenant
from budget_recovery_dagster.services.restore import StillWaiting
from budget_recovery_dagster.services.restore.report import find_missing
from budget_recovery_dagster.services.restore.tenants import live_usages
from tests.boards import board_key
from tests.fakes.usage_store import MemoryUsageStore
from tests.unit.manual_harness import (
    OF_A,
    OF_B,
    ManualHarness,
    captured_manual_harness,
    closes_incident,
)
from tests.unit.recovery_harness import outcome_of

NOON = datetime(2026, 11, 25, 12, tzinfo=UTC)
DAY = BudgetWindow("spend", Window.parse("2026-11-25"))
FOREIGN = "ratelimit.globex.1"
# Three counters, two leaderboards and our marker; a restore needs room for 1.5 times as many.
WHOLE, WITH_MARGIN = 6, 9


@pytest.fixture
def harness() -> ManualHarness:
    """Return a store of two tenants, captured and checked."""
    return captured_manual_harness()


def lose_with_room_for(harness: ManualHarness, free: int) -> None:
    """Lose the store; the new one holds a rate limit, and has room for so many more keys."""
    harness.store.max_messages = 1 + free
    harness.wipe()
    harness.store.put(FOREIGN, b"1")


def keeps_foreign(harness: ManualHarness) -> bool:
    return harness.store.live_key(FOREIGN).value is not None


def attempts(harness: ManualHarness) -> list[tuple[int, str | None]]:
    incident = harness.plane.incidents.recent(1)[0]
    found = harness.plane.incidents.attempts_of(incident.incident_id)
    return [(each.number, each.outcome) for each in found]


def test_a_restore_without_room_waits_and_names_the_setting(harness: ManualHarness) -> None:
    lose_with_room_for(harness, WITH_MARGIN - 1)
    sequence = harness.store.stream.last_sequence
    assert isinstance(harness.recover(), StillWaiting)
    result = harness.recover()
    assert isinstance(result, StillWaiting)
    assert result.reason.startswith(
        "The bucket has no room for the restore: max_msgs=9 leaves 8, and 9 are needed (1.5 x 6)."
    )
    assert result.hint.startswith("raise max_msgs to at least 10.")
    assert harness.incident.waiting is not None
    assert harness.incident.waiting.reason == result.reason
    assert harness.incident.attempts == 0
    assert attempts(harness) == []
    # Not even our marker was written.
    assert harness.store.stream.last_sequence == sequence
    assert keeps_foreign(harness)


def test_a_restore_with_just_enough_room_evicts_nothing(harness: ManualHarness) -> None:
    lose_with_room_for(harness, WITH_MARGIN)
    assert outcome_of(harness.recover()) is Outcome.RESTORED
    assert harness.store.limits().used.messages == 1 + WHOLE
    assert keeps_foreign(harness)
    assert (harness.usage("a"), harness.usage("a", "alice"), harness.usage("b")) == (
        "80",
        "30",
        "5",
    )


def test_a_restore_waits_for_bytes_too(harness: ManualHarness) -> None:
    lose_with_room_for(harness, 1000)
    harness.store.max_bytes = harness.store.limits().used.bytes + 1000
    result = harness.recover()
    assert isinstance(result, StillWaiting)
    assert f"max_bytes={harness.store.max_bytes} leaves 1,000, and " in result.reason
    assert "max_msgs" not in result.reason
    harness.store.max_bytes += 2000
    assert outcome_of(harness.recover()) is Outcome.RESTORED
    assert keeps_foreign(harness)


def test_a_full_store_in_which_nothing_is_lower_needs_no_room(harness: ManualHarness) -> None:
    lose_with_room_for(harness, 1000)
    harness.spend("a", "80")
    harness.spend("a", "30", "alice")
    harness.spend("b", "5")
    harness.store.max_messages = 4
    assert outcome_of(harness.recover()) is Outcome.NOTHING_LOST
    assert harness.store.limits().used.messages == 4
    assert keeps_foreign(harness)
    assert any("A further loss may go undetected" in each for each in harness.messages)


def test_overwritten_counters_need_no_messages(harness: ManualHarness) -> None:
    lose_with_room_for(harness, 1000)
    harness.spend("a", "1")
    harness.spend("a", "1", "alice")
    harness.spend("b", "1")
    harness.rank("a", {None: "1"})
    harness.rank("b", {None: "1"})
    # One more for our marker, with its margin.
    harness.store.max_messages = 6 + 2
    assert outcome_of(harness.recover()) is Outcome.RESTORED
    assert harness.usage("a") == "80"
    assert keeps_foreign(harness)


def test_a_store_that_fills_up_during_a_restore_stops_it_before_the_next_tenant(
    harness: ManualHarness,
) -> None:
    lose_with_room_for(harness, WITH_MARGIN)
    # One key less: the leaderboard of "a" is then the last that fits.
    harness.before_write(3, lambda: fill(harness, leave=1))
    result = harness.recover()
    assert isinstance(result, StillWaiting)
    assert result.reason.startswith("The bucket has no room for tenant 'b': max_msgs=10 leaves 0,")
    assert (harness.usage("a"), harness.usage("a", "alice")) == ("80", "30")
    assert harness.usage("b") is None
    assert keeps_foreign(harness)
    # The attempt is recorded, but does not count.
    assert harness.incident.attempts == 0
    assert attempts(harness) == [(1, f"Stopped, and not counted. {result.reason}")]
    harness.store.before_write = None
    harness.clock.advance(timedelta(minutes=1))
    assert isinstance(harness.recover(), StillWaiting)

    harness.store.max_messages = 20
    assert outcome_of(harness.recover()) is Outcome.RESTORED
    assert harness.usage("b") == "5"
    assert keeps_foreign(harness)


def fill(harness: ManualHarness, *, leave: int) -> None:
    """Write keys of others until there is room for so many more."""
    limit = harness.store.max_messages
    assert limit is not None
    for number in range(limit - leave - harness.store.limits().used.messages):
        harness.store.put(f"ratelimit.other.{number}", b"1")


def test_leaderboards_never_take_the_place_of_counters(harness: ManualHarness) -> None:
    lose_with_room_for(harness, WITH_MARGIN)
    # The second counter is decided, and after it only its own place is left.
    harness.before_write(2, lambda: fill(harness, leave=1))
    harness.recover()
    assert (harness.usage("a"), harness.usage("a", "alice")) == ("80", "30")
    assert harness.store.live_key(board_key("a", "spend", "lifetime")).value is None
    assert keeps_foreign(harness)
    incident = harness.incident
    (entry,) = harness.plane.audits.largest(incident.incident_id, 10).largest
    (note,) = entry.notes
    assert note.startswith("leaderboard not rebuilt: the bucket has no room: max_msgs=10 leaves 0,")


def test_the_final_check_does_not_wait_for_room(harness: ManualHarness) -> None:
    lose_with_room_for(harness, 0)
    for _ in range(3):
        harness.die_in_an_attempt()
    harness.recover()
    assert harness.state is RecoveryState.FAILED
    assert keeps_foreign(harness)


def test_a_manual_restore_without_room_is_refused_before_its_first_write(
    harness: ManualHarness,
) -> None:
    # Two counters, a leaderboard and our marker: 6 with the margin; 2 of "b" and the marker: 5.
    lose_with_room_for(harness, 5)
    sequence = harness.store.stream.last_sequence
    preview = harness.preview(OF_A)
    assert preview.refusal is not None
    assert "max_msgs=6 leaves 5, and 6 are needed (1.5 x 4)" in preview.refusal
    with pytest.raises(StoreFullError, match="max_msgs=6 leaves 5, and 6 are needed"):
        harness.apply(OF_A)
    assert harness.store.stream.last_sequence == sequence
    assert harness.preview(OF_B).refusal is None
    assert harness.apply(OF_B).failure is None
    assert harness.usage("b") == "5"
    assert keeps_foreign(harness)


def test_a_manual_restore_of_the_accepted_store_is_refused_too(harness: ManualHarness) -> None:
    harness.store.purge("usage.a.")
    harness.store.max_messages = harness.store.limits().used.messages + 1
    with pytest.raises(StoreFullError, match="max_msgs"):
        harness.apply(OF_A)
    assert harness.usage("b") == "5"


def test_a_manual_restore_reports_the_tenants_that_have_no_room(harness: ManualHarness) -> None:
    lose_with_room_for(harness, WITH_MARGIN)
    harness.before_write(3, lambda: fill(harness, leave=1))
    applied = harness.apply()
    assert applied.failure is not None
    assert "Tenant 'b' is not restored: The bucket has no room" in applied.failure.message
    assert not closes_incident(applied)
    assert keeps_foreign(harness)


def test_resolve_and_checks_write_no_marker_in_the_place_of_another_key(
    harness: ManualHarness,
) -> None:
    lose_with_room_for(harness, 0)
    resolved = harness.resolve()
    assert resolved.incident.ended is not None
    assert any("A further loss may go undetected" in each for each in harness.messages)
    checked = harness.check()
    assert "The marker was not renewed" in checked.check.reason
    assert checked.hint.startswith("raise max_bytes or max_msgs")
    assert keeps_foreign(harness)


def test_a_counter_lost_after_its_write_fails_the_attempt(harness: ManualHarness) -> None:
    harness.wipe()
    harness.before_write(2, lambda: harness.store.purge("usage.a.spend.lifetime.="))
    with pytest.raises(
        AttemptFailedError, match="without a delete marker, the first the aggregate"
    ):
        harness.recover()
    assert harness.state is RecoveryState.RECOVERING
    (entry,) = [
        each
        for each in harness.plane.audits.largest(harness.incident.incident_id, 10).largest
        if each.tenant == "a"
    ]
    assert entry.notes == (
        "1 counter missing from the store after the write (without a delete marker): the aggregate",
    )
    harness.store.before_write = None
    harness.clock.advance(timedelta(minutes=1))
    assert outcome_of(harness.recover()) is Outcome.RESTORED
    assert harness.usage("a") == "80"


def test_a_live_counter_lost_during_a_restore_fails_the_attempt(harness: ManualHarness) -> None:
    harness.wipe()
    harness.spend("a", "95")
    harness.before_write(1, lambda: harness.store.purge("usage.a.spend.lifetime.="))
    with pytest.raises(AttemptFailedError, match="1 counter of tenant 'a' missing"):
        harness.recover()


def test_a_live_counter_deleted_during_a_restore_is_reported(harness: ManualHarness) -> None:
    harness.wipe()
    harness.spend("a", "95")
    harness.before_write(1, lambda: harness.store.remove("usage.a.spend.lifetime.="))
    assert outcome_of(harness.recover()) is Outcome.RESTORED


@dataclass
class ReadBack:
    """A tenant with a counter of a day, read before and after it vanished without a trace."""

    store: MemoryUsageStore
    plan: RecoveryPlan
    results: tuple[RaiseResult, ...]
    live: LiveTenant

    @classmethod
    def of(
        cls, *, ttl: str | None = None, live: str = "1", max_age: timedelta | None = None
    ) -> Self:
        """Plan to raise a counter of a live usage to 7, at noon, and do it."""
        store = MemoryUsageStore()
        store.clock, store.keeps_for = NOON, max_age
        value = b'{"usage":"%s"}' % live.encode()
        store.put("usage.c.spend.2026-11-25.=", value, ttl=ttl, written_at=NOON)
        opened = store.open_tenant("c")
        plan = plan_restore("c", {DAY: {None: Decimal(7)}}, live_usages(opened.reading), (), NOON)
        orders = [
            RaiseOrder(each.of, each.entity, each.recorded, ValueShape.TEXT, NO_EXPIRY)
            for each in plan.that(Action.RAISE)
        ]
        results = opened.raise_counters(orders, is_open=lambda _: True)
        return cls(store, plan, results, opened)

    def causes(self, at: datetime) -> list[str | None]:
        """Return why counters are missing at this time."""
        after = self.store.open_tenant("c")
        missing = find_missing(self.plan, self.results, self.live, after, at)
        return [each.cause for each in missing]


@pytest.mark.parametrize("live", ["1", "9"], ids=["raised", "kept"])
def test_a_missing_counter_is_explained_by_its_window_its_age_or_a_delete_marker(live: str) -> None:
    hour = timedelta(hours=1)
    later = NOON + hour
    plain, expiring = ReadBack.of(live=live), ReadBack.of(live=live, ttl="3600")
    aging = ReadBack.of(live=live, max_age=hour)
    kept = ReadBack.of(live=live, max_age=hour, ttl="never")
    for each in (plain, expiring, aging, kept):
        assert each.causes(later) == []
        each.store.purge()
    assert plain.causes(later) == [None]
    assert plain.causes(datetime(2026, 11, 26, tzinfo=UTC)) == ["the window has closed"]
    for each in (expiring, aging):
        assert each.causes(later - timedelta(seconds=6)) == [None]
        assert each.causes(later) == ["expired since"]
    assert kept.causes(later) == [None]
    plain.store.remove("usage.c.spend.2026-11-25.=")
    assert plain.causes(later) == ["deleted since"]


def test_a_delete_marker_from_before_the_write_explains_nothing() -> None:
    read_back = ReadBack.of()
    # The store went back to a copy in which the counter is deleted.
    read_back.store.purge()
    read_back.store.stream = StoreIdentity(read_back.store.stream.created_at, 0)
    read_back.store.remove("usage.c.spend.2026-11-25.=")
    assert read_back.causes(NOON) == [None]


def test_a_counter_that_became_unreadable_after_its_write_is_not_missing(
    harness: ManualHarness,
) -> None:
    harness.wipe()
    harness.before_write(2, lambda: harness.store.put("usage.a.spend.lifetime.=", b"?"))
    assert outcome_of(harness.recover()) is Outcome.RESTORED
    incident = harness.plane.incidents.recent(1)[0]
    notes = [
        note
        for entry in harness.plane.audits.largest(incident.incident_id, 10).largest
        for note in entry.notes
    ]
    assert notes == ["1 counter unreadable after the write: the aggregate (the value is not JSON)"]
