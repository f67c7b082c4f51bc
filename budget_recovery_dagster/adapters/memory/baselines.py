"""The accepted identity of the store, in memory."""

from dataclasses import replace

from budget_recovery_dagster.adapters.memory.control_plane import ControlPlane
from budget_recovery_dagster.domain import baseline_moves
from budget_recovery_dagster.domain.identity import Baseline
from budget_recovery_dagster.domain.standing import Standing


class MemoryBaselines:
    """The baseline in the record of the store."""

    def __init__(self, control_plane: ControlPlane) -> None:
        self._plane = control_plane

    def intend_marker(self, nonce: str, *, judged: Baseline) -> Baseline:
        """Note that a marker with this nonce may be written from now on; a new version.

        Raises:
            BaselineMovedError: the baseline is not the ``judged`` one any more.
            CapturesPausedError: the store is not HEALTHY.
        """
        with self._plane.lock:
            return self._keep(baseline_moves.intend_marker(self._standing(), nonce, judged=judged))

    def accept(self, baseline: Baseline, *, judged: Baseline | None) -> Baseline:
        """Replace the baseline; its version is one above that of the judged one.

        Raises:
            BaselineMovedError, CapturesPausedError: as ``intend_marker``.
        """
        with self._plane.lock:
            return self._keep(baseline_moves.accept(self._standing(), baseline, judged=judged))

    def _standing(self) -> Standing:
        store = self._plane.claimed_store()
        return Standing(store.state, store.baseline)

    def _keep(self, baseline: Baseline) -> Baseline:
        self._plane.store = replace(self._plane.claimed_store(), baseline=baseline)
        return baseline
