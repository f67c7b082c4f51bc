"""The store's identity: what distinguishes a wiped or rebuilt store from the one we knew.

Nothing errors when the store is lost, so after every reading the identity is compared with the
last accepted one before what was read may stand for the truth.
"""

from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum

from budget_recovery_dagster.domain.moments import require_aware


@dataclass(frozen=True, slots=True)
class StoreIdentity:
    """When the store's stream was created, and the last sequence it has given out."""

    created_at: datetime
    last_sequence: int

    def __post_init__(self) -> None:
        require_aware(self.created_at)
        if self.last_sequence < 0:
            raise ValueError(f"last_sequence is {self.last_sequence}, below zero")

    def __str__(self) -> str:
        created_at = f"{self.created_at.astimezone(UTC):%Y-%m-%d %H:%M:%S.%f}"
        return f"created {created_at} UTC, sequence {self.last_sequence}"


@dataclass(frozen=True, slots=True)
class Marker:
    """What we last wrote into the store to know it by: a nonce, and the sequence that it got."""

    nonce: str
    revision: int


@dataclass(frozen=True, slots=True)
class Baseline:
    """The last accepted identity; ``version`` rises whenever any of it is replaced.

    ``marker`` was written at about ``marked_at``; both are None before a first one is known to
    stand in the store. ``intended`` is the nonce of one that may have been written since.
    """

    identity: StoreIdentity
    version: int
    marker: Marker | None = None
    marked_at: datetime | None = None
    intended: str | None = None

    def __post_init__(self) -> None:
        if (self.marker is None) != (self.marked_at is None):
            raise ValueError("a marker and the time of its writing belong together")


class Verdict(StrEnum):
    """What an observed identity means, compared with the baseline."""

    UNKNOWN = "unknown"
    FIRST_SEEN = "first seen"
    UNCHANGED = "unchanged"
    ADVANCED = "advanced"
    RECREATED = "recreated"
    REGRESSED = "regressed"
    MARKER_LOST = "marker lost"

    @property
    def is_loss(self) -> bool:
        """Whether the store no longer holds all that it held at the baseline."""
        return self in (Verdict.RECREATED, Verdict.REGRESSED, Verdict.MARKER_LOST)

    @property
    def is_good(self) -> bool:
        """Whether the store is known to hold all that it held at the baseline."""
        return self in (Verdict.FIRST_SEEN, Verdict.UNCHANGED, Verdict.ADVANCED)


def judge(baseline: StoreIdentity | None, observed: StoreIdentity) -> Verdict:
    """Compare an identity that was read with authority against the last accepted one."""
    if baseline is None:
        return Verdict.FIRST_SEEN
    if observed.created_at != baseline.created_at:
        return Verdict.RECREATED
    if observed.last_sequence < baseline.last_sequence:
        return Verdict.REGRESSED
    if observed.last_sequence == baseline.last_sequence:
        return Verdict.UNCHANGED
    return Verdict.ADVANCED
