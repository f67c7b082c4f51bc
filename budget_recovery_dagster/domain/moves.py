"""Moves of the recovery state, each conditional on the state it was judged against.

A move that is not allowed raises and changes nothing. Every move of an incident raises
IncidentMovedError if it is closed, or if its restore target is not that of ``judged``; further
errors are listed.
"""

from dataclasses import dataclass, replace
from datetime import datetime

from budget_recovery_dagster.domain.admission import require_healthy, require_unmoved
from budget_recovery_dagster.domain.incident import (
    MAX_ATTEMPTS,
    Ended,
    Event,
    GivenUp,
    Held,
    Incident,
    Loss,
    Recovery,
    RecoveryState,
    Waiting,
    after,
    backoff,
    may_launch,
    pause_after,
)
from budget_recovery_dagster.domain.store import Baseline
from budget_recovery_dagster.domain.verdict import same_creation
from budget_recovery_dagster.errors import (
    AttemptNotDueError,
    AttemptsUsedUpError,
    IncidentHeldError,
    IncidentMovedError,
)

READ_AGAIN = "read the incident again, and continue from its present state."


@dataclass(frozen=True, slots=True)
class Move:
    """The new state after a move, which may close the incident."""

    state: RecoveryState
    baseline: Baseline | None
    incident: Incident
    launches_before: int


@dataclass(frozen=True, slots=True)
class Standing:
    """The state and baseline of the store, and its open incident, if any.

    ``launches_before`` counts the launches before the newest attempt, loss or release: the backoff
    counts from there.
    """

    state: RecoveryState
    baseline: Baseline | None
    incident: Incident | None = None
    launches_before: int = 0

    def with_incident(self, incident: Incident) -> Move:
        """Return a move that changes only the incident."""
        return Move(self.state, self.baseline, incident, self.launches_before)

    def the_same(self, judged: Incident) -> Incident:
        """Return the open incident, even if it has changed since it was judged.

        Raises:
            IncidentMovedError: it is closed.
        """
        if self.incident is None:
            raise _moved(judged, "it is closed")
        if self.incident.incident_id != judged.incident_id:
            raise _moved(judged, f"it is closed, and {self.incident.short_id} is open")
        return self.incident

    def on_the_same_target(self, judged: Incident) -> Incident:
        """Return the open incident, unless its restore target is not that of ``judged``.

        Raises:
            IncidentMovedError: its restore target is not that of ``judged``, or it is closed.
        """
        incident = self.the_same(judged)
        if incident.target != judged.target:
            raise _moved(judged, "its restore target has changed")
        return incident

    def require_recovering(self, judged: Incident) -> None:
        """Refuse a move that is only for a store that is being restored.

        Raises:
            IncidentMovedError: the store is not RECOVERING.
        """
        if self.state is not RecoveryState.RECOVERING:
            raise _moved(judged, f"the store is {self.state.name}")


def _moved(judged: Incident, why: str) -> IncidentMovedError:
    return IncidentMovedError(f"Incident {judged.short_id} has changed: {why}.", READ_AGAIN)


def accept(standing: Standing, baseline: Baseline, *, judged: Baseline | None) -> Baseline:
    """Return a new baseline, with the next version.

    Raises:
        CapturesPausedError: the store is not HEALTHY.
        BaselineMovedError: the baseline is not the ``judged`` one any more.
    """
    require_healthy(standing.state, "its baseline stays unchanged")
    require_unmoved(standing.baseline, judged)
    return following(standing.baseline, baseline)


def following(present: Baseline | None, baseline: Baseline) -> Baseline:
    """Return a baseline with the version after that of the present one; the first is 1."""
    return replace(baseline, version=present.version + 1 if present else 1)


def hold(standing: Standing, held: Held, *, judged: Incident) -> Move:
    """Put the incident on hold, whatever its target; an existing hold stays unchanged.

    Raises:
        IncidentMovedError: also if the store is not RECOVERING.
    """
    incident = _held_recovery(standing, judged)
    return standing.with_incident(incident if incident.is_held else _put_on_hold(incident, held))


def _put_on_hold(incident: Incident, held: Held) -> Incident:
    """Return the incident with a hold that no earlier release ends."""
    released_at = incident.released_at
    # Also a release under a clock that was ahead is over.
    is_over = released_at is None or released_at >= held.at
    return replace(incident, held=held, released_at=None if is_over else released_at)


def release(standing: Standing, *, judged: Incident, now: datetime) -> Move:
    """Continue the restore at once, with all attempts; without a hold, nothing changes.

    Raises:
        IncidentHeldError: the database may be older than the store; a restore could bring back
            what was reset since.
        IncidentMovedError: as ``hold``, whatever its target; also if a further loss joined.
    """
    incident = _held_recovery(standing, judged)
    if incident.losses != judged.losses:
        raise _moved(judged, "a further loss joined it")
    if incident.held is None or not incident.is_held:
        return standing.with_incident(incident)
    if incident.is_database_behind:
        raise IncidentHeldError(
            f"Incident {incident.short_id} cannot be released: the database is older than the"
            " store, so a restore could bring back usage that was reset since.",
            incident.hold_ends,
        )
    released = replace(
        incident,
        # A hold dated in the future was stored under a clock that was ahead.
        held=replace(incident.held, at=min(incident.held.at, now)),
        released_at=now,
        attempts=0,
        waiting=None,
        next_launch_at=None,
        next_attempt_at=None,
    )
    return Move(standing.state, standing.baseline, released, launches_before=incident.launches)


def require_not_held(incident: Incident) -> None:
    """Refuse to continue a restore that is on hold.

    Raises:
        IncidentHeldError: it is on hold; the message says who, since when and why.
    """
    if incident.on_hold is not None:
        raise IncidentHeldError(incident.on_hold, incident.hold_ends)


def _held_recovery(standing: Standing, judged: Incident) -> Incident:
    incident = standing.the_same(judged)
    standing.require_recovering(judged)
    return incident


@dataclass(frozen=True, slots=True)
class Opening:
    """The facts of a new incident in addition to its loss.

    A unique id, the time, and the newest snapshot that has an intact record or never had a record,
    and the newest good check, both at that time. ``oldest_failing_at`` is the oldest of the newest
    snapshots of tenants whose last capture failed; None: there is none.
    """

    incident_id: str
    at: datetime
    newest_point_at: datetime | None
    newest_good_check_at: datetime | None
    oldest_failing_at: datetime | None = None

    @property
    def covered_until(self) -> datetime | None:
        """Until when snapshots have the usage of every tenant that they have."""
        known = [at for at in (self.newest_point_at, self.oldest_failing_at) if at is not None]
        return min(known, default=None)

    @property
    def last_good_at(self) -> datetime | None:
        """When the store was last known to be intact: a capture compares its identity as well."""
        known = [at for at in (self.newest_point_at, self.newest_good_check_at) if at is not None]
        return max(known, default=None)


# Losses


def open_incident(  # noqa: PLR0913 - by keyword, each a fact of its own
    standing: Standing,
    loss: Loss,
    *,
    target: Baseline | None,
    judged: Baseline | None,
    opening: Opening,
    held: Held | None = None,
    began_empty: bool = False,
) -> Move:
    """Open an incident for a first alarm; ``held``: it starts on hold.

    Raises:
        IncidentMovedError: an incident is open already.
        BaselineMovedError: the baseline is not the ``judged`` one any more.
        ValueError: the verdict is no alarm.
    """
    _require_alarm(loss)
    if standing.incident is not None:
        raise IncidentMovedError(
            f"Incident {standing.incident.short_id} is already open.", READ_AGAIN
        )
    if standing.state is not RecoveryState.HEALTHY:
        raise IncidentMovedError(
            f"The store is {standing.state.name}, but no incident is open.",
            "find out who changed the database manually, and correct the state of the store.",
        )
    require_unmoved(standing.baseline, judged)
    incident = Incident(
        incident_id=opening.incident_id,
        opened_at=opening.at,
        losses=(loss,),
        target=target,
        newest_point_at=opening.covered_until,
        last_good_at=opening.last_good_at,
        held=held,
        began_empty=began_empty,
    )
    state = after(standing.state, Event.LOSS)
    return Move(state, standing.baseline, incident, launches_before=0)


def join(  # noqa: PLR0913 - by keyword, each a fact of its own
    standing: Standing,
    loss: Loss,
    *,
    target: Baseline | None,
    judged: Incident,
    held: Held | None = None,
    began_empty: bool = False,
) -> Move:
    """Add a further alarm; ``held``: the restore is put on hold until a person chooses.

    A person's hold is replaced, so that its release is not taken for that choice.
    Its attempts start again, at once, if it is another store than before. They do not if the same
    store lost something again: then the restore itself may be the cause.

    Raises:
        ValueError: the verdict is no alarm.
    """
    _require_alarm(loss)
    incident = standing.on_the_same_target(judged)
    if held is not None and not incident.awaits_choice:
        incident = _put_on_hold(incident, _following_hold(incident, held))
    joined = replace(
        incident, losses=(*incident.losses, loss), target=target, began_empty=began_empty
    )
    state = after(standing.state, Event.LOSS)
    if _is_same_store(incident.target, target):
        return Move(state, standing.baseline, joined, standing.launches_before)
    again = replace(joined, attempts=0, waiting=None, next_launch_at=None, next_attempt_at=None)
    return Move(state, standing.baseline, again, launches_before=incident.launches)


def _following_hold(incident: Incident, held: Held) -> Held:
    """Return a hold that also names the one that it replaces, if any."""
    before = incident.held
    if before is None or not incident.is_held:
        return held
    reason = f"{held.reason} It was already on hold, by {before.by}: {before.reason}"
    return replace(held, reason=reason)


def _is_same_store(before: Baseline | None, target: Baseline | None) -> bool:
    if before is None or target is None:
        return False
    return same_creation(before.identity.created_at, target.identity.created_at)


def adopt_target(
    standing: Standing, target: Baseline, *, judged: Incident, began_empty: bool = False
) -> Move:
    """Make a store the restore target of the open incident.

    ``began_empty`` counts only if it is another store than before: later, with our marker in it,
    that cannot be observed any more.
    """
    incident = standing.on_the_same_target(judged)
    if _is_same_store(incident.target, target):
        began_empty = incident.began_empty
    return standing.with_incident(replace(incident, target=target, began_empty=began_empty))


# Launches and attempts


def claim_launch(standing: Standing, *, judged: Incident, now: datetime) -> Move | None:
    """Count one more launch; None if another process counted it, or none is due at ``now``."""
    incident = standing.incident
    if incident is None or incident.incident_id != judged.incident_id:
        return None
    if incident.launches != judged.launches:
        return None
    if may_launch(Recovery(standing.state, incident), now) is not None:
        return None
    launches = incident.launches + 1
    pause = backoff(launches - standing.launches_before)
    return standing.with_incident(replace(incident, launches=launches, next_launch_at=now + pause))


def wait(standing: Standing, reason: str, *, judged: Incident, now: datetime) -> Move:
    """Record that a restore waits for the store, and delay the next launch by the backoff."""
    incident = standing.on_the_same_target(judged)
    before = incident.waiting
    waiting = Waiting(
        since=before.since if before else now,
        reason=reason,
        waits=before.waits + 1 if before else 1,
    )
    put_off = now + backoff(waiting.waits)
    return standing.with_incident(replace(incident, waiting=waiting, next_launch_at=put_off))


def claim_attempt(standing: Standing, *, judged: Incident, now: datetime) -> Move:
    """Count one more attempt for the newest loss, and end the waiting.

    The next attempt is delayed, also if this one dies.

    Raises:
        IncidentMovedError: also if the store is not RECOVERING.
        IncidentHeldError: it is on hold.
        AttemptsUsedUpError: the loss has had all its attempts.
        AttemptNotDueError: the next attempt is due later.
    """
    incident = _recovering(standing, judged)
    # First: even the decision on used-up attempts must wait for the release.
    require_not_held(incident)
    if incident.attempts >= MAX_ATTEMPTS:
        raise AttemptsUsedUpError(
            f"Incident {incident.short_id} has used all {MAX_ATTEMPTS} attempts.",
            "see why they failed, fix the cause, and restore manually.",
        )
    if awaited := incident.awaited_attempt(now):
        raise AttemptNotDueError(awaited, "wait; it is launched automatically.")
    claimed = replace(incident, attempts=incident.attempts + 1, waiting=None, next_launch_at=None)
    claimed = replace(claimed, next_attempt_at=_after_pause(claimed, now))
    return Move(standing.state, standing.baseline, claimed, launches_before=incident.launches)


def _after_pause(incident: Incident, now: datetime) -> datetime | None:
    pause = pause_after(incident.attempts)
    return None if pause is None else now + pause


def fail_attempt(standing: Standing, *, judged: Incident, now: datetime) -> Move | None:
    """Delay the next attempt after one that failed at ``now``; None if the incident has changed."""
    incident = standing.incident
    if incident is None or standing.state is not RecoveryState.RECOVERING:
        return None
    same = (incident.incident_id, incident.losses, incident.attempts)
    if same != (judged.incident_id, judged.losses, judged.attempts):
        return None
    return standing.with_incident(replace(incident, next_attempt_at=_after_pause(incident, now)))


def return_attempt(standing: Standing, *, judged: Incident, waited: Waiting | None) -> Move:
    """Count one attempt less: it stopped because a restore has to wait for the store.

    ``waited`` is the waiting that the attempt ended, which goes on; None: there was none.

    Raises:
        IncidentMovedError: also if the store is not RECOVERING.
    """
    incident = _recovering(standing, judged)
    attempts = max(incident.attempts - 1, 0)
    return standing.with_incident(
        replace(incident, attempts=attempts, next_attempt_at=None, waiting=waited)
    )


# Ends


def give_up(standing: Standing, given_up: GivenUp, *, judged: Incident) -> Move:
    """Set the store to FAILED; no further restore is launched.

    Raises:
        IncidentMovedError: also if the store is not RECOVERING.
    """
    incident = _recovering(standing, judged)
    failed = replace(
        incident, given_up=given_up, waiting=None, next_launch_at=None, next_attempt_at=None
    )
    state = after(standing.state, Event.GAVE_UP)
    return Move(state, standing.baseline, failed, standing.launches_before)


def close(standing: Standing, ended: Ended, *, baseline: Baseline, judged: Incident) -> Move:
    """Close the incident and accept a baseline, with the version after that of the present one.

    Raises:
        IncidentMovedError: also if the store is not RECOVERING, unless a person ends it.
    """
    incident = standing.on_the_same_target(judged)
    if not ended.outcome.is_manual:
        standing.require_recovering(judged)
    return Move(
        state=after(standing.state, ended.outcome.event),
        baseline=following(standing.baseline, baseline),
        incident=replace(incident, ended=ended),
        launches_before=standing.launches_before,
    )


def _require_alarm(loss: Loss) -> None:
    if not loss.verdict.is_alarm:
        raise ValueError(f"the verdict {loss.verdict} is no alarm")


def _recovering(standing: Standing, judged: Incident) -> Incident:
    incident = standing.on_the_same_target(judged)
    standing.require_recovering(judged)
    return incident
