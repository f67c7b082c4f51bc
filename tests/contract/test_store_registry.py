import pytest

from budget_recovery_dagster.domain import RecoveryState
from budget_recovery_dagster.errors import SettingsError
from tests.contract.control_planes import BUCKET, NOON, ControlPlane


def test_the_first_claim_creates_a_healthy_store_without_a_baseline(plane: ControlPlane) -> None:
    record = plane.registry.claim()
    assert record.bucket == BUCKET
    assert record.state is RecoveryState.HEALTHY
    assert record.baseline is None


def test_every_claim_returns_the_same_record(plane: ControlPlane) -> None:
    assert plane.registry.claim() == plane.registry.claim()


def test_a_claim_for_another_bucket_is_refused(plane: ControlPlane) -> None:
    with pytest.raises(SettingsError, match=r"'staging'.*'budget-usage'"):
        plane.registry_of("staging").claim()
    assert plane.registry.claim().bucket == BUCKET


def test_a_claim_returns_state_and_baseline(plane: ControlPlane) -> None:
    snapshot = plane.capture("acme", {("team", "lifetime"): {"alice": "1"}}, at=NOON)
    plane.set_state(RecoveryState.RECOVERING)
    record = plane.registry.claim()
    assert record.state is RecoveryState.RECOVERING
    assert record.baseline is not None
    assert record.baseline.identity == snapshot.identity


def test_finding_the_store_returns_what_a_claim_returns(plane: ControlPlane) -> None:
    assert plane.registry.find() == plane.registry.claim()
    with pytest.raises(SettingsError, match=r"'staging'.*'budget-usage'"):
        plane.registry_of("staging").find()
