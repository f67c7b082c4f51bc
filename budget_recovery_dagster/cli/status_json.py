"""The status as JSON: stable keys, moments in UTC, sequences as text, for they pass 2^53."""

from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime
from typing import Any

from budget_recovery_dagster.cli.json_values import (
    dumped,
    identity_or_none,
    moment_or_none,
)
from budget_recovery_dagster.domain.incident import MAX_ATTEMPTS, Incident, Loss
from budget_recovery_dagster.recovery_ports import Attempt, Check
from budget_recovery_dagster.services.assessment import Condition
from budget_recovery_dagster.services.status import Status

_CHECKS = 10


def status_json(status: Status, exit_code: int) -> str:
    """Write the status; every key is there in every situation."""
    facts, assessment = status.facts, status.assessment
    good = facts.newest_good
    return dumped(
        condition=_name(assessment.condition),
        exit_code=exit_code,
        at=moment_or_none(facts.at),
        state=facts.recovery.state,
        doubts=assessment.doubts,
        next_step=assessment.next_step,
        incident=_incident(facts.recovery.incident, facts.attempt),
        last_closed_incident=_incident(facts.closed, None),
        checks={
            "interval_seconds": facts.check_interval.total_seconds(),
            "unknown_in_a_row": facts.unknown_in_a_row,
            "newest_good": _check(good) if good else None,
            "newest": [_check(each) for each in facts.checks[:_CHECKS]],
        },
        points={
            "newest_snapshot_at": moment_or_none(facts.newest_snapshot),
            "newest_by_tenant": _moments(facts.newest_points),
            "failing_tenants": _moments(facts.failing),
        },
        error=None,
    )


def failure_json(message: str, hint: str, exit_code: int) -> str:
    """Write that nothing can be told, with the same keys, and why."""
    return dumped(
        condition=_name(Condition.UNKNOWN),
        exit_code=exit_code,
        at=None,
        state=None,
        doubts=[message],
        next_step=hint,
        incident=None,
        last_closed_incident=None,
        checks=None,
        points=None,
        error={"message": message, "hint": hint},
    )


def _name(condition: Condition) -> str:
    return condition.name.lower()


def _incident(incident: Incident | None, attempt: Attempt | None) -> Mapping[str, Any] | None:
    if incident is None:
        return None
    waiting, held = incident.waiting, incident.held
    given_up, ended = incident.given_up, incident.ended
    uncovered = incident.uncovered
    return {
        "id": incident.incident_id,
        "opened_at": moment_or_none(incident.opened_at),
        "losses": [_loss(each) for each in incident.losses],
        "attempts": incident.attempts,
        "max_attempts": MAX_ATTEMPTS,
        "launches": incident.launches,
        "next_launch_at": moment_or_none(incident.next_launch_at),
        "newest_attempt": _attempt(attempt),
        "held": held
        and {
            "at": moment_or_none(held.at),
            "by": held.by,
            "reason": held.reason,
            "released_at": moment_or_none(incident.released_at) if not incident.is_held else None,
        },
        "waiting": waiting
        and {
            "since": moment_or_none(waiting.since),
            "reason": waiting.reason,
            "waits": waiting.waits,
        },
        "given_up": given_up
        and {
            "at": moment_or_none(given_up.at),
            "reason": given_up.reason,
            "detail": given_up.detail,
        },
        "ended": ended
        and {
            "at": moment_or_none(ended.at),
            "outcome": ended.outcome,
            "detail": ended.detail,
            "restored": asdict(ended.restored),
        },
        "newest_point_at": moment_or_none(incident.newest_point_at),
        "last_good_at": moment_or_none(incident.last_good_at),
        "uncovered_seconds": None if uncovered is None else uncovered.total_seconds(),
    }


def _loss(loss: Loss) -> Mapping[str, Any]:
    return {
        "found_at": moment_or_none(loss.found_at),
        "found_by": loss.found_by,
        "verdict": loss.verdict,
        "reason": loss.reason,
        "before": identity_or_none(loss.before),
        "after": identity_or_none(loss.after),
    }


def _attempt(attempt: Attempt | None) -> Mapping[str, Any] | None:
    if attempt is None:
        return None
    return {
        "loss": attempt.loss,
        "number": attempt.number,
        "run_id": attempt.run_id,
        "started_at": moment_or_none(attempt.started_at),
        "ended_at": moment_or_none(attempt.ended_at),
        "outcome": attempt.outcome,
    }


def _check(check: Check) -> Mapping[str, Any]:
    return {
        "checked_at": moment_or_none(check.checked_at),
        "checked_by": check.checked_by,
        "verdict": check.verdict,
        "reason": check.reason,
        "identity": identity_or_none(check.identity),
        "incident_id": check.incident_id,
    }


def _moments(by_tenant: Mapping[str, datetime | None]) -> Mapping[str, str | None]:
    return {tenant: moment_or_none(by_tenant[tenant]) for tenant in sorted(by_tenant)}
