"""The state of the store, doubts about it, and the operator's next step."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from itertools import takewhile

from budget_recovery_dagster.domain.admission import RESTORE_LEASE
from budget_recovery_dagster.domain.incident import (
    MAX_ATTEMPTS,
    Attempt,
    FailureReason,
    Incident,
    Recovery,
    RecoveryState,
)
from budget_recovery_dagster.domain.recovery_point import is_of_the_future, is_too_old
from budget_recovery_dagster.domain.store import Check, Verdict
from budget_recovery_dagster.ports import ControlPlane
from budget_recovery_dagster.services.words import clock_time, in_words, since

MISSED_CHECKS = 3
"""So many checks that did not come, or could not tell, and nobody knows how the store is."""
# The supervisor of restores looks twice a minute.
_LAUNCH_IS_LATE = timedelta(minutes=2)
# As often as a snapshot is due.
_LONG_HOLD = timedelta(hours=1)
_NAMED = 3


class Condition(StrEnum):
    """What is to be told of the store in a word."""

    HEALTHY = "healthy"
    RECOVERING = "recovering"
    FAILED = "failed"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Facts:
    """What the database knows of the store at ``at``, and how often the store is to be checked.

    ``checks`` are the newest, newest first; ``unknown_in_a_row`` is how many of the newest could
    not tell, ``newest_good`` the newest that found the store whole. ``attempt`` is the newest of
    the open incident, ``closed`` the newest incident that is over. ``newest_points`` are the newest
    intact records of current windows, by tenant; ``newest_snapshot`` is the newest of all.
    ``damaged`` counts the damaged records in current windows, by tenant. ``failing`` are the
    tenants whose last capture failed, with their newest snapshot. ``worker`` is the process that
    restores now.
    """

    at: datetime
    check_interval: timedelta
    recovery: Recovery
    attempt: Attempt | None
    worker: str | None
    closed: Incident | None
    checks: tuple[Check, ...]
    unknown_in_a_row: int
    newest_good: Check | None
    newest_points: Mapping[str, datetime]
    newest_snapshot: datetime | None
    damaged: Mapping[str, int]
    failing: Mapping[str, datetime | None]

    @property
    def known_whole_at(self) -> datetime | None:
        """When the store was last known to be whole: found so, or accepted after a loss.

        Before there is any check, a stored snapshot stands for one: it was compared, too.
        """
        known = [self.newest_good.checked_at] if self.newest_good else []
        if self.closed is not None and self.closed.ended is not None:
            known.append(self.closed.ended.at)
        if not self.checks and self.newest_snapshot is not None:
            known.append(self.newest_snapshot)
        return max(known, default=None)


@dataclass(frozen=True, slots=True)
class Assessment:
    """The condition; why it cannot be told, if so; and the next step, a sentence or two."""

    condition: Condition
    doubts: tuple[str, ...]
    next_step: str


def assess(facts: Facts) -> Assessment:
    """Say what the facts amount to. A HEALTHY store of which too little is known is not healthy."""
    match facts.recovery.state:
        case RecoveryState.RECOVERING:
            return Assessment(
                Condition.RECOVERING, _doubts_of_hold(facts), _step_of_recovery(facts)
            )
        case RecoveryState.FAILED:
            return Assessment(Condition.FAILED, (), _step_after_failure(facts.recovery.incident))
        case RecoveryState.HEALTHY:
            doubts = _doubts(facts)
            if doubts:
                steps = " ".join(dict.fromkeys(step for _, step in doubts))
                return Assessment(Condition.UNKNOWN, tuple(why for why, _ in doubts), steps)
            return Assessment(Condition.HEALTHY, (), _step_of_health(facts))


_SEE_CHECKS = (
    "See in Dagster whether its daemon runs, store_loss_sensor is on, and what its ticks say."
)
_SEE_STORE = "Make the store reachable again, then wait for the next check."
_SEE_CLOCKS = "Set the clocks of PostgreSQL and NATS right."
_SEE_LOSS = "Wait for the next check, which opens an incident if it finds the same."


def _doubts(facts: Facts) -> list[tuple[str, str]]:
    """Say why it cannot be told that the store is whole, and what is to be done about each."""
    newest = facts.checks[0] if facts.checks else None
    whole_at, now = facts.known_whole_at, facts.at
    for what, moment in (
        ("check", newest.checked_at if newest else None),
        ("snapshot", facts.newest_snapshot),
    ):
        if moment is not None and is_of_the_future(moment, now):
            late = f"The newest {what} is of {clock_time(moment, now)}, which has not come yet."
            # No age can be told, so nothing more is said.
            return [(late, _SEE_CLOCKS)]
    if newest is not None and newest.verdict.is_loss and not _is_settled(newest, facts):
        return [(f"The newest check found a loss: {newest.reason}", _SEE_LOSS)]
    doubts = []
    step = _SEE_CHECKS
    if facts.unknown_in_a_row >= MISSED_CHECKS and newest is not None:
        step = _SEE_STORE
        blind = f"The newest {facts.unknown_in_a_row} checks could not tell: {newest.reason}"
        doubts.append((blind, step))
    allowed = facts.check_interval * (MISSED_CHECKS if facts.checks else 1)
    if whole_at is None:
        doubts.append(("The store has never been found whole.", step))
    elif now - whole_at > allowed:
        interval = in_words(facts.check_interval)
        old = (
            f"The store was last known to be whole {since(whole_at, now)}; it is to be checked"
            f" every {interval}."
        )
        doubts.append((old, step))
    return doubts


def _is_settled(check: Check, facts: Facts) -> bool:
    """Whether the incident of the loss that a check found is over."""
    ended = facts.closed.ended if facts.closed else None
    return ended is not None and check.checked_at <= ended.at


def _step_of_health(facts: Facts) -> str:
    if facts.failing:
        return (
            f"The store is whole, but captures of {_names(facts.failing)} fail: see the newest run"
            " of hourly_snapshot_job in Dagster."
        )
    late = [tenant for tenant, at in facts.newest_points.items() if is_too_old(at, facts.at)]
    if late:
        return (
            f"The store is whole, but no new snapshot comes of {_names(late)}: see in Dagster"
            " whether hourly_snapshot_schedule is on and its runs succeed."
        )
    if facts.damaged:
        return (
            f"The store is whole, but snapshots of {_names(facts.damaged)} have damaged records:"
            " see with `budget-recovery preview` what a restore would bring back, and check the"
            " disk of the database."
        )
    return f"Nothing to do. {_next_check(facts)}"


def _next_check(facts: Facts) -> str:
    """Say when a loss that has happened by now would be found."""
    if not facts.checks:
        return "The first check of the store is to come."
    due = facts.checks[0].checked_at + facts.check_interval
    when = f" at {clock_time(due, facts.at)}" if due > facts.at else ""
    return f"The next check of the store is due{when}."


def _doubts_of_hold(facts: Facts) -> tuple[str, ...]:
    """Warn of a hold that may have been forgotten: captures are paused as long as it lasts."""
    incident = facts.recovery.incident
    held = incident.held if incident is not None and incident.is_held else None
    if held is None or facts.at - held.at < _LONG_HOLD:
        return ()
    span = in_words(facts.at - held.at)
    return (f"The restore is on hold for {span}: nothing is blocked again or captured meanwhile.",)


def _step_of_recovery(facts: Facts) -> str:
    incident = facts.recovery.incident
    if incident is None:
        return "See the log of restore_supervisor_sensor in Dagster: no incident is open."
    if incident.held is not None and incident.is_held:
        return (
            f"Remove the reason of the hold ({incident.held.reason.rstrip('.')}), then `budget-"
            "recovery release`: nothing is restored by itself until then."
        )
    if facts.worker is not None:
        return f"Nothing to do: {facts.worker} is at work."
    due = incident.next_launch_at or incident.released_at or incident.opened_at
    if facts.at - due > _LAUNCH_IS_LATE:
        return (
            f"The restore should have begun at {clock_time(due, facts.at)}: see in Dagster whether"
            " its daemon runs and restore_supervisor_sensor is on."
        )
    is_due = due <= facts.at
    is_next = "at any moment" if is_due else f"at {clock_time(due, facts.at)}"
    if incident.waiting is not None:
        reason = incident.waiting.reason.rstrip(".")
        return (
            f"Bring the store back to full health; the restore waits for that ({reason}) and looks"
            f" again {is_next}."
        )
    if incident.attempts >= MAX_ATTEMPTS:
        step = f"the attempts are used up, and a last look follows {is_next}"
    elif incident.launches and not is_due:
        step = f"a restore is launched, and again {is_next} if it does not begin"
    else:
        step = f"a restore is launched {is_next}"
    return f"Nothing to do: {step}."


def _step_after_failure(incident: Incident | None) -> str:
    given_up = incident.given_up if incident else None
    if given_up is None:
        return "See the newest run of restore_job in Dagster: why it failed is not noted."
    if given_up.reason is FailureReason.NO_SNAPSHOTS:
        return (
            "Nothing can be brought back, for no snapshot is retained: accept the store as it is"
            " with `budget-recovery resolve`, so that captures begin again."
        )
    return (
        f"Put right why it failed: {given_up.detail} Then `budget-recovery preview` and"
        " `budget-recovery restore`, or accept the store as it is with `budget-recovery resolve`."
        " Captures are paused until then."
    )


def _names(tenants: Mapping[str, object] | list[str]) -> str:
    names = sorted(tenants)
    more = [f"{len(names) - _NAMED} more"] if len(names) > _NAMED else []
    return ", ".join([*map(repr, names[:_NAMED]), *more])


MOST_CHECKS = 100
"""How many checks are looked at; so many that could not tell may be more."""


@dataclass(frozen=True, slots=True)
class Status:
    """What is known of the store, and what that amounts to."""

    facts: Facts
    assessment: Assessment


def read_status(plane: ControlPlane, *, check_interval: timedelta) -> Status:
    """Read from the control plane alone what was found last; the store is not observed.

    Raises:
        DatabaseError: the database failed, so nothing is known.
    """
    now = plane.clock.now()
    recovery = plane.incidents.recovery()
    open_one = recovery.incident
    attempts = plane.incidents.attempts_of(open_one.incident_id) if open_one else ()
    # At most one is open, and it is the newest.
    recent = plane.incidents.recent(2)
    checks = plane.registry.newest_checks(MOST_CHECKS)
    closed = next((each for each in recent if each.ended is not None), None)
    # What could not be told before the store was accepted anew says nothing of it.
    accepted_at = closed.ended.at if closed and closed.ended else None
    unknown = takewhile(
        lambda check: (
            check.verdict is Verdict.UNKNOWN
            and (accepted_at is None or check.checked_at > accepted_at)
        ),
        checks,
    )
    facts = Facts(
        at=now,
        check_interval=check_interval,
        recovery=recovery,
        attempt=attempts[-1] if attempts else None,
        worker=plane.leases.state_of(RESTORE_LEASE).holder,
        closed=closed,
        checks=checks,
        unknown_in_a_row=sum(1 for _ in unknown),
        newest_good=plane.registry.newest_good_check(),
        newest_points=plane.points.newest_points(now),
        newest_snapshot=max(plane.points.newest_snapshots().values(), default=None),
        damaged=plane.points.damaged(now),
        failing=plane.points.failing(),
    )
    return Status(facts, assess(facts))
