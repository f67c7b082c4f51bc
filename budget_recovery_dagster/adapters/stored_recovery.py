"""The forms in which recoveries and restores are kept; see ``stored_forms`` for why."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime

from budget_recovery_dagster.adapters.stored_forms import MAX_NAMED, storable, storable_id
from budget_recovery_dagster.audit_ports import (
    AuditTrail,
)
from budget_recovery_dagster.domain.incident import Ended, Held, Incident, Loss
from budget_recovery_dagster.recovery_ports import Attempt, Check, Closing


def storable_check(check: Check) -> Check:
    """Return a check as it is kept."""
    return replace(check, checked_by=storable(check.checked_by), reason=storable(check.reason))


def storable_loss(loss: Loss) -> Loss:
    """Return a loss as it is kept."""
    return replace(loss, found_by=storable(loss.found_by), reason=storable(loss.reason))


def ended_by(closing: Closing, at: datetime) -> Ended:
    """Return the end of an incident as it is kept."""
    return Ended(at, closing.outcome, storable(closing.detail), closing.restored)


def held_by(by: str, reason: str, at: datetime) -> Held:
    """Return a hold as it is kept."""
    return Held(at, storable(by), storable(reason))


def attempt_after(
    incident: Incident, *, number: int, run_id: str, holder: str, started_at: datetime
) -> Attempt:
    """Return the attempt by which an incident has just counted one more, as it is kept."""
    return Attempt(
        incident_id=incident.incident_id,
        loss=len(incident.losses),
        number=number,
        run_id=storable_id(run_id),
        holder=storable(holder),
        started_at=started_at,
        ended_at=None,
        outcome=None,
    )


def storable_trail(trail: AuditTrail) -> AuditTrail:
    """Return what a restore did as it is kept."""
    return replace(
        trail,
        run_id=storable_id(trail.run_id),
        who=storable(trail.who),
        why=storable(trail.why),
        entries=tuple(
            replace(entry, notes=_storable_notes(entry.notes)) for entry in trail.entries
        ),
    )


def _storable_notes(notes: Sequence[str]) -> tuple[str, ...]:
    kept = tuple(storable(note) for note in notes[:MAX_NAMED])
    left = len(notes) - len(kept)
    return (*kept, f"and {left} more") if left else kept
