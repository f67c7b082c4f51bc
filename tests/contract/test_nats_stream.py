"""The stream as a whole: its keys, its identity and its leader's time."""

import re
import time
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest

from budget_recovery_dagster.adapters.nats import consumers, open_usage_store
from budget_recovery_dagster.domain import CREATION_TOLERANCE
from budget_recovery_dagster.embedded import NatsServer
from budget_recovery_dagster.errors import StoreReadError
from tests.contract.nats_scene import Scene, set_scene
from tests.identities import identity_of
from tests.nats_servers import COUNTERS, DisturbedNetwork, failure_of
from tests.waiting import wait_until


@pytest.fixture
def scene(nats_server: NatsServer) -> Iterator[Scene]:
    with set_scene(nats_server) as scene:
        yield scene


def test_a_listing_spans_pulls_and_leaves_no_consumer(scene: Scene) -> None:
    tenants = [f"usage.t{number:06}.b.2026-11.e" for number in range(consumers.BATCH + 200)]
    scene.bucket.put_many(dict.fromkeys(tenants, b"1"))
    listing = scene.store.reader(COUNTERS).list_tenants()
    assert len(listing.tenants) == len(tenants)
    assert listing.unreadable == ()
    assert scene.bucket.consumers() == 0


@pytest.mark.parametrize("pull", [1, 2, 3])
def test_no_tenant_is_missed_if_keys_are_purged_during_the_listing(scene: Scene, pull: int) -> None:
    scene.bucket.put_many({f"usage.a.b.2026-11.{number}": b"1" for number in range(12_000)})
    scene.bucket.put_many({f"usage.m{number}.b.2026-11.e": b"1" for number in range(12_000)})

    def purge(number: int) -> None:
        if number == pull:
            scene.bucket.purge("usage.a.")

    scene.network.before_request = purge
    assert len(scene.store.reader(COUNTERS).list_tenants().tenants) >= 12_000


def test_a_key_that_arrives_twice_does_not_stand_for_one_that_is_missing(scene: Scene) -> None:
    scene.bucket.put_many({f"usage.a.b.2026-11.{n:05}": b"1" for n in range(consumers.BATCH)})
    scene.bucket.put("usage.hidden.b.2026-11.e", b"1")
    frame = re.compile(rb"HMSG [^ ]+\.usage\.hidden\.[^\r]+\r\nNATS/1\.0\r\n[^\r]+\r\n\r\n\r\n")
    lost: list[bytes] = []

    def overwrite(number: int) -> None:
        # It has arrived with the first pull, and arrives again with the second one.
        if number == 2:
            scene.bucket.put("usage.a.b.2026-11.00000", b"2")

    def lose_once(answer: bytes) -> bytes:
        lost.extend(frame.findall(answer) if not lost else ())
        return frame.sub(b"", answer) if lost and lost[0] in answer else answer

    scene.network.before_request, scene.network.rewrite = overwrite, lose_once
    assert scene.store.reader(COUNTERS).list_tenants().tenants == {"a", "hidden"}
    assert len(lost) == 1


def test_keys_that_are_overwritten_during_a_listing_cause_no_second_one(scene: Scene) -> None:
    keys = [f"usage.a.b.2026-11.{n:05}" for n in range(consumers.BATCH + 200)]
    scene.bucket.put_many(dict.fromkeys(keys, b"1"))

    def overwrite(number: int) -> None:
        # Of these, one half has arrived before, and the other one has not.
        if number == 2:
            scene.bucket.put_many(dict.fromkeys(keys[-400:], b"2"))

    scene.network.before_request = overwrite
    assert scene.store.reader(COUNTERS).list_tenants().tenants == {"a"}
    assert scene.network.requests == 2


def test_keys_that_vanish_during_each_listing_are_not_waited_for(scene: Scene) -> None:
    scene.bucket.put_many({f"usage.a.b.2026-11.{number}": b"1" for number in range(12_000)})
    scene.network.before_request = lambda number: purge_one_of(scene, number)
    assert scene.store.reader(COUNTERS).list_tenants().tenants == {"a"}
    # Two listings of three or four pulls.
    assert 6 <= scene.network.requests <= 8


def test_a_listing_that_finds_more_each_time_fails(scene: Scene) -> None:
    scene.bucket.put_many({f"usage.a.b.2026-11.{number}": b"1" for number in range(12_000)})

    def change(number: int) -> None:
        scene.bucket.put(f"usage.t{number}.b.2026-11.e", b"1")
        purge_one_of(scene, 2 * number)
        purge_one_of(scene, 2 * number + 1)

    scene.network.before_request = change
    failure = failure_of(scene.store.reader(COUNTERS).list_tenants)
    assert "too many keys were removed meanwhile" in failure.message


def purge_one_of(scene: Scene, number: int) -> None:
    """Purge a key that is delivered last."""
    scene.bucket.purge_key(f"usage.a.b.2026-11.{11_999 - number}")


def test_boards_are_listed_over_several_pages(scene: Scene) -> None:
    boards = [f"leaderboard.t.b{number:06}.2026-11" for number in range(100_200)]
    scene.bucket.put_many(dict.fromkeys(boards, b"1"))
    assert len(scene.store.reader(COUNTERS).read("t").boards or ()) == len(boards)


def test_no_board_is_missed_if_keys_disappear_between_pages(
    scene: Scene, nats_server: NatsServer
) -> None:
    scene.bucket.put_many({f"leaderboard.t.a.x.{number}": b"1" for number in range(60_000)})
    scene.bucket.put_many({f"leaderboard.t.m{number}.2026-11": b"1" for number in range(45_000)})

    def purge(number: int) -> None:
        # Each of the two reads begins with a request; the second one is for the first page.
        if number == 3:
            scene.bucket.purge("leaderboard.t.a.")

    with (
        DisturbedNetwork(nats_server.url, b"$JS.API.STREAM.INFO.") as network,
        open_usage_store(network.url, scene.bucket.name) as store,
    ):
        network.before_request = purge
        assert len(store.reader(COUNTERS).read("t").boards or ()) == 45_000
        assert network.requests == 5


def test_the_identity_is_that_of_the_stream(scene: Scene) -> None:
    scene.bucket.put("usage.t.b.2026-11.e", b"1")
    created_at = identity_of(scene.store).created_at
    assert created_at == scene.bucket.info().created
    assert abs(datetime.now(UTC) - created_at).total_seconds() < 60
    assert identity_of(scene.store).last_sequence == 1


@pytest.mark.parametrize(
    ("time", "now"),
    [
        (
            '"ts":"2026-11-29T15:04:05.123456789+01:00"',
            datetime(2026, 11, 29, 14, 4, 5, 123456, UTC),
        ),
        ('"ts":"2026-11-29T14:04:05.1Z"', datetime(2026, 11, 29, 14, 4, 5, 100_000, UTC)),
        ('"ts":"2026-11-29T14:04:05Z"', datetime(2026, 11, 29, 14, 4, 5, tzinfo=UTC)),
        ('"older servers":"do not tell"', None),
    ],
)
def test_the_time_is_that_of_the_leader(scene: Scene, time: str, now: datetime | None) -> None:
    scene.network.rewrite = lambda answer: with_time(answer, time)
    assert scene.store.now() == now
    assert identity_of(scene.store).created_at == scene.bucket.info().created


def test_an_invalid_time_is_an_unexpected_response(scene: Scene) -> None:
    scene.network.rewrite = lambda answer: with_time(answer, '"ts":"soon"')
    failure = failure_of(scene.store.now)
    assert isinstance(failure, StoreReadError)
    assert "Unexpected JetStream response" in failure.message


def with_time(answer: bytes, time: str) -> bytes:
    """Change the time in a JetStream response; its first line contains the length."""
    line, end, body = answer.partition(b"\r\n")
    changed = re.sub(rb'"ts":"[^"]*"', time.encode(), body)
    if changed == body:
        return answer
    start, _, size = line.rpartition(b" ")
    return b"%s %d%s%s" % (start, int(size) + len(changed) - len(body), end, changed)


def test_messages_from_before_the_creation_show_a_backup(scene: Scene) -> None:
    def may_have_older() -> bool:
        return scene.store.observe("a deployment").may_have_older

    assert not may_have_older(), "an empty stream"
    scene.bucket.put("usage.acme.team.lifetime.=", b"1")
    written_at = time.monotonic()
    assert not may_have_older()
    backup = scene.bucket.back_up()
    # Times less than this apart may come from two servers.
    tolerance = CREATION_TOLERANCE.total_seconds()
    wait_until(lambda: time.monotonic() - written_at > tolerance + 1)
    scene.bucket.destroy()
    scene.bucket.restore(backup)
    assert may_have_older()
    # Once nothing of it is left, all was written since.
    scene.bucket.put("usage.acme.team.lifetime.=", b"2")
    assert not may_have_older()
