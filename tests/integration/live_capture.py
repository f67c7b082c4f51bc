"""Captures of the store as it is, without a run around them."""

from budget_recovery_dagster.domain import Hour
from budget_recovery_dagster.services import Captured, Paused, Verified
from budget_recovery_dagster.settings import Settings, load_settings
from budget_recovery_dagster.wiring import opened_control_plane
from tests import services


def capture_unless_paused(hour: Hour, settings: Settings | None = None) -> Captured | Paused:
    """Capture the current hour, with a database pool and a client of its own."""
    with opened_control_plane(settings or load_settings()) as plane:
        captured = services.capture(plane, hour, settings=settings)
    assert not isinstance(captured, Verified)
    return captured


def capture_now(hour: Hour, settings: Settings | None = None) -> Captured:
    """Capture the current hour of a store that is HEALTHY."""
    captured = capture_unless_paused(hour, settings)
    assert isinstance(captured, Captured)
    return captured


def stored_tenants(captured: Captured) -> list[str]:
    """Return the tenants of which all was stored, where nothing else went wrong."""
    assert captured.stopped_by is None
    assert not captured.failures
    return sorted(captured.read)
