"""Counts of keys and deletions, and the bucket's configuration, in memory and on NATS."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest

from budget_recovery_dagster.adapters.nats import NatsUsageStore, Timeouts, open_usage_store
from budget_recovery_dagster.domain import BudgetWindow, TenantWindow, Window
from budget_recovery_dagster.embedded import NatsServer
from budget_recovery_dagster.errors import StoreReadError, StoreUnreachableError
from tests.contract.usage_stores import UGLY_NAMES, Subject
from tests.nats_servers import Bucket, DisturbedNetwork

SOON = timedelta(seconds=30)
MONTH = Window.parse("2026-11")
LIFETIME = Window.parse("lifetime")


def at(tenant: str, budget: str, window: Window = MONTH) -> TenantWindow:
    return TenantWindow(tenant, BudgetWindow(budget, window))


def last_sequence(subject: Subject) -> int:
    return subject.store.observe("nobody").identity.last_sequence


def test_keys_are_counted_by_tenant_budget_and_window(subject: Subject) -> None:
    for key in (
        "a.x.2026-11.u1",
        "a.x.2026-11.=",
        "a.x.lifetime.u1",
        "a.y.2026-11.u1",
        "b.x.2026-11.u1",
    ):
        subject.put(f"usage.{key}", b"1")
    subject.put("leaderboard.a.x.2026-11", b"{}")
    subject.put("usage.a.x.2026-11.too.long", b"1")
    wanted = [at("a", "x"), at("a", "x", LIFETIME), at("a", "y"), at("b", "x"), at("b", "nothing")]
    counts = subject.store.count_keys(dict.fromkeys(wanted, 1), within=SOON)
    assert counts == dict(zip(wanted, (2, 1, 1, 1, 0), strict=True))
    assert subject.store.count_keys({}, within=SOON) == {}


def test_a_reading_counts_the_same_keys_as_a_check(subject: Subject) -> None:
    for name in ("u1", "u2", "old1", "old2", "nan", "=zz"):
        subject.put(f"usage.a.x.2026-11.{name}", b"1")
    subject.put("usage.a.x.2026-11.nan", b"NaN")
    subject.put("usage.a.x.2026-11.too.long", b"1")
    for name in ("old1", "old2"):
        subject.remove(f"usage.a.x.2026-11.{name}")
    before = last_sequence(subject)
    reading = subject.counters.read("a")
    counters = len(reading.counters) + len(reading.omitted)
    # Two delete marks, and a name that cannot be read.
    assert (counters, reading.other_keys) == (3, {at("a", "x").of: 3})
    assert subject.store.count_keys({at("a", "x"): 1}, within=SOON) == {at("a", "x"): 6}
    assert reading.read_after == before


@pytest.mark.parametrize("name", UGLY_NAMES)
def test_a_count_of_an_ugly_name_matches_nothing_else(subject: Subject, name: str) -> None:
    subject.put("usage.a.x.2026-11.u1", b"1")
    wanted = [at(name, "x"), at("a", name)]
    assert subject.store.count_keys(dict.fromkeys(wanted, 1), within=SOON) == dict.fromkeys(
        wanted, 0
    )


def test_purged_keys_are_not_counted_but_delete_marks_are(subject: Subject) -> None:
    for tenant in ("a", "b"):
        for number in range(3):
            subject.put(f"usage.{tenant}.x.2026-11.u{number}", b"1")
    subject.purge("usage.a.x.")
    subject.remove("usage.b.x.2026-11.u0")
    counts = subject.store.count_keys({at("a", "x"): 1, at("b", "x"): 1}, within=SOON)
    assert counts == {at("a", "x"): 0, at("b", "x"): 3}


def test_a_large_window_is_counted_without_a_list_of_its_names(subject: Subject) -> None:
    for key in ("a.x.2026-11.u1", "a.x.2026-11.u2", "a.x.lifetime.u1", "ab.x.2026-11.u1"):
        subject.put(f"usage.{key}", b"1")
    subject.remove("usage.a.x.2026-11.u2")
    # Both ways count the same, whatever was expected.
    for expected in (1, 10**6):
        wanted = {at("a", "x"): expected, at("a", "y"): 1, at("b", "x"): 10**6}
        counts = subject.store.count_keys(wanted, within=SOON)
        assert counts == dict(zip(wanted, (2, 0, 0), strict=True))


@pytest.mark.parametrize("lost", [1, 2])
def test_a_failed_count_of_one_large_window_discards_no_other_count(
    nats_server: NatsServer, lost: int
) -> None:
    small, large = [at("a", "x"), at("b", "x")], [at("c", "x"), at("d", "x")]
    with counted_through(nats_server.url, b"$JS.API.CONSUMER.CREATE.") as (network, store):
        network.before_request = lambda number: number != lost
        wanted = dict.fromkeys(small, 1) | dict.fromkeys(large, 10**6)
        counts = store.count_keys(wanted, within=SOON)
        # Unknown is left out; it is neither zero nor an error of all.
        assert counts == dict.fromkeys([*small, large[2 - lost]], 2)
        network.before_request = lambda _: False
        with pytest.raises(StoreUnreachableError):
            store.count_keys(dict.fromkeys(large, 10**6), within=SOON)


def test_a_failed_count_of_one_small_window_discards_no_other_count(
    nats_server: NatsServer,
) -> None:
    wanted = [at(tenant, "x") for tenant in "abcd"]
    with counted_through(nats_server.url, b"$JS.API.STREAM.INFO.") as (network, store):
        unreadable: list[bytes] = []

        def spoil_once(answer: bytes) -> bytes:
            if b'"total":2' not in answer or unreadable:
                return answer
            unreadable.append(answer)
            return answer.replace(b'"created":', b'"creator":', 1)

        network.rewrite = spoil_once
        counts = store.count_keys(dict.fromkeys(wanted, 1), within=SOON)
        assert set(counts.values()) == {2}
        assert len(counts) == len(wanted) - 1
        network.rewrite = lambda answer: answer.replace(b'"created":', b'"creator":')
        with pytest.raises(StoreReadError, match="Unexpected JetStream response"):
            store.count_keys(dict.fromkeys(wanted, 1), within=SOON)


@contextmanager
def counted_through(url: str, watched: bytes) -> Iterator[tuple[DisturbedNetwork, NatsUsageStore]]:
    """Provide a bucket with two counters of each tenant, behind a network that a test disturbs."""
    with (
        Bucket.connected(url, "failing-counts") as bucket,
        DisturbedNetwork(url, watched) as network,
    ):
        bucket.create()
        for tenant in "abcd":
            for entity in ("u1", "u2"):
                bucket.put(f"usage.{tenant}.x.2026-11.{entity}", b"1")
        timeouts = Timeouts(answer=2)
        with open_usage_store(network.url, bucket.name, timeouts=timeouts) as store:
            yield network, store
        bucket.destroy()


def test_many_windows_are_counted_at_once(subject: Subject) -> None:
    wanted = [at(f"tenant {number}", "x") for number in range(1200)]
    subject.put("usage.tenant=201100.x.2026-11.u1", b"1")
    counts = subject.store.count_keys(dict.fromkeys(wanted, 1), within=SOON)
    assert len(counts) == 1200
    assert {each for each, count in counts.items() if count} == {at("tenant 1100", "x")}


def test_deletions_after_a_sequence_are_found(subject: Subject) -> None:
    for number in range(4):
        subject.put(f"usage.a.x.2026-11.u{number}", b"1")
    subject.remove("usage.a.x.2026-11.u0")
    before = last_sequence(subject)
    subject.put("usage.b.x.lifetime.u1", b"1")
    subject.remove("usage.b.x.lifetime.u1")
    subject.remove("usage.a.x.2026-11.u1")
    subject.remove("usage.a.x.2026-11.u2")
    # This one is back, and the others are no counters.
    subject.put("usage.a.x.2026-11.u2", b"1")
    subject.remove("leaderboard.a.x.2026-11")
    subject.remove("usage.nothing")

    found = subject.store.read_deletions(before, at_most=1000, within=SOON)
    assert sorted((each.tenant, str(each.of)) for each, _ in found.found) == [
        ("a", "x 2026-11"),
        ("b", "x lifetime"),
    ]
    assert all(before < sequence <= found.until for _, sequence in found.found)
    assert found.until == last_sequence(subject)
    again = subject.store.read_deletions(found.until, at_most=1000, within=SOON)
    assert (again.found, again.until) == ((), found.until)


def test_many_changes_are_read_in_parts(subject: Subject) -> None:
    for number in range(50):
        subject.put(f"usage.a.x.2026-11.u{number}", b"1")
    subject.remove("usage.a.x.2026-11.u7")
    first = subject.store.read_deletions(0, at_most=1, within=SOON)
    deleted, until = list(first.found), first.until
    while until < last_sequence(subject):
        part = subject.store.read_deletions(until, at_most=1, within=SOON)
        assert part.until > until
        deleted, until = [*deleted, *part.found], part.until
    assert [each for each, _ in deleted] == [at("a", "x")]


def test_what_was_read_in_time_counts(nats_server: NatsServer) -> None:
    with (
        Bucket.connected(nats_server.url, "many-changes") as bucket,
        DisturbedNetwork(nats_server.url) as network,
    ):
        bucket.create()
        bucket.put_many({f"usage.a.x.2026-11.u{number:05}": b"1" for number in range(12_000)})
        bucket.remove("usage.a.x.2026-11.u00007")
        network.before_request = lambda number: number == 1
        with open_usage_store(network.url, bucket.name) as store:
            part = store.read_deletions(0, at_most=10**6, within=timedelta(seconds=2))
            # One pull, of 5,000 messages; the deleted key has the last sequence.
            assert part.found == ()
            assert 5_000 <= part.until < 6_000
            network.before_request = lambda _: False
            with pytest.raises(StoreReadError, match="timed out after 1 s"):
                store.read_deletions(part.until, at_most=10**6, within=timedelta(seconds=1))
            network.before_request = None
            rest = store.read_deletions(part.until, at_most=10**6, within=SOON)
        assert [each for each, _ in rest.found] == [at("a", "x")]
        assert bucket.consumers() == 0
        bucket.destroy()


def test_an_expired_key_is_a_deletion(nats_server: NatsServer) -> None:
    with Bucket.connected(nats_server.url, "expiring-counters") as bucket:
        bucket.create()
        bucket.put("usage.a.x.2026-11.u1", b"1", {"Nats-TTL": "1s"})
        with open_usage_store(nats_server.url, bucket.name) as store:
            while not (found := store.read_deletions(1, at_most=10, within=SOON)).found:
                pass
        assert [each for each, _ in found.found] == [at("a", "x")]
        bucket.destroy()


def test_the_settings_of_the_bucket_are_read(nats_server: NatsServer) -> None:
    with Bucket.connected(nats_server.url, "settings-of-a-bucket") as bucket:
        bucket.create()
        with open_usage_store(nats_server.url, bucket.name) as store:
            assert store.configuration() == {
                "max_age": "unlimited",
                "max_bytes": "unlimited",
                "max_msgs": "unlimited",
                "history": "1",
                "discard": "new",
                "num_replicas": "1",
                "allow_msg_ttl": "on",
                "mirror": "none",
                "sources": "none",
            }
            bucket.reconfigure(max_age=5400.0, max_bytes=2**20)
            found = store.configuration()
        assert (found["max_age"], found["max_bytes"]) == ("5400 s", "1048576")
        bucket.destroy()
