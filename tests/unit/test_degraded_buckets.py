"""Restores into a bucket whose keys do not expire, or expire too early."""

from datetime import datetime, timedelta

import pytest

from budget_recovery_dagster.domain import Incident, Outcome
from budget_recovery_dagster.services.restore import Recovered
from tests.unit.capture_harness import NOW
from tests.unit.manual_harness import ManualHarness, closes_incident

EXPIRING = "usage.a.spend.2026-11.="
LASTING = "usage.a.total.lifetime.="
NO_TTL = "keys do not expire: the bucket has no per-key TTLs (allow_msg_ttl)"


def lost_store(lasting_ttl: str | None) -> ManualHarness:
    """Return a lost store of a monthly counter that expires, and a lifetime counter."""
    harness = ManualHarness()
    harness.store.clock = NOW
    harness.store.put(EXPIRING, b'{"usage":"7"}', ttl="2678400", written_at=NOW)
    harness.store.put(LASTING, b'{"usage":"9"}', ttl=lasting_ttl, written_at=NOW)
    harness.capture()
    harness.check()
    harness.clock.advance(timedelta(minutes=10))
    harness.store.clock = harness.clock.now()
    harness.wipe()
    return harness


@pytest.fixture
def harness() -> ManualHarness:
    """Return the lost store; its lifetime counter had no expiry."""
    return lost_store(None)


def recovered(harness: ManualHarness) -> Incident:
    result = harness.recover()
    assert isinstance(result, Recovered)
    assert result.incident.ended is not None
    assert result.incident.ended.outcome is Outcome.RESTORED
    return result.incident


def detail(incident: Incident | None) -> str:
    assert incident is not None
    assert incident.ended is not None
    return incident.ended.detail


def notes(harness: ManualHarness, incident: Incident) -> dict[str, tuple[str, ...]]:
    entries = harness.plane.audits.largest(incident.incident_id, 10).largest
    return {entry.of.budget: entry.notes for entry in entries}


def test_a_bucket_like_the_lost_one_has_no_notes(harness: ManualHarness) -> None:
    incident = recovered(harness)
    assert notes(harness, incident) == {"spend": (), "total": ()}
    assert "expire" not in detail(incident)
    assert "max_age" not in detail(incident)


def test_a_maximum_age_shorter_than_a_window_is_noted_with_its_time(harness: ManualHarness) -> None:
    harness.store.keeps_for = timedelta(days=2)
    incident = recovered(harness)
    # Written at 12:15 on the 25th: the month ends later, and a lifetime never.
    note = (
        "1 counter dropped from 2026-11-27 12:15:00 UTC on unless written again, before the window "
        "ends: the bucket has a max_age of 2.0 days"
    )
    assert notes(harness, incident) == {"spend": (note,), "total": (note,)}
    assert (
        "Keys of 2 windows are dropped 2.0 days after their last write, before the window ends "
        "(max_age)."
    ) in detail(incident)


def test_a_maximum_age_longer_than_the_window_is_noted_for_lifetimes_only(
    harness: ManualHarness,
) -> None:
    harness.store.keeps_for = timedelta(days=30)
    incident = recovered(harness)
    found = notes(harness, incident)
    assert found["spend"] == ()
    assert "dropped from 2026-12-25 12:15:00 UTC on" in found["total"][0]
    assert "Keys of 1 window are dropped 30.0 days after their last write" in detail(incident)


def test_a_key_that_never_expires_is_not_dropped_by_its_age(harness: ManualHarness) -> None:
    harness.store.keeps_for = timedelta(days=2)
    harness.store.put(LASTING, b'{"usage":"1"}', ttl="never", written_at=NOW)
    incident = recovered(harness)
    assert notes(harness, incident)["total"] == ()


@pytest.mark.parametrize("has_ttl", [True, False])
def test_only_without_times_to_live_is_a_protected_key_dropped_by_its_age(*, has_ttl: bool) -> None:
    harness = lost_store("never")
    harness.store.keeps_for = timedelta(days=2)
    harness.store.supports_ttl = has_ttl
    incident = recovered(harness)
    total = notes(harness, incident)["total"]
    assert len(total) == (0 if has_ttl else 1)
    restored = harness.store.live_key(LASTING).value
    assert restored is not None
    assert restored.ttl == ("never" if has_ttl else None)
    windows = "1 window are" if has_ttl else "2 windows are"
    assert f"Keys of {windows} dropped 2.0 days after their last write" in detail(incident)


def test_a_later_attempt_still_reports_a_lost_expiry(harness: ManualHarness) -> None:
    harness.store.supports_ttl = False
    # The attempt fails at its end, when all counters are raised and verified.
    harness.before_write(2, lambda: harness.store.purge("__guard."))
    with pytest.raises(Exception, match="lost once more"):
        harness.recover()
    harness.store.before_write = None
    harness.clock.advance(timedelta(seconds=1))
    incident = recovered(harness)
    # A lifetime counter never had an expiry.
    assert notes(harness, incident) == {"spend": (NO_TTL,), "total": ()}
    assert (
        "Keys of 1 window do not expire: the bucket has no per-key TTLs (allow_msg_ttl)."
        in detail(incident)
    )


def test_nothing_is_reported_if_nothing_was_restored(harness: ManualHarness) -> None:
    harness.store.supports_ttl = False
    harness.store.put(EXPIRING, b'{"usage":"7"}', written_at=NOW)
    harness.store.put(LASTING, b'{"usage":"9"}', written_at=NOW)
    result = harness.recover()
    assert isinstance(result, Recovered)
    assert "do not expire" not in detail(result.incident)


def test_a_manual_restore_reports_it_too(harness: ManualHarness) -> None:
    harness.store.supports_ttl = False
    harness.store.keeps_for = timedelta(days=2)
    applied = harness.apply()
    assert closes_incident(applied)
    (restored,) = applied.tenants
    assert restored.entries[0].notes[0] == NO_TTL
    assert "Keys of 1 window do not expire" in detail(applied.incident)
    assert "Keys of 2 windows are dropped 2.0 days" in detail(applied.incident)
    assert any(NO_TTL in message for message in harness.messages)


def test_an_age_that_ends_beyond_the_calendar_is_no_limit(harness: ManualHarness) -> None:
    harness.store.keeps_for = datetime.max - datetime(2000, 1, 1)  # noqa: DTZ001, DTZ901
    incident = recovered(harness)
    assert notes(harness, incident) == {"spend": (), "total": ()}


def test_a_counter_that_ages_out_during_the_restore_is_reported(harness: ManualHarness) -> None:
    harness.store.keeps_for = timedelta(seconds=1)
    harness.before_write(2, lambda: harness.store.purge(EXPIRING))
    incident = recovered(harness)
    assert notes(harness, incident)["spend"][0] == (
        "1 counter missing from the store after the write (expired since): the aggregate"
    )
    assert "1 counter missing again when read back: deleted, expired," in detail(incident)
