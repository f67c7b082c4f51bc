"""What every restore does around the tenants: wait for the store, mark it, verify the end."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Protocol

from budget_recovery_dagster.domain.incident import Closing, Incident, Outcome, Restored
from budget_recovery_dagster.domain.moves import require_not_held
from budget_recovery_dagster.domain.store import (
    SETTLED_FOR,
    Baseline,
    ClusterView,
    Observation,
    judge_observation,
    objection,
    why_not_converged,
)
from budget_recovery_dagster.domain.windows import RESTORE_CLOCK_SKEW
from budget_recovery_dagster.errors import (
    AttemptFailedError,
    DatabaseUnreachableError,
    LeaseLostError,
    StoreError,
    StoreNotReadyError,
    StorePermissionError,
    StoreWriteError,
    describe_error,
)
from budget_recovery_dagster.ports import (
    Clock,
    Incidents,
    RecoverableStore,
    RestoreAudits,
    RestorePoints,
    StoreChecks,
)
from budget_recovery_dagster.services.restore.tenants import (
    Left,
    TenantRestores,
    Worker,
    undone_error,
)
from budget_recovery_dagster.services.store_watch import (
    Losses,
    MarkerWriting,
    SameStore,
    check_of,
    new_nonce,
)
from budget_recovery_dagster.services.words import counted, in_words

# Three looks must span the twelve seconds for which a cluster is known to be blind.
_POLL_EVERY = timedelta(seconds=3)
_TO_SETTLE = SETTLED_FOR + _POLL_EVERY


class Ready(Protocol):
    """What is asked of a store before anything is written into it."""

    def await_ready(self, store: RecoverableStore) -> None:
        """Return once the store can be restored; see ``Readiness``."""
        ...


@dataclass(frozen=True, slots=True)
class Readiness:
    """Waits for at most ``timeout`` for a store that has something to be objected to.

    One that is well is given the time that it takes to prove it, too, however short the timeout.
    ``keep_going`` raises once waiting is of no use.
    """

    clock: Clock
    timeout: timedelta
    keep_going: Callable[[], None]
    tell: Callable[[str], None]

    def await_ready(self, store: RecoverableStore) -> None:
        """Return once the store can be restored.

        Raises:
            StoreNotReadyError: it has not converged in time, or its clock is not the database's.
            StoreError: it could not be reached, or is not there, at the end of that time.
        """
        self._await_convergence(store)
        require_one_time(store, self.clock)

    def _await_convergence(self, store: RecoverableStore) -> None:
        give_up_at = self.clock.now() + self.timeout
        views: list[ClusterView] = []
        said = ""
        while True:
            problem = self._problem(store, views)
            if problem is None:
                return
            is_well = bool(views) and objection(views[-1]) is None
            if self.clock.now() >= give_up_at + (_TO_SETTLE if is_well else timedelta(0)):
                raise problem
            if problem.message != said:
                said = problem.message
                self.tell(f"Waiting for the store: {said}")
            self.keep_going()
            self.clock.wait_until(self.clock.now() + _POLL_EVERY)

    def _problem(self, store: RecoverableStore, views: list[ClusterView]) -> StoreError | None:
        """Look once more, and say why the store has not converged; None if it has."""
        try:
            views.append(store.cluster_view(self.clock.now()))
        except StoreError as error:
            # What was seen before says nothing about a store that has been away since.
            views.clear()
            return error
        reason = why_not_converged(views)
        if reason is None:
            return None
        return StoreNotReadyError(
            f"The usage store has not converged: {reason}.",
            "bring back the servers that are missing: an automatic restore is tried again by "
            "itself, and one by hand can accept an unconverged store.",
        )


@dataclass(frozen=True, slots=True)
class Unconverged:
    """Takes a store as it is, because a person has said so; only its clock must be trusted."""

    clock: Clock
    tell: Callable[[str], None]

    def await_ready(self, store: RecoverableStore) -> None:
        """Return at once.

        Raises:
            StoreNotReadyError: its clock is not the database's.
            StoreError: it could not be reached, or is not there.
        """
        problem = objection(store.cluster_view(self.clock.now()))
        if problem is not None:
            self.tell(f"Going on although the store has not converged: {problem}")
        require_one_time(store, self.clock)


def require_one_time(store: RecoverableStore, clock: Clock) -> None:
    """Refuse a store whose clock is not the database's.

    Raises:
        StoreNotReadyError: it is not.
        StoreError: it could not be asked.
    """
    told, now = store.now(), clock.now()
    if told is not None and abs(told - now) > RESTORE_CLOCK_SKEW:
        raise StoreNotReadyError(
            f"The clocks disagree: the database's says {now:%Y-%m-%d %H:%M:%S}, the usage "
            f"store's {told:%Y-%m-%d %H:%M:%S} UTC. By which one a window is still open "
            "cannot be told.",
            "set the clocks of both servers by NTP.",
        )


@dataclass(frozen=True, slots=True)
class Remainder:
    """How many counters are lower than the recovery point.

    ``unreadable`` live counters are left as they are, and of ``unsound`` windows nobody knows what
    was used: every record of them is damaged. ``unseen`` tells of tenants that may have more.
    """

    counters: int
    unreadable: int
    unsound: int
    unseen: tuple[str, ...]

    @property
    def is_nothing(self) -> bool:
        """Whether everything was seen, and nothing of it can be raised."""
        return not self.counters and not self.unseen

    def unknown(self) -> Iterator[str]:
        """Say of what it is not known whether it is all there, in sentences."""
        if self.unsound:
            unknown = counted(self.unsound, "window")
            yield f"Nothing is known of {unknown}: no record is as captured."
        if self.unreadable:
            yield f"Left as unreadable: {counted(self.unreadable, 'live counter')}."


def find_remainder(
    restores: TenantRestores, tenants: list[str], note: Callable[[Left], None]
) -> Remainder:
    """Look at tenants one by one; ``note`` is told of each what is left.

    Raises:
        DatabaseUnreachableError, LeaseLostError: the work was cut short.
        StoreError: nothing can be asked of the store any more.
    """
    counters, unreadable, unseen = 0, 0, []
    for tenant in tenants:
        try:
            left = restores.left_of(tenant)
            note(left)
        except (DatabaseUnreachableError, LeaseLostError):
            raise
        except Exception as error:  # noqa: BLE001 - reported by name; no tenant hides another
            restores.require_answer(error)
            unseen.append(f"Tenant {tenant!r} cannot be seen: {describe_error(error)[0]}")
        else:
            counters += left.counters
            unreadable += left.unreadable
    return Remainder(counters, unreadable, restores.unsound, tuple(unseen))


@dataclass(frozen=True, slots=True)
class RestoreTools:
    """What attempts work with; ``next_step`` is what to do where the store became another one."""

    points: RestorePoints
    audits: RestoreAudits
    checks: StoreChecks
    incidents: Incidents
    losses: Losses
    clock: Clock
    next_step: str

    def same_store(self, store: RecoverableStore, deployment_id: str) -> SameStore:
        """Return what compares an opened store with the restore target of an incident."""
        return SameStore(store, deployment_id, self.losses, self.checks, self.clock, self.next_step)


@dataclass(slots=True)
class RestoreAttempt:
    """Works on the restore target of one incident, in an opened store."""

    tools: RestoreTools
    worker: Worker
    store: RecoverableStore
    deployment_id: str
    incident: Incident
    restores: TenantRestores = field(init=False)

    def __post_init__(self) -> None:
        self.restores = TenantRestores(
            points=self.tools.points,
            audits=self.tools.audits,
            clock=self.tools.clock,
            worker=self.worker,
            store=self.store,
            deployment_id=self.deployment_id,
            why=self.incident.losses[-1].reason,
            incident_id=self.incident.incident_id,
        )

    def restore(self) -> Closing:
        """Raise every tenant's counters, and say how the incident can be closed.

        Raises:
            StoreLostError: the store was lost once more; the incident says so.
            IncidentHeldError: a person has put it on hold; what was raised stays raised.
            AttemptFailedError: some tenants are not done; what was raised stays raised.
            StoreError, DatabaseError, LeaseLostError: the work was cut short; likewise.
        """
        for tenant in sorted(self.tools.points.tenants()):
            self.worker.lease.require_held()
            self._require_not_held()
            self.restores.restore(tenant)
        seen = self._require_same_store()
        if undone := self.restores.undone:
            raise undone_error(undone)
        return self._closing(seen)

    def verify(self) -> Closing:
        """Look whether nothing is left to be raised, writing nothing, and say how it can be closed.

        Raises:
            StoreLostError: as ``restore``.
            AttemptFailedError: something is left.
            StoreError, DatabaseError, LeaseLostError: it could not be seen.
        """
        remainder = find_remainder(
            self.restores,
            sorted(self.tools.points.tenants()),
            lambda left: self.restores.keep(left.entries),
        )
        seen = self._require_same_store()
        if not remainder.is_nothing:
            unseen = "".join(f" {sentence}" for sentence in remainder.unseen[-1:])
            raise AttemptFailedError(
                "All attempts have ended, and the snapshots still say more than "
                f"{counted(remainder.counters, 'counter')}.{unseen}",
                "read the logs of the runs of restore_job to see how they ended.",
            )
        return self._closing(seen)

    def _require_not_held(self) -> None:
        incident = self.tools.incidents.recovery().incident
        # Of another incident it is not told here: the end of this one will not be accepted.
        if incident is not None and incident.incident_id == self.incident.incident_id:
            require_not_held(incident)

    def _require_same_store(self) -> Observation:
        same_store = self.tools.same_store(self.store, self.deployment_id)
        return same_store.require(self.incident, found_by=self.worker.holder)

    def _closing(self, seen: Observation) -> Closing:
        restored = self._restored()
        raised = (
            f"Raised {counted(restored.counters, 'counter')} in "
            f"{counted(restored.windows, 'window')} of {counted(restored.tenants, 'tenant')}."
        )
        if self.restores.unsound:
            outcome = Outcome.IN_PART
            unknown = counted(self.restores.unsound, "window")
            told = [
                raised,
                f"Nothing is known of {unknown}: no record is as captured.",
                uncovered(self.incident),
            ]
        elif restored.counters:
            outcome, told = Outcome.RESTORED, [raised, uncovered(self.incident)]
        elif self.restores.has_current:
            outcome = Outcome.NOTHING_LOST
            told = ["No counter that can be raised is lower than the snapshots say."]
        else:
            outcome = Outcome.NOTHING_CURRENT
            told = [
                "Every window in the snapshots has closed, so there was nothing to bring back.",
                uncovered(self.incident),
            ]
        if noted := self.restores.noted:
            told.append(f"Of {counted(noted, 'window')} something was left: see its notes.")
        return Closing(outcome, " ".join(told), restored, base_of(self.incident, seen))

    def _restored(self) -> Restored:
        """Sum up what all attempts of the incident have raised."""
        restored = self.tools.audits.restored_in(self.incident.incident_id)
        return replace(restored, boards=self.restores.boards)


def base_of(incident: Incident, seen: Observation) -> Baseline:
    """Return the baseline that is accepted with the end of an incident."""
    target = incident.target
    if target is None:
        raise ValueError("an incident without a restore target cannot be closed")
    return replace(target, identity=seen.identity, intended=None)


def uncovered(incident: Incident) -> str:
    """Say which usage no snapshot holds."""
    span, since, until = incident.uncovered, incident.newest_point_at, incident.last_good_at
    if span is None or since is None or until is None:
        return "Since when usage is missing cannot be told: no check of the store is known."
    told = f"What was counted from {since:%Y-%m-%d %H:%M:%S} UTC until the loss"
    # To the second, or nobody would believe it.
    if span >= timedelta(seconds=1):
        told = f"{told}, at least until {until:%Y-%m-%d %H:%M:%S} UTC ({in_words(span)}),"
    return f"{told} is in no snapshot and did not come back."


@dataclass(frozen=True, slots=True)
class RestoreTarget:
    """The incident, standing on a store that is ready and marked.

    ``refusal`` is why the store did not take the marker: it takes no writes at all.
    """

    incident: Incident
    refusal: StoreWriteError | None = None


def require_led(seen: Observation) -> None:
    """Refuse to stand on what may be shown by a leader that was cut off.

    Raises:
        StoreNotReadyError: it may be.
    """
    if not seen.is_led:
        raise StoreNotReadyError(
            "Whoever answered for the store may not be its leader any more.",
            "bring back so many servers that most of them hear each other.",
        )


@dataclass(frozen=True, slots=True)
class TargetAdoption:
    """Lets a recovery stand on the store as it is now, which must be ready."""

    tools: RestoreTools
    worker: Worker
    deployment_id: str

    def take(self, store: RecoverableStore, incident: Incident) -> RestoreTarget:
        """Mark the store as the one to be restored.

        A store that was lost once more is joined to the incident. A marker that may not be written
        keeps nobody from restoring: less is noticed without it.

        Raises:
            StoreError: the store cannot be restored now.
            PossibleLossError: two looks at it disagree.
            IncidentMovedError: somebody else has moved the incident.
        """
        incident, seen = self._see(store, incident)
        target = incident.target or Baseline(seen.identity, version=1)
        target = replace(target, identity=seen.identity, intended=target.intended or new_nonce())
        incident = self.tools.incidents.adopt_target(target, judged=incident)
        marking = MarkerWriting(store, self.deployment_id)
        try:
            target = marking.renew(target, seen, self.tools.clock.now())
        except StorePermissionError as error:
            self.worker.tell(f"A further loss may go unnoticed: {error}")
            return RestoreTarget(incident)
        except StoreWriteError as error:
            return RestoreTarget(incident, refusal=error)
        return RestoreTarget(self.tools.incidents.adopt_target(target, judged=incident))

    def _see(self, store: RecoverableStore, incident: Incident) -> tuple[Incident, Observation]:
        def observe() -> Observation:
            return store.observe(self.deployment_id)

        seen = observe()
        require_led(seen)
        judgement = judge_observation(incident.target, seen, self.tools.clock.now())
        if not judgement.verdict.is_loss:
            return incident, seen
        joined = self.tools.losses.join(
            judgement, observe, judged=incident, found_by=self.worker.holder
        )
        self.tools.checks.record(check_of(joined))
        self.worker.tell(f"The store was lost once more. {judgement.reason}")
        return joined, observe()
