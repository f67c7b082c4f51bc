"""Moves of the baseline, compared with literal values."""

from dataclasses import replace

import pytest

from budget_recovery_dagster.domain import (
    Baseline,
    IntendedMarker,
    Marker,
    RecoveryState,
    Standing,
    moves,
)
from budget_recovery_dagster.errors import BaselineMovedError, CapturesPausedError
from tests.unit.test_moves import BASELINE, FAILED, HEALTHY, IDENTITY, LOST, RECOVERING, TARGET


def test_accepting_a_healthy_store_increments_the_baseline_version() -> None:
    healthy = Standing(HEALTHY, BASELINE)
    assert moves.accept(healthy, TARGET, judged=BASELINE) == Baseline(LOST, version=8)
    assert moves.accept(Standing(HEALTHY, None), BASELINE, judged=None).version == 1
    assert moves.accept(
        healthy, replace(BASELINE, intended=IntendedMarker("n2")), judged=BASELINE
    ) == Baseline(IDENTITY, 8, Marker("n1", 39), BASELINE.marked_at, intended=IntendedMarker("n2"))


def test_a_baseline_does_not_move_if_it_changed_since_it_was_judged() -> None:
    judged = replace(BASELINE, intended=IntendedMarker("n2"))
    with pytest.raises(BaselineMovedError):
        moves.accept(Standing(HEALTHY, BASELINE), TARGET, judged=judged)
    with pytest.raises(BaselineMovedError):
        moves.accept(
            Standing(HEALTHY, None),
            replace(BASELINE, intended=IntendedMarker("n")),
            judged=BASELINE,
        )


@pytest.mark.parametrize("state", [RECOVERING, FAILED])
def test_a_baseline_does_not_move_while_the_store_is_not_healthy(state: RecoveryState) -> None:
    with pytest.raises(CapturesPausedError):
        moves.accept(Standing(state, BASELINE), TARGET, judged=BASELINE)
    with pytest.raises(CapturesPausedError):
        moves.accept(
            Standing(state, BASELINE),
            replace(BASELINE, intended=IntendedMarker("n")),
            judged=BASELINE,
        )
