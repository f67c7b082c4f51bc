"""Writes to a real bucket: many, large and rejected ones, and times to live."""

from collections.abc import Iterator
from decimal import Decimal
from uuid import uuid4

import pytest

from budget_recovery_dagster.adapters.nats import IN_FLIGHT, NatsUsageStore, open_usage_store
from budget_recovery_dagster.domain import (
    NEVER_EXPIRES,
    IntendedMarker,
    RaiseResult,
    ValueShape,
    Written,
)
from budget_recovery_dagster.embedded import NatsServer
from budget_recovery_dagster.errors import (
    StoreMissingError,
    StoreNoQuorumError,
    StoreWriteError,
)
from tests.contract.nats_scene import counters
from tests.contract.restore_orders import (
    LIFETIME,
    always,
    board_order,
    key,
    open_after,
    order,
)
from tests.contract.restored_bucket import bucket_of
from tests.identities import identity_of
from tests.nats_servers import (
    PATIENT,
    Bucket,
    prompt_failure_of,
    publish_with_raw_headers,
    usages,
)
from tests.waiting import wait_until


@pytest.fixture
def bucket(nats_server: NatsServer) -> Iterator[Bucket]:
    with bucket_of(nats_server) as bucket:
        bucket.create()
        yield bucket


@pytest.fixture
def store(nats_server: NatsServer, bucket: Bucket) -> Iterator[NatsUsageStore]:
    with open_usage_store(nats_server.url, bucket.name, timeouts=PATIENT) as store:
        yield store


def raise_one(store: NatsUsageStore, usage: str = "5") -> RaiseResult:
    (result,) = store.open_tenant("t").raise_counters([order("e", usage)], is_open=always)
    return result


def test_more_counters_than_pending_requests_are_raised(
    store: NatsUsageStore, bucket: Bucket
) -> None:
    count = 3 * IN_FLIGHT + 10
    bucket.put_many(counters("b", count))
    orders = [order(str(number), str(number % 7)) for number in range(2 * count)]
    results = store.open_tenant("t").raise_counters(orders, is_open=always)
    assert [result.order for result in results] == orders
    for number, result in enumerate(results):
        before = Decimal(1) if number < count else None
        is_kept = before is not None and number % 7 <= 1
        assert (result.before, result.written) == (
            before,
            Written.KEPT if is_kept else Written.RAISED,
        )
    expected = {str(n): str(max(n % 7, 1 if n < count else 0)) for n in range(2 * count)}
    assert usages(store, "t") == expected


def test_values_of_a_million_bytes_are_raised(store: NatsUsageStore, bucket: Bucket) -> None:
    fat = b'{"usage":"1","applied":"%s"}' % (b"x" * 1_000_000)
    for number in range(40):
        bucket.put(key(str(number)), fat)
    orders = [order(str(number), "5") for number in range(40)]
    results = store.open_tenant("t").raise_counters(orders, is_open=always)
    assert {result.written for result in results} == {Written.RAISED}
    stored = bucket.stored(key("0"))
    assert stored is not None
    assert stored.data == fat.replace(b'"1"', b'"5"')


def test_a_value_above_max_payload_is_rejected_and_the_connection_stays_open(
    store: NatsUsageStore, bucket: Bucket
) -> None:
    most = 1_048_576
    value = b'{"usage":"1","applied":"%s"}'
    bucket.put(key("e"), value % (b"x" * (most - len(value) + 2)))
    live = store.open_tenant("t")
    orders = [order(entity, "5") for entity in ("first", "e", "last")]
    results = live.raise_counters(orders, is_open=always)
    assert [each.written for each in results] == [Written.RAISED, Written.REFUSED, Written.RAISED]
    assert results[1].reason.endswith(f" exceed the server's max_payload: {most} with headers")
    assert usages(store, "t") == {"first": "5", "e": "1", "last": "5"}
    large: dict[str | None, str] = {
        f"{number:03}{'x' * most}"[: most // 400]: "1" for number in range(500)
    }
    boards = [board_order(large), board_order({"a": "1"}, LIFETIME)]
    left, written = live.rebuild_boards(boards, is_open=always)
    assert (left.is_written, written.is_written) == (False, True)
    assert "exceed the server's max_payload" in left.reason


def test_a_counter_with_unreadable_headers_is_never_overwritten(
    store: NatsUsageStore, bucket: Bucket, nats_server: NatsServer
) -> None:
    def write_badly() -> None:
        publish_with_raw_headers(nats_server.url, bucket.subject(key("e")), b"NATS/1.0", b"1")

    bucket.put(key("e"), b"1")
    live = store.open_tenant("t")
    before = identity_of(store).last_sequence
    # First as read by the consumer, then as returned by the leader.
    (result,) = live.raise_counters([order("e", "5")], is_open=open_after(write_badly))
    assert (result.written, result.reason) == (Written.UNREADABLE, "the headers are unreadable")
    assert raise_one(store).written is Written.UNREADABLE
    assert identity_of(store).last_sequence == before + 1


def test_repeated_headers_of_any_language_are_kept_in_their_order(
    store: NatsUsageStore, bucket: Bucket, nats_server: NatsServer
) -> None:
    kept = "By: one\r\nGrund: geändert\r\nBy: two\r\n".encode()
    block = b"NATS/1.0\r\nNats-TTL: 1h\r\n%sNats-TTL: 2h\r\n\r\n" % kept
    publish_with_raw_headers(nats_server.url, bucket.subject(key("e")), block, b"1")
    live = store.open_tenant("t")
    (result,) = live.raise_counters([order("e", "5")], is_open=always)
    assert result.written is Written.RAISED
    assert bucket.headers_of(key("e")).endswith(b"\r\n%s\r\n" % kept)
    # As for the server, the first of two times to live counts.
    stored = bucket.stored(key("e"))
    assert stored is not None
    assert 3540 <= int(stored.ttl or "0") <= 3600
    # Read again from the leader.
    (result,) = live.raise_counters([order("e", "6")], is_open=always)
    assert result.written is Written.RAISED
    assert bucket.headers_of(key("e")).endswith(b"\r\n%s\r\n" % kept)


def test_a_full_bucket_is_reported_with_the_servers_message(nats_server: NatsServer) -> None:
    with bucket_of(nats_server) as bucket:
        bucket.create_with(max_bytes=2000)
        with open_usage_store(nats_server.url, bucket.name, timeouts=PATIENT) as store:
            live = store.open_tenant("t")
            orders = [order(str(number), "5") for number in range(100)]
            failure = prompt_failure_of(lambda: live.raise_counters(orders, is_open=always))
            assert isinstance(failure, StoreWriteError)
            assert "maximum bytes exceeded (10077)" in failure.message
            assert bucket.name in failure.message
            # Earlier writes stay.
            assert 0 < len(usages(store, "t")) < 100
            marker_failure = prompt_failure_of(
                lambda: store.write_marker("d", IntendedMarker("n" * 2000), after=0)
            )
            assert isinstance(marker_failure, StoreWriteError)
            assert "maximum bytes exceeded (10077)" in marker_failure.message


def test_an_expired_counter_is_recreated_over_the_delete_marker(
    store: NatsUsageStore, bucket: Bucket
) -> None:
    bucket.put(key("e"), b"1", {"Nats-TTL": "2s"})
    live = store.open_tenant("t")
    before = identity_of(store).last_sequence
    # The server's delete marker has its own sequence.
    wait_until(lambda: identity_of(store).last_sequence > before)
    # The key was read before it expired; only another read shows that it is gone.
    (result,) = live.raise_counters([order("e", "5")], is_open=always)
    assert result.written is Written.EXPIRED
    assert raise_one(store).written is Written.RAISED
    stored = bucket.stored(key("e"))
    assert stored is not None
    assert (stored.ttl, usages(store, "t")) == (None, {"e": "5"})


def test_a_raised_key_keeps_its_expiry(store: NatsUsageStore, bucket: Bucket) -> None:
    bucket.put(key("e"), b"1", {"Nats-TTL": "3s"})
    assert raise_one(store).written is Written.RAISED
    stored = bucket.stored(key("e"))
    assert stored is not None
    assert stored.ttl in {"1", "2", "3"}
    wait_until(lambda: usages(store, "t") == {})


def test_a_bucket_without_ttl_support_gets_keys_without_ttl(nats_server: NatsServer) -> None:
    with bucket_of(nats_server) as bucket:
        bucket.create_with(allow_msg_ttl=False)
        with open_usage_store(nats_server.url, bucket.name, timeouts=PATIENT) as store:
            live = store.open_tenant("t")
            orders = [
                order("new", "1", LIFETIME, expiry=60),
                order("gone", "1", LIFETIME, expiry=0),
                order("kept", "1", LIFETIME, expiry=NEVER_EXPIRES),
            ]
            results = live.raise_counters(orders, is_open=always)
            assert [result.written for result in results] == [
                Written.RAISED,
                Written.EXPIRED,
                Written.RAISED,
            ]
            assert (results[0].expires_at, results[2].ages_out_at) == (None, None)
            boards = [board_order({"a": "1"}, LIFETIME, expiry=60)]
            assert live.rebuild_boards(boards, is_open=always)[0].is_written
            marker = store.write_marker("d", IntendedMarker("n"), after=0)
            for name in (
                key("new", LIFETIME),
                key("kept", LIFETIME),
                "leaderboard.t.b.lifetime",
                "__guard.d",
            ):
                stored = bucket.stored(name)
                assert stored is not None
                assert stored.ttl is None
            found = store.observe("d").marker
            assert found is not None
            assert found.revision == marker.revision


def test_a_bucket_that_is_deleted_before_a_write_is_reported(nats_server: NatsServer) -> None:
    with Bucket.connected(nats_server.url, f"vanishing-{uuid4().hex}") as bucket:
        bucket.create()
        with open_usage_store(nats_server.url, bucket.name, timeouts=PATIENT) as store:
            live = store.open_tenant("t")
            is_open = open_after(bucket.destroy)
            failure = prompt_failure_of(
                lambda: live.raise_counters([order("e", "5")], is_open=is_open)
            )
            assert isinstance(failure, StoreNoQuorumError)
            assert isinstance(prompt_failure_of(lambda: raise_one(store)), StoreMissingError)
            for call in (
                lambda: store.observe("d"),
                lambda: store.write_marker("d", IntendedMarker("n"), after=0),
                lambda: store.open_tenant("t"),
            ):
                assert isinstance(prompt_failure_of(call), StoreMissingError)


def test_a_concurrently_changed_shape_is_kept(store: NatsUsageStore, bucket: Bucket) -> None:
    bucket.put(key("e"), b'{"usage":"1"}')
    live = store.open_tenant("t")
    live.raise_counters(
        [order("e", "5", shape=ValueShape.TEXT)],
        is_open=open_after(lambda: bucket.put(key("e"), b"2")),
    )
    stored = bucket.stored(key("e"))
    assert stored is not None
    assert stored.data == b"5"
