"""The row about the store, in memory."""

from dataclasses import replace
from uuid import uuid4

from budget_recovery_dagster.adapters.memory.control_plane import ControlPlane
from budget_recovery_dagster.domain.admission import require_bucket
from budget_recovery_dagster.domain.incident import RecoveryState
from budget_recovery_dagster.ports import StoreRecord


class MemoryStoreRegistry:
    """A StoreRegistry that is forgotten with its control plane."""

    def __init__(self, control_plane: ControlPlane) -> None:
        self._plane = control_plane

    def claim(self, bucket: str) -> StoreRecord:
        """Return the store's record, making it at first use.

        Raises:
            SettingsError: this control plane already belongs to another bucket.
        """
        with self._plane.lock:
            if self._plane.store is None:
                self._plane.store = StoreRecord(
                    bucket, str(uuid4()), RecoveryState.HEALTHY, baseline=None
                )
            require_bucket(self._plane.store.bucket, bucket)
            return self._plane.store

    def set_state(self, state: RecoveryState) -> None:
        """Put the claimed store into a state, without any of the rules for moving there."""
        with self._plane.lock:
            self._plane.store = replace(self._plane.claimed_store(), state=state)
