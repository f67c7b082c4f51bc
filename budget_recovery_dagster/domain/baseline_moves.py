"""The moves of the baseline, decided on what the lock on the store shows."""

from dataclasses import replace

from budget_recovery_dagster.domain.admission import admit_baseline, require_unmoved
from budget_recovery_dagster.domain.identity import Baseline
from budget_recovery_dagster.domain.standing import Standing


def intend_marker(standing: Standing, nonce: str, *, judged: Baseline) -> Baseline:
    """Note the nonce of a marker that may be written from now on.

    Raises:
        CapturesPausedError: the store is not HEALTHY.
        BaselineMovedError: the baseline is not the ``judged`` one any more.
    """
    return accept(standing, replace(judged, intended=nonce), judged=judged)


def accept(standing: Standing, baseline: Baseline, *, judged: Baseline | None) -> Baseline:
    """Return a new baseline, under the version that follows.

    Raises:
        CapturesPausedError, BaselineMovedError: as ``intend_marker``.
    """
    admit_baseline(standing.state)
    require_unmoved(standing.baseline, judged)
    return following(standing.baseline, baseline)


def following(present: Baseline | None, baseline: Baseline) -> Baseline:
    """Return a baseline under the version that follows the present one's, from 1."""
    return replace(baseline, version=present.version + 1 if present else 1)
