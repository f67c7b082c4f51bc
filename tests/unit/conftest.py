import os

import pytest


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A developer's own settings must not decide a unit test."""
    for name in list(os.environ):
        if name.startswith("BUDGET_RECOVERY_"):
            monkeypatch.delenv(name)
