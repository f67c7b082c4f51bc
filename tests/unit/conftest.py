import os

import pytest

from tests.unit.capture_house import House


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unset the developer's own settings, so that they do not affect a unit test."""
    for name in list(os.environ):
        if name.startswith("BUDGET_RECOVERY_"):
            monkeypatch.delenv(name)


@pytest.fixture
def house() -> House:
    house = House()
    for tenant in ("a", "b", "c"):
        house.spend(tenant, "10")
    return house
