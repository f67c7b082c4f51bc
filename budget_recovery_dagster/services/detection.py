"""The check of the store: is it the one that we accepted last?

While it is, our marker in it is renewed, which proves that the store can be written. Once it is
not, an incident is opened. While one is open, the check looks for a further loss, and writes
nothing into the store.
"""

from dataclasses import dataclass, field, replace
from datetime import datetime

from budget_recovery_dagster.domain.admission import CHECK_LEASE
from budget_recovery_dagster.domain.detection import Judgement, Sighting, judge_sighting
from budget_recovery_dagster.domain.identity import Baseline, Verdict
from budget_recovery_dagster.domain.incident import Incident, Recovery
from budget_recovery_dagster.errors import (
    BaselineMovedError,
    CapturesPausedError,
    IncidentMovedError,
    LeaseHeldError,
    PossibleLossError,
    StoreError,
    StorePermissionError,
    StoreWriteError,
)
from budget_recovery_dagster.ports import Clock, Leases, Snapshots, StoreRecord, StoreRegistry
from budget_recovery_dagster.recovery_ports import Baselines, Check, Incidents, StoreChecks
from budget_recovery_dagster.restore_ports import OpenStore, RecoverableStore
from budget_recovery_dagster.services.losses import Losses, look_or_gone, stand_in
from budget_recovery_dagster.services.marking import MarkerWriting, new_nonce

# Captures move the baseline too; each round judges anew.
_ROUNDS = 5
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
    seen: Sighting
    judgement: Judgement
    now: datetime


@dataclass(frozen=True, slots=True)
class _Finding:
    judgement: Judgement
    seen: Sighting | None = None
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
        seen = look_or_gone(lambda: store.look(record.deployment_id))
        now = self.clock.now()
        judgement = judge_sighting(accepted, seen, now)
        if judgement.verdict.is_loss:
            self._losses.open(
                judgement,
                lambda: store.look(record.deployment_id),
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
        seen = look_or_gone(lambda: store.look(deployment_id))
        ground = incident.ground
        if ground is None:
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
            self.incidents.stand_on(Baseline(seen.identity, version=1), judged=incident)
        judgement = judge_sighting(ground, seen, self.clock.now())
        if judgement.verdict.is_loss:
            self._losses.join(
                judgement, lambda: store.look(deployment_id), judged=incident, found_by=checked_by
            )
            return _Finding(judgement, seen)
        # Nothing is said of the store that was lost: this is about what stands in its place.
        what = "The store is there again" if ground is None else "No further loss"
        now = seen.identity if seen else "gone"
        return _Finding(Judgement(judgement.verdict, f"{what}: {now}."), seen)
