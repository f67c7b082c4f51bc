"""Captures of the store without a Dagster run."""

from budget_recovery_dagster.domain import Hour
from budget_recovery_dagster.services import Captured, Paused, Verified
from budget_recovery_dagster.settings import Settings
from budget_recovery_dagster.wiring import opened_control_plane
from tests import services


def capture_unless_paused(hour: Hour, settings: Settings | None = None) -> Captured | Paused:
    """Capture the current hour, with its own database pool and client."""
    with opened_control_plane(settings or services.present_settings()) as plane:
        captured = services.capture(plane, hour, settings=settings)
    assert not isinstance(captured, Verified)
    return captured


def capture_now(hour: Hour, settings: Settings | None = None) -> Captured:
    """Capture the current hour of a HEALTHY store."""
    captured = capture_unless_paused(hour, settings)
    assert isinstance(captured, Captured)
    return captured


def stored_tenants(captured: Captured) -> list[str]:
    """Return the stored tenants; require that nothing failed."""
    assert captured.stopped_by is None
    assert not captured.failures
    return sorted(captured.read)
