"""Audit trails put together of what was recorded piece by piece."""

from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime

from budget_recovery_dagster.restore_ports import AuditTrail


def join_trails(pieces: Iterable[AuditTrail]) -> tuple[AuditTrail, ...]:
    """Return one trail of each run and time, oldest first, as its first piece describes it.

    ``pieces`` come in the order of their writing. A piece without entries leaves no trail.
    """
    joined: dict[tuple[datetime, str], AuditTrail] = {}
    for piece in pieces:
        if not piece.entries:
            continue
        key = piece.at, piece.run_id
        known = joined.get(key)
        joined[key] = replace(known, entries=known.entries + piece.entries) if known else piece
    return tuple(sorted(joined.values(), key=lambda trail: trail.at))
