"""Gateways, their stores and one address; databases; and the product's checks and captures on them.

Each change is made twice: to the fakes, which the product sees, and to the truth.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from random import Random

from budget_recovery_dagster.adapters.nats import marker_key
from budget_recovery_dagster.domain import (
    EVERYONE,
    CaptureSource,
    Hour,
    IntendedMarker,
    Marker,
    RecoveryState,
    RetentionPolicy,
    Verdict,
)
from budget_recovery_dagster.errors import (
    BudgetRecoveryError,
    IncidentHeldError,
    StoreRefusedError,
    StoreUnreachableError,
)
from budget_recovery_dagster.ports import OpenStore
from budget_recovery_dagster.services import (
    Captured,
    ResetRequest,
    capture_hour,
    check_store,
    record_reset,
)
from budget_recovery_dagster.services.restore import (
    Acceptance,
    Order,
    recover_store,
    release_restore,
    resolve_incident,
)
from tests.detection_model.judge import (
    TOLERANCE,
    Decision,
    Risk,
    Situation,
    neighbours_of,
    right_decisions,
    risk_of,
)
from tests.detection_model.truth import (
    Accepted,
    Database,
    Installation,
    Renewal,
    Store,
    Write,
)
from tests.fakes.plane import MemoryControlPlane
from tests.fakes.usage_store import MemoryUsageStore

BEGIN = datetime(2026, 11, 25, 12, tzinfo=UTC)
AWAY = StoreUnreachableError("No server responds.", "start it.")
FULL = StoreRefusedError("The store is full.", "make room.")
SECOND = timedelta(seconds=1)
MINUTE = timedelta(minutes=1)
_PATIENCE = timedelta(seconds=30)
_RETENTION = RetentionPolicy(7)
_ORDER = Order("ann", "a decision", "a run", lambda _: None)
_WRITING = {Decision.SAME, Decision.FIRST_SEEN, Decision.RENEWALS_ACCEPTED}
_OF = {
    Verdict.UNKNOWN: Decision.UNKNOWN,
    Verdict.FIRST_SEEN: Decision.FIRST_SEEN,
    Verdict.SAME: Decision.SAME,
    Verdict.LOST: Decision.LOST,
    Verdict.OTHER_STORE: Decision.OTHER_STORE,
    Verdict.DATABASE_BEHIND: Decision.BEHIND,
}


class ModelStore(MemoryUsageStore):
    """A fake store that can lose the acknowledgement of a marker, or the marker to a cleanup."""

    def __init__(self, created_at: datetime) -> None:
        super().__init__(created_at)
        self.loses_acknowledgement = False
        self.deletes_markers = False

    def write_marker(self, deployment_id: str, marker: IntendedMarker, *, after: int) -> Marker:
        written = super().write_marker(deployment_id, marker, after=after)
        if self.deletes_markers:
            self.remove(marker_key(deployment_id))
        if self.loses_acknowledgement:
            raise AWAY
        return written


@dataclass(slots=True)
class Outcome:
    """A decision, compared with the truth; ``risk`` is the known reason if it is wrong."""

    decision: Decision
    right: frozenset[Decision]
    risk: Risk | None = None

    @property
    def is_right(self) -> bool:
        return self.decision in self.right


@dataclass(slots=True)
class World:
    """All stores and databases of a history, with the present time.

    ``sites`` are the addresses; the settings name ``at``. ``stale`` is what a server shows that is
    no longer the leader. ``alternate`` is a second site that answers in turn with ``at``.
    ``has_stored``: the last capture stored something.
    """

    random: Random
    now: datetime = BEGIN
    sites: list[Store | None] = field(default_factory=list)
    at: int = 0
    alternate: int | None = None
    is_led: bool = True
    stale: Store | None = None
    is_away: bool = False
    max_age: timedelta | None = None
    has_stored: bool = False
    owed: list[Write] = field(default_factory=list)
    acting: Database = field(init=False)
    installation: Installation = field(init=False)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self.install()

    # Stores

    @property
    def store(self) -> Store | None:
        """The store at the address."""
        return self.sites[self.at]

    def create(self, gateway: int, created_at: datetime) -> Store:
        """Return a new store of a gateway that counted some usage."""
        fake = ModelStore(created_at)
        fake.keeps_for = self.max_age
        created = Store(gateway, next(self._numbers), created_at, fake)
        created.spend(self.now.toordinal())
        return created

    def jump(self) -> None:
        """Note the present content as one that must not get lost."""
        if self.store is not None:
            self.owed.append(self.store.head)

    def replace(self, store: Store | None) -> None:
        """Put another store in the place of the one at the address."""
        self.jump()
        self.sites[self.at] = store

    def move_to(self, site: int) -> None:
        """Let the address lead to another site."""
        self.jump()
        self.at = site

    def advance(self, by: timedelta) -> None:
        """Let time pass; markers that are too old are dropped."""
        self.now += by
        self.expire()

    def expire(self) -> None:
        if self.max_age is None:
            return
        for store in self.sites:
            for name, renewal in list(store.head.markers.items()) if store else []:
                if store is not None and renewal.at + self.max_age <= self.now:
                    is_ours = name == self.acting.deployment
                    leaves_mark = is_ours and self.random.random() < 0.5
                    store.drop_marker(name, is_expired=True, leaves_mark=leaves_mark)

    @property
    def loses_acknowledgements(self) -> bool:
        fake = None if self.store is None else self.store.fake
        return isinstance(fake, ModelStore) and fake.loses_acknowledgement

    @property
    def refuses_markers(self) -> bool:
        return self.store is not None and self.store.fake.marker_failure is not None

    @property
    def may_write(self) -> bool:
        """Whether a check should find the accepted store, and renew the marker in it."""
        return bool(right_decisions(self._situation(self.store)) & _WRITING)

    # Databases

    def install(self) -> None:
        """Start with an empty database."""
        plane = MemoryControlPlane.at(self.now)
        self.acting = Database(plane, plane.registry.claim().deployment_id)
        self.installation = Installation([self.acting])

    def put_back(self, dump: Database) -> None:
        """Replace the acting database by a dump of it."""
        restored = dump.copy()
        self.installation.databases.remove(self.acting)
        self.installation.databases.append(restored)
        self.acting = restored

    def record(self, kind: str) -> None:
        """Note an event that the acting database records."""
        number = next(self._numbers)
        self.installation.events[number] = kind
        self.acting.events.add(number)

    # What the product does

    def check(self) -> Outcome:
        """Check the store, and compare the decision with the truth."""
        return self._judged(self._check, is_capture=False)

    def capture(self) -> Outcome:
        """Capture the hour, and compare the decision with the truth."""
        # Two snapshots never have the same time.
        self.advance(SECOND)
        return self._judged(self._capture, is_capture=True)

    def reset(self, *, is_reachable: bool) -> Outcome | None:
        """Record a reset; with NATS, this also renews the marker, and a check follows."""
        plane = self._plane()
        if "a" not in plane.points.tenants():
            return None
        self.record("reset")
        request = ResetRequest("a", "spend", None, EVERYONE, None, "ann", "pardoned")

        def check(opener: OpenStore) -> Decision:
            record_reset(plane, request, opener)
            return self._check(opener)

        if not is_reachable:
            record_reset(plane, request, None)
            return None
        return self._judged(check, is_capture=False)

    def _plane(self) -> MemoryControlPlane:
        self.acting.plane.clock.set(self.now)
        return self.acting.plane

    def _judged(self, act: Callable[[OpenStore], Decision], *, is_capture: bool) -> Outcome:
        plane, began_at = self._plane(), self.now
        situations = self._situations()
        right = self._right(situations)
        foreign = self._untouchable(situations)
        known = set(map(id, plane.state.checks))
        decision = act(self._opener())
        new = [each for each in plane.state.checks if id(each) not in known]
        if plane.incidents.recovery().incident is None and any(
            each.verdict is Verdict.DATABASE_BEHIND for each in new
        ):
            decision = Decision.RENEWALS_ACCEPTED
        outcome = Outcome(decision, right)
        if not outcome.is_right:
            risks = (risk_of(situation, decision) for situation in situations)
            outcome.risk = next(filter(None, risks), None)
        # Nothing is written into a store that is not known to be ours.
        is_untouched = all(store.fake.stream.last_sequence == at for store, at in foreign.items())
        assert is_untouched or outcome.risk is not None
        self.now = plane.clock.now()
        if not is_capture and decision in _WRITING | {Decision.UNKNOWN}:
            self.acting.is_writing = self.loses_acknowledgements or self.refuses_markers
        self._follow(decision, began_at, is_capture=is_capture)
        return outcome

    def _situations(self) -> list[Situation]:
        shown = [self.at] if self.alternate is None else [self.at, self.alternate]
        return [self._situation(self.sites[site]) for site in shown]

    def _situation(self, store: Store | None) -> Situation:
        accepted = self.acting.accepted
        site = None
        if accepted is not None:
            found = self.sites[accepted.site]
            site = found if found and found.creation == accepted.creation else None
        return Situation(
            self.installation,
            self.acting,
            store,
            is_answered=self.is_led and not self.is_away,
            owed=tuple(self.owed),
            accepted_site=site,
            now=self.now,
            max_age=self.max_age,
        )

    def _right(self, situations: list[Situation]) -> frozenset[Decision]:
        first, *others = map(right_decisions, situations)
        if self.loses_acknowledgements and first & _WRITING:
            return first | {Decision.UNKNOWN}
        if not others:
            return first
        if self.acting.accepted is None:
            return frozenset({Decision.UNKNOWN})
        return first | others[0] | {Decision.UNKNOWN}

    def _untouchable(self, situations: list[Situation]) -> dict[Store, int]:
        return {
            each.store: each.store.fake.stream.last_sequence
            for each in situations
            if each.store and right_decisions(each) == {Decision.OTHER_STORE}
        }

    def _opener(self) -> OpenStore:
        fakes = [self._shown(self.sites[self.at])]
        if self.alternate is not None:
            fakes.append(self._shown(self.sites[self.alternate]))
        turns = itertools.cycle(fakes)
        return lambda: nullcontext(next(turns))

    def _shown(self, store: Store | None) -> MemoryUsageStore:
        shown = store if self.stale is None else self.stale
        fake = MemoryUsageStore() if shown is None else shown.show(self.now)
        fake.is_gone = shown is None and not self.is_away
        fake.is_led = self.is_led
        fake.identity_failure = AWAY if self.is_away else None
        return fake

    def _check(self, opener: OpenStore) -> Decision:
        return _OF[check_store(self.acting.plane, opener, checked_by="a check").check.verdict]

    def _capture(self, opener: OpenStore) -> Decision:
        plane, was_new = self.acting.plane, self.acting.accepted is None
        captured = None
        with suppress(BudgetRecoveryError):
            captured = capture_hour(
                plane,
                opener,
                Hour.containing(self.now),
                source=CaptureSource.COUNTERS,
                retention=_RETENTION,
                run_id=f"run {next(self._numbers)}",
                holder="a capture",
                on_outcome=lambda _: None,
            )
        incident = plane.incidents.recovery().incident
        if incident is not None:
            return _OF[incident.losses[-1].verdict]
        if not isinstance(captured, Captured) or captured.stopped_by or captured.failed:
            return Decision.UNKNOWN
        # That a known tenant has no counters is recorded, too.
        self.has_stored = bool(captured.outcomes)
        if captured.outcomes:
            self.record("capture")
        return Decision.FIRST_SEEN if was_new else Decision.SAME

    # What follows from it

    def _follow(self, decision: Decision, began_at: datetime, *, is_capture: bool) -> None:
        """Note what the product accepted or wrote; end an incident as operators would."""
        if decision is Decision.RENEWALS_ACCEPTED:
            self.acting.renewals_lost_at = self.now
            self.record("renewals lost")
        self._note_markers(frozenset(self.acting.events), began_at)
        if decision is Decision.UNKNOWN:
            if self.acting.accepted is None and self.acting.plane.registry.claim().baseline:
                # Only the marker failed: the store is accepted as it was before.
                self._accept(began_at)
                self._forget_marker()
            return
        self._settle()
        if decision in (Decision.SAME, Decision.FIRST_SEEN, Decision.RENEWALS_ACCEPTED):
            # A capture that finds no tenant accepts nothing.
            if self.acting.plane.registry.claim().baseline is not None:
                self._accept_decided(decision, began_at, is_capture=is_capture)
            return
        self.record("incident opened")
        self.calm_down()
        self._end(decision)

    def _forget_marker(self) -> None:
        accepted = self.acting.accepted
        if accepted is not None and accepted.marker is not None:
            head = accepted.head.parent or accepted.head
            self.acting.accepted = replace(accepted, head=head, marker=None)

    def _accept_decided(self, decision: Decision, at: datetime, *, is_capture: bool) -> None:
        if not is_capture or decision is not Decision.SAME:
            self._accept(at)
        elif self.has_stored and self.acting.accepted is not None and self.store is not None:
            # It accepts what it read, and leaves the rest to checks.
            self.acting.accepted = replace(
                self.acting.accepted,
                head=self.store.head,
                shown_creation=self.store.shown_creation,
            )

    def _note_markers(self, events: frozenset[int], at: datetime) -> None:
        """Find markers of the acting database that were written since."""
        deployment = self.acting.deployment
        for store in filter(None, self.sites):
            live = store.fake._keys.get(marker_key(deployment))
            if live is None or live.revision <= store.head.sequence:
                continue
            if live.value is None:
                store.forget_marker(deployment)
                continue
            number = next(self._numbers)
            store.marked(deployment, Renewal(number, events, at))
            self.acting.renewals.add(number)
            self.installation.renewals.add(number)

    def _settle(self) -> None:
        """Note that a decision was about all that the database lacks."""
        self.acting.settled |= self.installation.events.keys() | self.installation.renewals

    def _accept(self, at: datetime) -> None:
        database, store = self.acting, self.store
        assert store is not None
        before = database.accepted
        if before is not None and before.creation != store.creation:
            database.former.add(before.creation)
        database.former.discard(store.creation)
        database.accepted = Accepted(
            self.at,
            store.creation,
            store.gateway,
            store.head,
            store.shown_creation,
            at,
            neighbours_of(store, database.deployment),
            store.head.markers.get(database.deployment),
        )

    def calm_down(self) -> None:
        """End all that keeps a restore from succeeding."""
        self.is_led, self.is_away, self.alternate, self.stale = True, False, None, None
        for store in filter(None, self.sites):
            store.fake.marker_failure = None
            if isinstance(store.fake, ModelStore):
                store.fake.loses_acknowledgement = False

    def _end(self, decision: Decision) -> None:
        """End the incident: by a restore, by accepting the store, or by the right address."""
        if self.store is None:
            self.sites[self.at] = self.create(self._gateway, self.now)
        if decision is Decision.OTHER_STORE and self._is_back_at_accepted():
            return
        began_at = self.now
        plane, opener = self._plane(), self._opener()
        if decision is Decision.LOST or (
            decision is Decision.OTHER_STORE and self.random.random() < 0.5
        ):
            if decision is Decision.OTHER_STORE:
                release_restore(plane, by="ann")
            self._recover(opener)
        if plane.incidents.recovery().incident is not None:
            # Refused once for a store that nobody has decided about.
            with suppress(IncidentHeldError):
                self._resolve(opener)
        if plane.incidents.recovery().incident is not None:
            self._resolve(opener)
        assert plane.incidents.recovery().state is RecoveryState.HEALTHY
        self.now = plane.clock.now()
        # The marker is written first; the end of the incident is recorded last.
        self._note_markers(frozenset(self.acting.events), began_at)
        for store in filter(None, self.sites):
            store.note_restored()
        self.record("incident closed")
        self._settle()
        self._accept(began_at)

    def _resolve(self, opener: OpenStore) -> None:
        resolve_incident(
            self.acting.plane,
            opener,
            _ORDER,
            acceptance=Acceptance.KEEP_SNAPSHOTS,
            retention=_RETENTION,
            convergence_timeout=_PATIENCE,
        )

    @property
    def _gateway(self) -> int:
        return self.acting.accepted.gateway if self.acting.accepted else 0

    def _recover(self, opener: OpenStore) -> None:
        recover_store(
            self.acting.plane,
            opener,
            run_id="a run",
            holder="a restore",
            convergence_timeout=_PATIENCE,
            on_progress=lambda _: None,
        )

    def _is_back_at_accepted(self) -> bool:
        """Correct the address, if the accepted store still exists; the incident closes."""
        accepted = self.acting.accepted
        assert accepted is not None
        if self.random.random() < 0.4:
            return False
        self.move_to(accepted.site)
        store = self.store or self.create(self._gateway, self.now)
        self.sites[self.at] = store
        apart = abs(store.shown_creation - accepted.shown_creation)
        is_right = right_decisions(self._situation(store)) == {Decision.SAME}
        if not is_right or apart >= TOLERANCE:
            return False
        plane = self._plane()
        for _ in range(3):
            assert plane.incidents.recovery().state is RecoveryState.RECOVERING
            decision = self._check(self._opener())
            assert decision is Decision.SAME, decision
            self.now = plane.clock.now() + MINUTE
            plane.clock.set(self.now)
        assert plane.incidents.recovery().state is RecoveryState.HEALTHY
        self.record("incident closed")
        self._note_markers(frozenset(self.acting.events), self.now)
        self._accept(self.now - MINUTE)
        return True
