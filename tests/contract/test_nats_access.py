"""Authentication and permissions of the NATS user, and the errors without them."""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal
from functools import partial
from pathlib import Path

import pytest

from budget_recovery_dagster.adapters.nats import NatsUsageStore, open_usage_store
from budget_recovery_dagster.embedded import NatsServer
from budget_recovery_dagster.errors import (
    StoreMissingError,
    StorePermissionError,
    StoreUnreachableError,
)
from tests.contract.nats_credentials import Operator
from tests.identities import identity_of
from tests.nats_servers import (
    BOARDS,
    COUNTERS,
    PASSWORD,
    PATIENT,
    Bucket,
    failure_of,
    prompt_failure_of,
    usages,
    users,
    with_user,
)
from tests.waiting import wait_until

BUCKET = "budget-usage"
OPENSSL = shutil.which("openssl")

API = "$JS.API"
READING = [
    f"{API}.STREAM.INFO.KV_{BUCKET}",
    f"{API}.CONSUMER.MSG.NEXT.KV_{BUCKET}.*",
]
CREATING = f"{API}.CONSUMER.CREATE.KV_{BUCKET}.*.$KV.{BUCKET}.usage"
CREATING_ON_BOARDS = f"{API}.CONSUMER.CREATE.KV_{BUCKET}.*.$KV.{BUCKET}.leaderboard"
DELETING = f"{API}.CONSUMER.DELETE.KV_{BUCKET}.*"
INBOX = "_INBOX_budget_recovery.>"


def user(name: str, publish: list[str], subscribe: str = INBOX) -> dict[str, object]:
    return {
        "user": name,
        "password": PASSWORD,
        "permissions": {"publish": publish, "subscribe": [subscribe]},
    }


@pytest.fixture(scope="module")
def restricted_server(server_dir: Path) -> Iterator[NatsServer]:
    """A server with users of different permissions, and a bucket with three tenants."""
    config = users(
        {"user": "gateway", "password": PASSWORD},
        user("some", [*READING, DELETING, f"{CREATING}.a.>", f"{CREATING}.b.>"]),
        user("nothing", ["unrelated"]),
        user("deaf", [">"], subscribe="_INBOX_of_another.>"),
        user("boards", [*READING, DELETING, f"{CREATING_ON_BOARDS}.>"]),
        user("untidy", [*READING, f"{CREATING}.>"]),
    )
    with NatsServer(server_dir / "restricted_server", config=config) as server:
        with Bucket.connected(with_user(server.url, "gateway", PASSWORD), BUCKET) as bucket:
            bucket.create()
            for tenant in ("a", "b", "c"):
                bucket.put(f"usage.{tenant}.x.2026-11.{tenant}", b"1")
                bucket.rank(tenant, "x", "2026-11", {tenant: "1"})
        yield server


@contextmanager
def opened_as(server: NatsServer, name: str, password: str = PASSWORD) -> Iterator[NatsUsageStore]:
    url = with_user(server.url, name, password)
    with open_usage_store(url, BUCKET, timeouts=PATIENT) as store:
        yield store


def test_a_user_may_read_some_tenants_and_not_others(restricted_server: NatsServer) -> None:
    with opened_as(restricted_server, "some") as store:
        assert store.reader(COUNTERS).list_tenants().tenants == {"a", "b", "c"}
        assert usages(store, "a") == {"a": "1"}
        failure = prompt_failure_of(lambda: store.reader(COUNTERS).read("c"))
        assert isinstance(failure, StorePermissionError)
        assert f"publish to {API}.CONSUMER.CREATE.KV_{BUCKET}." in failure.message
        assert failure.message.endswith(f".$KV.{BUCKET}.usage.c.>.")
        assert "permissions violation" in str(failure.__cause__).lower()
        assert usages(store, "b") == {"b": "1"}


def test_a_user_may_read_leaderboards_and_no_counters(restricted_server: NatsServer) -> None:
    with opened_as(restricted_server, "boards") as store:
        boards, counters = store.reader(BOARDS), store.reader(COUNTERS)
        assert boards.list_tenants().tenants == {"a", "b", "c"}
        assert [(each.entity, each.usage) for each in boards.read("a").counters] == [
            ("a", Decimal(1))
        ]
        failure = prompt_failure_of(lambda: counters.read("a"))
        assert isinstance(failure, StorePermissionError)
        assert failure.message.endswith(f".$KV.{BUCKET}.usage.a.>.")
        assert len(boards.read("b").counters) == 1
    with opened_as(restricted_server, "some") as store:
        failure = prompt_failure_of(lambda: store.reader(BOARDS).read("a"))
        assert isinstance(failure, StorePermissionError)
        assert failure.message.endswith(f".$KV.{BUCKET}.leaderboard.a.>.")


def test_a_missing_permission_is_reported_with_its_subject(restricted_server: NatsServer) -> None:
    with opened_as(restricted_server, "nothing") as store:
        for call in (
            lambda: identity_of(store),
            store.reader(COUNTERS).list_tenants,
            lambda: store.reader(COUNTERS).read("a"),
        ):
            failure = prompt_failure_of(call)
            assert isinstance(failure, StorePermissionError)
            assert f"publish to {API}.STREAM.INFO.KV_{BUCKET}." in failure.message


def test_a_user_who_may_not_receive_responses_gets_a_clear_error(
    restricted_server: NatsServer,
) -> None:
    with opened_as(restricted_server, "deaf") as store:
        failure = prompt_failure_of(lambda: identity_of(store))
    assert isinstance(failure, StorePermissionError)
    assert INBOX in failure.message
    assert "permissions violation" in str(failure.__cause__).lower()


def test_a_user_who_may_not_delete_consumers_gets_a_clear_error(
    restricted_server: NatsServer,
) -> None:
    with opened_as(restricted_server, "untidy") as store:
        failure = prompt_failure_of(lambda: store.reader(COUNTERS).read("a"))
    assert isinstance(failure, StorePermissionError)
    assert "CONSUMER.DELETE" in failure.message


@pytest.mark.parametrize("name", ["some", "nobody"])
@pytest.mark.parametrize("password", ["wr0ng", "wr%400ng"])
def test_a_wrong_password_is_rejected_and_not_shown(
    restricted_server: NatsServer, name: str, password: str
) -> None:
    with opened_as(restricted_server, name, password) as store:
        failure = prompt_failure_of(lambda: identity_of(store))
    assert isinstance(failure, StorePermissionError)
    assert "rejected the NATS user: Authorization Violation" in failure.message
    assert "authorization violation" in str(failure.__cause__).lower()
    assert "wr" not in str(failure)


def test_a_missing_password_is_rejected(restricted_server: NatsServer) -> None:
    with open_usage_store(restricted_server.url, BUCKET, timeouts=PATIENT) as store:
        assert isinstance(prompt_failure_of(lambda: identity_of(store)), StorePermissionError)


def test_a_password_may_contain_any_character(server_dir: Path) -> None:
    config = users({"user": "us:er", "password": "p@ss/w#rd"})
    with NatsServer(server_dir / "password", config=config) as server:
        url = with_user(server.url, "us%3Aer", "p%40ss%2Fw%23rd")
        with open_usage_store(url, BUCKET, timeouts=PATIENT) as store:
            assert isinstance(prompt_failure_of(lambda: identity_of(store)), StoreMissingError)


@contextmanager
def opened_with(credentials: Path, server: NatsServer) -> Iterator[NatsUsageStore]:
    with open_usage_store(server.url, BUCKET, credentials=credentials, timeouts=PATIENT) as store:
        yield store


def test_credentials_are_accepted_until_they_expire(server_dir: Path, tmp_path: Path) -> None:
    operator = Operator()
    with NatsServer(server_dir / "operated", config=operator.config) as server:
        valid, expired = tmp_path / "valid.creds", tmp_path / "expired.creds"
        valid.write_text(operator.credentials(expires_in=3600))
        expired.write_text(operator.credentials(expires_in=-3600))
        with opened_with(valid, server) as store:
            failure = prompt_failure_of(lambda: identity_of(store))
            assert isinstance(failure, StoreUnreachableError)
            assert "JetStream" in failure.message
        with opened_with(expired, server) as store:
            failure = prompt_failure_of(lambda: identity_of(store))
            assert isinstance(failure, StorePermissionError)
            assert "renew the credentials" in failure.hint


def test_a_removed_credentials_file_is_reported_at_the_next_connection(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    path = tmp_path / "gone.creds"
    path.write_text(Operator().credentials(expires_in=3600))
    with opened_with(path, nats_server) as store:
        path.unlink()
        failure = prompt_failure_of(lambda: identity_of(store))
    assert isinstance(failure, StorePermissionError)
    assert str(path) in failure.message


def test_credentials_that_expire_during_a_connection_are_reported(
    server_dir: Path, tmp_path: Path
) -> None:
    operator = Operator()
    with NatsServer(server_dir / "expiring", config=operator.config) as server:
        path = tmp_path / "short.creds"
        path.write_text(operator.credentials(expires_in=2))
        with opened_with(path, server) as store:
            ask = partial(identity_of, store)
            wait_until(lambda: isinstance(failure_of(ask), StorePermissionError))


def test_no_password_is_sent_without_tls_if_tls_is_required(
    restricted_server: NatsServer,
) -> None:
    url = with_user(restricted_server.url, "gateway", PASSWORD).replace("nats://", "tls://")
    with open_usage_store(url, BUCKET, timeouts=PATIENT) as store:
        failure = prompt_failure_of(lambda: identity_of(store))
    assert isinstance(failure, StoreUnreachableError)
    assert "does not require TLS, so nothing was sent" in failure.message


@pytest.mark.skipif(
    OPENSSL is None, reason="openssl, which makes the certificate, is not installed"
)
def test_tls_requires_the_authority_that_signed_the_certificate(
    server_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert OPENSSL is not None
    certificate, key = tmp_path / "server.pem", tmp_path / "key.pem"
    request = "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=test"
    request += " -addext subjectAltName=IP:127.0.0.1"
    command = [OPENSSL, *request.split(), "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    # By default the server waits two seconds for the client, which a busy machine may take longer.
    config = f'tls {{ cert_file: "{certificate}", key_file: "{key}", timeout: 60 }}'
    with NatsServer(server_dir / "tls", config=config) as server:
        for url in (
            server.url.replace("nats://", "tls://"),
            server.url.replace("tls://", "nats://"),
        ):
            with open_usage_store(
                url, BUCKET, certificate_authority=certificate, timeouts=PATIENT
            ) as store:
                assert isinstance(prompt_failure_of(lambda: identity_of(store)), StoreMissingError)
            with open_usage_store(url, BUCKET, timeouts=PATIENT) as store:
                failure = prompt_failure_of(lambda: identity_of(store))
                assert isinstance(failure, StoreUnreachableError)
                assert "BUDGET_RECOVERY_NATS_CA" in failure.hint
            with monkeypatch.context() as system:
                system.setenv("SSL_CERT_FILE", str(certificate))  # trusted by the whole system
                with open_usage_store(url, BUCKET, timeouts=PATIENT) as store:
                    failure = prompt_failure_of(lambda: identity_of(store))
                    assert isinstance(failure, StoreMissingError)
