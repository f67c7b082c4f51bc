"""Restores on a real server into a bucket that deletes its oldest keys when it is full."""

from datetime import timedelta
from typing import Any

import dagster as dg
import psycopg
import pytest
from nats.js.api import DiscardPolicy

from budget_recovery_dagster.domain import Hour, Outcome
from budget_recovery_dagster.errors import AttemptFailedError, StoreLostError
from budget_recovery_dagster.services.restore import StillWaiting
from tests.integration.commands import answer, page
from tests.integration.interrupted_store import Interruptions, interrupted
from tests.integration.recovery_harness import Harness
from tests.integration.recovery_runs import (
    check,
    incidents,
    outcome,
    requested,
    run_restore,
    state,
    supervise,
    usages,
)
from tests.integration.snapshot_job import run_job
from tests.nats_servers import Bucket

LIFETIME = "lifetime"
COUNTERS: dict[str | None, str] = {f"user-{number:02}": "1.5" for number in range(50)}
FOREIGN = [f"ratelimit.acme.{number:02}" for number in range(12)]
EVICTING = {"discard": DiscardPolicy.OLD, "allow_msg_ttl": True}


def replace_bucket(bucket: Bucket, **settings: Any) -> None:
    """Replace the bucket by one that holds only keys of others."""
    bucket.destroy()
    bucket.create_with(**EVICTING, **settings)
    for key in FOREIGN:
        bucket.put(key, b"1")


def foreign(bucket: Bucket) -> list[str]:
    return [key for key in FOREIGN if bucket.stored(key) is not None]


@pytest.mark.parametrize("limit", ["max_msgs", "max_bytes"])
def test_a_restore_without_room_waits_and_harms_no_other_key(
    configured: Bucket,
    database: psycopg.Connection,
    instance: dg.DagsterInstance,
    current_hour: Hour,
    monkeypatch: pytest.MonkeyPatch,
    limit: str,
) -> None:
    configured.spend("acme", "users", LIFETIME, COUNTERS)
    assert run_job(instance, current_hour).success
    check(instance)
    # 50 counters, a leaderboard and our marker need 78 messages with the margin; 40 are free.
    replace_bucket(configured, **{limit: 52 if limit == "max_msgs" else 6000})
    before = configured.info().state.last_seq
    (request,) = requested(check(instance))

    result = run_restore(instance, request.tags)

    assert result.success
    assert outcome(instance, result) == "waiting"
    (incident,) = incidents(database)
    assert incident["attempts"] == 0
    assert incident["waiting_reason"].startswith(
        f"The bucket has no room for the restore: {limit}={52 if limit == 'max_msgs' else 6000} "
    )
    assert foreign(configured) == FOREIGN
    assert configured.info().state.last_seq == before

    # A person sees it everywhere, and may raise the limit.
    assert incident["waiting_reason"] in " ".join(" ".join(page("status", code=1)).split())
    refused = answer("restore", "--yes", "--reason", "now", code=2)
    assert refused["error"]["code"] == "store_full"
    assert configured.info().state.last_seq == before
    configured.reconfigure(**{limit: 90 if limit == "max_msgs" else 30_000})
    database.execute("update budget_recovery.incident set next_launch_at = now()")
    (again,) = requested(supervise(instance))

    result = run_restore(instance, again.tags)

    assert outcome(instance, result) == "restored"
    assert usages(configured, "acme", "users", LIFETIME) == COUNTERS
    assert foreign(configured) == FOREIGN
    assert state(database) == "healthy"


def test_a_bucket_that_fills_up_during_a_restore_loses_nothing(harness: Harness) -> None:
    harness.bucket.spend("acme", "users", LIFETIME, COUNTERS)
    harness.bucket.spend("globex", "users", LIFETIME, COUNTERS)
    harness.capture()
    # Two tenants with 51 keys each and our marker, with the margin.
    replace_bucket(harness.bucket, max_msgs=12 + 155)
    harness.find_loss()

    def fill() -> None:
        for number in range(12 + 155 - harness.bucket.messages() - 1):
            harness.bucket.put(f"ratelimit.globex.{number}", b"1")

    # After the counters of the first tenant; its leaderboard still fits.
    result = harness.run(interrupted(Interruptions(after_raising=fill)))

    assert isinstance(result, StillWaiting)
    assert "no room for tenant 'globex': max_msgs=167 leaves " in result.reason
    assert result.incident.attempts == 0
    assert usages(harness.bucket, "acme", "users", LIFETIME) == COUNTERS
    assert usages(harness.bucket, "globex", "users", LIFETIME) == {}
    assert foreign(harness.bucket) == FOREIGN
    harness.bucket.reconfigure(max_msgs=400)
    incident = harness.recover()
    assert incident.ended is not None
    assert incident.ended.outcome is Outcome.RESTORED
    assert usages(harness.bucket, "globex", "users", LIFETIME) == COUNTERS


def test_a_bucket_that_evicts_during_a_restore_is_lost_once_and_then_waited_for(
    harness: Harness,
) -> None:
    harness.bucket.spend("acme", "users", LIFETIME, COUNTERS)
    harness.capture()
    replace_bucket(harness.bucket, max_msgs=100)
    harness.find_loss()

    def evict() -> None:
        # The gateway fills the bucket: rate limits, our marker and counters are deleted.
        for number in range(70):
            harness.bucket.put(f"ratelimit.globex.{number}", b"1")

    with pytest.raises(StoreLostError, match="lost once more during the restore"):
        harness.run(interrupted(Interruptions(after_raising=evict)))

    for _ in range(3):
        result = harness.run()
        assert isinstance(result, StillWaiting)
        assert "no room for the restore: max_msgs=100 leaves 0" in result.reason
        # The same store lost something, so the restore has no new attempts.
        assert (result.incident.attempts, len(result.incident.losses)) == (1, 2)
        assert not harness.check().check.verdict.is_alarm
    harness.bucket.reconfigure(max_msgs=300)
    incident = harness.recover()
    assert incident.ended is not None
    assert incident.ended.outcome is Outcome.RESTORED
    assert usages(harness.bucket, "acme", "users", LIFETIME) == COUNTERS


def test_counters_that_vanish_after_their_write_without_a_trace_are_not_restored(
    harness: Harness,
) -> None:
    harness.bucket.spend("acme", "users", LIFETIME, COUNTERS)
    harness.capture()
    harness.lose()
    harness.find_loss()
    purge = Interruptions(after_raising=lambda: harness.bucket.purge("usage.acme.users."))

    with pytest.raises(AttemptFailedError, match=r"tenant 'acme' missing after the restore"):
        harness.run(interrupted(purge))

    incident = harness.plane.incidents.recovery().incident
    assert incident is not None
    assert incident.attempts == 1
    (note,) = harness.entries(incident)["acme", "users", LIFETIME].notes
    assert note.startswith(
        "50 counters missing from the store after the write (without a delete marker): 'user-00'"
    )
    assert usages(harness.bucket, "acme", "users", LIFETIME) == {}
    harness.recover()
    assert usages(harness.bucket, "acme", "users", LIFETIME) == COUNTERS


def test_counters_that_the_gateway_deletes_after_their_write_are_reported(harness: Harness) -> None:
    harness.bucket.spend("acme", "users", LIFETIME, {"alice": "5"})
    harness.capture()
    harness.lose()
    harness.find_loss()
    delete = Interruptions(
        after_raising=lambda: harness.bucket.remove("usage.acme.users.lifetime.alice")
    )

    incident = harness.recover(interrupted(delete))

    # Nothing of it is there, but something was lost, and restored.
    assert incident.ended is not None
    assert incident.ended.outcome is Outcome.RESTORED
    assert incident.ended.detail.startswith(
        "Raised 0 counters in 0 windows of 0 tenants. Usage between"
    )
    assert "1 counter missing again when read back" in incident.ended.detail


def test_a_bucket_without_expiries_or_with_a_short_age_is_reported(harness: Harness) -> None:
    day = f"{harness.clock.time:%Y-%m-%d}"
    harness.bucket.put(f"usage.acme.users.{day}.=", b"5", {"Nats-TTL": str(40 * 86400)})
    harness.capture()
    harness.bucket.destroy()
    harness.bucket.create_with(max_age=60)
    harness.find_loss()

    incident = harness.recover()

    assert incident.ended is not None
    assert incident.ended.outcome is Outcome.RESTORED
    no_ttl, early = harness.entries(incident)["acme", "users", day].notes
    assert no_ttl == "keys do not expire: the bucket has no per-key TTLs (allow_msg_ttl)"
    assert "1 counter dropped from " in early
    assert "the bucket has a max_age of 60 s" in early
    assert "Keys of 1 window do not expire: the bucket has no" in incident.ended.detail
    assert "Keys of 1 window are dropped 60 s after their last write" in incident.ended.detail


def test_the_ten_minute_check_of_a_full_bucket_evicts_nothing(harness: Harness) -> None:
    harness.bucket.destroy()
    harness.bucket.create_with(**EVICTING, max_msgs=len(COUNTERS) + 1)
    harness.bucket.spend("acme", "users", LIFETIME, COUNTERS)
    harness.bucket.put(FOREIGN[0], b"1")
    # No room for a first marker: detection is degraded, and says so.
    checked = harness.check()
    assert "The marker was not renewed" in checked.check.reason
    assert harness.bucket.stored(FOREIGN[0]) is not None
    assert usages(harness.bucket, "acme", "users", LIFETIME) == COUNTERS
    # With room for it, it is renewed in its own place.
    harness.bucket.reconfigure(max_msgs=len(COUNTERS) + 2)
    for _ in range(3):
        harness.clock.time += timedelta(minutes=10)
        assert "not renewed" not in harness.check().check.reason
    assert usages(harness.bucket, "acme", "users", LIFETIME) == COUNTERS
    assert harness.bucket.messages() == len(COUNTERS) + 2
