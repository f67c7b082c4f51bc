"""Capture on the fakes of the ports, which pass the same contract tests as the real servers."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pytest

from budget_recovery_dagster.adapters.memory.control_plane import ControlPlane, ManualClock
from budget_recovery_dagster.adapters.memory.leases import MemoryLeases
from budget_recovery_dagster.adapters.memory.snapshots import MemorySnapshots
from budget_recovery_dagster.adapters.memory.store_registry import MemoryStoreRegistry
from budget_recovery_dagster.adapters.memory.usage_store import MemoryUsageStore
from budget_recovery_dagster.domain.admission import CAPTURE_LEASE
from budget_recovery_dagster.domain.counters import BudgetWindow
from budget_recovery_dagster.domain.identity import Baseline, StoreIdentity
from budget_recovery_dagster.domain.incident import RecoveryState
from budget_recovery_dagster.domain.moments import Hour
from budget_recovery_dagster.domain.retention import RetentionPolicy
from budget_recovery_dagster.domain.windows import Window
from budget_recovery_dagster.errors import (
    BudgetRecoveryError,
    CapturesPausedError,
    ClockSkewError,
    DatabaseError,
    DatabaseUnreachableError,
    HourClosedError,
    HourNotCapturedError,
    HourNotReachedError,
    LeaseHeldError,
    LeaseLostError,
    PossibleLossError,
    SettingsError,
    StoreMissingError,
    StorePermissionError,
    StoreReadError,
    StoreUnreachableError,
)
from budget_recovery_dagster.ports import PruneReport, Uncaptured
from budget_recovery_dagster.services.capture import CaptureService, Paused, Verified
from budget_recovery_dagster.services.capture_outcome import Captured, TenantOutcome, TenantStored

NOW = datetime(2026, 11, 25, 12, 5, tzinfo=UTC)
BORN = datetime(2026, 11, 1, tzinfo=UTC)
REBORN = datetime(2026, 11, 25, 12, 4, tzinfo=UTC)
LIFETIME = BudgetWindow("spend", Window.parse("lifetime"))


@dataclass
class House:
    """A capture service with everything around it in memory."""

    store: MemoryUsageStore = field(default_factory=lambda: MemoryUsageStore(BORN))
    clock: ManualClock = field(default_factory=lambda: ManualClock(NOW))
    outcomes: list[TenantOutcome] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.plane = ControlPlane(self.clock)
        self.snapshots = MemorySnapshots(self.plane)
        self.registry = MemoryStoreRegistry(self.plane)
        self.leases = MemoryLeases(self.plane)
        self.service = CaptureService(
            open_store=lambda: nullcontext(self.store),
            snapshots=self.snapshots,
            reports=self.snapshots,
            registry=self.registry,
            leases=self.leases,
            clock=self.clock,
            bucket="budget-usage",
            retention=RetentionPolicy(7),
        )

    @property
    def hour(self) -> Hour:
        return Hour.containing(self.clock.now())

    def spend(self, tenant: str, usage: str, entity: str | None = None) -> None:
        self.store.put_usage(tenant, "spend", "lifetime", entity, usage)

    def run(self, run_id: str = "a run", hour: Hour | None = None) -> Captured | Verified | Paused:
        return self.service.capture(
            hour or self.hour, run_id=run_id, holder=run_id, on_outcome=self.outcomes.append
        )

    def capture(self, run_id: str = "a run") -> Captured:
        captured = self.run(run_id)
        assert isinstance(captured, Captured)
        return captured

    def known(self, tenant: str, entity: str | None = None) -> Decimal:
        return self.snapshots.recovery_point(tenant, self.clock.now())[LIFETIME][entity]

    def while_reading(self, tenant: str, happen: Callable[[], object]) -> None:
        """Let something happen when half of the tenant's keys have been read, once."""

        def hook(read: str) -> None:
            if read == tenant:
                self.store.in_mid_reading = None
                happen()

        self.store.in_mid_reading = hook


class RefusingSnapshots(MemorySnapshots):
    """A database in which every commit is refused."""

    def __init__(self, plane: ControlPlane, error: BudgetRecoveryError) -> None:
        super().__init__(plane)
        self._error = error

    def commit(self, *_: object, **__: object) -> Baseline:
        raise self._error


class UnprunableSnapshots(MemorySnapshots):
    """A database in which pruning is refused."""

    def __init__(self, plane: ControlPlane, error: BudgetRecoveryError) -> None:
        super().__init__(plane)
        self._error = error

    def prune(self, *_: object, **__: object) -> PruneReport:
        raise self._error


def names(outcomes: tuple[TenantOutcome, ...] | tuple[TenantStored, ...]) -> list[str]:
    return [outcome.tenant for outcome in outcomes]


@pytest.fixture
def house() -> House:
    house = House()
    for tenant in ("a", "b", "c"):
        house.spend(tenant, "10")
    return house


DENIED = StorePermissionError("The user may not read tenant b.", "grant it.")


def test_one_tenant_that_cannot_be_read_stops_no_other(house: House) -> None:
    house.store.failures["b"] = DENIED

    captured = house.capture("one")

    assert names(captured.stored) == ["a", "c"]
    assert [(f.tenant, f.reason) for f in captured.failed] == [
        ("b", "The user may not read tenant b.")
    ]
    assert captured.stopped_by is None
    assert house.outcomes == list(captured.outcomes)
    assert [s.tenant for s in house.snapshots.captured_by("one")] == ["a", "c"]
    assert [(f.name, f.hint) for f in house.snapshots.failures_of("one")] == [("b", "grant it.")]


def test_cleanup_spares_the_tenant_that_failed_in_this_run(house: House) -> None:
    # Two snapshots each, so that the older one of a healthy tenant is not needed any more.
    house.capture()
    house.clock.advance(timedelta(hours=1))
    house.capture()
    house.clock.advance(timedelta(days=8))
    house.store.failures["b"] = DENIED
    house.capture()

    kept = dict.fromkeys("abc", 0)
    for tenant, _ in house.plane.snapshots:
        kept[tenant] += 1
    assert kept == {"a": 1, "b": 2, "c": 1}


def test_an_error_that_nobody_foresaw_is_named_and_stops_no_other(house: House) -> None:
    def break_down() -> None:
        raise RuntimeError("out of cheese")

    house.while_reading("b", break_down)
    captured = house.capture()
    assert names(captured.stored) == ["a", "c"]
    assert captured.failed[0].reason == "Unexpected RuntimeError: out of cheese"
    assert isinstance(captured.failed[0].error, RuntimeError)


def test_a_store_recreated_during_the_reading_is_not_stored(house: House) -> None:
    house.capture("good")
    house.clock.advance(timedelta(minutes=1))

    def wipe() -> None:
        house.store.recreate(REBORN)
        house.spend("b", "0.01")

    house.while_reading("b", wipe)
    captured = house.capture("bad")

    assert names(captured.stored) == ["a"]
    assert isinstance(captured.stopped_by, PossibleLossError)
    assert [f.tenant for f in captured.failed] == ["b", "c"]
    assert all("Possible loss" in f.reason for f in captured.failed)
    assert captured.pruned is None
    assert house.known("b") == Decimal(10)


@pytest.mark.parametrize("what", ["recreated", "regressed", "gone"])
def test_a_wipe_during_the_very_first_capture_is_noticed(what: str, house: House) -> None:
    def wipe() -> None:
        house.store.purge()
        if what == "recreated":
            house.store.recreate(REBORN)
        elif what == "regressed":
            house.store.stream = replace(house.store.stream, last_sequence=1)
        else:
            house.store.identity_failure = StoreMissingError("No bucket.", "look.")

    house.while_reading("a", wipe)
    captured = house.capture()
    assert captured.stored == ()
    assert isinstance(captured.stopped_by, PossibleLossError)
    assert what in captured.stopped_by.message
    assert house.registry.claim("budget-usage").baseline is None


def test_known_tenants_are_captured_also_if_the_store_cannot_be_listed(house: House) -> None:
    house.capture()
    house.clock.advance(timedelta(minutes=1))
    failure = house.store.listing_failure = StoreReadError("Too many keys.", "look.")
    captured = house.capture()
    assert names(captured.stored) == ["a", "b", "c"]
    assert captured.stopped_by is failure


def test_a_bucket_that_goes_before_the_listing_is_a_possible_loss(house: House) -> None:
    house.capture()
    house.clock.advance(timedelta(minutes=1))
    house.store.listing_failure = StoreMissingError("No bucket.", "look.")
    in_order = iter([None, house.store.listing_failure])

    class VanishingStore(MemoryUsageStore):
        def identity(self) -> StoreIdentity:
            self.identity_failure = next(in_order)
            return super().identity()

    vanishing = VanishingStore(BORN)
    vanishing.stream = house.store.stream
    vanishing.listing_failure = house.store.listing_failure
    service = replace(house.service, open_store=lambda: nullcontext(vanishing))
    captured = service.capture(house.hour, run_id="r", holder="r", on_outcome=lambda _: None)
    assert isinstance(captured, Captured)
    assert isinstance(captured.stopped_by, PossibleLossError)


@pytest.mark.parametrize("what", ["recreated", "regressed", "gone"])
def test_a_store_of_another_identity_stores_nothing_and_prunes_nothing(
    what: str, house: House
) -> None:
    house.capture("old")
    house.clock.advance(timedelta(days=8))
    if what == "recreated":
        house.store.recreate(REBORN)
    elif what == "regressed":
        house.store.stream = house.store.stream.__class__(BORN, 2)
    else:
        house.store.identity_failure = StoreMissingError("No bucket.", "look.")

    captured = house.capture("new")

    assert captured.stored == ()
    assert isinstance(captured.stopped_by, PossibleLossError)
    assert what in captured.stopped_by.message
    assert captured.pruned is None
    assert len(house.snapshots.captured_by("old")) == 3
    assert [f.name for f in house.snapshots.failures_of("new")] == ["a", "b", "c"]


def test_a_baseline_lost_from_the_database_is_no_first_install(house: House) -> None:
    house.capture()
    house.plane.store = None
    house.clock.advance(timedelta(minutes=1))
    house.store.recreate(REBORN)
    house.spend("a", "1")
    assert isinstance(house.capture().stopped_by, PossibleLossError)
    assert house.known("a") == Decimal(10)


def test_a_missing_bucket_before_any_snapshot_is_a_mistake_not_a_loss() -> None:
    house = House()
    house.store.identity_failure = StoreMissingError("No bucket.", "check BUCKET.")
    with pytest.raises(StoreMissingError):
        house.run()


def test_a_baseline_that_another_moved_is_judged_again(house: House) -> None:
    house.capture()
    house.clock.advance(timedelta(minutes=1))

    def another_accepts_the_present() -> None:
        assert house.plane.store is not None
        assert house.plane.store.baseline is not None
        old = house.plane.store.baseline
        moved = old.__class__(house.store.stream, old.version + 1)
        house.plane.store = house.plane.store.__class__(
            house.plane.store.bucket,
            house.plane.store.deployment_id,
            house.plane.store.state,
            moved,
        )

    house.while_reading("b", another_accepts_the_present)
    assert names(house.capture().stored) == ["a", "b", "c"]


def test_a_store_that_goes_down_is_not_waited_for_tenant_by_tenant(house: House) -> None:
    gone = StoreUnreachableError("No answer.", "see whether NATS runs.")

    def go_down() -> None:
        house.store.identity_failure = gone
        house.store.failures = {"b": gone, "c": DENIED}

    house.while_reading("a", go_down)
    captured = house.capture()

    # "c" was not tried: its own failure would have been another.
    assert [f.reason for f in captured.failed] == ["No answer."] * 3
    assert captured.stopped_by is gone


def test_an_unreachable_store_is_told_of_every_known_tenant(house: House) -> None:
    house.capture()
    house.store.identity_failure = StoreUnreachableError("No answer.", "see whether NATS runs.")
    captured = house.capture("later")
    assert [f.name for f in house.snapshots.failures_of("later")] == ["a", "b", "c"]
    assert captured.read == frozenset()


def test_eight_days_of_failing_captures_leave_the_last_good_point(house: House) -> None:
    house.capture()
    house.store.identity_failure = StoreUnreachableError("No answer.", "see whether NATS runs.")
    for _ in range(8 * 24):
        house.clock.advance(timedelta(hours=1))
        house.capture()
    house.store.identity_failure = None
    assert house.known("a") == Decimal(10)
    assert house.capture().stored != ()
    assert house.known("a") == Decimal(10)


def test_a_budget_missing_for_eight_days_keeps_its_own_point(house: House) -> None:
    house.store.put_usage("a", "other", "lifetime", "bob", "5")
    house.capture()
    house.store.purge("usage.a.other.")
    for _ in range(8 * 24 + 1):
        house.clock.advance(timedelta(hours=1))
        captured = house.capture()
        assert captured.stored[0].drops == 1
    other = BudgetWindow("other", Window.parse("lifetime"))
    point = house.snapshots.recovery_point("a", house.clock.now())
    assert point[other] == {"bob": Decimal(5)}
    # One record of it, beside a week of the budget that was there all the time.
    records = [s.records for (tenant, _), s in house.plane.snapshots.items() if tenant == "a"]
    assert sum(other in record for record in records) == 1
    assert len(records) <= 7 * 24 + 2


def test_a_tenant_gone_from_the_store_is_missed_not_forgotten(house: House) -> None:
    house.capture()
    house.clock.advance(timedelta(hours=1))
    house.store.purge("usage.b.")
    captured = house.capture()
    assert [(o.tenant, o.drops) for o in captured.stored] == [("a", 0), ("b", 1), ("c", 0)]
    assert house.known("b") == Decimal(10)


def test_a_tenant_whose_windows_have_closed_fades_away(house: House) -> None:
    house.store.purge()
    house.store.put_usage("d", "spend", "2026-11-25", None, "1")
    house.spend("a", "10")
    house.capture()
    house.store.purge("usage.d.")
    for _ in range(9):
        house.clock.advance(timedelta(days=1))
        house.capture()
    assert house.snapshots.tenants() == {"a"}


def test_a_partial_reading_is_stored_marked_and_the_point_still_has_the_rest(house: House) -> None:
    for entity in ("x", "y", "z"):
        house.spend("a", "3", entity)
    house.capture()
    house.clock.advance(timedelta(minutes=1))

    # Of the reading and of the one that repeats it: each is short of what was announced.
    doomed = iter(["usage.a.spend.lifetime.z", "usage.a.spend.lifetime.y"])

    def purge_next(read: str) -> None:
        if read == "a":
            house.store.purge(next(doomed))

    house.store.in_mid_reading = purge_next
    stored = house.capture().stored[0]

    assert (stored.tenant, stored.is_partial, stored.entries, stored.drops) == ("a", True, 2, 2)
    assert house.known("a", "y") == house.known("a", "z") == Decimal(3)


def test_a_partial_reading_that_found_nothing_is_not_taken_for_nothing(house: House) -> None:
    house.store.put_usage("new", "spend", "lifetime", "x", "1")
    house.store.put_usage("new", "spend", "lifetime", "y", "1")
    purges = iter(["usage.new.spend.lifetime.y", "usage.new."])

    def purge_next(read: str) -> None:
        if read == "new":
            house.store.purge(next(purges))

    house.store.in_mid_reading = purge_next
    new = house.capture().stored[-1]
    assert (new.tenant, new.is_partial) == ("new", True)


def test_clocks_that_disagree_store_nothing_and_prune_nothing(house: House) -> None:
    house.capture("good")
    house.store.clock = NOW
    house.clock.advance(timedelta(days=25))
    captured = house.capture("ahead")
    assert isinstance(captured.stopped_by, ClockSkewError)
    assert "2026-12-20 12:05:00" in captured.stopped_by.message
    assert "2026-11-25 12:05:00" in captured.stopped_by.message
    assert (captured.stored, captured.pruned) == ((), None)
    house.clock.set(NOW + timedelta(seconds=59))
    assert names(house.capture("right again").stored) == ["a", "b", "c"]


def test_a_scheduler_that_is_a_little_ahead_is_waited_for(house: House) -> None:
    next_hour = Hour(house.hour.end)
    house.clock.set(next_hour.start - timedelta(seconds=8))
    captured = house.run(hour=next_hour)
    assert isinstance(captured, Captured)
    assert next_hour.start <= captured.captured_at < next_hour.end


def test_a_database_that_refuses_one_after_another_is_not_asked_for_each(house: House) -> None:
    for tenant in "defgh":
        house.spend(tenant, "10")
    refused = DatabaseError("The database refused: disk full.", "free disk space.")
    service = replace(house.service, snapshots=RefusingSnapshots(house.plane, refused))
    captured = service.capture(house.hour, run_id="r", holder="r", on_outcome=lambda _: None)
    assert isinstance(captured, Captured)
    assert captured.stopped_by is refused
    assert [f.seconds > 0 for f in captured.failed] == [True] * 3 + [False] * 5


def test_a_prune_that_fails_does_not_hide_the_snapshots(house: House) -> None:
    failure = DatabaseError("The database refused: too slow.", "look in pg_stat_activity.")
    service = replace(house.service, snapshots=UnprunableSnapshots(house.plane, failure))
    captured = service.capture(house.hour, run_id="r", holder="r", on_outcome=lambda _: None)
    assert isinstance(captured, Captured)
    assert names(captured.stored) == ["a", "b", "c"]
    assert captured.prune_failure is failure


def test_a_database_that_is_gone_ends_the_capture(house: House) -> None:
    gone = DatabaseUnreachableError("No connection.", "see whether PostgreSQL runs.")
    service = replace(house.service, snapshots=RefusingSnapshots(house.plane, gone))
    with pytest.raises(DatabaseUnreachableError):
        service.capture(house.hour, run_id="r", holder="r", on_outcome=house.outcomes.append)
    assert house.outcomes == []


def test_unreadable_values_are_omitted_by_name_and_stand_in_the_point(house: House) -> None:
    house.spend("a", "7", "bob")
    house.capture()
    house.clock.advance(timedelta(minutes=1))
    house.store.put("usage.a.spend.lifetime.bob", b'{"usage": "NaN"}')
    captured = house.capture("second")
    assert (captured.stored[0].entries, captured.stored[0].omitted) == (1, 1)
    assert captured.stored[0].drops == 0
    assert house.known("a", "bob") == Decimal(7)


def test_a_second_capture_is_told_who_is_at_it(house: House) -> None:
    with (
        house.leases.hold(CAPTURE_LEASE, "run 1234 on host-a (pid 7)"),
        pytest.raises(LeaseHeldError, match=r"run 1234 on host-a \(pid 7\)"),
    ):
        house.run()
    assert names(house.capture().stored) == ["a", "b", "c"]


def test_a_lost_lease_stores_nothing_more(house: House) -> None:
    house.while_reading("b", lambda: house.leases.lose(CAPTURE_LEASE))
    captured = house.capture()
    assert names(captured.stored) == ["a"]
    assert isinstance(captured.stopped_by, LeaseLostError)
    assert captured.pruned is None


def test_an_hour_that_closes_in_the_middle_stores_nothing_more(house: House) -> None:
    house.while_reading("b", lambda: house.clock.set(house.hour.end))
    captured = house.capture()
    assert names(captured.stored) == ["a"]
    assert isinstance(captured.stopped_by, HourClosedError)


def test_a_pause_in_the_middle_stores_nothing_more(house: House) -> None:
    house.while_reading("b", lambda: house.registry.set_state(RecoveryState.RECOVERING))
    captured = house.capture()
    assert names(captured.stored) == ["a"]
    assert isinstance(captured.stopped_by, CapturesPausedError)


@pytest.mark.parametrize("state", [RecoveryState.RECOVERING, RecoveryState.FAILED])
def test_while_captures_are_paused_nothing_is_read(state: RecoveryState, house: House) -> None:
    house.registry.claim("budget-usage")
    house.registry.set_state(state)
    assert house.run() == Paused(state)
    assert house.outcomes == []


def test_a_past_hour_is_verified_if_stored_and_refused_if_not(house: House) -> None:
    stored_hour = house.hour
    house.capture("stored")
    house.clock.advance(timedelta(hours=3))
    house.spend("a", "99")

    verified = house.run(hour=stored_hour)
    assert isinstance(verified, Verified)
    assert [s.tenant for s in verified.snapshots] == ["a", "b", "c"]
    assert verified.damage == ()
    with pytest.raises(HourNotCapturedError, match=r"2026-11-25-13:00 UTC.*2026-11-25-15:00"):
        house.run(hour=Hour.parse("2026-11-25-13:00"))
    assert house.known("a") == Decimal(10)


def test_a_future_hour_is_refused(house: House) -> None:
    with pytest.raises(HourNotReachedError, match="has not begun"):
        house.run(hour=Hour(house.hour.end))


def test_a_current_hour_can_be_captured_again(house: House) -> None:
    house.capture("first")
    house.clock.advance(timedelta(minutes=10))
    house.spend("a", "11")
    house.capture("second")
    assert [s.run_id for s in house.snapshots.captured_in(house.hour) if s.tenant == "a"] == [
        "first",
        "second",
    ]


def test_the_database_of_another_bucket_is_refused(house: House) -> None:
    house.registry.claim("other-bucket")
    with pytest.raises(SettingsError, match="BUDGET_RECOVERY_BUCKET"):
        house.run()


def test_an_empty_store_has_nothing_to_capture() -> None:
    captured = House().capture()
    assert (captured.outcomes, captured.stopped_by) == ((), None)


def test_keys_that_name_no_tenant_are_reported(house: House) -> None:
    house.store.put("usage.=zz.spend.lifetime.=", b"1")
    captured = house.capture("a run")
    assert names(captured.stored) == ["a", "b", "c"]
    (noted,) = house.snapshots.failures_of("a run")
    assert (noted.kind, noted.name) == (Uncaptured.KEY, "usage.=zz.spend.lifetime.=")
    assert [bad.key for bad in captured.unreadable] == ["usage.=zz.spend.lifetime.="]
