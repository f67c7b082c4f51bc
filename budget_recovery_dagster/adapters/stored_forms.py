"""The forms in which a snapshot's texts are kept: characters that fit, lists of bounded length.

PostgreSQL's text and JSON hold neither NUL nor half a surrogate pair. A name with such a character
cannot come from the store; a reason or a run's id can hold anything, and must not cost a snapshot.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from budget_recovery_dagster.domain.counters import (
    BudgetWindow,
    OmittedCounter,
    UnreadableKey,
    format_usage,
)
from budget_recovery_dagster.domain.resets import Reset
from budget_recovery_dagster.domain.snapshots import TenantSnapshot
from budget_recovery_dagster.ports import CaptureFailure, CaptureSummary, NamedDrop, Uncaptured

MAX_NAMED = 100
"""How many drops, unreadable keys or omitted counters a list names; their number is kept too."""

_MAX_TEXT = 2000
# An index takes no more than about 2,700 bytes; a character is up to four.
_MAX_ID = 250


def storable(text: str) -> str:
    """Return a text for people in a form that PostgreSQL holds, cut if it is very long."""
    return _cut(text, _MAX_TEXT)


def storable_id(text: str) -> str:
    """Return an id, such as a run's, in a form that PostgreSQL holds and can index."""
    return _cut(text, _MAX_ID)


def _cut(text: str, longest: int) -> str:
    clean = text.replace("\0", "\\x00").encode(errors="backslashreplace").decode()
    return clean if len(clean) <= longest else f"{clean[: longest - 1]}…"


def summary_of(snapshot: TenantSnapshot, run_id: str) -> CaptureSummary:
    """Return what is kept of a snapshot as a whole."""
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
    """Return the drops that are kept by name."""
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
    """Return the omitted counters of a record that are kept by name, as they are kept."""
    return tuple(
        replace(omission, key=storable(omission.key), reason=storable(omission.reason))
        for omission in omitted[:MAX_NAMED]
    )


def named_omissions(omitted: Sequence[OmittedCounter]) -> list[dict[str, object]]:
    """Return the omitted counters of a record that are kept by name, to be stored."""
    return [
        {
            "entity": omission.entity,
            "key": omission.key,
            "reason": omission.reason,
            # Of nearly all it is known.
            **({} if omission.is_entity_known else {"is_entity_known": False}),
        }
        for omission in kept_omissions(omitted)
    ]


def omissions_from(
    of: BudgetWindow, stored: Iterable[Mapping[str, Any]]
) -> tuple[OmittedCounter, ...]:
    """Read back the omitted counters of a record that were kept by name."""
    return tuple(OmittedCounter(of, **omission) for omission in stored)


def storable_reset(reset: Reset) -> Reset:
    """Return a reset as it is kept."""
    return replace(reset, by=storable(reset.by), reason=storable(reset.reason))


def storable_failure(failure: CaptureFailure) -> CaptureFailure:
    """Return a failure as it is kept."""
    return CaptureFailure(
        name=storable_id(failure.name) if failure.kind is Uncaptured.KEY else failure.name,
        hour=failure.hour,
        reason=storable(failure.reason),
        hint=storable(failure.hint),
        kind=failure.kind,
    )
