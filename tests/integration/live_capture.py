"""Captures of the store as it is, without a run around them."""

from budget_recovery_dagster.bootstrap import opened_database
from budget_recovery_dagster.domain import Hour
from budget_recovery_dagster.services import Captured, Paused, Verified
from budget_recovery_dagster.settings import Settings, load_settings


def capture_unless_paused(hour: Hour, settings: Settings | None = None) -> Captured | Paused:
    """Capture the current hour, with a database pool and a client of its own."""
    with opened_database(settings or load_settings()) as plane:
        captured = plane.capture_service().capture(
            hour, run_id="a run", holder="a capture", on_outcome=lambda _: None
        )
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
