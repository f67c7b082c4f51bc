"""Supervision: what is to be done about an open incident, whatever has become of its runs.

The scheduler's word is not enough: it may call a run started whose host is gone, or not know of a
worker that outlived its code server. What tells whether somebody works is the lease of restores.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

from budget_recovery_dagster.domain.incident import (
    Incident,
    Recovery,
    RecoveryState,
    may_launch,
)

DEAD_AFTER = timedelta(seconds=60)
"""A run that is called started and has had no lease for so long is dead.

Longer than it takes to start one, and than the pauses between its attempts.
"""

LOST_AFTER = timedelta(seconds=20)
"""A launch of which no run is known for so long is lost.

Longer than it takes from the counting of a launch to its run; less than between two looks.
"""


class Phase(StrEnum):
    """Where a run is, as the scheduler says."""

    QUEUED = "queued"
    STARTED = "started"
    CANCELED = "canceled"
    OVER = "over"


@dataclass(frozen=True, slots=True)
class RunSeen:
    """A run that was to put the incident right; ``requested_at`` is when it was asked for.

    ``terminated_at`` is when a person first asked for its end, if that is known; ``launch`` is the
    incident's launch that it is of, None where it was started by hand.
    """

    run_id: str
    phase: Phase
    requested_at: datetime
    terminated_at: datetime | None = None
    launch: int | None = None

    @property
    def short_id(self) -> str:
        """Return as much of the id as people need."""
        return self.run_id[:8]

    @property
    def unwanted_since(self) -> datetime | None:
        """Return since when a person wants the restore to stop; None if nobody has said so."""
        if self.phase is not Phase.CANCELED:
            return None
        # Both count: the moments may be of two clocks, and none is terminated before it is there.
        return max(self.requested_at, self.terminated_at or self.requested_at)


@dataclass(frozen=True, slots=True)
class Suspicion:
    """That a started run was found without a lease, or a launch without a run.

    ``suspect`` is the id of the run, or names the launch; the last taking of the lease then had
    this token.
    """

    suspect: str
    token: int
    since: datetime


@dataclass(frozen=True, slots=True)
class Rest:
    """Nothing is to be done now, and why; ``suspicion`` is to be remembered until the next look."""

    reason: str
    suspicion: Suspicion | None = None


@dataclass(frozen=True, slots=True)
class Launch:
    """A restore is to be launched for the incident."""

    incident: Incident


@dataclass(frozen=True, slots=True)
class LaunchAgain:
    """The launch that was counted last is to be requested once more: its request was lost."""

    incident: Incident


@dataclass(frozen=True, slots=True)
class DeclareDead:
    """A run is to be declared failed: nobody works in it any more."""

    run: RunSeen


@dataclass(frozen=True, slots=True)
class PutOnHold:
    """A person has terminated a run, and so wants the restore to stop."""

    incident: Incident
    run: RunSeen


Decision = Rest | Launch | LaunchAgain | DeclareDead | PutOnHold


@dataclass(frozen=True, slots=True)
class Scene:
    """What is known when it is decided: runs are of the open incident, newest first.

    ``worker`` is who holds the lease of restores, None if nobody does; ``token`` is that of its
    last taking.
    """

    recovery: Recovery
    runs: Sequence[RunSeen]
    worker: str | None
    token: int
    suspicion: Suspicion | None

    def first(self, phase: Phase) -> RunSeen | None:
        """Return the newest run that is in a phase."""
        return next((run for run in self.runs if run.phase is phase), None)


def supervise(scene: Scene, now: datetime) -> Decision:
    """Decide what is to be done at ``now`` (aware)."""
    incident = scene.recovery.incident
    if incident is not None and (run := _terminated(scene, incident)):
        return PutOnHold(incident, run)
    if scene.worker is not None:
        return Rest(f"{scene.worker} is at work.")
    if started := scene.first(Phase.STARTED):
        return _about_silent(started, scene, now)
    if queued := scene.first(Phase.QUEUED):
        return Rest(f"Run {queued.short_id} is about to start.")
    return _about_launch(scene, now)


def _terminated(scene: Scene, incident: Incident) -> RunSeen | None:
    """Return a run that a person has terminated since any was asked for or let go on.

    It need not be the newest: another that came while it worked had nothing to do. That is no news
    where the incident is on hold, and stops nothing where no restore is to come.
    """
    if incident.is_held or scene.recovery.state is not RecoveryState.RECOVERING:
        return None
    wanted = [run.requested_at for run in scene.runs if run.phase is not Phase.CANCELED]
    if incident.released_at is not None:
        wanted.append(incident.released_at)
    for run in scene.runs:
        since = run.unwanted_since
        if since is not None and all(moment < since for moment in wanted):
            return run
    return None


def _about_silent(run: RunSeen, scene: Scene, now: datetime) -> Decision:
    """Decide about a run that is called started though nobody holds the lease."""
    known = _suspicion(run.run_id, scene, now)
    if now - known.since >= DEAD_AFTER:
        return DeclareDead(run)
    return Rest(f"Run {run.short_id} is started, and nobody works in it yet.", known)


def _about_launch(scene: Scene, now: datetime) -> Decision:
    """Decide whether a restore is to be launched where no run is known to be on its way."""
    incident = scene.recovery.incident
    reason = may_launch(scene.recovery, now)
    if incident is None or scene.recovery.state is not RecoveryState.RECOVERING:
        return Rest(reason or "No incident is open.")
    if reason is None:
        return Launch(incident)
    # The tick that counted the last launch may have been broken off before it asked for the run.
    is_missed = all(run.launch != incident.launches for run in scene.runs)
    if incident.is_held or not incident.launches or not is_missed:
        return Rest(reason)
    known = _suspicion(f"launch-{incident.launches}", scene, now)
    if now - known.since >= LOST_AFTER:
        return LaunchAgain(incident)
    return Rest(f"No run of launch {incident.launches} is known yet. {reason}", known)


def _suspicion(suspect: str, scene: Scene, now: datetime) -> Suspicion:
    """Return the suspicion as it is known, or a new one."""
    known = scene.suspicion
    is_known = known is not None and (known.suspect, known.token) == (suspect, scene.token)
    if known is None or not is_known or known.since > now:
        # A new one, or somebody has had the lease in between; or the clock was ahead.
        return Suspicion(suspect, scene.token, now)
    return known
