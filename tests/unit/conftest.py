import os

import pytest

from tests.unit.capture_harness import Harness


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unset the developer's own settings, so that they do not affect a unit test."""
    for name in list(os.environ):
        if name.startswith("BUDGET_RECOVERY_"):
            monkeypatch.delenv(name)


@pytest.fixture
def harness() -> Harness:
    harness = Harness()
    for tenant in ("a", "b", "c"):
        harness.spend(tenant, "10")
    return harness
