"""A program that deletes our marker as soon as it is written keeps nothing from working."""

from collections.abc import Iterator
from contextlib import contextmanager

import dagster as dg
import nats
import psycopg
import pytest
from anyio.from_thread import start_blocking_portal
from nats.aio.msg import Msg

from budget_recovery_dagster.domain import Hour
from budget_recovery_dagster.embedded import NatsServer
from tests.integration.commands import run
from tests.integration.live_capture import capture_now
from tests.integration.recovery_runs import (
    check,
    incidents,
    outcome,
    requested,
    run_restore,
    skipped,
    state,
    usages,
    verdict,
)
from tests.nats_servers import Bucket
from tests.waiting import wait_until

LIFETIME = "lifetime"
DELETE = {"KV-Operation": "DEL"}
PURGE = {"KV-Operation": "PURGE", "Nats-Rollup": "sub"}
USAGES = {None: "80", "alice": "30"}


@contextmanager
def running_cleaner(url: str, bucket: str, deletion: dict[str, str]) -> Iterator[list[str]]:
    """Delete each key below __guard when it is written; yield the subjects of the deletions."""
    deleted: list[str] = []
    with start_blocking_portal() as portal:
        client = portal.call(nats.connect, url)

        async def delete(message: Msg) -> None:
            if not (message.headers or {}).get("KV-Operation"):
                await client.publish(message.subject, b"", headers=deletion)
                deleted.append(message.subject)

        async def start() -> None:
            await client.subscribe(f"$KV.{bucket}.__guard.>", cb=delete)
            await client.flush()

        portal.call(start)
        try:
            yield deleted
        finally:
            portal.call(client.close)


def await_deletions(deleted: list[str], number: int) -> None:
    wait_until(lambda: len(deleted) >= number)


@pytest.fixture
def captured(configured: Bucket, instance: dg.DagsterInstance, current_hour: Hour) -> Bucket:
    configured.spend("acme", "total", LIFETIME, USAGES)
    check(instance)
    capture_now(current_hour)
    return configured


@pytest.mark.parametrize("deletion", [DELETE, PURGE], ids=["delete", "purge"])
def test_a_program_that_deletes_every_marker_keeps_no_restore_from_starting(
    captured: Bucket,
    nats_server: NatsServer,
    instance: dg.DagsterInstance,
    database: psycopg.Connection,
    deletion: dict[str, str],
) -> None:
    with running_cleaner(nats_server.url, captured.name, deletion) as deleted:
        for number in range(1, 4):
            assert verdict(check(instance)) == "same"
            await_deletions(deleted, number)
        assert incidents(database) == []

        for number in range(1, 4):
            before = len(deleted)
            captured.destroy()
            captured.create()
            (request,) = requested(check(instance))
            assert outcome(instance, run_restore(instance, request.tags)) == "restored"
            assert usages(captured, "acme", "total", LIFETIME) == USAGES
            assert [each["attempts"] for each in incidents(database)] == [1] * number
            await_deletions(deleted, before + 1)

        captured.destroy()
        captured.create()
        check(instance)
        run("resolve", "--reason", "it was emptied on purpose", "--keep-snapshots", "--yes")
        assert state(database) == "healthy"
        assert verdict(check(instance)) == "same"
    assert "Try:" not in skipped(check(instance))
