"""The columns in which an identity or a baseline stands in a row; each is all there or all null."""

from datetime import datetime
from decimal import Decimal

from budget_recovery_dagster.domain.identity import Baseline, Marker, StoreIdentity

BaselineColumns = tuple[
    datetime | None,
    Decimal | int | None,
    int | None,
    str | None,
    Decimal | int | None,
    datetime | None,
    str | None,
]
"""Creation, last sequence, version; the marker's nonce, revision and time; the intended nonce."""


def identity_in(
    created_at: datetime | None, last_sequence: Decimal | int | None
) -> StoreIdentity | None:
    """Read an identity; a sequence is exact over the whole unsigned range."""
    if created_at is None or last_sequence is None:
        return None
    return StoreIdentity(created_at, int(last_sequence))


def identity_columns(identity: StoreIdentity | None) -> tuple[datetime | None, int | None]:
    """Return an identity as its columns."""
    return (identity.created_at, identity.last_sequence) if identity else (None, None)


def baseline_in(columns: BaselineColumns) -> Baseline | None:
    """Read a baseline with its marker, if it has one."""
    created_at, last_sequence, version, nonce, revision, marked_at, intended = columns
    identity = identity_in(created_at, last_sequence)
    if identity is None or version is None:
        return None
    marker = None if nonce is None or revision is None else Marker(nonce, int(revision))
    return Baseline(identity, version, marker, marked_at, intended)


def columns_of(baseline: Baseline | None) -> BaselineColumns:
    """Return a baseline as its columns."""
    if baseline is None:
        return (None, None, None, None, None, None, None)
    marker = baseline.marker
    return (
        baseline.identity.created_at,
        baseline.identity.last_sequence,
        baseline.version,
        marker.nonce if marker else None,
        marker.revision if marker else None,
        baseline.marked_at,
        baseline.intended,
    )
