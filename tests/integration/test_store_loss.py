"""A check detects a lost store once, records the loss and requests a restore."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import dagster as dg
import psycopg
import pytest
from nats.js.api import StorageType

from budget_recovery_dagster.domain import Hour
from budget_recovery_dagster.services import Paused
from budget_recovery_dagster.wiring import opened_control_plane
from tests import services
from tests.integration.detection_records import losses, store_checks, store_row
from tests.integration.live_capture import (
    capture_now,
    capture_unless_paused,
    stored_tenants,
)
from tests.integration.own_store import OwnStore
from tests.integration.recovery_runs import (
    check,
    incidents,
    observed,
    outcome,
    requested,
    run_restore,
    skipped,
    state,
    verdict,
)
from tests.nats_servers import Bucket

LIFETIME = "lifetime"
MARKER = "__guard."


@dataclass(frozen=True)
class Scene:
    """An accepted store, and the expected results of its loss."""

    instance: dg.DagsterInstance
    database: psycopg.Connection

    def expect_loss(
        self, found: str, *, before: int, after: int | None, reason: str
    ) -> dg.RunRequest:
        """Require that the next check detects a first loss, records it, and requests a restore."""
        accepted = store_row(self.database)
        result = check(self.instance)
        (request,) = requested(result)
        (incident,) = incidents(self.database)
        (loss,) = losses(self.database)
        assert state(self.database) == "recovering"
        assert request.run_key == f"{incident['incident_id']}/launch-1"
        assert (incident["launches"], incident["closed_at"]) == (1, None)
        assert (loss["verdict"], loss["found_by"]) == (found, "store_loss_sensor")
        assert reason in loss["reason"]
        assert loss["before_created_at"] == accepted["baseline_created_at"]
        assert (loss["before_last_sequence"], loss["after_last_sequence"]) == (before, after)
        assert incident["target_last_sequence"] == after
        checked = store_checks(self.database)[-1]
        assert (checked["verdict"], checked["incident_id"]) == (found, incident["incident_id"])
        assert reason in checked["reason"]
        shown = observed(result)
        assert (shown["verdict"], shown["state"]) == (found, "recovering")
        assert shown["incident"] == incident["incident_id"]
        # An open incident does not change the accepted baseline.
        assert store_row(self.database) == accepted | {"state": "recovering"}
        return request


@pytest.fixture
def scene(instance: dg.DagsterInstance, database: psycopg.Connection) -> Scene:
    return Scene(instance, database)


@pytest.fixture
def accepted(configured: Bucket, scene: Scene) -> Bucket:
    """Return a bucket with a counter at sequence 1 and our marker at 2."""
    configured.spend("acme", "total", LIFETIME, {None: "80"})
    assert verdict(check(scene.instance)) == "first_seen"
    return configured


def rebuild(bucket: Bucket) -> None:
    bucket.destroy()
    bucket.create()


def rebuild_further_on(bucket: Bucket) -> None:
    """Rebuild the bucket with a higher first sequence."""
    bucket.destroy()
    bucket.create_with(first_seq=1000)


@pytest.mark.parametrize(("wipe", "after"), [(rebuild, 0), (rebuild_further_on, 999)])
def test_a_wiped_and_rebuilt_store_is_lost(
    accepted: Bucket, scene: Scene, wipe: Callable[[Bucket], None], after: int
) -> None:
    wipe(accepted)
    scene.expect_loss("lost", before=2, after=after, reason="The store was recreated; it was")
    (loss,) = losses(scene.database)
    assert loss["after_created_at"] > loss["before_created_at"]
    assert accepted.stored(f"{MARKER}{store_row(scene.database)['deployment_id']}") is None


def test_a_missing_bucket_is_lost_and_its_return_is_not_a_further_loss(
    accepted: Bucket, scene: Scene
) -> None:
    # As nats-io/nats-server#5382: streams deleted as orphans while the cluster is healthy.
    accepted.destroy()
    scene.expect_loss("lost", before=2, after=None, reason="The store is gone; it was")
    assert "still does not exist" in skipped(check(scene.instance))
    (incident,) = incidents(scene.database)
    assert incident["target_created_at"] is None
    accepted.create()
    accepted.spend("acme", "total", LIFETIME, {None: "1"})
    for expected in ("same", "same"):
        assert verdict(check(scene.instance)) == expected
    (incident,) = incidents(scene.database)
    assert incident["target_last_sequence"] == 1
    assert len(losses(scene.database)) == 1
    # The returned store is checked for further losses.
    rebuild(accepted)
    assert verdict(check(scene.instance)) == "lost"
    assert len(incidents(scene.database)) == 1
    assert [loss["before_last_sequence"] for loss in losses(scene.database)] == [2, 1]


@pytest.mark.parametrize("prefix", [None, MARKER])
def test_a_purge_of_our_marker_is_a_loss(
    accepted: Bucket, scene: Scene, prefix: str | None
) -> None:
    before = accepted.info()
    if prefix is None:
        accepted._do(lambda js: js.purge_stream(accepted.stream))
    else:
        accepted.purge(prefix)
    # Neither of these shows the purge.
    assert accepted.info().created == before.created
    assert accepted.info().state.last_seq == before.state.last_seq
    scene.expect_loss(
        "lost",
        before=2,
        after=2,
        reason="Part of the store is gone, or our marker was overwritten: it should be at",
    )


def test_a_store_rolled_back_to_an_older_copy_is_lost(own_store: OwnStore, scene: Scene) -> None:
    # As BerriAI/litellm#30684: a store restarted from an older dump.
    own_store.do(lambda bucket: bucket.create())
    own_store.spend("10")
    assert verdict(check(scene.instance)) == "first_seen"
    own_store.copy()
    own_store.spend("20")
    assert verdict(check(scene.instance)) == "same"
    own_store.set_back()
    scene.expect_loss(
        "lost", before=4, after=2, reason="The store went back to an earlier state; it was"
    )
    (loss,) = losses(scene.database)
    assert loss["after_created_at"] == loss["before_created_at"]


def test_a_rollback_behind_later_traffic_is_detected(own_store: OwnStore, scene: Scene) -> None:
    own_store.do(lambda bucket: bucket.create())
    own_store.spend("10")
    assert verdict(check(scene.instance)) == "first_seen"
    own_store.copy()
    own_store.spend("20")
    assert verdict(check(scene.instance)) == "same"
    own_store.set_back()
    for usage in ("11", "12", "13", "14"):
        own_store.spend(usage)
    scene.expect_loss(
        "lost",
        before=4,
        after=6,
        reason="The store went back to older data, or our marker was overwritten: it should be at"
        " sequence 4, but 2 has another one.",
    )


def test_a_regression_by_one_is_detected_at_large_sequences(
    own_store: OwnStore, scene: Scene
) -> None:
    # As hasura/graphql-engine#10126: beyond 2**53 a floating-point number skips every other one.
    own_store.do(lambda bucket: bucket.create_with(first_seq=9007199254740992))
    own_store.spend("10")
    own_store.copy()
    first = observed(check(scene.instance))
    assert (first["verdict"], first["last_sequence"]) == ("first_seen", "9007199254740992")
    known = store_row(scene.database)
    assert (known["baseline_last_sequence"], known["marker_revision"]) == (9007199254740993,) * 2
    own_store.set_back()
    scene.expect_loss(
        "lost",
        before=9007199254740993,
        after=9007199254740992,
        reason="sequence 9007199254740993; now:",
    )


def test_a_bucket_in_memory_is_lost_with_its_server(own_store: OwnStore, scene: Scene) -> None:
    own_store.do(lambda bucket: bucket.create_with(storage=StorageType.MEMORY))
    own_store.spend("10")
    assert verdict(check(scene.instance)) == "first_seen"
    own_store.restart()
    scene.expect_loss("lost", before=2, after=None, reason="The store is gone")


def test_a_loss_is_detected_even_if_the_baseline_is_missing(
    accepted: Bucket, scene: Scene, current_hour: Hour
) -> None:
    assert stored_tenants(capture_now(current_hour)) == ["acme"]
    scene.database.execute("delete from budget_recovery.store")
    rebuild(accepted)
    requested(check(scene.instance))
    # The newest snapshot contains the identity of its store.
    (loss,) = losses(scene.database)
    assert (loss["verdict"], loss["before_last_sequence"]) == ("lost", 2)


def test_concurrent_observations_of_one_loss_open_one_incident(
    accepted: Bucket, scene: Scene, current_hour: Hour
) -> None:
    assert stored_tenants(capture_now(current_hour)) == ["acme"]
    rebuild(accepted)

    def observe(_: int) -> None:
        with opened_control_plane(services.present_settings()) as plane:
            services.check(plane, by="another tick")

    with ThreadPoolExecutor(4) as pool:
        captured = pool.submit(capture_unless_paused, current_hour)
        assert list(pool.map(observe, range(3))) == [None] * 3
    outcome_of_capture = captured.result()
    assert isinstance(outcome_of_capture, Paused) or not outcome_of_capture.read
    (request,) = requested(check(scene.instance))
    for _ in range(2):
        assert "is due at" in skipped(check(scene.instance))
    (incident,) = incidents(scene.database)
    assert request.run_key == f"{incident['incident_id']}/launch-1"
    assert len(losses(scene.database)) == 1


def test_two_losses_on_one_day_have_two_incidents_and_two_restores(
    accepted: Bucket, scene: Scene, current_hour: Hour
) -> None:
    # As PostHog/posthog#46932: a reused run key drops the later run.
    assert stored_tenants(capture_now(current_hour)) == ["acme"]
    keys: list[str | None] = []
    for _ in range(2):
        rebuild(accepted)
        (request,) = requested(check(scene.instance))
        keys.append(request.run_key)
        restored = run_restore(scene.instance, request.tags)
        assert outcome(scene.instance, restored) == "restored"
        assert verdict(check(scene.instance)) == "same"
    found: list[dict[str, Any]] = incidents(scene.database)
    assert keys == [f"{incident['incident_id']}/launch-1" for incident in found]
    assert len(set(keys)) == 2
    assert [incident["outcome"] for incident in found] == ["restored", "restored"]
