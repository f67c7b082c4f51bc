from datetime import UTC, datetime

import pytest

from budget_recovery_dagster.domain import StoreIdentity, Verdict, judge

BORN = datetime(2026, 11, 1, 12, tzinfo=UTC)
BASELINE = StoreIdentity(BORN, 9007199254740993)


@pytest.mark.parametrize(
    ("observed", "verdict", "loss"),
    [
        (StoreIdentity(BORN, 9007199254740993), Verdict.UNCHANGED, False),
        (StoreIdentity(BORN, 9007199254740994), Verdict.ADVANCED, False),
        (StoreIdentity(BORN, 9007199254740992), Verdict.REGRESSED, True),
        (StoreIdentity(BORN.replace(microsecond=1), 2**60), Verdict.RECREATED, True),
        (StoreIdentity(BORN.replace(year=2025), 0), Verdict.RECREATED, True),
    ],
)
def test_an_identity_is_judged_against_the_baseline(
    observed: StoreIdentity, verdict: Verdict, *, loss: bool
) -> None:
    assert judge(BASELINE, observed) is verdict
    assert verdict.is_loss is loss


def test_an_identity_without_a_baseline_is_first_seen() -> None:
    assert judge(None, BASELINE) is Verdict.FIRST_SEEN
    assert not Verdict.FIRST_SEEN.is_loss


def test_an_identity_needs_a_time_zone_and_a_sequence_of_at_least_zero() -> None:
    with pytest.raises(ValueError, match="no time zone"):
        StoreIdentity(datetime(2026, 11, 1), 1)  # noqa: DTZ001
    with pytest.raises(ValueError, match="below zero"):
        StoreIdentity(BORN, -1)
