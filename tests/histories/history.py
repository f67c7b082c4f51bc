"""A random history: a gateway spends, accidents happen, services and people act.

A seed decides everything. After each work of a service, the store is compared with what it was
before (see ``model.Work``). At the end, all faults are gone, and the services must come to rest.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from decimal import Decimal

from budget_recovery_dagster.adapters.nats import CounterKey, encode_key
from budget_recovery_dagster.domain import (
    EVERYONE,
    Entity,
    Everyone,
    Hour,
    Incident,
    Outcome,
    RecoveryState,
    Reset,
    RetentionPolicy,
    Window,
    may_launch,
    tenant_text,
)
from budget_recovery_dagster.domain.snapshots import CaptureSource
from budget_recovery_dagster.services import (
    Captured,
    ResetRequest,
    TenantOutcome,
    TenantStored,
    capture_hour,
    check_store,
    preview_restore,
    read_status,
    record_reset,
)
from budget_recovery_dagster.services.falls import requested_capture
from budget_recovery_dagster.services.future_snapshots import (
    FutureSnapshots,
    discard_future,
    list_future,
)
from budget_recovery_dagster.services.restore import (
    Acceptance,
    Applied,
    GaveUp,
    Order,
    Recovered,
    Resolved,
    RestoreRequest,
    StillWaiting,
    hold_restore,
    recover_store,
    release_restore,
    resolve_incident,
    restore_manually,
)
from tests.histories.judged import JudgedScene
from tests.histories.model import (
    CaptureNote,
    ResetNote,
    counter_of,
    counters_of,
    usage_of,
)
from tests.histories.scene import ENTITIES, HOUR, MINUTE, PERIODS, SECOND, ZERO, BrokenError
from tests.histories.worlds import FOREIGN_MARKER, World

# With these, a person accepts another store at the address.
_DECISIONS = ("release", "resolve", "manual restore")
_CONVERGENCE = timedelta(seconds=30)
# As often as a check in the time of the longest backoff, and then three for a store that returned.
_CHECKS_TO_REST = 12


@dataclass
class Sizes:
    """How long a history is."""

    steps: int = 45
    days: int = 3
    captures_a_day: int = 8


class History(JudgedScene):
    """One history, with the services and the people of a scene."""

    def __init__(self, world: World, seed: int, sizes: Sizes | None = None) -> None:
        super().__init__(world, seed)
        self.sizes = sizes or Sizes()
        self.retention = RetentionPolicy(self.chance.choice([1, 2]))
        self.late_reset: tuple[ResetRequest, int] | None = None
        self._runs = 0

    # The course of events

    def play(self) -> None:
        """Play the history to its end.

        Raises:
            BrokenError: a promise was broken.
        """
        try:
            self._begin()
            for _ in range(self.sizes.steps):
                self._step()
            self._come_to_rest()
        except BrokenError:
            raise
        except Exception as error:  # noqa: BLE001 - shown with the seed and the steps
            self.fail(f"unexpected {type(error).__name__}: {error}", error)

    def _begin(self) -> None:
        world = self.world
        world.supports_ttl = self.chance.random() < 0.7
        world.clock.advance(self.chance.randrange(7 * 24) * HOUR)
        world.create()
        world.put("ratelimit.acme.rpm", b"7")
        world.put("blocked.acme.team.lifetime.bo", b"1")
        world.put("usage-like.acme", b"8")
        if self.chance.random() < 0.3:
            world.put(FOREIGN_MARKER, b"{}")
            self.is_neighbour_known = True
        self.spend(6)
        self.capture()
        self.check()

    def _step(self) -> None:
        self.advance(self.chance.choice([SECOND, MINUTE, 10 * MINUTE, HOUR, 5 * HOUR]))
        weights = {
            self.spend: 30,
            self.capture: 22,
            self.check: 24,
            self.supervise: 20,
            self.accident: 26,
            self.act: 12,
            self.calm: 8,
            self.capture_ahead: 2,
            self.forget_reset: 3,
            self.pass_days: 3,
        }
        self.chance.choices(list(weights), list(weights.values()))[0]()

    def pass_days(self) -> None:
        """Let days pass, with captures and traffic, or without."""
        self.note("days pass")
        days = self.chance.randrange(1, self.sizes.days + 1)
        pause = timedelta(days=1) / self.sizes.captures_a_day
        is_busy = self.chance.random() < 0.8
        for _ in range(days * self.sizes.captures_a_day):
            self.advance(pause)
            if is_busy:
                self.spend(1)
                self.capture()
                self.check()
                self.supervise()

    # Services

    def capture_ahead(self) -> None:
        """Capture once with clocks that are hours ahead, and that do not show it."""
        ahead = self.chance.choice([2 * HOUR, 30 * HOUR])
        self.note(f"the clock is {ahead} ahead for a capture")
        before = self.world.faults.clock_ahead
        self.set_clock_ahead(before + ahead)
        self.world.faults.is_timeless = True
        self.capture(is_calm=True)
        self.world.faults.is_timeless = False
        self.set_clock_ahead(before)

    def forget_reset(self) -> None:
        """Reset counters, and set the database back to before that."""
        self.copy_database()
        self.advance(MINUTE)
        self.reset()
        for step in (self.spend, self.check, self.capture):
            if self.chance.random() < 0.7:
                step()
        self.set_database_back()
        if self.chance.random() < 0.4:
            self.accident()

    def capture(self, *, is_calm: bool = False) -> None:
        """Capture the present hour."""
        at, stored = self.world.clock.now(), []
        before = counters_of(self.world.keys())
        self._runs += 1

        def on_outcome(outcome: TenantOutcome) -> None:
            if isinstance(outcome, TenantStored):
                stored.append(outcome.tenant)

        def work() -> object:
            return capture_hour(
                self.world.plane,
                self.world.opened,
                Hour.containing(at),
                source=CaptureSource.COUNTERS,
                retention=self.retention,
                run_id=f"run {self._runs}",
                holder=f"run {self._runs}",
                on_outcome=on_outcome,
            )

        was_open = self.recovery().incident is not None
        result = self.work("capture", work, is_calm=is_calm)
        if was_open and stored:
            self.fail("a capture stored snapshots during an incident")
        event, after = self.model.next_event(), counters_of(self.world.keys())
        # The gateway's writes into a full bucket delete old keys before they are read.
        before = {key: usage for key, usage in before.items() if usage <= after.get(key, -1)}
        for tenant in stored:
            self.model.database.captures.append(
                CaptureNote(event, tenant, at, _of(before, tenant), _of(after, tenant))
            )
        self.seen["tenant captured"] += len(stored)
        if isinstance(result, Captured) and result.pruned is not None and result.pruned.records:
            self.seen["capture that pruned"] += 1

    def check(self) -> None:
        """Check the store."""
        world, before = self.world, self.recovery().incident
        checked = self.work(
            "check", lambda: check_store(world.plane, world.opened, checked_by="a check")
        )
        if checked is not None:
            self.seen[f"verdict {checked.check.verdict}"] += 1
            if checked.check.evidence is not None:
                self.seen[f"evidence {checked.check.evidence}"] += 1
            self.steps[-1] += f" {checked.check.reason}"
            if before is not None and checked.recovery.incident is None:
                self._closed(world.plane.incidents.recent(1)[0])

    def supervise(self) -> None:
        """Launch a restore if one is due, as the sensors do."""
        plane = self.world.plane
        recovery = plane.incidents.recovery()
        if requested_capture(plane) is not None:
            self.seen["capture requested"] += 1
            self.capture()
        if recovery.incident is None or may_launch(recovery, self.world.clock.now()) is not None:
            return
        if plane.incidents.claim_launch(judged=recovery.incident) is not None:
            self.recover()

    def recover(self) -> None:
        """Run one recovery."""
        world = self.world
        result = self.work(
            "restore",
            lambda: recover_store(
                world.plane,
                world.opened,
                run_id="a run",
                holder="a restore",
                convergence_timeout=_CONVERGENCE,
                on_progress=lambda _: None,
            ),
        )
        if isinstance(result, Recovered):
            self._closed(result.incident)
        elif isinstance(result, GaveUp):
            self.seen[f"gave up {result.reason}"] += 1
        elif isinstance(result, StillWaiting):
            self.seen["restore that waited"] += 1
            self.steps[-1] += f" {result.reason}"

    def _closed(self, incident: Incident) -> None:
        """Count how an incident ended; require that nothing captured stayed lost."""
        self.raised_windows = frozenset()
        outcome = incident.ended.outcome if incident.ended else None
        self.seen[f"incident {outcome}"] += 1
        # Otherwise a tenant may have lost counters after its restore.
        is_complete = outcome not in (Outcome.ACCEPTED, Outcome.RETURNED)
        is_disturbed = self.is_disturbed or (self.is_limited and self.raced)
        if is_complete and not is_disturbed:
            self._require_restored()

    def _require_restored(self) -> None:
        keys = self.world.keys()
        for key, usage in self.model.due(self.world.clock.now()).items():
            raw = keys.get(encode_key(key))
            live = None if raw is None else usage_of(raw.data)
            if raw is None or (live is not None and live < usage):
                self.fail(f"{encode_key(key)} was captured with {usage}, and is now {raw}")

    # People

    def act(self) -> None:
        """Let a person do something."""
        kinds: dict[Callable[[], None], int] = {
            self.reset: 6,
            self.record_late_reset: 3,
            self.hold: 2,
            self.release: 4,
            self.resolve: 3,
            self.restore: 5,
            self.discard: 2,
        }
        self.chance.choices(list(kinds), list(kinds.values()))[0]()

    def reset(self) -> None:
        """Lower counters on purpose, and record that, at once or later."""
        now = self.world.store_time
        tenant, budget = self.chance.choice(self.tenants), self.chance.choice(list(PERIODS))
        period = self.chance.choice(PERIODS[budget])
        window = self.chance.choice([None, Window.containing(period, now).token])
        entity: Entity | Everyone = self.chance.choice([*ENTITIES, None, EVERYONE, EVERYONE])
        is_late = (
            self.late_reset is None
            and self.chance.random() < 0.25
            and not self.world.plane.snapshots.in_future(self.world.clock.now())
            and not self.world.faults.clock_ahead
        )
        at = self.world.clock.now() if is_late else None
        request = ResetRequest(tenant, budget, window, entity, at, "ann", "pardoned")
        event = self.model.next_event()
        self._lower(_noted(request, event))
        self.note(f"{tenant} {budget} {window} {entity} is reset")
        if is_late:
            self.late_reset = request, event
        else:
            self._record(request, event)

    def record_late_reset(self) -> None:
        if self.late_reset is not None:
            (request, event), self.late_reset = self.late_reset, None
            if self.world.plane.snapshots.in_future(self.world.clock.now()):
                # Whether a snapshot with a wrong time was captured after the reset is not certain,
                # so that none of them is used.
                event = self.model.next_event()
            self._record(request, event)

    def _lower(self, note: ResetNote) -> None:
        held = counters_of(self.world.keys())
        for key in sorted(self.model.truth.keys() | held.keys(), key=encode_key):
            if note.is_about(key):
                self.model.truth[key] = ZERO
                if key in held and self.chance.random() < 0.5:
                    self.write_counter(key, ZERO)
                elif key in held:
                    self.world.remove(encode_key(key))

    def _record(self, request: ResetRequest, event: int) -> None:
        world, is_away = self.world, self.chance.random() < 0.2
        note = _noted(request, event)
        known = len(self.model.resets)

        def work() -> object:
            # Recorded even if the check after it fails.
            named = replace(request, tenant=tenant_text(request.tenant))
            recorded = record_reset(world.plane, named, None)
            self.model.reset(note)
            if not is_away:
                check_store(world.plane, world.opened, checked_by="record-reset")
            return recorded

        self.work("record-reset", work)
        self.seen["reset recorded"] += len(self.model.resets) - known

    def hold(self) -> None:
        self._person("hold", lambda: hold_restore(self.world.plane, "wait", by="ann"))

    def release(self) -> None:
        self._person("release", lambda: release_restore(self.world.plane, by="ann"))

    def resolve(self) -> None:
        """Accept the store as it is."""
        acceptance = self.chance.choice(list(Acceptance))
        world, is_behind = self.world, self.is_behind()
        is_all_readable = all(
            usage_of(raw.data) is not None
            for key, raw in world.keys().items()
            if counter_of(key) is not None
        )
        result = self._person(
            f"resolve {acceptance}",
            lambda: resolve_incident(
                world.plane,
                world.opened,
                self._order(),
                acceptance=acceptance,
                retention=self.retention,
                convergence_timeout=_CONVERGENCE,
            ),
        )
        if not isinstance(result, Resolved):
            return
        self._closed(result.incident)
        if is_behind and (acceptance is Acceptance.KEEP_SNAPSHOTS or not is_all_readable):
            self.may_revive("accepted by a person")
        self._accept(result.resets)

    def _accept(self, resets: tuple[Reset, ...]) -> None:
        """Take the store's lower counters as the truth, as the person who accepted it does."""
        held = counters_of(self.world.keys())
        for each in resets:
            entities = None if isinstance(each.entity, Everyone) else each.names
            note = ResetNote(
                self.model.next_event(), each.tenant, each.budget, each.window, entities
            )
            self.model.reset(note)
            for key, usage in self.model.truth.items():
                if note.is_about(key):
                    self.model.truth[key] = min(usage, held.get(key, ZERO))

    def restore(self, request: RestoreRequest | None = None) -> None:
        """Restore manually, with or without a preview."""
        world, chosen = self.world, request or self._request()
        if self.is_behind():
            self.may_revive("restored by a person")
        if request is not None or self.chance.random() < 0.5:
            self.work(
                "preview",
                lambda: preview_restore(
                    world.plane, world.opened, chosen, by="ann", on_progress=lambda _: None
                ),
            )
        self.despite_resets = chosen.despite_resets
        result = self._person(
            f"manual restore of {chosen}",
            lambda: restore_manually(
                world.plane, world.opened, chosen, self._order(), convergence_timeout=_CONVERGENCE
            ),
        )
        self.despite_resets = False
        if isinstance(result, Applied):
            if result.failure is not None:
                self.steps[-1] += f" failed: {result.failure}"
            if result.incident is not None and result.incident.ended is not None:
                self._closed(result.incident)

    def _request(self) -> RestoreRequest:
        tenant = self.chance.choice(["*", *self.tenants[:1]])
        listed = self.world.plane.snapshots.listed(None)
        snapshot = "latest"
        if listed and self.chance.random() < 0.3:
            snapshot = self.chance.choice(listed).captured_at.isoformat()
        return RestoreRequest(
            tenant=tenant, snapshot=snapshot, despite_resets=self.chance.random() < 0.15
        )

    def discard(self) -> None:
        """Discard the snapshots that are dated in the future."""
        plane = self.world.plane
        if self.world.faults.clock_ahead:
            return
        discarded = self._person(
            "discard-future",
            lambda: discard_future(
                plane,
                list_future(plane, None).found,
                None,
                by="ann",
                reason="wrong",
                holder="ann",
            ),
        )
        if isinstance(discarded, FutureSnapshots):
            times = {each.captured_at for each in discarded.found}
            database = self.model.database
            database.captures = [n for n in database.captures if n.captured_at not in times]

    def _order(self) -> Order:
        return Order("ann", "looked right", "a run", lambda _: None)

    def _person(self, name: str, work: Callable[[], object]) -> object:
        result = self.work(name, work, is_calm=True)
        if result is not None and self.is_foreign and name.startswith(_DECISIONS):
            self.is_foreign, self.is_neighbour_known = False, True
        return result

    # The end

    def _come_to_rest(self) -> None:
        """End all faults; require that the store becomes HEALTHY, and that nothing stays lost."""
        self.note("everything is well from now on")
        self.is_over = True
        self.calm()
        if self.world.is_at_other and self.chance.random() < 0.5:
            self.change_address()
        if not self.world.exists:
            self.world.create()
        self.record_late_reset()
        self._repair()
        if not self._rests():
            self._decide()
            if not self._rests():
                self.fail(f"it does not end: {self.recovery()}")
        self.advance(HOUR)
        self.spend(1)
        self._require_complete_capture()
        self.restore(RestoreRequest())
        if self.recovery().state is not RecoveryState.HEALTHY:
            self.fail(f"it was not accepted: {self.recovery()}")
        self._require_restored()
        read_status(self.world.plane, check_interval=timedelta(minutes=10))

    def _repair(self) -> None:
        """Correct unreadable counters in the gateway."""
        for key, raw in self.world.keys().items():
            if counter_of(key) is not None and usage_of(raw.data) is None:
                self.world.remove(key)

    def _rests(self) -> bool:
        """Check and restore as the sensors do; return whether the store becomes HEALTHY."""
        healthy = 0
        for _ in range(_CHECKS_TO_REST):
            self.advance(11 * MINUTE)
            self.check()
            self.supervise()
            healthy = healthy + 1 if self.recovery().state is RecoveryState.HEALTHY else 0
            if healthy == 2:
                return True
        return False

    def _decide(self) -> None:
        """Let a person end what only a person can end."""
        recovery = self.recovery()
        incident = recovery.incident
        if incident is None:
            self.fail(f"{recovery.state} without an incident")
        is_failed = recovery.state is RecoveryState.FAILED
        if not is_failed and not incident.is_held:
            self.fail(f"it does not end, and nobody has to act: {incident}")
        self.seen["end needed a person"] += 1
        choices = [self.resolve]
        if self.world.plane.points.tenants():
            choices.append(lambda: self.restore(RestoreRequest()))
            if not is_failed and not incident.is_database_behind:
                choices.append(self.release)
        self.chance.choice(choices)()

    def _require_complete_capture(self) -> None:
        captures = len(self.model.database.captures)
        self.capture(is_calm=True)
        captured = {each.tenant for each in self.model.database.captures[captures:]}
        held = {each.tenant for each in counters_of(self.world.keys())}
        if not held <= captured:
            self.fail(f"not captured: {held - captured}")


def _of(values: Mapping[CounterKey, Decimal], tenant: str) -> dict[CounterKey, Decimal]:
    return {key: usage for key, usage in values.items() if key.tenant == tenant}


def _noted(request: ResetRequest, event: int) -> ResetNote:
    who = request.entity
    entities = None if isinstance(who, Everyone) else frozenset({who})
    return ResetNote(event, request.tenant, request.budget, request.window, entities)
