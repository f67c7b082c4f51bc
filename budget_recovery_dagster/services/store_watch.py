"""Is this still the accepted store? Comparisons, markers, and how a loss opens an incident.

Checks, captures and restores compare the store here, each against what it has to be: the accepted
baseline, or the restore target of an open incident. Two matching observations confirm a loss.
"""

from dataclasses import dataclass, field, replace
from datetime import datetime
from secrets import token_hex

from budget_recovery_dagster.domain.admission import CHECK_LEASE
from budget_recovery_dagster.domain.incident import Incident, Loss, Recovery, StoreRecord
from budget_recovery_dagster.domain.store import (
    AGREEING_AFTER,
    WHAT_HAPPENED,
    Baseline,
    Check,
    Judgement,
    Marker,
    Observation,
    StoreIdentity,
    Verdict,
    accepted_marker,
    judge,
    judge_observation,
)
from budget_recovery_dagster.errors import (
    AttemptFailedError,
    BaselineMovedError,
    CapturesPausedError,
    IncidentMovedError,
    LeaseHeldError,
    MarkerConflictError,
    PossibleLossError,
    StoreError,
    StoreLostError,
    StoreMissingError,
    StoreNotReadyError,
    StorePermissionError,
    StoreWriteError,
)
from budget_recovery_dagster.ports import ControlPlane, OpenStore, UsageStore
from budget_recovery_dagster.services.falls import Compared, compare_counts

ROUNDS = 5
"""How often a comparison starts again because the baseline moved; each round reads it anew."""

_NONCE_BYTES = 16
_SECOND_DEPLOYMENT = (
    "if it keeps happening, look for a second deployment that uses the same database."
)
_MOVED = (BaselineMovedError, CapturesPausedError, IncidentMovedError)


@dataclass(frozen=True, slots=True)
class Finding:
    """An observation made at ``at``, judged; ``seen`` None: the store does not exist.

    ``hint`` says what to do about a marker that could not be written; empty: nothing.
    """

    judgement: Judgement
    seen: Observation | None
    at: datetime
    hint: str = ""


@dataclass(frozen=True, slots=True)
class StoreWatch:
    """Compares one opened store with what was accepted; ``observer`` is recorded with a loss."""

    plane: ControlPlane
    store: UsageStore
    deployment_id: str
    observer: str

    def compare(self, accepted: Baseline | None) -> Finding:
        """Observe the store and judge it against a baseline.

        Raises:
            StoreError: the store could not be observed.
        """
        try:
            seen = self.store.observe(self.deployment_id)
        except StoreMissingError:
            return self.judge(accepted, None)
        return self.judge(accepted, seen)

    def judge(self, accepted: Baseline | None, seen: Observation | None) -> Finding:
        """Judge an observation that was just made against a baseline."""
        now = self.plane.clock.now()
        return Finding(judge_observation(accepted, seen, now), seen, now)

    def compare_with_baseline(self) -> Finding:
        """Compare with the accepted baseline, again if it moves meanwhile.

        Raises:
            StoreError: the store could not be observed.
        """
        for _ in range(ROUNDS):
            baseline = self.plane.registry.claim().baseline
            found = self.compare(baseline or last_captured(self.plane))
            if found.judgement.verdict.is_good or self.plane.registry.claim().baseline == baseline:
                break
        return found

    def open_incident(
        self, found: Finding, *, accepted: Baseline | None, judged: Baseline | None
    ) -> Incident:
        """Confirm a loss against ``accepted`` by a second observation, and open an incident.

        ``judged`` is the stored baseline; ``accepted`` may replace one that is missing.

        Raises:
            PossibleLossError: the second observation does not match.
            BaselineMovedError: the baseline has moved; compare again.
            IncidentMovedError: an incident is already open.
            StoreError: the store could not be observed again.
        """
        loss, target = self._confirmed(found, accepted)
        return self.plane.incidents.open(loss, target=target, judged=judged)

    def join_loss(self, found: Finding, incident: Incident) -> Incident:
        """Confirm a further loss against an incident's restore target, and add it to the incident.

        Raises:
            PossibleLossError, StoreError: as ``open_incident``.
            IncidentMovedError: the incident has moved; compare again.
        """
        loss, target = self._confirmed(found, incident.target)
        return self.plane.incidents.join(loss, target=target, judged=incident)

    def require_accepted(self) -> Observation:
        """Require that no incident is open and the store is the accepted one.

        Opening an incident is left to checks.

        Raises:
            StoreLostError: an incident has been opened.
            PossibleLossError: it is another store, and no check has found that yet.
            StoreNotReadyError, StoreError: the store could not be identified.
        """
        found = self.compare_with_baseline()
        judgement, seen = found.judgement, found.seen
        incident = self.plane.incidents.recovery().incident
        if incident is not None:
            raise StoreLostError(
                f"The store was lost: incident {incident.short_id} has been opened.",
                "see `budget-recovery status`, and preview once more.",
            )
        if judgement.verdict.is_loss:
            raise PossibleLossError(
                f"The store is not the one that was accepted. {judgement.reason}",
                "wait for the next check, which opens an incident if it finds the same; then "
                "restore.",
            )
        if seen is None or not seen.is_led or not judgement.verdict.is_good:
            raise StoreNotReadyError(
                f"The store could not be identified as the accepted one. {judgement.reason}",
                "wait until the cluster has a leader with a quorum, then try again.",
            )
        return seen

    def require_target(self, incident: Incident, *, next_step: str) -> Observation:
        """Require that the store is still the restore target that was marked at the start.

        ``next_step`` is what to do if it is another one.

        Raises:
            StoreLostError: it was lost once more; the incident records that.
            AttemptFailedError: the store could not be identified.
            PossibleLossError, StoreError: likewise.
        """
        target = incident.target
        found = self.compare(target)
        judgement, seen = found.judgement, found.seen
        if judgement.verdict.is_loss:
            lost = StoreLostError(
                f"The store was lost once more during the restore. {judgement.reason}", next_step
            )
            try:
                joined = self.join_loss(found, incident)
            except IncidentMovedError as error:
                # A check was quicker and has recorded the loss.
                raise lost from error
            self.plane.registry.record_check(check_of(joined))
            raise lost
        if not judgement.verdict.is_good or (seen is not None and not seen.is_led):
            raise AttemptFailedError(
                f"The store could not be identified as the restore target. {judgement.reason}",
                f"wait for the cluster to settle. {next_step}",
            )
        if target is None or seen is None or accepted_marker(target, seen) != target.marker:
            raise AttemptFailedError(
                "Our marker is no longer in the store, so it may not be the one that was restored.",
                "find out who deletes keys of the gateway's bucket that begin with __guard.",
            )
        return seen

    def renew_marker(self, accepted: Baseline, seen: Observation, now: datetime) -> Baseline:
        """Write the intended marker and return the baseline that holds with it, to be accepted.

        ``seen`` is the observation that identified the store as the ``accepted`` one at ``now``.

        Raises:
            MarkerConflictError: the marker's key was written since that observation.
            StorePermissionError: the marker may not be written.
            StoreWriteError: the store refuses it.
            StoreError: it is unknown whether it was written.
        """
        if accepted.intended is None:
            raise ValueError("a marker is written once its nonce is recorded as intended")
        marker = self._write_marker(
            accepted.intended, after=seen.marker.revision if seen.marker else 0
        )
        # The store gave out the marker's sequence after everything that was observed.
        newest = max(seen.identity.last_sequence, marker.revision)
        return replace(
            accepted,
            identity=StoreIdentity(seen.identity.created_at, newest),
            marker=marker,
            marked_at=now,
            intended=None,
        )

    def _confirmed(self, found: Finding, accepted: Baseline | None) -> tuple[Loss, Baseline | None]:
        """Observe once more; return the loss, and the restore target if a store exists."""
        if accepted is None:
            raise ValueError("nothing can be lost that was never accepted")
        clock = self.plane.clock
        clock.wait_until(clock.now() + AGREEING_AFTER)
        again = self.compare(accepted)
        if again.judgement.verdict is not found.judgement.verdict:
            raise PossibleLossError(
                f"Two observations of the store disagree: {found.judgement.reason} Then: "
                f"{again.judgement.reason}",
                "wait for the next check, which observes the store again.",
            )
        identity = None if again.seen is None else again.seen.identity
        loss = Loss(
            found_at=again.at,
            found_by=self.observer,
            verdict=found.judgement.verdict,
            reason=found.judgement.reason,
            before=accepted.identity,
            after=identity,
        )
        # The marker of the target is not known yet.
        return loss, None if identity is None else Baseline(identity, version=1)

    def _write_marker(self, nonce: str, *, after: int) -> Marker:
        try:
            return self.store.write_marker(self.deployment_id, nonce, after=after)
        except MarkerConflictError:
            found = self.store.observe(self.deployment_id).marker
            if found is None or found.nonce != nonce or found.revision <= after:
                raise
            # The same nonce, from an earlier try or one whose acknowledgement was lost.
            return Marker(nonce, found.revision)


def watch_store(plane: ControlPlane, store: UsageStore, observer: str) -> StoreWatch:
    """Return the watch of an opened store.

    Raises:
        SettingsError: the database belongs to another bucket.
    """
    return StoreWatch(plane, store, plane.registry.claim().deployment_id, observer)


def new_nonce() -> str:
    """Return a nonce that no other marker has."""
    return token_hex(_NONCE_BYTES)


def last_captured(plane: ControlPlane) -> Baseline | None:
    """Return the baseline to use if its row is lost: the newest snapshot's identity, if any."""
    newest = plane.snapshots.newest_identity()
    return None if newest is None else Baseline(newest, version=0)


def check_of(incident: Incident) -> Check:
    """Return the newest loss of an incident as a check that found it."""
    loss = incident.losses[-1]
    return Check(
        checked_at=loss.found_at,
        checked_by=loss.found_by,
        verdict=loss.verdict,
        reason=loss.reason,
        identity=loss.after,
        incident_id=incident.incident_id,
    )


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
            found = _check(watch_store(plane, store, checked_by))
            if found.seen is not None and found.judgement.verdict.is_good:
                compared = compare_counts(plane, store, found.seen)
    except (LeaseHeldError, PossibleLossError, StoreError) as error:
        found = _unknown(plane, error.message, error.hint)
    recovery = plane.incidents.recovery()
    incident = recovery.incident
    check = Check(
        checked_at=plane.clock.now(),
        checked_by=checked_by,
        verdict=found.judgement.verdict,
        reason=" ".join([found.judgement.reason, *compared.notes]),
        identity=found.seen.identity if found.seen else None,
        incident_id=incident.incident_id if incident else None,
    )
    plane.registry.record_check(check)
    return Checked(check, recovery, found.hint or compared.hint, compared)


def _check(watch: StoreWatch) -> Finding:
    for _ in range(ROUNDS):
        try:
            incident = watch.plane.incidents.recovery().incident
            return _check_accepted(watch) if incident is None else _check_target(watch, incident)
        except _MOVED:
            continue
    reason = f"The accepted baseline moved {ROUNDS} times during the check."
    return _unknown(watch.plane, reason, _SECOND_DEPLOYMENT)


def _unknown(plane: ControlPlane, reason: str, hint: str) -> Finding:
    return Finding(Judgement(Verdict.UNKNOWN, reason), None, plane.clock.now(), hint)


def _check_accepted(watch: StoreWatch) -> Finding:
    record = watch.plane.registry.claim()
    accepted = record.baseline or last_captured(watch.plane)
    found = watch.compare(accepted)
    if found.judgement.verdict.is_loss:
        watch.open_incident(found, accepted=accepted, judged=record.baseline)
    elif found.seen is not None and found.judgement.verdict.is_good:
        return _renew(watch, record, found, found.seen)
    return found


def _renew(watch: StoreWatch, record: StoreRecord, found: Finding, seen: Observation) -> Finding:
    """Accept the store as it is now, with a new marker in it."""
    plane, latest = watch.plane, record.baseline
    if latest is None:
        latest = plane.registry.accept(Baseline(seen.identity, version=0), judged=None)
    if latest.intended is None:
        latest = plane.registry.accept(replace(latest, intended=new_nonce()), judged=latest)
    try:
        renewed = watch.renew_marker(latest, seen, found.at)
    except (StorePermissionError, StoreWriteError) as error:
        # It is the accepted store all the same; without a marker, fewer losses can be detected.
        reason = f"{found.judgement.reason} The marker was not renewed: {error.message}"
        judgement = replace(found.judgement, reason=reason)
        found = replace(found, judgement=judgement, hint=error.hint)
        renewed = replace(latest, identity=seen.identity)
    plane.registry.accept(renewed, judged=latest)
    return found


def _check_target(watch: StoreWatch, incident: Incident) -> Finding:
    """Compare the store with the restore target of an open incident, writing nothing into it."""
    target = incident.target
    found = watch.compare(target)
    seen = found.seen
    if target is None:
        if seen is None:
            gone = Judgement(Verdict.RECREATED, "The store still does not exist.")
            return replace(found, judgement=gone)
        if not seen.is_led:
            # A replica that was cut off may not know yet that the store is gone.
            unled = Judgement(
                Verdict.UNKNOWN,
                "The server that answered may no longer be the leader, so the store may still "
                f"be gone; observed: {seen.identity}.",
            )
            return replace(found, judgement=unled, seen=None)
        watch.plane.incidents.adopt_target(Baseline(seen.identity, version=1), judged=incident)
    if found.judgement.verdict.is_loss:
        watch.join_loss(found, incident)
        return found
    # Not about the store that was lost, but about the one in its place.
    what = "The store exists again" if target is None else "No further loss"
    reason = f"{what}: {seen.identity if seen else 'gone'}."
    return replace(found, judgement=Judgement(found.judgement.verdict, reason))


@dataclass(slots=True)
class CaptureWatch:
    """Requires, through one capture, that the store stays the accepted one.

    ``baseline`` is the stored one as this capture last read or moved it.
    """

    watch: StoreWatch
    baseline: Baseline | None = field(default=None, init=False)
    _last_seen: StoreIdentity | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.read_baseline()

    def read_baseline(self) -> None:
        """Read the stored baseline again."""
        self.baseline = self.watch.plane.registry.claim().baseline

    def require_accepted(self) -> StoreIdentity:
        """Compare the store with the accepted one, and open an incident if it was lost.

        Raises:
            StoreLostError: it is not the accepted one; an incident is now open.
            CapturesPausedError: the same, and an incident was opened meanwhile.
            PossibleLossError: it may have lost data; that could not be confirmed.
            StoreError: it could not be observed; before a first capture it may not exist.
        """
        for _ in range(ROUNDS):
            try:
                return self._compare()
            except BaselineMovedError:
                self.read_baseline()
        raise PossibleLossError(
            f"The usage store differs from the accepted one, which moved {ROUNDS} times.",
            _SECOND_DEPLOYMENT,
        )

    def _compare(self) -> StoreIdentity:
        if self.baseline is None:
            self.read_baseline()
        watch = self.watch
        accepted = self.baseline or last_captured(watch.plane)
        try:
            seen: Observation | None = watch.store.observe(watch.deployment_id)
        except StoreMissingError:
            if accepted is None and self._last_seen is None:
                raise
            seen = None
        found = watch.judge(accepted, seen)
        judgement = found.judgement
        if judgement.verdict.is_loss:
            if watch.plane.registry.claim().baseline != self.baseline:
                # A check has just renewed the marker, for example: no need to confirm.
                raise BaselineMovedError(judgement.reason, "compare with the new baseline.")
            self._open_incident(found, accepted)
        if seen is not None and judgement.verdict is Verdict.UNKNOWN:
            raise PossibleLossError(
                judgement.reason,
                "wait for the cluster to settle; the next capture compares again.",
            )
        return self._compare_with_last(seen)

    def _open_incident(self, found: Finding, accepted: Baseline | None) -> None:
        reason = found.judgement.reason
        try:
            incident = self.watch.open_incident(found, accepted=accepted, judged=self.baseline)
        except IncidentMovedError as error:
            raise CapturesPausedError(
                f"{reason} An incident is already open for it.",
                "wait for the recovery to end; captures resume by themselves.",
            ) from error
        self.watch.plane.registry.record_check(check_of(incident))
        raise StoreLostError(
            f"{reason} Nothing of it was stored; incident {incident.short_id} is open.",
            "wait: the restore starts automatically, and captures resume after it.",
        )

    def _compare_with_last(self, seen: Observation | None) -> StoreIdentity:
        # The last observation of this capture counts too: in a first one nothing is accepted yet.
        last = self._last_seen
        verdict = None if seen is None else judge(last, seen.identity)
        if seen is None or verdict is None or verdict.is_loss:
            what = "is gone" if verdict is None else WHAT_HAPPENED[verdict]
            raise PossibleLossError(
                f"The usage store may have lost data during this capture: it {what}. It was: "
                f"{last}.",
                "find out what happened to the gateway's bucket; the next capture compares again.",
            )
        self._last_seen = seen.identity
        return seen.identity
