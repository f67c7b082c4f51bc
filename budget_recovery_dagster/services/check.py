"""One check of the store: compare, renew the marker, count the keys, record what was found."""

from contextlib import suppress
from dataclasses import dataclass, field, replace

from budget_recovery_dagster.domain.admission import CHECK_LEASE, RESTORE_LEASE
from budget_recovery_dagster.domain.incident import (
    Closing,
    Incident,
    Loss,
    Outcome,
    Recovery,
)
from budget_recovery_dagster.domain.verdict import (
    Check,
    Evidence,
    Judgement,
    Observation,
    Verdict,
    baseline_of,
    same_creation,
)
from budget_recovery_dagster.errors import (
    BaselineMovedError,
    CapturesPausedError,
    IncidentHeldError,
    IncidentMovedError,
    LeaseHeldError,
    PossibleLossError,
    StoreError,
    StorePermissionError,
    StoreWriteError,
)
from budget_recovery_dagster.ports import ControlPlane, OpenStore
from budget_recovery_dagster.services.falls import Compared, compare_counts
from budget_recovery_dagster.services.store_watch import (
    MARKER_DELETED,
    ROUNDS,
    SECOND_DEPLOYMENT,
    SPARE_MARKER,
    Finding,
    StoreWatch,
    compared_with,
    watch_store,
)

RETURNED_AFTER = 3
"""After so many checks in a row that saw only the accepted store, it has returned."""

_MOVED = (BaselineMovedError, CapturesPausedError, IncidentMovedError)


@dataclass(frozen=True, slots=True)
class Checked:
    """What a check found, and the recovery state after it; ``compared`` is what else it found.

    ``hint`` says what to do about an unknown verdict or a marker that could not be written; empty:
    nothing.
    """

    check: Check
    recovery: Recovery
    hint: str = ""
    compared: Compared = field(default_factory=Compared)


def check_store(plane: ControlPlane, open_store: OpenStore, *, checked_by: str) -> Checked:
    """Compare the store with what was accepted, record the result, and open an incident on a loss.

    While the store is the accepted one, our marker in it is renewed, which proves that the store
    can be written. While an incident is open, nothing is written; a further loss joins it. What
    cannot be read gives the verdict UNKNOWN and changes nothing.

    Raises:
        SettingsError: the database belongs to another bucket.
        DatabaseError: the database failed; the check may not be recorded.
    """
    plane.registry.claim()
    compared = Compared()
    try:
        with plane.leases.hold(CHECK_LEASE, checked_by), open_store() as store:
            found = _check(watch_store(plane, store, open_store, checked_by))
            if found.seen is not None and found.verdict.is_good:
                compared = compare_counts(plane, store, found.seen)
    except (LeaseHeldError, PossibleLossError, StoreError) as error:
        found = _unknown(plane, error.message, error.hint)
    recovery = plane.incidents.recovery()
    incident = recovery.incident
    check = Check(
        checked_at=plane.clock.now(),
        checked_by=checked_by,
        verdict=found.verdict,
        reason=" ".join([found.judgement.reason, *compared.notes]),
        identity=found.seen.identity if found.seen else None,
        incident_id=incident.incident_id if incident else None,
        evidence=found.judgement.evidence,
    )
    plane.registry.record_check(check)
    return Checked(check, recovery, found.hint or compared.hint, compared)


def foresee_check(plane: ControlPlane, open_store: OpenStore) -> Finding:
    """Return what one observation of a check would find, and record nothing.

    Raises:
        SettingsError, DatabaseError: as ``check_store``; also if there was no check yet.
    """
    incident = plane.incidents.recovery().incident
    target = compared_with(incident) if incident else None
    try:
        with open_store() as store:
            return watch_store(plane, store, open_store, "a preview").compare(target)
    except (PossibleLossError, StoreError) as error:
        return _unknown(plane, error.message, error.hint)


def renew_marker(plane: ControlPlane, open_store: OpenStore, *, renewed_by: str) -> str | None:
    """Renew our marker in the accepted store at once; return why that failed, None if it did not.

    It judges nothing: to open an incident is left to checks.

    Raises:
        DatabaseError: the database failed.
    """
    try:
        with plane.leases.hold(CHECK_LEASE, renewed_by), open_store() as store:
            if plane.incidents.recovery().incident is not None:
                return "An incident is open."
            watch = watch_store(plane, store, open_store, renewed_by)
            found = watch.compare()
            if found.seen is None or found.verdict is not Verdict.SAME:
                return found.judgement.reason
            renewed = _renew(watch, found, found.seen)
            return renewed.judgement.reason if renewed.hint else None
    except (LeaseHeldError, PossibleLossError, StoreError, *_MOVED) as error:
        return error.message


def _check(watch: StoreWatch) -> Finding:
    for _ in range(ROUNDS):
        try:
            incident = watch.plane.incidents.recovery().incident
            return _check_accepted(watch) if incident is None else _check_incident(watch, incident)
        except _MOVED:
            continue
    reason = f"The accepted baseline moved {ROUNDS} times during the check."
    return _unknown(watch.plane, reason, SECOND_DEPLOYMENT)


def _unknown(plane: ControlPlane, reason: str, hint: str) -> Finding:
    unknown = Judgement(Verdict.UNKNOWN, reason)
    return Finding(unknown, None, plane.clock.now(), baseline=None, accepted=None, hint=hint)


def _check_accepted(watch: StoreWatch) -> Finding:
    found = watch.compare()
    if found.verdict.is_alarm:
        if watch.raise_alarm(found) is not None:
            return found
        found = watch.compare()
    elif found.verdict is Verdict.FIRST_SEEN:
        watch.confirm(found)
    if found.seen is not None and found.verdict.is_good:
        return _renew(watch, found, found.seen)
    return found


def _renew(watch: StoreWatch, found: Finding, seen: Observation) -> Finding:
    """Accept the store as it is now, with a new marker in it."""
    registry, latest = watch.plane.registry, found.baseline
    if latest is None:
        latest = registry.accept(baseline_of(seen, found.at), judged=None)
        if seen.marker is not None and seen.marker.nonce is not None:
            registry.acknowledge(seen.marker)
    for _ in range(2):
        intended = latest.intended
        if intended is None:
            intended = registry.next_marker()
            latest = registry.accept(replace(latest, intended=intended), judged=latest)
        try:
            renewed, seen = watch.renew_marker(latest, seen, found.at)
        except (StorePermissionError, StoreWriteError) as error:
            # It is the accepted store all the same; without a marker, fewer losses are detected.
            registry.accept(baseline_of(seen, found.at, known=latest), judged=latest)
            return _without_marker(found, error.message, error.hint)
        latest = registry.accept(renewed, judged=latest)
        if latest.marker is None:
            return _without_marker(found, MARKER_DELETED, SPARE_MARKER)
        # An earlier check may have intended this marker before the newest event.
        if intended.landmark == registry.newest_landmark():
            break
    return found


def _without_marker(found: Finding, problem: str, hint: str) -> Finding:
    reason = f"{found.judgement.reason} The marker was not renewed: {problem}"
    judgement = replace(found.judgement, reason=reason, evidence=Evidence.MARKER_NOT_WRITTEN)
    return replace(found, judgement=judgement, hint=hint)


def _check_incident(watch: StoreWatch, incident: Incident) -> Finding:
    """Compare the store while an incident is open, writing nothing into it."""
    found = watch.compare(compared_with(incident))
    if found.verdict is Verdict.UNKNOWN:
        return found
    if incident.awaits_choice:
        return _check_held(watch, incident, found)
    if incident.target is None:
        return _check_for_target(watch, incident, found)
    if found.verdict.is_alarm:
        watch.join_alarm(found, incident)
        return found
    # Not about the store that was lost, but about the one in its place.
    identity = found.seen.identity if found.seen else "gone"
    return _with_reason(found, f"No further loss: {identity}.")


def _check_for_target(watch: StoreWatch, incident: Incident, found: Finding) -> Finding:
    """Make a store that exists again the restore target of an incident."""
    if found.seen is None:
        return _with_reason(found, "The store still does not exist.")
    with suppress(IncidentHeldError):
        watch.settle_target(incident, is_chosen=False)
        judgement = Judgement(Verdict.SAME, f"The store exists again: {found.seen.identity}.")
        return replace(found, judgement=judgement)
    return found


def _check_held(watch: StoreWatch, incident: Incident, found: Finding) -> Finding:
    """Compare the store with the accepted one while a person has to decide about another one."""
    if found.verdict is Verdict.SAME and found.seen is not None:
        watch.confirm(found)
        earlier = watch.plane.registry.newest_checks(RETURNED_AFTER - 1)
        has_returned = len(earlier) == RETURNED_AFTER - 1 and all(
            check.verdict is Verdict.SAME and check.incident_id == incident.incident_id
            for check in earlier
        )
        if has_returned and incident.may_return:
            _close_as_returned(watch, incident, found, found.seen)
        return found
    if not _is_recorded(incident.losses[-1], found):
        watch.join_alarm(found, incident)
    return found


def _is_recorded(loss: Loss, found: Finding) -> bool:
    """Whether a finding is only a repetition of an alarm."""
    is_repeated = loss.verdict is found.verdict
    if loss.after is None or found.seen is None:
        return is_repeated and loss.after is None and found.seen is None
    # A manual restore or resolve leaves our marker in the store, which then has another verdict.
    if found.verdict is Verdict.DATABASE_BEHIND and not is_repeated:
        return False
    return same_creation(loss.after.created_at, found.seen.identity.created_at)


def _close_as_returned(
    watch: StoreWatch, incident: Incident, found: Finding, seen: Observation
) -> None:
    plane = watch.plane
    restored = plane.audits.restored_in(incident.incident_id)
    raised = (
        f"{restored.counters:,} counters had been raised before."
        if restored.counters
        else "Nothing was restored."
    )
    detail = (
        f"The server shows the accepted store again, in {RETURNED_AFTER} checks in a row. {raised}"
    )
    baseline = baseline_of(seen, found.at, known=found.baseline)
    closing = Closing(Outcome.RETURNED, detail, restored, baseline)
    # A person may be restoring just now; then the next check closes it.
    with suppress(LeaseHeldError), plane.leases.hold(RESTORE_LEASE, watch.observer) as lease:
        plane.incidents.close(closing, judged=incident, lease=lease)


def _with_reason(found: Finding, reason: str) -> Finding:
    return replace(found, judgement=replace(found.judgement, reason=reason))
