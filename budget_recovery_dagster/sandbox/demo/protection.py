"""What protects the store, as the story sees it; the command puts the real services behind it."""

from dataclasses import dataclass
from datetime import datetime
from typing import Protocol


@dataclass(frozen=True, slots=True)
class SnapshotTaken:
    """That every tenant's counters were stored, as of ``captured_at``."""

    captured_at: datetime
    tenants: int
    counters: int


@dataclass(frozen=True, slots=True)
class LossFound:
    """That a check has found the store lost, and has opened an incident; ``reason`` says how."""

    reason: str
    incident: str


@dataclass(frozen=True, slots=True)
class RecoveryEnded:
    """How a recovery ended; ``detail`` says in sentences what was done, or why it was not."""

    is_recovered: bool
    detail: str


class Protection(Protocol):
    """The store's protection, each part of which is asked for when the story comes to it."""

    def take_snapshot(self) -> SnapshotTaken:
        """Store a snapshot of every tenant.

        Raises:
            DemoError: one could not be stored.
        """
        ...

    def find_loss(self) -> LossFound:
        """Check the store, which has been lost.

        Raises:
            DemoError: the check does not find that.
        """
        ...

    def recover(self) -> RecoveryEnded:
        """Bring the lost store back, which may fail."""
        ...
