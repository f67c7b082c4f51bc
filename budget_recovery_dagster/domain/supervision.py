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


class Phase(StrEnum):
    """Where a run is, as the scheduler says."""

    QUEUED = "queued"
    STARTED = "started"
    CANCELED = "canceled"
    OVER = "over"


@dataclass(frozen=True, slots=True)
class RunSeen:
    """A run that was to put the incident right; ``requested_at`` is when it was asked for."""

    run_id: str
    phase: Phase
    requested_at: datetime

    @property
    def short_id(self) -> str:
        """Return as much of the id as people need."""
        return self.run_id[:8]


@dataclass(frozen=True, slots=True)
class Suspicion:
    """That a started run was found without a lease, whose last taking had this token."""

    run_id: str
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
class DeclareDead:
    """A run is to be declared failed: nobody works in it any more."""

    run: RunSeen


@dataclass(frozen=True, slots=True)
class PutOnHold:
    """A person has terminated a run, and so wants the restore to stop."""

    incident: Incident
    run: RunSeen


Decision = Rest | Launch | DeclareDead | PutOnHold


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


def supervise(scene: Scene, now: datetime) -> Decision:
    """Decide what is to be done at ``now`` (aware)."""
    incident = scene.recovery.incident
    if incident is not None and (run := _terminated(scene, incident)):
        return PutOnHold(incident, run)
    started = [run for run in scene.runs if run.phase is Phase.STARTED]
    queued = [run for run in scene.runs if run.phase is Phase.QUEUED]
    if scene.worker is not None:
        return Rest(f"{scene.worker} is at work.")
    if started:
        return _about_silent(started[0], scene, now)
    if queued:
        return Rest(f"Run {queued[0].short_id} is about to start.")
    reason = may_launch(scene.recovery, now)
    if reason is not None or incident is None:
        return Rest(reason or "No incident is open.")
    return Launch(incident)


def _terminated(scene: Scene, incident: Incident) -> RunSeen | None:
    """Return the newest run if a person has terminated it since the incident was last released.

    That is no news where it is on hold, and stops nothing where no restore is to come.
    """
    if incident.is_held or scene.recovery.state is not RecoveryState.RECOVERING:
        return None
    newest = scene.runs[0] if scene.runs else None
    if newest is None or newest.phase is not Phase.CANCELED:
        return None
    released_at = incident.released_at
    return newest if released_at is None or released_at < newest.requested_at else None


def _about_silent(run: RunSeen, scene: Scene, now: datetime) -> Decision:
    """Decide about a run that is called started though nobody holds the lease."""
    known = scene.suspicion
    is_known = known is not None and (known.run_id, known.token) == (run.run_id, scene.token)
    if known is None or not is_known or known.since > now:
        # A new one, or one that has had the lease in between and is alive; or the clock was ahead.
        known = Suspicion(run.run_id, scene.token, now)
    if now - known.since >= DEAD_AFTER:
        return DeclareDead(run)
    return Rest(f"Run {run.short_id} is started, and nobody works in it yet.", known)
