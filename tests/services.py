"""The services as Dagster and the commands call them, on the servers of the present settings."""

import os
from collections.abc import Callable
from functools import cache

import dagster as dg

from budget_recovery_dagster.definitions import build_definitions
from budget_recovery_dagster.domain import Hour
from budget_recovery_dagster.ports import ControlPlane, OpenStore
from budget_recovery_dagster.services import (
    Captured,
    Checked,
    Paused,
    TenantOutcome,
    Verified,
    capture_hour,
    check_store,
)
from budget_recovery_dagster.services.restore import RecoveryResult, recover_store
from budget_recovery_dagster.settings import PREFIX, Settings, load_settings
from budget_recovery_dagster.wiring import store_opener
from tests.postgres_servers import skip_pause


def present_settings() -> Settings:
    """Return the settings of the environment, which are read once for each environment."""
    return _read(
        frozenset((name, os.environ[name]) for name in os.environ if name.startswith(PREFIX))
    )


@cache
def _read(_environment: frozenset[tuple[str, str]]) -> Settings:
    return load_settings()


def definitions() -> dg.Definitions:
    """Return the definitions that Dagster loads with the present settings."""
    return _built(present_settings())


@cache
def _built(settings: Settings) -> dg.Definitions:
    return build_definitions(settings)


def capture(
    plane: ControlPlane,
    hour: Hour,
    *,
    open_store: OpenStore | None = None,
    settings: Settings | None = None,
    run_id: str = "a run",
    holder: str = "a capture",
    on_outcome: Callable[[TenantOutcome], None] = lambda _: None,
) -> Captured | Verified | Paused:
    settings = settings or present_settings()
    return capture_hour(
        plane,
        open_store or store_opener(settings),
        hour,
        source=settings.capture_source,
        retention=settings.retention,
        run_id=run_id,
        holder=holder,
        on_outcome=on_outcome,
    )


def check(
    plane: ControlPlane, *, open_store: OpenStore | None = None, by: str = "a check"
) -> Checked:
    return check_store(plane, open_store or store_opener(present_settings()), checked_by=by)


def recover(
    plane: ControlPlane,
    *,
    open_store: OpenStore | None = None,
    run_id: str = "a run",
    holder: str | None = None,
    on_progress: Callable[[str], None] = lambda _: None,
) -> RecoveryResult:
    """Try once to recover the store, without waiting for the time of the attempt."""
    settings = present_settings()
    skip_pause(settings.require_postgres_url())
    return recover_store(
        plane,
        open_store or store_opener(settings),
        run_id=run_id,
        holder=holder or run_id,
        convergence_timeout=settings.convergence_timeout,
        on_progress=on_progress,
    )
