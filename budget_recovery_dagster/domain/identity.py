"""The store's identity: what distinguishes a wiped or rebuilt store from the one we knew.

Nothing errors when the store is lost, so after every reading the identity is compared with the
last accepted one before what was read may stand for the truth.
"""

from dataclasses import dataclass
from datetime import datetime
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
        return f"created {self.created_at.isoformat()}, sequence {self.last_sequence}"


@dataclass(frozen=True, slots=True)
class Baseline:
    """The last accepted identity; ``version`` rises whenever it is replaced."""

    identity: StoreIdentity
    version: int


class Verdict(StrEnum):
    """What an observed identity means, compared with the baseline."""

    FIRST_SEEN = "first seen"
    UNCHANGED = "unchanged"
    ADVANCED = "advanced"
    RECREATED = "recreated"
    REGRESSED = "regressed"

    @property
    def is_loss(self) -> bool:
        """Whether the store no longer holds all that it held at the baseline."""
        return self in (Verdict.RECREATED, Verdict.REGRESSED)


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
