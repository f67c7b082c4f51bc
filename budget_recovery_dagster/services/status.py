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
"""After so many checks that are missing or unknown, the state of the store is unknown."""
# The supervisor of restores runs twice a minute.
_LAUNCH_IS_LATE = timedelta(minutes=2)
# As often as a snapshot is due.
_LONG_HOLD = timedelta(hours=1)
_NAMED = 3


class Condition(StrEnum):
    """The state of the store in one word."""

    HEALTHY = "healthy"
    RECOVERING = "recovering"
    FAILED = "failed"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Facts:
    """What the database knows of the store at ``at``, and how often the store is to be checked.

    ``checks`` are the newest, newest first; ``unknown_in_a_row`` is how many of the newest are
    unknown, ``newest_good`` the newest that found the store intact. ``attempt`` is the newest of
    the open incident, ``closed`` the newest closed incident. ``newest_points`` are the newest
    intact records of open windows, by tenant; ``newest_snapshot`` is the newest of all.
    ``damaged`` counts the damaged records in open windows, by tenant. ``failing`` are the
    tenants whose last capture failed, with their newest snapshot. ``worker`` is the process that
    is restoring.
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
        """When the store was last known to be intact: checked, or accepted after a loss.

        Before the first check, a stored snapshot counts: a capture compares the store, too.
        """
        known = [self.newest_good.checked_at] if self.newest_good else []
        if self.closed is not None and self.closed.ended is not None:
            known.append(self.closed.ended.at)
        if not self.checks and self.newest_snapshot is not None:
            known.append(self.newest_snapshot)
        return max(known, default=None)


@dataclass(frozen=True, slots=True)
class Assessment:
    """The condition, the doubts about it, and the next step in a sentence or two."""

    condition: Condition
    doubts: tuple[str, ...]
    next_step: str


def assess(facts: Facts) -> Assessment:
    """Assess the facts. The condition of a HEALTHY store without recent checks is unknown."""
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
    "Check in Dagster that the daemon runs and store_loss_sensor is on, and read its ticks."
)
_SEE_STORE = "Make the store reachable again, then wait for the next check."
_SEE_CLOCKS = "Synchronize the clocks of PostgreSQL and NATS with NTP."
_SEE_LOSS = "Wait for the next check, which opens an incident if it confirms the loss."


def _doubts(facts: Facts) -> list[tuple[str, str]]:
    """Return the reasons why the store may not be intact, each with the next step."""
    newest = facts.checks[0] if facts.checks else None
    whole_at, now = facts.known_whole_at, facts.at
    for what, moment in (
        ("check", newest.checked_at if newest else None),
        ("snapshot", facts.newest_snapshot),
    ):
        if moment is not None and is_of_the_future(moment, now):
            late = f"The newest {what} has a time in the future: {clock_time(moment, now)}."
            # Ages are meaningless then, so no other doubt is reported.
            return [(late, _SEE_CLOCKS)]
    if newest is not None and newest.verdict.is_loss and not _is_settled(newest, facts):
        return [(f"The newest check found a loss: {newest.reason}", _SEE_LOSS)]
    doubts = []
    step = _SEE_CHECKS
    if facts.unknown_in_a_row >= MISSED_CHECKS and newest is not None:
        step = _SEE_STORE
        blind = f"The newest {facts.unknown_in_a_row} checks are unknown: {newest.reason}"
        doubts.append((blind, step))
    allowed = facts.check_interval * (MISSED_CHECKS if facts.checks else 1)
    if whole_at is None:
        doubts.append(("No check has found the store intact yet.", step))
    elif now - whole_at > allowed:
        interval = in_words(facts.check_interval)
        old = (
            f"The store was last known to be intact {since(whole_at, now)}; a check is due every"
            f" {interval}."
        )
        doubts.append((old, step))
    return doubts


def _is_settled(check: Check, facts: Facts) -> bool:
    """Whether the incident of the loss that a check found is closed."""
    ended = facts.closed.ended if facts.closed else None
    return ended is not None and check.checked_at <= ended.at


def _step_of_health(facts: Facts) -> str:
    if facts.failing:
        return (
            f"The store is intact, but captures of {_names(facts.failing)} fail: see the newest run"
            " of hourly_snapshot_job in Dagster."
        )
    late = [tenant for tenant, at in facts.newest_points.items() if is_too_old(at, facts.at)]
    if late:
        has = "has" if len(late) == 1 else "have"
        return (
            f"The store is intact, but {_names(late)} {has} no recent snapshot: check in Dagster"
            " that hourly_snapshot_schedule is on and its runs succeed."
        )
    if facts.damaged:
        return (
            f"The store is intact, but snapshots of {_names(facts.damaged)} have damaged records:"
            " run `budget-recovery preview` to see what a restore would bring back, and check the"
            " disk of the database."
        )
    return f"Nothing to do. {_next_check(facts)}"


def _next_check(facts: Facts) -> str:
    """Write when the next check is due, which would find a loss that happened by now."""
    if not facts.checks:
        return "The store has not been checked yet."
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
    return (f"The restore has been on hold for {span}: no block is restored, captures are paused.",)


def _step_of_recovery(facts: Facts) -> str:
    incident = facts.recovery.incident
    if incident is None:
        return "See the log of restore_supervisor_sensor in Dagster: no incident is open."
    if incident.held is not None and incident.is_held:
        return (
            f"Remove the reason of the hold ({incident.held.reason.rstrip('.')}), then run"
            " `budget-recovery release`: no automatic restore starts until then."
        )
    if facts.worker is not None:
        return f"Nothing to do: {facts.worker} is restoring."
    due = incident.next_launch_at or incident.released_at or incident.opened_at
    if facts.at - due > _LAUNCH_IS_LATE:
        return (
            f"The restore was due at {clock_time(due, facts.at)}: check in Dagster that the daemon"
            " runs and restore_supervisor_sensor is on."
        )
    is_due = due <= facts.at
    is_next = "now" if is_due else f"at {clock_time(due, facts.at)}"
    if incident.waiting is not None:
        reason = incident.waiting.reason.rstrip(".")
        return (
            f"Bring all servers of the store up; the restore waits for them ({reason}) and checks"
            f" again {is_next}."
        )
    if incident.attempts >= MAX_ATTEMPTS:
        step = f"all attempts are used; the final check is due {is_next}"
    elif incident.launches and not is_due:
        step = f"a restore was launched; it is launched again {is_next} if it does not start"
    else:
        step = f"the launch of a restore is due {is_next}"
    return f"Nothing to do: {step}."


def _step_after_failure(incident: Incident | None) -> str:
    given_up = incident.given_up if incident else None
    if given_up is None:
        return "See the newest run of restore_job in Dagster: no reason of the failure is stored."
    if given_up.reason is FailureReason.NO_SNAPSHOTS:
        return (
            "Nothing can be restored, because no snapshot is retained: accept the store as it is"
            " with `budget-recovery resolve`, so that captures resume."
        )
    return (
        f"Fix the cause: {given_up.detail} Then run `budget-recovery preview` and"
        " `budget-recovery restore`, or accept the store as it is with `budget-recovery resolve`."
        " Captures are paused until then."
    )


def _names(tenants: Mapping[str, object] | list[str]) -> str:
    names = sorted(tenants)
    more = [f"{len(names) - _NAMED} more"] if len(names) > _NAMED else []
    return ", ".join([*map(repr, names[:_NAMED]), *more])


MOST_CHECKS = 100
"""How many checks are read; if all of them are unknown, there may be more."""


@dataclass(frozen=True, slots=True)
class Status:
    """The facts about the store, and their assessment."""

    facts: Facts
    assessment: Assessment


def read_status(plane: ControlPlane, *, check_interval: timedelta) -> Status:
    """Read the status from the control plane; the store itself is not read.

    Raises:
        DatabaseError: the database failed.
    """
    now = plane.clock.now()
    recovery = plane.incidents.recovery()
    open_one = recovery.incident
    attempts = plane.incidents.attempts_of(open_one.incident_id) if open_one else ()
    # At most one incident is open, and it is the newest.
    recent = plane.incidents.recent(2)
    checks = plane.registry.newest_checks(MOST_CHECKS)
    closed = next((each for each in recent if each.ended is not None), None)
    # Unknown checks from before the store was accepted again do not count.
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
