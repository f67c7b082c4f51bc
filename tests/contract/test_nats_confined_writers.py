"""Permissions to write into the store, and the errors without them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from budget_recovery_dagster.adapters.nats import NatsUsageStore, Timeouts, open_usage_store
from budget_recovery_dagster.domain import IntendedMarker, Written
from budget_recovery_dagster.embedded import NatsServer
from budget_recovery_dagster.errors import (
    StorePermissionError,
)
from tests.contract.restore_orders import (
    NOVEMBER,
    always,
    board_order,
    order,
)
from tests.nats_servers import (
    PASSWORD,
    PATIENT,
    Bucket,
    prompt_failure_of,
    users,
    with_user,
)

IMPATIENT = Timeouts(connect=5.0, answer=0.5, reading=30.0)
WRITING = b"Nats-Expected-Last-Subject-Sequence"


CONFINED = "budget-usage"


@pytest.fixture(scope="module")
def restricted_server(server_dir: Path) -> Iterator[NatsServer]:
    """A server with users who have some of the permissions of a restore."""
    reading = [
        f"$JS.API.STREAM.INFO.KV_{CONFINED}",
        f"$JS.API.CONSUMER.*.KV_{CONFINED}.>",
        f"$JS.API.CONSUMER.MSG.NEXT.KV_{CONFINED}.*",
    ]
    getting = f"$JS.API.STREAM.MSG.GET.KV_{CONFINED}"

    def user(name: str, publish: list[str]) -> dict[str, object]:
        permissions = {"publish": publish, "subscribe": ["_INBOX_budget_recovery.>"]}
        return {"user": name, "password": PASSWORD, "permissions": permissions}

    config = users(
        {"user": "gateway", "password": PASSWORD},
        user("one_tenant", [*reading, getting, f"$KV.{CONFINED}.usage.a.>"]),
        user("reader", [*reading, getting]),
        user("no_look", reading),
    )
    with NatsServer(server_dir / "restricted_server writers", config=config) as server:
        with Bucket.connected(with_user(server.url, "gateway", PASSWORD), CONFINED) as bucket:
            bucket.create()
        yield server


@contextmanager
def opened_as(server: NatsServer, name: str) -> Iterator[NatsUsageStore]:
    url = with_user(server.url, name, PASSWORD)
    with open_usage_store(url, CONFINED, timeouts=PATIENT) as store:
        yield store


def test_a_user_may_raise_one_tenant_and_not_another(restricted_server: NatsServer) -> None:
    orders = [order(str(number), "5") for number in range(3000)]
    with opened_as(restricted_server, "one_tenant") as store:
        results = store.open_tenant("a").raise_counters(orders, is_open=always)
        assert {result.written for result in results} == {Written.RAISED}
        live = store.open_tenant("b")
        failure = prompt_failure_of(lambda: live.raise_counters(orders, is_open=always))
        assert isinstance(failure, StorePermissionError)
        assert f"may not publish to $KV.{CONFINED}.usage.b.b.2026-11." in failure.message
        a = store.open_tenant("a")
        boards = [board_order({"x": "1"}, NOVEMBER)]
        failure = prompt_failure_of(lambda: a.rebuild_boards(boards, is_open=always))
        assert isinstance(failure, StorePermissionError)
        assert f"publish to $KV.{CONFINED}.leaderboard.a.b.2026-11" in failure.message


def test_a_missing_permission_to_write_the_marker_is_reported_with_its_subject(
    restricted_server: NatsServer,
) -> None:
    with opened_as(restricted_server, "reader") as store:
        assert store.observe("d").marker is None
        failure = prompt_failure_of(lambda: store.write_marker("d", IntendedMarker("n"), after=0))
        assert isinstance(failure, StorePermissionError)
        assert f"publish to $KV.{CONFINED}.__guard.d" in failure.message


def test_a_missing_permission_to_read_the_marker_is_reported_with_its_subject(
    restricted_server: NatsServer,
) -> None:
    with opened_as(restricted_server, "no_look") as store:
        failure = prompt_failure_of(lambda: store.observe("d"))
        assert isinstance(failure, StorePermissionError)
        assert f"STREAM.MSG.GET.KV_{CONFINED}" in failure.message
