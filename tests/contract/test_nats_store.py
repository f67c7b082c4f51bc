"""Errors of the NATS adapter: prompt, of the right class, with a hint, without a password."""

import socket
import threading
from pathlib import Path
from uuid import uuid4

import pytest

from budget_recovery_dagster.adapters.nats import Timeouts, open_usage_store
from budget_recovery_dagster.embedded import NatsServer
from budget_recovery_dagster.errors import (
    SettingsError,
    StoreMissingError,
    StoreReadError,
    StoreUnreachableError,
)
from tests.free_ports import unused_port
from tests.identities import identity_of
from tests.nats_servers import (
    COUNTERS,
    PASSWORD,
    PATIENT,
    Bucket,
    DisturbedNetwork,
    prompt_failure_of,
    usages,
    with_user,
)

BUCKET = "budget-usage"
SHORT = Timeouts(connect=0.5, answer=2.0, reading=10.0)


def test_every_call_reports_a_missing_bucket(nats_server: NatsServer) -> None:
    with open_usage_store(nats_server.url, f"none-{uuid4().hex}", timeouts=PATIENT) as store:
        for call in (
            lambda: identity_of(store),
            store.reader(COUNTERS).list_tenants,
            lambda: store.reader(COUNTERS).read("t"),
        ):
            failure = prompt_failure_of(call)
            assert isinstance(failure, StoreMissingError)
            assert "BUDGET_RECOVERY_BUCKET" in failure.hint


@pytest.mark.parametrize(
    ("config", "user"),
    [
        ("jetstream: disabled", None),
        ('accounts { A { users: [{user: "u", password: "s3cret"}] } }', "u"),
    ],
    ids=["on the server", "for the account"],
)
def test_disabled_jetstream_is_not_a_missing_bucket(
    server_dir: Path, config: str, user: str | None
) -> None:
    with NatsServer(server_dir / f"off {uuid4().hex}", config=config) as server:
        url = server.url if user is None else with_user(server.url, user, PASSWORD)
        with open_usage_store(url, BUCKET, timeouts=PATIENT) as store:
            for call in (
                lambda: identity_of(store),
                store.reader(COUNTERS).list_tenants,
                lambda: store.reader(COUNTERS).read("t"),
            ):
                failure = prompt_failure_of(call)
                assert isinstance(failure, StoreUnreachableError)
                assert "JetStream" in failure.message
                assert "not enabled" in failure.message


def test_a_stopped_server_is_unreachable_at_once() -> None:
    port = unused_port()
    url = f"nats://u:{PASSWORD}@127.0.0.1:{port}"
    with open_usage_store(url, BUCKET, timeouts=PATIENT) as store:
        for call in (
            lambda: identity_of(store),
            store.reader(COUNTERS).list_tenants,
            lambda: store.reader(COUNTERS).read("t"),
        ):
            failure = prompt_failure_of(call)
            assert isinstance(failure, StoreUnreachableError)
            assert f"NATS at nats://127.0.0.1:{port}: Connection refused" in failure.message


def test_the_next_of_several_servers_is_tried(nats_server: NatsServer) -> None:
    urls = f"nats://127.0.0.1:{unused_port()}, {nats_server.url}"
    with open_usage_store(urls, "none", timeouts=PATIENT) as store:
        assert isinstance(prompt_failure_of(lambda: identity_of(store)), StoreMissingError)


@pytest.mark.parametrize("greeting", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"x" * 100_000])
def test_a_server_of_another_protocol_is_unreachable(greeting: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def greet() -> None:
            connection, _ = listener.accept()
            with connection:
                if greeting:
                    connection.sendall(greeting)
                connection.recv(1)  # until the other side gives up

        greeter = threading.Thread(target=greet)
        greeter.start()
        url = f"nats://127.0.0.1:{listener.getsockname()[1]}"
        with open_usage_store(url, BUCKET, timeouts=SHORT) as store:
            failure = prompt_failure_of(lambda: identity_of(store))
        greeter.join()
    assert isinstance(failure, StoreUnreachableError)


def test_a_hanging_server_is_unreachable(nats_server: NatsServer) -> None:
    name = f"silent-{uuid4().hex}"
    with (
        Bucket.connected(nats_server.url, name) as bucket,
        DisturbedNetwork(nats_server.url) as network,
        open_usage_store(network.url, name, timeouts=SHORT) as store,
    ):
        bucket.create()
        bucket.put("usage.t.b.2026-11.e", b"1")
        network.before_request = lambda _: False
        failure = prompt_failure_of(lambda: store.reader(COUNTERS).read("t"))
        assert isinstance(failure, StoreReadError)
        assert "stopped responding" in failure.message
        assert bucket.consumers() == 0
        network.before_request = None
        assert usages(store, "t") == {"e": "1"}


def test_the_call_after_a_lost_connection_reconnects(nats_server: NatsServer) -> None:
    name = f"lost-{uuid4().hex}"
    with (
        Bucket.connected(nats_server.url, name) as bucket,
        DisturbedNetwork(nats_server.url) as network,
        open_usage_store(network.url, name, timeouts=PATIENT) as store,
    ):
        bucket.create()
        bucket.put("usage.t.b.2026-11.e", b"1")

        def cut(_: int) -> bool:
            network.cut()
            return False

        network.before_request = cut
        failure = prompt_failure_of(lambda: store.reader(COUNTERS).read("t"))
        assert isinstance(failure, StoreUnreachableError)
        assert "Lost the connection" in failure.message
        assert bucket.consumers() == 0
        network.before_request = None
        assert usages(store, "t") == {"e": "1"}


def test_a_restarted_server_is_used_again(server_dir: Path) -> None:
    server = NatsServer(server_dir / "returning", port=unused_port())
    with server, open_usage_store(server.url, BUCKET, timeouts=PATIENT) as store:
        with Bucket.connected(server.url, BUCKET) as bucket:
            bucket.create()
        before = identity_of(store)
        server.stop()
        assert isinstance(prompt_failure_of(lambda: identity_of(store)), StoreUnreachableError)
        server.start()
        assert identity_of(store) == before


@pytest.mark.parametrize("bucket", ["", "*", ">", "a.b", "a b", "a\n", "é", "x" * 201])
def test_a_bucket_name_with_wildcards_is_rejected(bucket: str) -> None:
    with (
        pytest.raises(SettingsError, match="not a valid bucket name"),
        open_usage_store("nats://127.0.0.1", bucket),
    ):
        pass
