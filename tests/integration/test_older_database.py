"""An older copy of the control-plane database: a dump, point-in-time recovery, a lagging standby.

The store is right and the database is old. It must not be taken for a loss of the store, since a
restore would bring back what was reset meanwhile.
"""

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import psycopg
import pytest

from budget_recovery_dagster.domain import (
    EVERYONE,
    Evidence,
    Incident,
    Outcome,
    RecoveryState,
    Verdict,
)
from budget_recovery_dagster.errors import IncidentHeldError
from budget_recovery_dagster.services import RecordedReset, ResetRequest, record_reset
from budget_recovery_dagster.services.restore import (
    NothingToDo,
    RestoreRequest,
    release_restore,
    restore_manually,
)
from tests.integration.commands import run
from tests.integration.recovery_harness import (
    ORDER,
    Harness,
    all_stored,
    opened_harness,
    outcome_of,
    spend_total,
    total_in,
)
from tests.integration.timeless_store import capture, opened_store
from tests.nats_servers import Bucket, Stored

Copy = Callable[[], str]


def of_the_gateway(bucket: Bucket) -> dict[str, Stored]:
    found = all_stored(bucket)
    return {key: stored for key, stored in found.items() if not key.startswith("__guard.")}


def reset(harness: Harness, *, is_reachable: bool = True) -> RecordedReset:
    """Record that the counters of acme were lowered just now."""
    request = ResetRequest("acme", "total", None, EVERYONE, None, "alice@ops", "pardoned")
    return record_reset(harness.plane, request, opened_store if is_reachable else None)


def later(harness: Harness) -> None:
    harness.clock.time += timedelta(minutes=10)


@pytest.fixture
def known(configured: Bucket, database_url: str) -> Bucket:
    """Return a store with a counter of 80, checked and captured."""
    with opened_harness(configured, database_url) as harness:
        spend_total(harness.bucket, "80")
        harness.check()
        harness.capture()
        later(harness)
        harness.check()
    return configured


@pytest.fixture
def old(known: Bucket, copy_of_the_database: Copy) -> str:
    """Return the URL of a copy of the database as it is now."""
    return copy_of_the_database()


def held(harness: Harness) -> Incident:
    """Check; require that an incident was opened that only a person can end, and return it."""
    incident = harness.find_held(
        Verdict.DATABASE_BEHIND,
        "`budget-recovery resolve --keep-snapshots`",
        "--record-resets instead only if",
        "`budget-recovery restore`",
    )
    assert "The control-plane database is older than the store" in str(incident.on_hold)
    return incident


def test_a_reset_is_not_revived_by_a_database_from_before_it(
    known: Bucket, database_url: str, old: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened_harness(known, database_url) as harness:
        spend_total(harness.bucket, "0")
        assert reset(harness).unmarked is None
    before = of_the_gateway(known)
    monkeypatch.setenv("BUDGET_RECOVERY_POSTGRES_URL", old)
    with opened_harness(known, old) as harness:
        incident = held(harness)
        assert incident.losses[-1].evidence is Evidence.LANDMARK_MISSING
        assert isinstance(harness.run(), NothingToDo)
        # What is said next works: a release is refused, and no restore is running.
        assert "To continue: budget-recovery resolve" in run("hold", "--reason", "a test")
        assert not reset(harness).is_restoring
        assert total_in(known) == "0"
        assert of_the_gateway(known) == before
        assert harness.plane.incidents.recovery().state is RecoveryState.RECOVERING


def test_a_standby_that_lost_only_renewals_is_accepted_and_reported(
    known: Bucket, database_url: str, old: str
) -> None:
    with opened_harness(known, database_url) as harness:
        later(harness)
        for _ in range(2):
            spend_total(harness.bucket, "81")
            harness.check()
    with opened_harness(known, old) as harness:
        later(harness)
        checked = harness.check()
        assert checked.check.verdict is Verdict.SAME
        assert checked.recovery.state is RecoveryState.HEALTHY
        _, reported = harness.plane.registry.newest_checks(2)
        assert reported.verdict is Verdict.DATABASE_BEHIND
        assert reported.evidence is Evidence.NUMBER_AHEAD
        assert "Nothing but renewals of the marker was missing" in reported.reason
        # The installation stays the same, and goes on above the marker's number.
        harness.check()
        assert harness.plane.incidents.recovery().state is RecoveryState.HEALTHY
        harness.capture()
        assert total_in(known) == "81"


def test_a_second_loss_of_renewals_within_a_day_is_held(
    known: Bucket, database_url: str, old: str, copy_of_the_database: Copy
) -> None:
    """Two installations with copies of one database would accept each other time and again."""
    with opened_harness(known, database_url) as harness:
        harness.check()
    with opened_harness(known, old) as harness:
        assert harness.check().check.verdict is Verdict.SAME
    with opened_harness(known, database_url) as harness:
        # The other one has recorded an event that this one lacks.
        held(harness)


@pytest.mark.parametrize("hours", [1, 25])
def test_renewals_lost_again_are_accepted_only_after_a_day(
    known: Bucket, old: str, copy_of_the_database: Copy, database_url: str, hours: int
) -> None:
    with opened_harness(known, database_url) as harness:
        harness.check()
    with opened_harness(known, old) as harness:
        harness.check()
        since = harness.clock.time
    # A standby of the accepted copy that loses its next renewals.
    with opened_harness(known, old) as harness:
        baseline = harness.plane.registry.claim().baseline
        assert baseline is not None
        marker = harness.plane.registry.next_marker()
        with opened_store() as store:
            record = harness.plane.registry.claim()
            seen = store.observe(record.deployment_id)
            assert seen.marker is not None
            unknown = replace(marker, number=marker.number + 5, nonce="lost with the renewals")
            store.write_marker(record.deployment_id, unknown, after=seen.marker.revision)
        harness.clock.time = since + timedelta(hours=hours)
        checked = harness.check()
        is_accepted = hours > 24
        assert checked.check.verdict is (Verdict.SAME if is_accepted else Verdict.DATABASE_BEHIND)
        assert (checked.recovery.incident is None) is is_accepted


def test_a_standby_that_lost_a_capture_is_held(known: Bucket, database_url: str, old: str) -> None:
    with opened_harness(known, database_url) as harness:
        harness.clock.time += timedelta(hours=1)
        spend_total(harness.bucket, "90")
        assert len(capture(harness.plane, harness.clock, run_id="another run").stored) == 1
        harness.check()
    with opened_harness(known, old) as harness:
        held(harness)


def test_a_dump_from_before_an_incident_is_held(known: Bucket, database_url: str, old: str) -> None:
    with opened_harness(known, database_url) as harness:
        harness.lose()
        assert harness.find_loss() is Verdict.LOST
        harness.recover()
        spend_total(harness.bucket, "95")
        harness.check()
    before = of_the_gateway(known)
    with opened_harness(known, old) as harness:
        held(harness)
        assert isinstance(harness.run(), NothingToDo)
    assert of_the_gateway(known) == before


def test_a_dump_from_within_an_incident_is_held(
    known: Bucket, database_url: str, copy_of_the_database: Copy
) -> None:
    with opened_harness(known, database_url) as harness:
        harness.lose()
        assert harness.find_loss() is Verdict.LOST
    dump = copy_of_the_database()
    with opened_harness(known, database_url) as harness:
        harness.recover()
        spend_total(harness.bucket, "0")
        reset(harness)
    before = of_the_gateway(known)
    with opened_harness(known, dump) as harness:
        assert isinstance(harness.run(), NothingToDo)
        incident = harness.plane.incidents.recovery().incident
        assert incident is not None
        assert incident.losses[-1].verdict is Verdict.DATABASE_BEHIND
        assert incident.on_hold is not None
        harness.check()
        assert of_the_gateway(known) == before


def test_an_older_database_is_not_released_but_resolved(
    known: Bucket, database_url: str, old: str
) -> None:
    with opened_harness(known, database_url) as harness:
        spend_total(harness.bucket, "0")
        reset(harness)
    with opened_harness(known, old) as harness:
        held(harness)
        with pytest.raises(IncidentHeldError, match="cannot be released") as refused:
            release_restore(harness.plane, by="alice@ops")
        assert "`budget-recovery resolve --keep-snapshots`" in refused.value.hint
        harness.resolve()
        assert total_in(known) == "0"
        assert harness.check().check.verdict is Verdict.SAME
        harness.clock.time += timedelta(hours=1)
        harness.capture()


def test_an_older_database_is_ended_by_a_manual_restore(
    known: Bucket, database_url: str, old: str
) -> None:
    with opened_harness(known, database_url) as harness:
        spend_total(harness.bucket, "7")
        reset(harness)
    with opened_harness(known, old) as harness:
        held(harness)
        applied = restore_manually(
            harness.plane, opened_store, RestoreRequest(), ORDER, convergence_timeout=timedelta(0)
        )
        assert applied.failure is None
        assert applied.incident is not None
        assert outcome_of(applied.incident) is Outcome.RESTORED_MANUALLY
        assert total_in(known) == "80"
        assert harness.check().check.verdict is Verdict.SAME


def test_a_reset_recorded_while_nats_is_away_enters_the_marker_with_the_next_check(
    known: Bucket, database_url: str, old: str
) -> None:
    with opened_harness(known, database_url) as harness:
        spend_total(harness.bucket, "0")
        unmarked = reset(harness, is_reachable=False).unmarked
        assert unmarked == "No NATS server is configured."
        assert harness.check().check.verdict is Verdict.SAME
    with opened_harness(known, old) as harness:
        held(harness)


def test_a_reset_recorded_during_an_incident_enters_the_marker_after_it(
    known: Bucket, database_url: str, old: str
) -> None:
    with opened_harness(known, database_url) as harness:
        harness.lose()
        harness.find_loss()
        assert reset(harness).unmarked == "An incident is open."
        harness.recover()
        harness.check()
        assert total_in(known) is None
    with opened_harness(known, old) as harness:
        held(harness)


def test_a_lost_row_of_the_store_is_not_a_new_installation(
    known: Bucket, database_url: str
) -> None:
    with opened_harness(known, database_url) as harness:
        before = harness.plane.registry.claim()
    with psycopg.connect(database_url) as connection:
        connection.execute("delete from budget_recovery.store")
    with opened_harness(known, database_url) as harness:
        assert harness.plane.registry.claim().deployment_id == before.deployment_id
        assert harness.check().check.verdict is Verdict.SAME
        harness.lose()
        assert harness.find_loss() is Verdict.LOST
        harness.recover()
        assert total_in(known) == "80"
