"""Is this still the accepted store? Comparisons, markers, and how an alarm opens an incident.

Checks, captures and restores compare the store here, each against what it has to be: the accepted
baseline, or the restore target of an open incident. Each observation that confirms another one uses
a connection of its own, because several servers may answer at one address.
"""

from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from budget_recovery_dagster.domain.incident import Incident, Loss
from budget_recovery_dagster.domain.store import Baseline, IntendedMarker, StoreIdentity
from budget_recovery_dagster.domain.verdict import (
    AGREEING_AFTER,
    Check,
    Evidence,
    FoundMarker,
    Judgement,
    Observation,
    Verdict,
    baseline_of,
    began_empty,
    confirms,
    continues,
    judge_observation,
)
from budget_recovery_dagster.domain.windows import clock_skew
from budget_recovery_dagster.errors import (
    AttemptFailedError,
    BaselineMovedError,
    CapturesPausedError,
    IncidentHeldError,
    IncidentMovedError,
    MarkerConflictError,
    PossibleLossError,
    StoreLostError,
    StoreMissingError,
    StoreNotReadyError,
)
from budget_recovery_dagster.ports import Clock, ControlPlane, OpenStore, UsageStore

ROUNDS = 5
"""How often a comparison starts again because the baseline moved; each round reads it anew."""

MARKER_DELETED = "Another program has deleted the marker right after it was written."
SPARE_MARKER = (
    "find out who deletes keys of the gateway's bucket that begin with __guard, and exempt those"
    " keys."
)
SECOND_DEPLOYMENT = (
    "if it keeps happening, check whether a second installation uses the same database."
)
# Two installations that use copies of one database each find the other's renewals, time and again.
_RENEWALS_LOST_ONCE_IN = timedelta(days=1)
_HOLDS = {
    Verdict.OTHER_STORE: (
        "The server shows another store than the accepted one. Nothing is written into it."
    ),
    Verdict.DATABASE_BEHIND: (
        "The control-plane database is older than the store. A restore could bring back usage that"
        " was reset since."
    ),
}


@dataclass(frozen=True, slots=True)
class Finding:
    """An observation made at ``at``, judged; ``seen`` None: the store does not exist.

    ``baseline`` is the stored one, read after the observation; ``accepted`` is what the observation
    was compared with. ``hint`` says what to do about a marker that could not be written; empty:
    nothing. ``is_agreed``: another observation confirmed it, or none was needed.
    """

    judgement: Judgement
    seen: Observation | None
    at: datetime
    baseline: Baseline | None
    accepted: Baseline | None
    hint: str = ""
    is_agreed: bool = True

    @property
    def verdict(self) -> Verdict:
        """The verdict on the observation."""
        return self.judgement.verdict

    def agrees_with(self, earlier: "Finding") -> bool:
        """Whether both have one verdict on one store, which did not go back in between."""
        return self.verdict is earlier.verdict and confirms(earlier.seen, self.seen)


@dataclass(frozen=True, slots=True)
class StoreWatch:
    """Compares one opened store with what was accepted; ``observer`` is recorded with an alarm.

    ``open_again`` opens the store with a further connection.
    """

    plane: ControlPlane
    store: UsageStore
    open_again: OpenStore
    deployment_id: str
    observer: str

    def compare(self, target: Baseline | None = None) -> Finding:
        """Observe the store and judge it against a restore target, or the accepted baseline (None).

        Raises:
            StoreError: the store could not be observed.
        """
        return self.compare_since(self.plane.registry.claim().baseline, target)

    def compare_since(self, before: Baseline | None, target: Baseline | None = None) -> Finding:
        """Compare as ``compare`` does; ``before`` is the stored baseline as read before this."""
        for _ in range(ROUNDS):
            found = self._observe(self.store, target)
            # A check may have just renewed the marker: then the observation is too old to judge.
            if not found.verdict.is_alarm or found.baseline == before:
                break
            before = found.baseline
        return found

    def confirm(self, first: Finding, target: Baseline | None = None) -> Finding:
        """Confirm a finding by a second observation; an alarm also by a third one.

        Another store is confirmed also if it answers in turn with the accepted one, since then
        nothing is written. Such a store that looks like a loss is not confirmed.

        If all three observations differ, the result is the first one, not agreed and without an
        observation: something is wrong with the store, and it is unknown what.

        Raises:
            PossibleLossError: the others do not show what the first one showed.
            StoreError: the store could not be observed again.
        """
        second = self._observe_again(target)
        if second.agrees_with(first):
            return second
        if not first.verdict.is_alarm or second.verdict is Verdict.UNKNOWN:
            raise _disagreement(first, second)
        if not second.verdict.is_alarm and first.verdict is not Verdict.OTHER_STORE:
            # The accepted store is there, so two stores answer in turn: neither is lost.
            raise _disagreement(first, second)
        third = self._observe_again(target)
        if third.verdict is Verdict.UNKNOWN or not (
            third.verdict.is_alarm or second.verdict.is_alarm
        ):
            raise _disagreement(first, third)
        if third.agrees_with(first) or third.agrees_with(second):
            return third
        reasons = " ".join(each.judgement.reason for each in (first, second, third))
        differ = Judgement(first.verdict, f"Three observations of the store differ: {reasons}")
        return replace(first, judgement=differ, seen=None, is_agreed=False)

    def raise_alarm(self, first: Finding) -> Incident | None:
        """Confirm an alarm about the accepted store, and open an incident.

        None: the database had lost only renewals of the marker, and the store is accepted.

        Raises:
            PossibleLossError: other observations do not confirm it.
            BaselineMovedError: the baseline has moved; compare again.
            IncidentMovedError: an incident is already open.
            CapturesPausedError: the store is not HEALTHY.
            StoreError: the store could not be observed again.
        """
        found = self.confirm(first)
        if found.seen is not None and self._lacks_only_renewals(found, found.seen):
            self._accept_renewals(found, found.seen)
            return None
        loss, target = self._loss_of(found)
        return self.plane.incidents.open(
            loss,
            target=target,
            judged=found.baseline,
            hold=_HOLDS.get(found.verdict),
            began_empty=began_empty(found.accepted, found.seen),
        )

    def join_alarm(self, first: Finding, incident: Incident) -> Incident:
        """Confirm a further alarm while an incident is open, and add it to the incident.

        Raises:
            PossibleLossError, StoreError: as ``raise_alarm``.
            IncidentMovedError: the incident has moved; compare again.
        """
        found = self.confirm(first, compared_with(incident))
        return self._join(found, incident, hold=_HOLDS.get(found.verdict))

    def _join(self, found: Finding, incident: Incident, *, hold: str | None) -> Incident:
        """Add a confirmed alarm to an incident, and record it as a check; ``hold``: why to wait."""
        loss, target = self._loss_of(found)
        joined = self.plane.incidents.join(
            loss,
            target=target,
            judged=incident,
            hold=hold,
            began_empty=began_empty(found.accepted, found.seen),
        )
        self.plane.registry.record_check(check_of(joined))
        return joined

    def settle_target(self, incident: Incident, *, is_chosen: bool) -> tuple[Incident, Observation]:
        """Return the incident with the observed store as its restore target.

        ``is_chosen``: a person decided to use the store that the incident is about, even if it is
        another one, or if the database is older than it.

        Raises:
            IncidentHeldError: only a person can decide about this store; the incident is on hold.
            PossibleLossError: observations disagree, so it is unknown which store it is.
            StoreNotReadyError, StoreError: the store could not be identified.
            IncidentMovedError: the incident has moved.
        """
        found, is_decided = self._compare_in(incident, is_chosen=is_chosen)
        standard = incident.target if is_decided else compared_with(incident)
        if found.seen is None:
            raise StoreMissingError(
                "The bucket does not exist.",
                "start the gateway, which creates the bucket; the restore then continues.",
            )
        if found.verdict is Verdict.UNKNOWN:
            raise StoreNotReadyError(
                found.judgement.reason, "restore a quorum of the cluster's servers."
            )
        if found.verdict is Verdict.SAME and standard is not None:
            return incident, found.seen
        if found.verdict is not Verdict.SAME:
            confirmed = self.confirm(found, standard)
            # Others may agree with each other, but they did not see the store that is adopted.
            if not confirmed.is_agreed or not confirmed.agrees_with(found):
                raise PossibleLossError(
                    f"It is unknown which store the server shows. {found.judgement.reason}",
                    "check that every address in BUDGET_RECOVERY_NATS_URL leads to the same"
                    " cluster.",
                )
        return self._adopt(incident, found, found.seen, is_decided=is_decided), found.seen

    def _compare_in(self, incident: Incident, *, is_chosen: bool) -> tuple[Finding, bool]:
        """Compare the store in an incident; also return whether a person decided about this one.

        If so, it is compared with itself as it was shown to that person.
        """
        found = self.compare(compared_with(incident))
        if not is_chosen or found.seen is None or not incident.is_about(found.seen.identity):
            return found, False
        return self.judge(found.seen, incident.target), True

    def refusal_to_choose(self, incident: Incident | None) -> str | None:
        """Return why a person's restore would be refused because of the store; None: it is not.

        Raises:
            StoreError: the store could not be observed.
        """
        if incident is None:
            judgement = self.compare().judgement
            return None if judgement.verdict.is_good else judgement.reason
        found, is_decided = self._compare_in(incident, is_chosen=True)
        is_undecided = _needs_choice(found, incident) and not is_decided
        is_refused = found.verdict is Verdict.UNKNOWN or is_undecided
        return found.judgement.reason if is_refused else None

    def _adopt(
        self, incident: Incident, found: Finding, seen: Observation, *, is_decided: bool
    ) -> Incident:
        """Make an observed store the restore target, or put the incident on hold."""
        if _needs_choice(found, incident) and not is_decided:
            hold = _HOLDS.get(found.verdict)
            joined = self._join(found, incident, hold=hold)
            raise IncidentHeldError(joined.on_hold or found.judgement.reason, joined.hold_ends)
        if found.verdict is Verdict.DATABASE_BEHIND and seen.marker is not None:
            self.plane.registry.acknowledge(seen.marker)
        if compared_with(incident) is None or found.verdict is not Verdict.LOST:
            return self.plane.incidents.adopt_target(
                baseline_of(seen, found.at),
                judged=incident,
                began_empty=began_empty(found.accepted, seen),
            )
        return self._join(found, incident, hold=None)

    def require_accepted(self) -> Observation:
        """Require that no incident is open and the store is the accepted one.

        Opening an incident is left to checks.

        Raises:
            StoreLostError: an incident has been opened.
            PossibleLossError: it is another store, and no check has found that yet.
            StoreNotReadyError, StoreError: the store could not be identified.
        """
        found = self.compare()
        judgement, seen = found.judgement, found.seen
        incident = self.plane.incidents.recovery().incident
        if incident is not None:
            raise StoreLostError(
                f"The store was lost: incident {incident.short_id} has been opened.",
                "see `budget-recovery status`, and preview once more.",
            )
        if judgement.verdict.is_alarm:
            raise PossibleLossError(
                f"The store is not the one that was accepted. {judgement.reason}",
                "wait for the next check, which opens an incident if it finds the same; then "
                "restore.",
            )
        if seen is None or not judgement.verdict.is_good:
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
            IncidentHeldError: it is a store that only a person can decide about.
            AttemptFailedError: the store could not be identified.
            PossibleLossError, StoreError: likewise.
        """
        target = incident.target
        found = self.compare(target)
        judgement, seen = found.judgement, found.seen
        if judgement.verdict.is_alarm:
            lost = StoreLostError(
                f"The store was lost once more during the restore. {judgement.reason}", next_step
            )
            try:
                joined = self.join_alarm(found, incident)
            except IncidentMovedError as error:
                # A check was quicker and has recorded the alarm.
                raise lost from error
            if joined.on_hold is not None:
                raise IncidentHeldError(joined.on_hold, joined.hold_ends)
            raise lost
        if seen is None or not judgement.verdict.is_good:
            raise AttemptFailedError(
                f"The store could not be identified as the restore target. {judgement.reason}",
                f"wait for the cluster to settle. {next_step}",
            )
        return seen

    def renew_marker(
        self, accepted: Baseline, seen: Observation, now: datetime
    ) -> tuple[Baseline, Observation]:
        """Write the intended marker; return the baseline that holds with it, to be accepted.

        ``seen`` is the observation that identified the store as the ``accepted`` one at ``now``.
        The store is observed once more after the write, and that observation is returned. If
        another program has deleted the marker by then, the baseline has none. The store remembers
        the deletion, so it is the same store; without a marker, fewer losses are detected.

        Raises:
            MarkerConflictError: the marker's key was written since that observation.
            StorePermissionError: the marker may not be written.
            StoreWriteError: the store refuses it.
            PossibleLossError: the marker is not in the store that was observed.
            StoreError: it is unknown whether it was written.
        """
        intended = accepted.intended
        if intended is None:
            raise ValueError("a marker is written once it is recorded as intended")
        after = seen.marker.revision if seen.marker else 0
        conflict: MarkerConflictError | None = None
        try:
            revision = self.store.write_marker(self.deployment_id, intended, after=after).revision
        except MarkerConflictError as error:
            # An earlier try may have written it, whose acknowledgement was lost.
            conflict, revision = error, after + 1
        again = self.store.observe(self.deployment_id)
        if not confirms(seen, again) or not _has_written(again.marker, intended, revision):
            raise conflict or PossibleLossError(
                f"The marker at sequence {revision} is not in the store that was observed:"
                f" {again.identity}, after {seen.identity}.",
                "wait for the next check, which observes the store again.",
            )
        return replace(baseline_of(again, now), version=accepted.version), again

    def _observe_again(self, target: Baseline | None) -> Finding:
        self.plane.clock.wait(AGREEING_AFTER)
        with self.open_again() as store:
            return self._observe(store, target)

    def _observe(self, store: UsageStore, target: Baseline | None) -> Finding:
        try:
            seen: Observation | None = store.observe(self.deployment_id)
        except StoreMissingError:
            seen = None
        return self.judge(seen, target)

    def judge(self, seen: Observation | None, target: Baseline | None = None) -> Finding:
        """Judge an observation that was just made; see ``compare``."""
        plane = self.plane
        # After the observation: a marker that it shows may have been recorded only just before.
        baseline = plane.registry.claim().baseline
        accepted = baseline or last_captured(plane)
        memory, now = plane.registry.memory_of(seen, accepted), plane.clock.now()
        standard = target or accepted
        judgement = judge_observation(standard, seen, memory, now)
        return Finding(judgement, seen, now, baseline, standard)

    def _loss_of(self, found: Finding) -> tuple[Loss, Baseline | None]:
        """Return a confirmed alarm as a loss, and the store that was found, if one was."""
        if found.accepted is None:
            raise ValueError("nothing can be lost that was never accepted")
        seen = found.seen
        loss = Loss(
            found_at=found.at,
            found_by=self.observer,
            verdict=found.verdict,
            reason=found.judgement.reason,
            before=found.accepted.identity,
            after=seen.identity if seen else None,
            evidence=found.judgement.evidence,
        )
        return loss, baseline_of(seen, found.at) if seen else None

    def _lacks_only_renewals(self, found: Finding, seen: Observation) -> bool:
        """Whether an older database lacks nothing but renewals of the marker, once in a day."""
        if found.judgement.evidence is not Evidence.NUMBER_AHEAD or found.accepted is None:
            return False
        if seen.marker is None or seen.marker.landmark is None:
            return False
        is_same = continues(found.accepted.identity, seen.identity)
        since = found.at - _RENEWALS_LOST_ONCE_IN
        return is_same and not self.plane.registry.renewals_lost_since(since)

    def _accept_renewals(self, found: Finding, seen: Observation) -> None:
        registry = self.plane.registry
        if seen.marker is None:
            raise ValueError("without a marker no renewal is known")
        accepted = replace(
            baseline_of(seen, found.at),
            version=found.baseline.version if found.baseline else 1,
        )
        registry.accept_renewals(accepted, seen.marker, judged=found.baseline)
        registry.record_check(
            Check(
                checked_at=found.at,
                checked_by=self.observer,
                verdict=found.verdict,
                reason=f"{found.judgement.reason} Nothing but renewals of the marker was missing,"
                " so the store is accepted as it is.",
                identity=seen.identity,
                evidence=found.judgement.evidence,
            )
        )


def _has_written(found: FoundMarker | None, intended: IntendedMarker, revision: int) -> bool:
    """Whether the store has the marker, or a deletion of it, at ``revision`` or later."""
    if found is None or found.revision < revision:
        return False
    return found.nonce == intended.nonce or (found.is_deleted and not found.is_expired)


def _disagreement(first: Finding, then: Finding) -> PossibleLossError:
    return PossibleLossError(
        f"Two observations of the store disagree: {first.judgement.reason} Then: "
        f"{then.judgement.reason}",
        "wait for the next check. If it happens again, check that every address in"
        " BUDGET_RECOVERY_NATS_URL leads to the same cluster.",
    )


def _needs_choice(found: Finding, incident: Incident) -> bool:
    """Whether only a person can decide about a store that was found in an incident."""
    return found.verdict in _HOLDS or (incident.awaits_choice and found.verdict.is_alarm)


def compared_with(incident: Incident) -> Baseline | None:
    """Return the restore target that the store is compared with; None: the accepted baseline."""
    return None if incident.awaits_choice else incident.target


def watch_store(
    plane: ControlPlane, store: UsageStore, open_again: OpenStore, observer: str
) -> StoreWatch:
    """Return the watch of an opened store.

    Raises:
        SettingsError: the database belongs to another bucket.
    """
    return StoreWatch(plane, store, open_again, plane.registry.claim().deployment_id, observer)


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
        evidence=loss.evidence,
    )


def measure_clock_skew(clock: Clock, store: UsageStore) -> timedelta | None:
    """Return how far the store's clock is ahead of the database's; negative if it is behind.

    The time that the store takes to answer is not counted as skew. None: the store does not report
    its time.

    Raises:
        StoreError: the store did not answer.
    """
    before, there, after = clock.now(), store.now(), clock.now()
    if there is None:
        return None
    return clock_skew(before, there, after)


def measure_host_skew(clock: Clock) -> timedelta:
    """Return how far this host's clock is ahead of the database's; negative if it is behind."""
    return -clock_skew(clock.host_time(), clock.now(), clock.host_time())


@dataclass(slots=True)
class CaptureWatch:
    """Requires, through one capture, that the store stays the accepted one.

    ``baseline`` is the stored one as this capture last read or moved it; ``first`` is the store as
    a first capture observed it.
    """

    watch: StoreWatch
    baseline: Baseline | None = field(default=None, init=False)
    first: Baseline | None = field(default=None, init=False)
    _last_seen: StoreIdentity | None = field(default=None, init=False)

    def __post_init__(self) -> None:
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
                continue
        raise PossibleLossError(
            f"The usage store differs from the accepted one, which moved {ROUNDS} times.",
            SECOND_DEPLOYMENT,
        )

    def _compare(self) -> StoreIdentity:
        found = self.watch.compare_since(self.baseline)
        self.baseline = found.baseline
        if found.verdict.is_alarm:
            self._raise_alarm(found)
        if found.seen is None and self._last_seen is None:
            raise StoreMissingError(
                "The bucket does not exist.",
                "correct BUDGET_RECOVERY_BUCKET, or start the gateway, which creates the bucket.",
            )
        if found.seen is not None and found.verdict is Verdict.UNKNOWN:
            raise PossibleLossError(
                found.judgement.reason,
                "wait for the cluster to settle; the next capture compares again.",
            )
        if found.verdict is Verdict.FIRST_SEEN and self._last_seen is None:
            found = self.watch.confirm(found)
            self.first = baseline_of(found.seen, found.at) if found.seen else None
        return self._compare_with_last(found.seen)

    def _raise_alarm(self, found: Finding) -> None:
        """Open an incident, or accept the store.

        Raises:
            BaselineMovedError: the store is accepted; compare again.
            StoreLostError, CapturesPausedError, PossibleLossError, StoreError: it is not.
        """
        reason = found.judgement.reason
        try:
            incident = self.watch.raise_alarm(found)
        except IncidentMovedError as error:
            raise CapturesPausedError(
                f"{reason} An incident is already open for it.",
                "wait for the recovery to end; captures resume by themselves.",
            ) from error
        if incident is None:
            raise BaselineMovedError(reason, "compare with the new baseline.")
        self.watch.plane.registry.record_check(check_of(incident))
        raise StoreLostError(
            f"{reason} Nothing of it was stored; incident {incident.short_id} is open.",
            incident.hold_ends
            if incident.is_held
            else "wait: the restore starts automatically, and captures resume after it.",
        )

    def _compare_with_last(self, seen: Observation | None) -> StoreIdentity:
        # The last observation of this capture counts too: in a first one nothing is accepted yet.
        last = self._last_seen
        if seen is None or (last and not continues(last, seen.identity)):
            now = "gone" if seen is None else seen.identity
            raise PossibleLossError(
                "The usage store may have lost data during this capture. It was: "
                f"{last}; now: {now}.",
                "find out what happened to the gateway's bucket; the next capture compares again.",
            )
        self._last_seen = seen.identity
        return seen.identity
