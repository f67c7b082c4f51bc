"""The state of recovery of a store."""

from enum import StrEnum


class RecoveryState(StrEnum):
    """Whether the store is trusted; captures are paused in every state but HEALTHY."""

    HEALTHY = "HEALTHY"
    RECOVERING = "RECOVERING"
    FAILED = "FAILED"

    @property
    def captures_paused(self) -> bool:
        """Whether a capture now could let a damaged store stand in for a good snapshot."""
        return self is not RecoveryState.HEALTHY
