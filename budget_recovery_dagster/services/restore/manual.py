"""What a person does about an incident: restore manually, resolve, hold and release."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from enum import StrEnum
from typing import NamedTuple
from uuid import UUID

from budget_recovery_dagster.domain.admission import LONGEST_RESTORE, RESTORE_LEASE
from budget_recovery_dagster.domain.audits import MOST_AMOUNTS, IncidentAmounts
from budget_recovery_dagster.domain.counters import Entity
from budget_recovery_dagster.domain.incident import Closing, Incident, Outcome, RecoveryState
from budget_recovery_dagster.domain.plan import (
    Difference,
    KeptPreview,
    PlannedEntry,
    RecoveryPlan,
    RestoreChoice,
    differences,
)
from budget_recovery_dagster.domain.recovery_point import EVERYONE, Everyone, Reset
from budget_recovery_dagster.domain.snapshots import RetentionPolicy
from budget_recovery_dagster.domain.verdict import Observation, same_creation
from budget_recovery_dagster.domain.windows import Window
from budget_recovery_dagster.errors import (
    BudgetRecoveryError,
    ChoiceError,
    DatabaseError,
    DatabaseUnreachableError,
    IncidentMovedError,
    StoreWriteError,
)
from budget_recovery_dagster.ports import ControlPlane, OpenStore, Previews
from budget_recovery_dagster.services.restore.preview import (
    ChosenPoints,
    RestoreRequest,
    choose_points,
    outdated,
    require_same,
)
from budget_recovery_dagster.services.restore.report import (
    cost,
    counted,
    largest_amounts,
    listed,
    uncovered,
)
from budget_recovery_dagster.services.restore.session import (
    Remainder,
    RestoreSession,
    TenantRestores,
    Worker,
)
from budget_recovery_dagster.services.restore.tenants import TenantRestored, undone_error

_NEXT_STEP = "See `budget-recovery status`, and preview once more."


@dataclass(frozen=True, slots=True)
class Order:
    """Who orders a manual restore or resolve, why, and in which run.

    ``on_progress`` receives sentences. ``accept_unconverged``: use the store even if its servers
    have not converged.
    """

    by: str
    reason: str
    run_id: str
    on_progress: Callable[[str], None]
    accept_unconverged: bool = False


def require_reason(reason: str) -> None:
    """Refuse an empty reason of a restore, a resolve, a hold or a reset.

    Raises:
        ChoiceError: it is empty.
    """
    if not reason.strip():
        raise ChoiceError("The reason is empty.", "give a reason; it is stored.")


@dataclass(frozen=True, slots=True)
class Applied:
    """What a manual restore did.

    ``preview`` is the one that it was compared with; None: there is none of the last 24 hours
    with these options, and ``differences`` are unknown, as for tenants ``uncompared``. ``absent``
    are the tenants without usage in the chosen snapshot. ``failure`` is why not everything is
    done; what was raised stays raised. ``incident`` is the one that was open, as it is now;
    ``remainder`` is what keeps it open, None if that was not determined. ``others`` is what other
    snapshots than the chosen one hold more of the chosen budgets; None: none was chosen, or it was
    not determined. ``amounts`` are what the incident cost by now, None if none was open.
    """

    choice: RestoreChoice
    preview: KeptPreview | None
    differences: tuple[Difference, ...]
    uncompared: tuple[str, ...]
    absent: tuple[str, ...]
    tenants: tuple[TenantRestored, ...]
    failure: BudgetRecoveryError | None
    incident: Incident | None
    remainder: Remainder | None
    others: Remainder | None = None
    amounts: IncidentAmounts | None = None

    @property
    def raised(self) -> int:
        """How many counters were raised."""
        return sum(tenant.raised for tenant in self.tenants)

    @property
    def boards(self) -> int:
        """How many leaderboards were written."""
        return sum(tenant.boards for tenant in self.tenants)


def restore_manually(  # noqa: PLR0913 - by keyword, each the caller's own
    plane: ControlPlane,
    open_store: OpenStore,
    request: RestoreRequest,
    order: Order,
    *,
    convergence_timeout: timedelta,
    preview_id: str | None = None,
) -> Applied:
    """Raise the counters that are asked for, and close the incident if nothing is left.

    The plan is compared with the preview of this id, or else with the newest one with these
    options. An error raised here means that nothing was written but our marker; later failures are
    in the result.

    Raises:
        ChoiceError: what is asked for does not exist, or no reason is given.
        LeaseHeldError: another restore is running; the message says whose and since when.
        PreviewOutdatedError: the store is another one than at the preview.
        PossibleLossError, StoreLostError: the store is lost.
        IncidentHeldError: it is a store that nobody has decided about; the incident is on hold.
        StoreFullError: the bucket would delete other keys to make room.
        SettingsError: the database belongs to another bucket.
        StoreError, DatabaseError, IncidentMovedError: it could not start.
    """
    require_reason(order.reason)
    choose_points(plane, request)
    with _manual_session(plane, open_store, order) as session:
        seen = _await_ready(session, order, convergence_timeout)
        # Once more: retention may have removed the snapshot during the wait.
        chosen = choose_points(plane, request)
        comparison = _Comparison.of(plane.previews, chosen.choice, preview_id)
        if comparison.preview is None:
            order.on_progress("No preview with these options in the last 24 hours")
        else:
            require_same(comparison.preview, seen.identity)
        TenantRestores(session, chosen, order.reason).require_room(chosen.tenants())
        if refusal := _adopt_target(session):
            raise refusal
        if comparison.preview is not None:
            _require_no_loss_since(comparison.preview, session.incident)
        return _Run(chosen, order, session, comparison).restore()


def _require_no_loss_since(kept: KeptPreview, incident: Incident | None) -> None:
    """Refuse to restore a store that may have lost data since it was previewed.

    Raises:
        PreviewOutdatedError: a loss was found since, and the preview did not see the store after
            that loss.
    """
    loss = incident.losses[-1] if incident is not None else None
    if loss is None or loss.found_at <= kept.at:
        return
    was_previewed_after = (
        loss.after is not None
        # Exactly: a store may be made anew within the tolerance. The plan is made anew in any case.
        and loss.after.created_at != loss.before.created_at
        and same_creation(loss.after.created_at, kept.identity.created_at)
    )
    if not was_previewed_after:
        raise outdated(kept, loss.reason.rstrip("."))


@contextmanager
def _manual_session(
    plane: ControlPlane, open_store: OpenStore, order: Order
) -> Iterator[RestoreSession]:
    plane.registry.claim()
    with (
        plane.leases.hold(RESTORE_LEASE, order.by, at_most=LONGEST_RESTORE) as lease,
        open_store() as store,
    ):
        worker = Worker(order.run_id, order.by, lease, order.on_progress)
        yield RestoreSession(plane, store, open_store, worker, _NEXT_STEP)


def _await_ready(session: RestoreSession, order: Order, timeout: timedelta) -> Observation:
    if order.accept_unconverged:
        session.accept_unconverged()
    else:
        session.await_convergence(timeout)
    # A person may accept servers that have not converged, but not what may be another store.
    return session.require_led()


def _adopt_target(session: RestoreSession) -> StoreWriteError | None:
    incident = session.plane.incidents.recovery().incident
    if incident is None:
        session.watch.require_accepted()
        return None
    return session.adopt_target(incident, is_chosen=True)


@dataclass(slots=True)
class _Comparison:
    """Compares a restore with its preview; ``preview`` is None if there is none.

    ``uncompared`` are the tenants that could not be compared.
    """

    previews: Previews
    preview: KeptPreview | None
    found: list[Difference] = field(default_factory=list)
    uncompared: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, previews: Previews, choice: RestoreChoice, preview_id: str | None) -> "_Comparison":
        """Compare with the preview of this id, or else with the newest one for this choice.

        Raises:
            ChoiceError: there is no such preview, or it has another choice.
            DatabaseUnreachableError: the database is not reachable; nothing can be restored.
        """
        if preview_id is not None:
            kept = _stored_preview(previews, preview_id)
            if kept is None or kept.choice != choice:
                raise ChoiceError(
                    f"No stored preview {preview_id!r} has these options: {choice}.",
                    "preview again; a preview is stored for a day.",
                )
            return cls(previews, kept)
        try:
            return cls(previews, previews.newest(choice))
        except DatabaseUnreachableError:
            raise
        except DatabaseError:
            # A restore must not fail only because there is nothing to compare it with.
            return cls(previews, None)

    def tenants(self) -> frozenset[str]:
        """Return the previewed tenants."""
        if self.preview is None:
            return frozenset()
        return self.previews.tenants_of(self.preview.preview_id)

    def previewed(self, tenant: str) -> Sequence[PlannedEntry] | None:
        """Return the previewed entries of a tenant; None if they are unknown.

        Raises:
            DatabaseUnreachableError: the database is not reachable.
        """
        if self.preview is None:
            return None
        try:
            return self.previews.entries_of(self.preview.preview_id, tenant)
        except DatabaseUnreachableError:
            raise
        except DatabaseError:
            return None

    def add(
        self, tenant: str, previewed: Sequence[PlannedEntry] | None, plan: RecoveryPlan | None
    ) -> None:
        """Compare the plan of a tenant with its preview; ``plan`` None: no plan could be made."""
        if self.preview is None:
            return
        if previewed is None or plan is None:
            self.uncompared.append(tenant)
        else:
            self.found += differences(tenant, previewed, plan.entries)


def _stored_preview(previews: Previews, preview_id: str) -> KeptPreview | None:
    return previews.get(preview_id) if _is_id(preview_id) else None


def _is_id(preview_id: str) -> bool:
    try:
        return str(UUID(preview_id)) == preview_id
    except ValueError:
        return False


@dataclass(slots=True)
class _Run:
    """One manual restore, of the accepted store or of an incident's restore target."""

    chosen: ChosenPoints
    order: Order
    session: RestoreSession
    comparison: _Comparison
    absent: list[str] = field(default_factory=list)
    remainder: Remainder | None = None
    restores: TenantRestores = field(init=False)

    def __post_init__(self) -> None:
        choice = self.chosen.choice
        is_latest = choice.snapshot is None and not choice.despite_resets
        self.restores = TenantRestores(self.session, self.chosen, self.order.reason, is_latest)

    def restore(self) -> Applied:
        failure: BudgetRecoveryError | None = None
        incident = self.session.incident
        try:
            for tenant in sorted({*self.chosen.tenants(), *self.comparison.tenants()}):
                self._restore(tenant)
            if self.restores.undone:
                failure = undone_error(self.restores.undone)
            incident = self._end(failure)
        except BudgetRecoveryError as error:
            # What was raised by then is reported, whatever became of the rest.
            failure = error
        return Applied(
            choice=self.chosen.choice,
            preview=self.comparison.preview,
            differences=tuple(self.comparison.found),
            uncompared=tuple(self.comparison.uncompared),
            absent=tuple(self.absent),
            tenants=tuple(self.restores.tenants),
            failure=failure,
            incident=incident,
            remainder=self.remainder,
            others=self._others(),
            amounts=self._amounts(),
        )

    def _amounts(self) -> IncidentAmounts | None:
        session = self.session
        if session.incident is None:
            return None
        # As ``_others``.
        with suppress(BudgetRecoveryError):
            return _amounts_in(session, session.incident)
        return None

    def _others(self) -> Remainder | None:
        """Return what other snapshots than the chosen one hold more, as the store is now."""
        choice = self.chosen.choice
        if choice.snapshot is None:
            return None
        latest = replace(self.chosen, choice=replace(choice, snapshot=None))
        restores = TenantRestores(self.session, latest, self.order.reason)
        # The restore has ended; only its report would be without this.
        with suppress(BudgetRecoveryError):
            return restores.remainder(is_final=False, tenants=latest.tenants())
        return None

    def _restore(self, tenant: str) -> None:
        previewed = self.comparison.previewed(tenant)
        restored = self.restores.restore(tenant)
        if restored is None:
            self.absent.append(tenant)
            self.comparison.add(tenant, previewed, RecoveryPlan(tenant, ()))
        else:
            self.comparison.add(tenant, previewed, restored.plan)

    def _end(self, failure: BudgetRecoveryError | None) -> Incident | None:
        """Close the open incident if nothing of the whole store is left; return how it is now."""
        session = self.session
        degraded: list[str] = []
        if session.incident is not None and failure is None:
            restores = TenantRestores(session, session.plane.points, self.order.reason)
            self.remainder = restores.remainder(is_final=False)
            degraded += restores.degraded()
        seen = session.require_same_store()
        incident, remainder = session.incident, self.remainder
        if incident is None or remainder is None or not remainder.is_nothing:
            return incident
        detail = " ".join([*remainder.unknown(), *degraded, uncovered(incident)])
        return _close(
            session,
            self.order,
            Outcome.RESTORED_MANUALLY,
            detail,
            seen,
        )


def _close(  # noqa: PLR0913 - by keyword, each the caller's own
    session: RestoreSession,
    order: Order,
    outcome: Outcome,
    detail: str,
    seen: Observation,
    *,
    resets: Sequence[Reset] = (),
) -> Incident:
    """Close the open incident; who closed it, why, and what was raised precede ``detail``.

    Raises:
        IncidentMovedError: the incident has been moved by someone else.
        LeaseLostError: the lease is no longer held.
    """
    baseline = session.accepted_with(seen)
    incident = session.open_incident
    restored = session.plane.audits.restored_in(incident.incident_id)
    raised = (
        f"In the whole incident, {counted(restored.counters, 'counter')} raised in "
        f"{counted(restored.windows, 'window')} of {counted(restored.tenants, 'tenant')}."
        if restored.counters
        else "Nothing was raised."
    )
    by = f"By {order.by}: {order.reason.strip().rstrip('.')}."
    amounts = cost(incident, _amounts_in(session, incident))
    sentences = " ".join([by, raised, *amounts, detail])
    closing = Closing(outcome, sentences, restored, baseline)
    return session.close(closing, reason="Accepted manually", resets=resets)


def _amounts_in(session: RestoreSession, incident: Incident) -> IncidentAmounts:
    return session.plane.audits.amounts_in(incident.incident_id, MOST_AMOUNTS)


class Acceptance(StrEnum):
    """What becomes of recorded usage that an accepted store lacks.

    It is excluded from restores by resets, or kept, so that the next loss brings it back.
    """

    RECORD_RESETS = "record_resets"
    KEEP_SNAPSHOTS = "keep_snapshots"


@dataclass(frozen=True, slots=True)
class Resolved:
    """The incident, closed, and what the snapshots still hold beyond the store.

    ``resets`` are recorded; until ``undo_until`` at least, the excluded usage is retained as long
    as its window is open. None: no reset is recorded.
    """

    incident: Incident
    acceptance: Acceptance
    remainder: Remainder
    resets: tuple[Reset, ...] = ()
    undo_until: datetime | None = None


def resolve_incident(  # noqa: PLR0913 - by keyword, each the caller's own
    plane: ControlPlane,
    open_store: OpenStore,
    order: Order,
    *,
    acceptance: Acceptance,
    retention: RetentionPolicy,
    convergence_timeout: timedelta,
    preview_id: str | None = None,
) -> Resolved:
    """Accept the store as it is: captures resume, and checks compare with it from now on.

    ``preview_id`` is the preview of the whole store that the person decided on, None if there was
    none. Nothing is written into the store but our marker. Resets are recorded only for counters
    that were read as lower than in the snapshots, or as absent, and only together with the end of
    the incident.

    Raises:
        ChoiceError: no reason is given, or the preview is not stored any more.
        IncidentMovedError: no incident is open, or it was moved by someone else.
        PreviewOutdatedError: the store is another one than at the preview.
        IncidentHeldError: it is a store that nobody has decided about; the incident is on hold.
        LeaseHeldError: a restore is running; the message says whose and since when.
        StoreLostError, PossibleLossError, AttemptFailedError: the store became another one
            meanwhile, or could not be verified to be the same.
        SettingsError: the database belongs to another bucket.
        StoreError, DatabaseError, LeaseLostError: the store could not be read; nothing is changed.
    """
    require_reason(order.reason)
    require_open_incident(plane)
    with _manual_session(plane, open_store, order) as session:
        seen = _await_ready(session, order, convergence_timeout)
        if preview_id is not None:
            _require_previewed(plane.previews, preview_id, seen)
        if refusal := _adopt_target(session):
            order.on_progress(f"A further loss may go undetected: {refusal}")
        incident = session.open_incident
        restores = TenantRestores(session, plane.points, order.reason)
        remainder = restores.remainder(is_final=True)
        seen = session.require_same_store()
        resets: tuple[Reset, ...] = ()
        if acceptance is Acceptance.RECORD_RESETS:
            resets = tuple(_resets(remainder, order, incident, plane.clock.now()))
        undo_until = _undo_until(resets, retention) if resets else None
        detail = " ".join(_left(remainder, incident, undo_until))
        closed = _close(session, order, Outcome.ACCEPTED, detail, seen, resets=resets)
        return Resolved(closed, acceptance, remainder, resets, undo_until)


def _require_previewed(previews: Previews, preview_id: str, seen: Observation) -> None:
    kept = _stored_preview(previews, preview_id)
    if kept is None:
        raise ChoiceError(
            f"The preview {preview_id!r} is not stored any more.",
            "run `budget-recovery resolve` once more; a preview is stored for a day.",
        )
    require_same(kept, seen.identity)


def _resets(
    remainder: Remainder, order: Order, incident: Incident, at: datetime
) -> Iterator[Reset]:
    """Yield a reset for each budget and window with lower counters.

    Captures are paused, so every record is older than ``at``.
    """
    reason = f"incident {incident.short_id} accepted: {order.reason.strip()}"
    for lower in remainder.lower:
        who: Everyone | frozenset[Entity] = EVERYONE if lower.are_all else lower.entities
        of = lower.of
        yield Reset(
            lower.tenant, of.budget, of.window.token, who, at, order.by, reason, recorded_at=at
        )


def _undo_until(resets: Sequence[Reset], retention: RetentionPolicy) -> datetime:
    """Return until when the excluded usage is retained, unless its window ends before."""
    retained = resets[0].at + timedelta(days=retention.days)
    ends = [Window.parse(reset.window).end for reset in resets if reset.window is not None]
    return min(retained, max(end or retained for end in ends))


def require_open_incident(plane: ControlPlane) -> None:
    """Refuse to resolve a store without an open incident.

    Raises:
        IncidentMovedError: none is open.
    """
    recovery = plane.incidents.recovery()
    if recovery.incident is None:
        raise IncidentMovedError(
            f"The store is {recovery.state.name}, and no incident is open.",
            "there is nothing to resolve; see `budget-recovery status`.",
        )


def _left(remainder: Remainder, incident: Incident, undo_until: datetime | None) -> Iterator[str]:
    if remainder.counters:
        lower = counted(remainder.counters, "counter")
        amounts = largest_amounts((each.tenant, each.of, each.rise) for each in remainder.lower)
        yield f"Left lower than in the snapshots: {lower}. The largest: {amounts}."
        if undo_until is None:
            yield "No reset is recorded: the next loss brings their usage back."
        else:
            yield (
                "Resets are recorded: restores exclude what was captured of them so far. To undo,"
                " for each tenant and budget: `budget-recovery restore --despite-resets --tenant"
                " <tenant> --budget <budget> --reason <why>`, until"
                f" {undo_until:%Y-%m-%d %H:%M:%S} UTC or the end of the window. This brings back"
                " usage of other resets of the budget as well."
            )
    yield from remainder.unknown()
    if remainder.unseen:
        yield f"Not everything could be read: {listed(remainder.unseen)}"
    yield uncovered(incident)


class HoldResult(NamedTuple):
    """The open incident after a hold or release, and whether it was on hold before.

    A second hold and a release without a hold change nothing.
    """

    incident: Incident
    was_on_hold: bool


def hold_restore(plane: ControlPlane, reason: str, *, by: str) -> HoldResult:
    """Keep the restore of the open incident from starting or continuing.

    Raises:
        ChoiceError: no reason is given.
        IncidentMovedError: no incident is being recovered.
    """
    require_reason(reason)
    judged = _recovering(plane)
    return HoldResult(plane.incidents.hold(reason, by, judged=judged), judged.is_held)


def release_restore(plane: ControlPlane, *, by: str) -> HoldResult:
    """Let the restore of the open incident continue, with all its attempts.

    Raises:
        IncidentMovedError: no incident is being recovered.
    """
    judged = _recovering(plane)
    return HoldResult(plane.incidents.release(by, judged=judged), judged.is_held)


def _recovering(plane: ControlPlane) -> Incident:
    recovery = plane.incidents.recovery()
    if recovery.incident is None or recovery.state is not RecoveryState.RECOVERING:
        raise IncidentMovedError(
            f"The store is {recovery.state.name}: no restore is under way.",
            "see `budget-recovery status`.",
        )
    return recovery.incident
