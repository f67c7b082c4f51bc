"""Supervision: the next action for an open incident and its runs, and how a dead run ends.

Dagster's status is not enough: a started run may have lost its host, and a worker may outlive its
code server. The restore lease decides whether a worker is alive.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

from budget_recovery_dagster.domain.incident import (
    Attempt,
    Incident,
    Outcome,
    Recovery,
    RecoveryState,
    may_launch,
)

DEAD_AFTER = timedelta(seconds=60)
"""A started run without a lease for so long is dead.

Longer than the start of a run. While the next attempt is not due, no run is dead.
"""

LEFT_DEAD_AFTER = timedelta(minutes=2)
"""The same for a run of no open incident, which may still wait for a next attempt.

Longer than that wait within a run, and nothing waits for such a run.
"""

LOST_AFTER = timedelta(seconds=20)
"""A launch without a run for so long is lost.

Longer than the time from counting a launch to its run; shorter than the interval of ticks.
"""


class Phase(StrEnum):
    """The phase of a run, according to Dagster."""

    QUEUED = "queued"
    STARTED = "started"
    CANCELED = "canceled"
    OVER = "over"


@dataclass(frozen=True, slots=True)
class RunSeen:
    """A restore run of this installation; ``requested_at`` is when it was requested.

    ``terminated_at`` is when a person first requested its termination, if known; ``launch`` is the
    number of its launch, None if it was started manually. ``incident_id`` is the incident that it
    was launched for or has worked on, if known. ``pauses_until``: until then it waits for its next
    attempt.
    """

    run_id: str
    phase: Phase
    requested_at: datetime
    terminated_at: datetime | None = None
    launch: int | None = None
    incident_id: str | None = None
    pauses_until: datetime | None = None

    @property
    def short_id(self) -> str:
        """The first characters of the id, for people."""
        return self.run_id[:8]

    @property
    def unwanted_since(self) -> datetime | None:
        """The time since which a person wants the restore to stop; None if no person does."""
        if self.phase is not Phase.CANCELED:
            return None
        # Both count: the times may come from two clocks, and a termination follows its request.
        return max(self.requested_at, self.terminated_at or self.requested_at)


@dataclass(frozen=True, slots=True)
class Suspicion:
    """A started run without a lease, or a launch without a run.

    ``suspect`` is the id of the run, or the name of the launch; ``token`` is that of the lease at
    that time.
    """

    suspect: str
    token: int
    since: datetime


@dataclass(frozen=True, slots=True)
class Rest:
    """Do nothing now, and why; ``suspicion`` is stored until the next tick."""

    reason: str
    suspicion: Suspicion | None = None


@dataclass(frozen=True, slots=True)
class Launch:
    """Launch a restore for the incident."""

    incident: Incident


@dataclass(frozen=True, slots=True)
class LaunchAgain:
    """Request the last counted launch again: its request was lost."""

    incident: Incident


@dataclass(frozen=True, slots=True)
class DeclareDead:
    """End a run that has no worker any more, as ``fate_of`` says."""

    run: RunSeen


@dataclass(frozen=True, slots=True)
class PutOnHold:
    """Put the incident on hold: a person terminated its run."""

    incident: Incident
    run: RunSeen


Decision = Rest | Launch | LaunchAgain | DeclareDead | PutOnHold


@dataclass(frozen=True, slots=True)
class Scene:
    """The facts of a decision: the runs of the open incident, newest first, and the lease.

    ``worker`` is the holder of the restore lease, None if it is free; ``token`` is its newest
    token. ``left`` are the started runs of no open incident.
    """

    recovery: Recovery
    runs: Sequence[RunSeen]
    worker: str | None
    token: int
    suspicion: Suspicion | None
    left: Sequence[RunSeen] = ()

    def first(self, phase: Phase) -> RunSeen | None:
        """Return the newest run that is in a phase."""
        return next((run for run in self.runs if run.phase is phase), None)


def supervise(scene: Scene, now: datetime) -> Decision:
    """Decide the next action at ``now`` (aware): the open incident comes first."""
    decision = _about_incident(scene, now)
    is_idle = isinstance(decision, Rest) and decision.suspicion is None and scene.worker is None
    left = [run for run in scene.left if run.pauses_until is None or run.pauses_until <= now]
    return _suspect(left[0], scene, now, LEFT_DEAD_AFTER) if is_idle and left else decision


def _about_incident(scene: Scene, now: datetime) -> Decision:
    incident = scene.recovery.incident
    if incident is not None and (run := _terminated(scene, incident)):
        return PutOnHold(incident, run)
    if scene.worker is not None:
        return Rest(f"{scene.worker} is restoring.")
    if started := scene.first(Phase.STARTED):
        return _about_silent(started, scene, now)
    if queued := scene.first(Phase.QUEUED):
        return Rest(f"Run {queued.short_id} is about to start.")
    return _about_launch(scene, now)


def _terminated(scene: Scene, incident: Incident) -> RunSeen | None:
    """Return a run that a person terminated after the last request or release of a restore.

    It need not be the newest run: one that started during its work had nothing to do. None if the
    incident is on hold already, or if no restore would follow.
    """
    if incident.is_held or scene.recovery.state is not RecoveryState.RECOVERING:
        return None
    wanted = [run.requested_at for run in scene.runs if run.phase is not Phase.CANCELED]
    if incident.released_at is not None:
        wanted.append(incident.released_at)
    for run in scene.runs:
        since = run.unwanted_since
        if since is not None and all(at < since for at in wanted):
            return run
    return None


def _about_silent(run: RunSeen, scene: Scene, now: datetime) -> Decision:
    """Decide about a started run without a lease."""
    incident = scene.recovery.incident
    if incident is not None and (awaited := incident.awaited_attempt(now)):
        return Rest(f"Run {run.short_id} has no worker. {awaited}")
    return _suspect(run, scene, now, DEAD_AFTER)


def _suspect(run: RunSeen, scene: Scene, now: datetime, dead_after: timedelta) -> Decision:
    known = _suspicion(run.run_id, scene, now)
    if now - known.since >= dead_after:
        return DeclareDead(run)
    return Rest(f"Run {run.short_id} is started but has no worker yet.", known)


def _about_launch(scene: Scene, now: datetime) -> Decision:
    """Decide whether to launch a restore while no run is queued or started."""
    incident = scene.recovery.incident
    reason = may_launch(scene.recovery, now)
    if incident is None or scene.recovery.state is not RecoveryState.RECOVERING:
        return Rest(reason or "No incident is open.")
    if reason is None:
        return Launch(incident)
    # The tick that counted the last launch may have been interrupted before it requested the run.
    is_missed = all(run.launch != incident.launches for run in scene.runs)
    if incident.is_held or not incident.launches or not is_missed:
        return Rest(reason)
    known = _suspicion(f"launch-{incident.launches}", scene, now)
    if now - known.since >= LOST_AFTER:
        return LaunchAgain(incident)
    return Rest(f"Launch {incident.launches} has no run yet. {reason}", known)


def _suspicion(suspect: str, scene: Scene, now: datetime) -> Suspicion:
    """Return the stored suspicion if it still holds, or a new one."""
    known = scene.suspicion
    is_known = known is not None and (known.suspect, known.token) == (suspect, scene.token)
    if known is None or not is_known or known.since > now:
        # None is stored, or a worker held the lease in between, or the clock was ahead.
        return Suspicion(suspect, scene.token, now)
    return known


@dataclass(frozen=True, slots=True)
class Fate:
    """How a run without a worker ends; ``shown`` is the incident whose result it should show."""

    has_succeeded: bool
    reason: str
    shown: Incident | None = None


def fate_of(run: RunSeen, incident: Incident | None, attempts: Sequence[Attempt]) -> Fate:
    """Return how a dead run ends, from what the database knows of it.

    ``incident`` is the one that it worked on, None if it is unknown; ``attempts`` are those of the
    incident, oldest first.
    """
    if incident is None:
        return Fate(has_succeeded=False, reason="It worked on no incident.")
    own = [each for each in attempts if each.run_id == run.run_id]
    is_newest = bool(own) and own[-1] == attempts[-1]
    if incident.ended is not None and _may_have_ended(incident.ended.outcome, own, attempts):
        reason = f"Incident {incident.short_id} ended: {incident.ended.outcome.words}."
        return Fate(has_succeeded=True, reason=reason, shown=incident)
    if incident.given_up is not None and is_newest:
        reason = f"Incident {incident.short_id} was given up."
        return Fate(has_succeeded=False, reason=reason, shown=incident)
    if own and own[-1].outcome:
        return Fate(has_succeeded=False, reason=f"Its last attempt ended: {own[-1].outcome}")
    return Fate(has_succeeded=False, reason="No end of an attempt of it is recorded.")


def _may_have_ended(outcome: Outcome, own: Sequence[Attempt], attempts: Sequence[Attempt]) -> bool:
    """Whether a run with these attempts can have closed its incident, rather than another one."""
    if not outcome.is_automatic:
        return False
    newest = attempts[-1].outcome if attempts else None
    if not own:
        # It verified what dead runs had restored, or the store lacked nothing.
        return newest != outcome.words
    # The worker may have died between closing the incident and recording the end of its attempt.
    return own[-1] == attempts[-1] and newest in (None, outcome.words)
