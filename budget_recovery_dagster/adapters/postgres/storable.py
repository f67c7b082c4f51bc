"""Limits of stored texts and lists, shared by every implementation of the control plane."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from budget_recovery_dagster.domain.counters import (
    BudgetWindow,
    OmittedCounter,
    UnreadableKey,
    format_usage,
)
from budget_recovery_dagster.domain.incident import Attempt, Closing, Ended, Held, Incident, Loss
from budget_recovery_dagster.domain.recovery_point import Reset
from budget_recovery_dagster.domain.snapshots import (
    CaptureFailure,
    CaptureSummary,
    NamedDrop,
    TenantSnapshot,
    Uncaptured,
)
from budget_recovery_dagster.domain.store import Check

MAX_NAMED = 100
"""How many drops, unreadable keys or omitted counters a list names; the total is stored too."""
_MAX_TEXT_LENGTH = 2000
# An index entry is limited to about 2,700 bytes; a character takes up to four.
_MAX_ID_LENGTH = 250


def storable(text: str) -> str:
    """Return a text in a form that PostgreSQL can store, cut to 2,000 characters."""
    return _clean(text, _MAX_TEXT_LENGTH)


def storable_id(text: str) -> str:
    """Return an id, such as a run's, that PostgreSQL can store and index: 250 characters."""
    return _clean(text, _MAX_ID_LENGTH)


def _clean(text: str, max_length: int) -> str:
    clean = text.replace("\0", "\\x00").encode(errors="backslashreplace").decode()
    return clean if len(clean) <= max_length else f"{clean[: max_length - 1]}…"


def summary_of(snapshot: TenantSnapshot, run_id: str) -> CaptureSummary:
    """Return the summary that is stored for a snapshot."""
    return CaptureSummary(
        tenant=snapshot.tenant,
        captured_at=snapshot.captured_at,
        source=snapshot.source,
        identity=snapshot.identity,
        run_id=storable_id(run_id),
        record_count=len(snapshot.records),
        entry_count=snapshot.entry_count,
        omitted_count=snapshot.omitted_count,
        drop_count=len(snapshot.drops),
        truncated_count=snapshot.truncated_count,
        unreadable_count=len(snapshot.unreadable),
        unreadable=tuple(
            UnreadableKey(storable(unreadable.key), storable(unreadable.reason))
            for unreadable in snapshot.unreadable[:MAX_NAMED]
        ),
        is_partial=snapshot.is_partial,
    )


def named_drops_of(snapshot: TenantSnapshot) -> tuple[NamedDrop, ...]:
    """Return the drops that are stored by name."""
    return tuple(
        NamedDrop(
            tenant=snapshot.tenant,
            budget=drop.of.budget,
            window=drop.of.window.token,
            entity=drop.entity,
            before=format_usage(drop.before),
            after=None if drop.after is None else format_usage(drop.after),
        )
        for drop in snapshot.drops[:MAX_NAMED]
    )


def kept_omissions(omitted: Sequence[OmittedCounter]) -> tuple[OmittedCounter, ...]:
    """Return the omitted counters of a record that are stored by name, in stored form."""
    return tuple(
        replace(omission, key=storable(omission.key), reason=storable(omission.reason))
        for omission in omitted[:MAX_NAMED]
    )


def named_omissions(omitted: Sequence[OmittedCounter]) -> list[dict[str, object]]:
    """Return the JSON of the omitted counters that are stored by name."""
    return [
        {
            "entity": omission.entity,
            "key": omission.key,
            "reason": omission.reason,
            # Stored only if false, which is rare.
            **({} if omission.is_entity_known else {"is_entity_known": False}),
        }
        for omission in kept_omissions(omitted)
    ]


def omissions_from(
    of: BudgetWindow, stored: Iterable[Mapping[str, Any]]
) -> tuple[OmittedCounter, ...]:
    """Return the omitted counters from their stored JSON."""
    return tuple(OmittedCounter(of, **omission) for omission in stored)


def storable_reset(reset: Reset) -> Reset:
    """Return a reset in its stored form."""
    return replace(reset, by=storable(reset.by), reason=storable(reset.reason))


def storable_failure(failure: CaptureFailure) -> CaptureFailure:
    """Return a failure in its stored form."""
    return CaptureFailure(
        name=storable_id(failure.name) if failure.kind is Uncaptured.KEY else failure.name,
        hour=failure.hour,
        reason=storable(failure.reason),
        hint=storable(failure.hint),
        kind=failure.kind,
    )


def storable_check(check: Check) -> Check:
    """Return a check in its stored form."""
    return replace(check, checked_by=storable(check.checked_by), reason=storable(check.reason))


def storable_loss(loss: Loss) -> Loss:
    """Return a loss in its stored form."""
    return replace(loss, found_by=storable(loss.found_by), reason=storable(loss.reason))


def ended_by(closing: Closing, at: datetime) -> Ended:
    """Return the end of an incident in its stored form."""
    return Ended(at, closing.outcome, storable(closing.detail), closing.restored)


def held_by(by: str, reason: str, at: datetime) -> Held:
    """Return a hold in its stored form."""
    return Held(at, storable(by), storable(reason))


def attempt_after(
    incident: Incident, *, number: int, run_id: str, holder: str, started_at: datetime
) -> Attempt:
    """Return the newest attempt of an incident, not yet ended, in its stored form."""
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
