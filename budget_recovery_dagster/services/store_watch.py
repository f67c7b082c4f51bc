"""Is this still the accepted store? Checks, markers, and how a loss opens an incident."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from secrets import token_hex

from budget_recovery_dagster.domain.admission import CHECK_LEASE
from budget_recovery_dagster.domain.incident import Incident, Loss, Recovery
from budget_recovery_dagster.domain.store import (
    AGREEING_AFTER,
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
from budget_recovery_dagster.ports import (
    Baselines,
    Clock,
    Incidents,
    Leases,
    OpenStore,
    RecoverableStore,
    Snapshots,
    StoreChecks,
    StoreRecord,
    StoreRegistry,
    UsageStore,
)

Look = Callable[[], Observation]
"""Looks at the store; raises StoreMissingError where the cluster says that there is none."""


def observe_or_gone(look: Look) -> Observation | None:
    """Look at the store; None where the cluster says that it does not exist."""
    try:
        return look()
    except StoreMissingError:
        return None


def stand_in(snapshots: Snapshots) -> Baseline | None:
    """Return what was accepted where its row is lost: while snapshots exist, no store is new."""
    newest = snapshots.newest_identity()
    return None if newest is None else Baseline(newest, version=0)


def target_of(seen: Observation | None) -> Baseline | None:
    """Return what a recovery stands on that begins with this look: no marker is known in it."""
    return None if seen is None else Baseline(seen.identity, version=1)


@dataclass(frozen=True, slots=True)
class Losses:
    """Confirms losses and keeps them as incidents."""

    incidents: Incidents
    clock: Clock

    def open(
        self,
        judgement: Judgement,
        look: Look,
        *,
        accepted: Baseline | None,
        judged: Baseline | None,
        found_by: str,
    ) -> Incident:
        """Confirm a loss against ``accepted`` by a second look, and open an incident for it.

        ``judged`` is the baseline as it is stored; ``accepted`` may stand in for one that is not.

        Raises:
            PossibleLossError: the second look does not find the same.
            BaselineMovedError: the baseline has moved; judge again.
            IncidentMovedError: an incident is open already.
            StoreError: there is no second look.
        """
        seen, found_at = self._look_again(judgement, look, accepted)
        loss = _loss(judgement, accepted, seen, found_by, found_at)
        return self.incidents.open(loss, target=target_of(seen), judged=judged)

    def join(
        self, judgement: Judgement, look: Look, *, judged: Incident, found_by: str
    ) -> Incident:
        """Confirm a further loss against an incident's restore target, and add it to the incident.

        Raises:
            PossibleLossError, StoreError: as ``open``.
            IncidentMovedError: the incident has moved; judge again.
        """
        seen, found_at = self._look_again(judgement, look, judged.target)
        loss = _loss(judgement, judged.target, seen, found_by, found_at)
        return self.incidents.join(loss, target=target_of(seen), judged=judged)

    def _look_again(
        self, judgement: Judgement, look: Look, accepted: Baseline | None
    ) -> tuple[Observation | None, datetime]:
        self.clock.wait_until(self.clock.now() + AGREEING_AFTER)
        seen = observe_or_gone(look)
        now = self.clock.now()
        again = judge_observation(accepted, seen, now)
        if again.verdict is not judgement.verdict:
            raise PossibleLossError(
                f"Two looks at the store disagree: {judgement.reason} Then: {again.reason}",
                "wait for the next check, which looks again.",
            )
        return seen, now


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


def _loss(
    judgement: Judgement,
    accepted: Baseline | None,
    seen: Observation | None,
    found_by: str,
    found_at: datetime,
) -> Loss:
    if accepted is None:
        raise ValueError("nothing can be lost that was never accepted")
    return Loss(
        found_at=found_at,
        found_by=found_by,
        verdict=judgement.verdict,
        reason=judgement.reason,
        before=accepted.identity,
        after=None if seen is None else seen.identity,
    )


_NONCE_BYTES = 16


def new_nonce() -> str:
    """Return a nonce that no other marker has."""
    return token_hex(_NONCE_BYTES)


@dataclass(frozen=True, slots=True)
class MarkerWriting:
    """Renews the marker of one deployment in an opened store."""

    store: RecoverableStore
    deployment_id: str

    def renew(self, accepted: Baseline, seen: Observation, now: datetime) -> Baseline:
        """Write the intended marker and return the baseline that holds with it, to be accepted.

        ``seen`` is a look at the store that was found to be the ``accepted`` one at ``now``.

        Raises:
            MarkerConflictError: somebody has written the marker's key since the look.
            StorePermissionError: the marker may not be written.
            StoreWriteError: the store refuses it.
            StoreError: whether it was written is not known.
        """
        if accepted.intended is None:
            raise ValueError("a marker is written once its nonce is noted as intended")
        marker = self._write(accepted.intended, after=seen.marker.revision if seen.marker else 0)
        # The store gave out the marker's sequence after everything that was seen.
        newest = max(seen.identity.last_sequence, marker.revision)
        return replace(
            accepted,
            identity=StoreIdentity(seen.identity.created_at, newest),
            marker=marker,
            marked_at=now,
            intended=None,
        )

    def _write(self, nonce: str, *, after: int) -> Marker:
        try:
            return self.store.write_marker(self.deployment_id, nonce, after=after)
        except MarkerConflictError:
            found = self.store.observe(self.deployment_id).marker
            if found is None or found.nonce != nonce or found.revision <= after:
                raise
            # The same nonce, from another try or from one whose answer was lost.
            return Marker(nonce, found.revision)


@dataclass(frozen=True, slots=True)
class SameStore:
    """Compares an opened store with the restore target that the recovery of an incident stands on.

    ``next_step`` is what to do where it is another one.
    """

    store: RecoverableStore
    deployment_id: str
    losses: Losses
    checks: StoreChecks
    clock: Clock
    next_step: str

    def require(self, incident: Incident, *, found_by: str) -> Observation:
        """See that the store is the one that was marked before the first reading.

        Raises:
            StoreLostError: it was lost once more; the incident says so.
            AttemptFailedError: that cannot be seen.
            PossibleLossError, StoreError: likewise.
        """
        target = incident.target
        seen = observe_or_gone(self._look)
        judgement = judge_observation(target, seen, self.clock.now())
        if judgement.verdict.is_loss:
            lost = StoreLostError(
                f"The store was lost once more meanwhile. {judgement.reason}", self.next_step
            )
            try:
                joined = self.losses.join(judgement, self._look, judged=incident, found_by=found_by)
            except IncidentMovedError as error:
                # A check was quicker, and has kept the loss.
                raise lost from error
            self.checks.record(check_of(joined))
            raise lost
        if not judgement.verdict.is_good or (seen is not None and not seen.is_led):
            raise AttemptFailedError(
                f"The store could not be seen to be the same. {judgement.reason}",
                f"wait for the cluster to settle. {self.next_step}",
            )
        if target is None or seen is None or accepted_marker(target, seen) != target.marker:
            raise AttemptFailedError(
                "Our marker is no longer in the store, so it may not be the one that was restored.",
                "see who deletes keys of the gateway's bucket that begin with __guard.",
            )
        return seen

    def _look(self) -> Observation:
        return self.store.observe(self.deployment_id)


# A check renews the marker in between: then what was accepted is read again.
_DECISIONS = 3


@dataclass(frozen=True, slots=True)
class AcceptedStore:
    """Compares an opened store with the baseline; it opens no incident, which is for a check."""

    store: RecoverableStore
    registry: StoreRegistry
    snapshots: Snapshots
    incidents: Incidents
    clock: Clock
    bucket: str

    def require(self) -> Observation:
        """See that the store is the accepted one.

        Raises:
            StoreLostError: an incident has been opened.
            PossibleLossError: it is another one, and no check has found that yet.
            StoreNotReadyError, StoreError: that cannot be seen.
        """
        judgement, seen = self.judge()
        incident = self.incidents.recovery().incident
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
                f"The store could not be seen to be the accepted one. {judgement.reason}",
                "wait until the store answers for itself, then try again.",
            )
        return seen

    def judge(self) -> tuple[Judgement, Observation | None]:
        """Compare a look at the store with what is accepted; the look is None where it is gone.

        Raises:
            StoreError: there is no look.
        """
        for _ in range(_DECISIONS):
            record = self.registry.claim(self.bucket)
            accepted = record.baseline or stand_in(self.snapshots)
            seen = observe_or_gone(partial(self.store.observe, record.deployment_id))
            judgement = judge_observation(accepted, seen, self.clock.now())
            is_moved = self.registry.claim(self.bucket).baseline != record.baseline
            if judgement.verdict.is_good or not is_moved:
                break
        return judgement, seen


# Each round reads the baseline anew, so only one that moves all the time uses them up.
_ROUNDS = 5


@dataclass(slots=True)
class IdentityWatch:
    """Compares a store with the ``baseline``, and opens an incident for one that is lost."""

    registry: StoreRegistry
    snapshots: Snapshots
    checks: StoreChecks
    losses: Losses
    clock: Clock
    bucket: str
    found_by: str
    baseline: Baseline | None = field(default=None, init=False)
    _deployment_id: str = field(default="", init=False)
    _last_seen: StoreIdentity | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.read_baseline()

    def read_baseline(self) -> None:
        """Take over the baseline as it is stored now."""
        record = self.registry.claim(self.bucket)
        self.baseline, self._deployment_id = record.baseline, record.deployment_id

    def accept(self, store: UsageStore) -> StoreIdentity:
        """Look at the store and compare it with the accepted one.

        Raises:
            StoreLostError: it is not the accepted one, and an incident is open for that.
            CapturesPausedError: the same, and somebody else has opened the incident.
            PossibleLossError: it may have lost data; that could not be settled.
            StoreError: it could not be looked at; a first one may not be there at all.
        """
        for _ in range(_ROUNDS):
            try:
                return self._compare(store)
            except BaselineMovedError:
                self.read_baseline()
        raise PossibleLossError(
            f"The usage store differs from what was accepted, and that moved {_ROUNDS} times.",
            "if it keeps happening, look for a second deployment that uses the same database.",
        )

    def _compare(self, store: UsageStore) -> StoreIdentity:
        if self.baseline is None:
            self.read_baseline()
        accepted = self.baseline or stand_in(self.snapshots)
        try:
            seen: Observation | None = store.observe(self._deployment_id)
        except StoreMissingError:
            if accepted is None and self._last_seen is None:
                raise
            seen = None
        judgement = judge_observation(accepted, seen, self.clock.now())
        if judgement.verdict.is_loss:
            if self.registry.claim(self.bucket).baseline != self.baseline:
                # A check has just renewed the marker, say: nothing to wait for and look again.
                raise BaselineMovedError(judgement.reason, "compare with the new baseline.")
            self._open_incident(store, judgement, accepted)
        if seen is not None and judgement.verdict is Verdict.UNKNOWN:
            raise PossibleLossError(
                judgement.reason, "wait for the cluster to settle; the next capture looks again."
            )
        return self._compare_with_last(seen)

    def _open_incident(
        self, store: UsageStore, judgement: Judgement, accepted: Baseline | None
    ) -> None:
        try:
            incident = self.losses.open(
                judgement,
                lambda: store.observe(self._deployment_id),
                accepted=accepted,
                judged=self.baseline,
                found_by=self.found_by,
            )
        except IncidentMovedError as error:
            raise CapturesPausedError(
                f"{judgement.reason} An incident is open for it already.",
                "wait for the recovery to end; captures resume by themselves.",
            ) from error
        self.checks.record(check_of(incident))
        raise StoreLostError(
            f"{judgement.reason} Nothing of it was stored; incident {incident.short_id} is open.",
            "wait: the restore begins by itself, and captures resume after it.",
        )

    def _compare_with_last(self, seen: Observation | None) -> StoreIdentity:
        # The last look of this capture counts too: in a first one nothing is accepted yet.
        last = self._last_seen
        verdict = "gone" if seen is None else judge(last, seen.identity)
        if seen is None or judge(last, seen.identity).is_loss:
            raise PossibleLossError(
                f"The usage store may have lost data during this capture: it is {verdict}. It was: "
                f"{last}.",
                "see what happened to the gateway's bucket; the next capture looks again.",
            )
        self._last_seen = seen.identity
        return seen.identity


_MOVED = (BaselineMovedError, CapturesPausedError, IncidentMovedError)


@dataclass(frozen=True, slots=True)
class Checked:
    """What a check found, and the state of recovery after it.

    ``hint`` says what to do about an unknown verdict or a marker that could not be written; empty:
    nothing.
    """

    check: Check
    recovery: Recovery
    hint: str = ""


@dataclass(frozen=True, slots=True)
class _Sound:
    """A store that is the accepted one: as it is known, as it was seen at ``now``, the verdict."""

    record: StoreRecord
    seen: Observation
    judgement: Judgement
    now: datetime


@dataclass(frozen=True, slots=True)
class _Finding:
    judgement: Judgement
    seen: Observation | None = None
    hint: str = ""


@dataclass(frozen=True, slots=True)
class DetectionService:
    """Checks the one store that the control-plane database belongs to."""

    open_store: OpenStore
    registry: StoreRegistry
    baselines: Baselines
    snapshots: Snapshots
    checks: StoreChecks
    incidents: Incidents
    leases: Leases
    clock: Clock
    bucket: str
    _losses: Losses = field(init=False)

    def __post_init__(self) -> None:
        losses = Losses(self.incidents, self.clock)
        object.__setattr__(self, "_losses", losses)

    def check(self, *, checked_by: str) -> Checked:
        """Compare the store with what was accepted, keep the result, and open what must be opened.

        What cannot be read gives the verdict UNKNOWN, on which nothing is changed.

        Raises:
            SettingsError: the database belongs to another bucket.
            DatabaseError: the database did not do what was asked; the check may
                be lost.
        """
        self.registry.claim(self.bucket)
        try:
            with self.leases.hold(CHECK_LEASE, checked_by), self.open_store() as store:
                finding = self._find(store, checked_by)
        except (LeaseHeldError, PossibleLossError, StoreError) as error:
            finding = _Finding(Judgement(Verdict.UNKNOWN, error.message), hint=error.hint)
        recovery = self.incidents.recovery()
        incident = recovery.incident
        check = Check(
            checked_at=self.clock.now(),
            checked_by=checked_by,
            verdict=finding.judgement.verdict,
            reason=finding.judgement.reason,
            identity=finding.seen.identity if finding.seen else None,
            incident_id=incident.incident_id if incident else None,
        )
        self.checks.record(check)
        return Checked(check, recovery, finding.hint)

    def _find(self, store: RecoverableStore, checked_by: str) -> _Finding:
        for _ in range(_ROUNDS):
            try:
                incident = self.incidents.recovery().incident
                if incident is None:
                    return self._compare(store, checked_by)
                return self._watch(store, incident, checked_by)
            except _MOVED:
                continue
        return _Finding(
            Judgement(
                Verdict.UNKNOWN,
                f"What was accepted of the store moved {_ROUNDS} times during the check.",
            ),
            hint="if it keeps happening, look for a second deployment that uses the same database.",
        )

    def _compare(self, store: RecoverableStore, checked_by: str) -> _Finding:
        record = self.registry.claim(self.bucket)
        accepted = record.baseline or stand_in(self.snapshots)
        seen = observe_or_gone(lambda: store.observe(record.deployment_id))
        now = self.clock.now()
        judgement = judge_observation(accepted, seen, now)
        if judgement.verdict.is_loss:
            self._losses.open(
                judgement,
                lambda: store.observe(record.deployment_id),
                accepted=accepted,
                judged=record.baseline,
                found_by=checked_by,
            )
        elif seen is not None and judgement.verdict.is_good:
            return self._renew(store, _Sound(record, seen, judgement, now))
        return _Finding(judgement, seen)

    def _renew(self, store: RecoverableStore, sound: _Sound) -> _Finding:
        """Accept the store as it is now, with a new marker in it."""
        seen, judgement = sound.seen, sound.judgement
        latest = sound.record.baseline
        if latest is None:
            latest = self.baselines.accept(Baseline(seen.identity, version=0), judged=None)
        if latest.intended is None:
            latest = self.baselines.intend_marker(new_nonce(), judged=latest)
        hint = ""
        try:
            marking = MarkerWriting(store, sound.record.deployment_id)
            renewed = marking.renew(latest, seen, sound.now)
        except (StorePermissionError, StoreWriteError) as error:
            # The store is the right one all the same; without a marker less would be noticed.
            judgement = replace(
                judgement,
                reason=f"{judgement.reason} The marker is not renewed: {error.message}",
            )
            hint = error.hint
            renewed = replace(latest, identity=seen.identity)
        self.baselines.accept(renewed, judged=latest)
        return _Finding(judgement, seen, hint)

    def _watch(self, store: RecoverableStore, incident: Incident, checked_by: str) -> _Finding:
        """Look whether the store was lost once more; nothing is written into it."""
        deployment_id = self.registry.claim(self.bucket).deployment_id
        seen = observe_or_gone(lambda: store.observe(deployment_id))
        target = incident.target
        if target is None:
            if seen is None:
                return _Finding(Judgement(Verdict.RECREATED, "The store is still gone."))
            if not seen.is_led:
                # It may not know yet that the store is gone, and shows the lost one.
                return _Finding(
                    Judgement(
                        Verdict.UNKNOWN,
                        "Whoever answered may not be the leader any more, so that the store may "
                        f"still be gone; seen was: {seen.identity}.",
                    )
                )
            self.incidents.adopt_target(Baseline(seen.identity, version=1), judged=incident)
        judgement = judge_observation(target, seen, self.clock.now())
        if judgement.verdict.is_loss:
            self._losses.join(
                judgement,
                lambda: store.observe(deployment_id),
                judged=incident,
                found_by=checked_by,
            )
            return _Finding(judgement, seen)
        # Nothing is said of the store that was lost: this is about what stands in its place.
        what = "The store is there again" if target is None else "No further loss"
        now = seen.identity if seen else "gone"
        return _Finding(Judgement(judgement.verdict, f"{what}: {now}."), seen)
