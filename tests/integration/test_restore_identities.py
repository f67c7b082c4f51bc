"""Stores that only look lost, further losses, and low recovery points."""

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from uuid import uuid4

import pytest

from budget_recovery_dagster.domain import Outcome, RecoveryState, Restored, Verdict
from budget_recovery_dagster.embedded import NatsServer
from budget_recovery_dagster.errors import StoreLostError
from tests.integration.interrupted_store import Interruptions, interrupted
from tests.integration.recovery_harness import Harness, all_stored, opened_harness, outcome_of
from tests.integration.recovery_runs import usages
from tests.nats_servers import Bucket, Stored
from tests.stream_descriptions import move_creation

LIFETIME = "lifetime"
GUARD = "__guard."


def of_the_gateway(bucket: Bucket) -> dict[str, Stored]:
    """Return everything in the bucket except our marker, with its revision."""
    found = all_stored(bucket)
    return {key: stored for key, stored in found.items() if not key.startswith(GUARD)}


@pytest.fixture
def own_server(server_dir: Path) -> Iterator[NatsServer]:
    """Start a server for this test, which stops and starts it."""
    with NatsServer(server_dir / f"nats {uuid4().hex[:8]}") as server:
        yield server


@pytest.mark.parametrize("years", [-1, 0.1])
def test_a_changed_creation_time_with_all_data_ends_with_nothing_lost(
    years: float,
    own_server: NatsServer,
    server_dir: Path,
    database_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("BUDGET_RECOVERY_POSTGRES_URL", database_url)
    monkeypatch.setenv("BUDGET_RECOVERY_NATS_URL", own_server.url)
    monkeypatch.setenv("BUDGET_RECOVERY_BUCKET", "b")
    with Bucket.connected(own_server.url, "b") as bucket:
        bucket.create()
        bucket.spend("acme", "total", LIFETIME, {None: "80", "alice": "30.5"})
        bucket.rank("acme", "total", LIFETIME, {None: "80", "alice": "30.5"})
        bucket.put("blocked.acme.total.lifetime.alice", b"{}")
        with opened_harness(bucket, database_url) as harness:
            harness.capture()
            harness.check()
        # Counted after the snapshot; must be kept.
        bucket.spend("acme", "total", LIFETIME, {None: "81"})
        bucket.rank("acme", "total", LIFETIME, {None: "81", "alice": "30.5"})
        before = of_the_gateway(bucket)
        created: datetime = bucket.info().created
    own_server.stop()
    moved = created.replace(microsecond=123456) + timedelta(days=365 * years)
    move_creation(own_server._data_dir, "KV_b", moved)
    own_server.start()
    monkeypatch.setenv("BUDGET_RECOVERY_NATS_URL", own_server.url)
    with (
        Bucket.connected(own_server.url, "b") as bucket,
        opened_harness(bucket, database_url, datetime.now(UTC)) as harness,
    ):
        assert bucket.info().created == moved
        assert harness.find_loss() is Verdict.LOST
        incident = harness.recover()
        assert outcome_of(incident) is Outcome.NOTHING_LOST
        assert of_the_gateway(bucket) == before
        assert harness.check().check.verdict.is_good
        assert [outcome.tenant for outcome in harness.capture().stored] == ["acme"]
        assert harness.plane.incidents.recovery().state is RecoveryState.HEALTHY


@pytest.mark.parametrize(
    "interruptions",
    [
        lambda wipe: Interruptions(after_raising=wipe),
        lambda wipe: Interruptions(after_rebuilding=wipe),
    ],
    ids=["after the counters", "after the leaderboards"],
)
def test_a_further_loss_during_a_restore_fails_it(
    harness: Harness, interruptions: Callable[[Callable[[], None]], Interruptions]
) -> None:
    for tenant in ("acme", "globex"):
        harness.bucket.spend(tenant, "total", LIFETIME, {None: "80", "alice": "30"})
        harness.bucket.rank(tenant, "total", LIFETIME, {None: "80", "alice": "30"})
    harness.capture()
    harness.lose()
    harness.find_loss()
    wipes: list[int] = []

    def wipe_once() -> None:
        wipes.append(1)
        # After the second tenant nothing more is written.
        if len(wipes) == 2:
            harness.lose()

    with pytest.raises(StoreLostError):
        harness.run(interrupted(interruptions(wipe_once)), "first run")

    recovery = harness.plane.incidents.recovery()
    assert recovery.state is RecoveryState.RECOVERING
    assert recovery.incident is not None
    assert len(recovery.incident.losses) == 2
    # Made within five seconds of the lost one, it counts as the same store: no new attempts.
    assert recovery.incident.attempts == 1
    assert recovery.incident.ended is None
    assert usages(harness.bucket, "acme", "total", LIFETIME) == {}

    incident = harness.recover(run_id="second run")
    assert outcome_of(incident) is Outcome.RESTORED
    assert incident.attempts == 2
    assert incident.ended is not None
    # Counters that were raised twice count once.
    assert incident.ended.restored == Restored(tenants=2, windows=2, counters=4, boards=2)
    entry = harness.entries(incident)["acme", "total", LIFETIME]
    assert (entry.raised, entry.before, entry.after) == (2, Decimal(0), Decimal(80))
    for tenant in ("acme", "globex"):
        assert usages(harness.bucket, tenant, "total", LIFETIME) == {None: "80", "alice": "30"}
    assert harness.check().check.verdict.is_good
    attempts = harness.plane.incidents.attempts_of(incident.incident_id)
    assert [(each.loss, each.number, each.run_id) for each in attempts] == [
        (1, 1, "first run"),
        (2, 1, "second run"),
    ]


def test_a_lower_newer_snapshot_does_not_hide_a_higher_older_one(harness: Harness) -> None:
    for usage in ("100", "80", "90"):
        harness.bucket.spend("acme", "total", LIFETIME, {None: usage, "alice": "5"})
        harness.capture()
    harness.lose()
    harness.find_loss()
    incident = harness.recover()
    assert usages(harness.bucket, "acme", "total", LIFETIME) == {None: "100", "alice": "5"}
    entry = harness.entries(incident)["acme", "total", LIFETIME]
    assert (entry.raised, entry.before, entry.after) == (2, Decimal(0), Decimal(100))


def test_an_incident_reports_the_time_that_no_snapshot_covers(harness: Harness) -> None:
    noon = datetime(2026, 11, 28, 12, 0, tzinfo=UTC)
    harness.bucket.spend("acme", "total", LIFETIME, {None: "80"})
    harness.capture(noon)
    harness.bucket.spend("acme", "total", LIFETIME, {None: "85"})
    assert harness.check(noon + timedelta(minutes=40)).check.verdict.is_good
    harness.lose()
    harness.find_loss(noon + timedelta(minutes=50))
    opened = harness.plane.incidents.recovery().incident
    assert opened is not None
    assert opened.uncovered is not None
    assert round(opened.uncovered.total_seconds() / 60) == 50
    assert opened.newest_point_at is not None
    assert f"{opened.newest_point_at:%H:%M}" == "12:00"

    incident = harness.recover()

    assert incident.ended is not None
    for part in ("2026-11-28 12:00", "2026-11-28 12:50", "50 min", "is not restored"):
        assert part in incident.ended.detail
    # Exactly the usage of the recovery point.
    assert usages(harness.bucket, "acme", "total", LIFETIME) == {None: "80"}
