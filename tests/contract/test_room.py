"""The contract of limits and room, in memory and on a NATS server."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest
from nats.js.api import DiscardPolicy, StorageType

from budget_recovery_dagster.domain import IntendedMarker, RaiseOrder, Room, StoreLimits
from budget_recovery_dagster.embedded import NatsServer
from budget_recovery_dagster.errors import StoreFullError
from tests.contract import usage_stores
from tests.contract.restore_orders import LIFETIME, always, board_order, key, order, raised
from tests.contract.usage_stores import Subject
from tests.fakes.usage_store import MemoryUsageStore
from tests.nats_servers import usages

OPEN = Callable[..., AbstractContextManager[Subject]]
DEPLOYMENT = "d"
MARKER = f"__guard.{DEPLOYMENT}"


@pytest.fixture(params=["memory", "nats"])
def evicting(request: pytest.FixtureRequest) -> OPEN:
    """Open a store that deletes its oldest keys at these limits."""

    @contextmanager
    def in_memory(max_msgs: int | None = None, max_bytes: int | None = None) -> Iterator[Subject]:
        subject = usage_stores.in_memory()
        assert isinstance(subject.store, MemoryUsageStore)
        subject.store.max_messages, subject.store.max_bytes = max_msgs, max_bytes
        yield subject

    @contextmanager
    def on_nats(max_msgs: int = -1, max_bytes: int = -1) -> Iterator[Subject]:
        url = request.getfixturevalue("nats_server").url
        with usage_stores.on_nats(
            url,
            discard=DiscardPolicy.OLD,
            max_msgs=max_msgs,
            max_bytes=max_bytes,
            allow_msg_ttl=True,
        ) as subject:
            yield subject

    return in_memory if request.param == "memory" else on_nats


def used(subject: Subject) -> Room:
    return subject.store.limits().used


def room_for(subject: Subject, *orders: RaiseOrder) -> Room:
    return subject.store.open_tenant("t").room_for(orders, (), is_open=always)


def fill_up_to(subject: Subject, free: int) -> None:
    """Write a key after which so many bytes are free."""
    limit = subject.store.limits().max_bytes
    assert limit is not None
    before = used(subject).bytes
    subject.put("filler.0", b"")
    empty = used(subject).bytes - before
    subject.put("filler.0", b"x" * (limit - before - empty - free))
    assert limit - used(subject).bytes == free


def test_a_store_reports_its_limits_and_what_it_holds(evicting: OPEN) -> None:
    with evicting(max_msgs=5, max_bytes=10_000) as subject:
        limits = subject.store.limits()
        assert (limits.max_messages, limits.max_bytes) == (5, 10_000)
        assert (limits.used, limits.max_age) == (Room(), None)
        assert limits.evicts
        assert limits.may_evict
        assert limits.supports_ttl
        subject.put(key("a"), b"1")
        subject.remove(key("a"))
        subject.put("ratelimit.x", b"1")
        # A delete marker takes room, too.
        assert used(subject).messages == 2


def test_a_store_without_limits_never_evicts(evicting: OPEN) -> None:
    with evicting() as subject:
        limits = subject.store.limits()
        assert (limits.max_messages, limits.max_bytes) == (None, None)
        assert not limits.may_evict


def test_the_room_for_new_counters_is_what_they_then_take(evicting: OPEN) -> None:
    with evicting(max_bytes=100_000) as subject:
        subject.put(key("other"), b"1")
        orders = [
            order("plain", "12.345"),
            order("alice@example.com", "5", expiry=3600, of=LIFETIME),
            order(None, "99999999999999999999.000000000000000001"),
        ]
        expected, before = room_for(subject, *orders), used(subject)
        raised(subject, *orders)
        after = used(subject)
        assert expected.messages == after.messages - before.messages == 3
        taken = after.bytes - before.bytes
        # In memory, the header of a condition is not stored.
        assert taken <= expected.bytes <= taken + 3 * 60


def test_an_overwritten_counter_makes_room_for_its_new_value(evicting: OPEN) -> None:
    with evicting(max_bytes=100_000) as subject:
        subject.put(key("live"), b'{"usage":"1","note":"%s"}' % (b"x" * 500))
        subject.put(key("gone"), b"1")
        subject.remove(key("gone"))
        live = room_for(subject, order("live", "25"))
        assert live.messages == 0
        assert 0 < live.bytes < 100
        assert room_for(subject, order("gone", "25")).messages == 0


def test_a_counter_that_is_not_raised_needs_no_room(evicting: OPEN) -> None:
    with evicting(max_bytes=100_000) as subject:
        subject.put(key("same"), b'{"usage":"5"}')
        subject.put(key("bad"), b"?")
        assert room_for(subject, order("same", "5"), order("bad", "5")) == Room()


def test_leaderboards_need_room_only_if_they_are_wrong(evicting: OPEN) -> None:
    with evicting(max_bytes=100_000) as subject:
        live = subject.store.open_tenant("t")
        ranking = board_order({"a": "2", "b": "1"})
        needed = live.room_for((), [ranking], is_open=always)
        before = used(subject)
        live.rebuild_boards([ranking], is_open=always)
        taken = used(subject).bytes - before.bytes
        assert needed.messages == 1
        assert taken <= needed.bytes <= taken + 60
        assert live.room_for((), [ranking], is_open=always) == Room()


def test_a_marker_is_not_written_in_the_place_of_another_key(evicting: OPEN) -> None:
    with evicting(max_msgs=2) as subject:
        subject.put(key("a"), b"1")
        subject.put("ratelimit.x", b"1")
        with pytest.raises(StoreFullError, match=MARKER):
            subject.store.write_marker(DEPLOYMENT, IntendedMarker("one"), after=0)
        assert usages(subject.store, "t") == {"a": "1"}


def test_a_marker_is_renewed_in_its_own_place_in_a_full_store(evicting: OPEN) -> None:
    with evicting(max_bytes=3000) as subject:
        first = subject.store.write_marker(DEPLOYMENT, IntendedMarker("one"), after=0)
        subject.put(key("a"), b"1")
        fill_up_to(subject, free=1)
        subject.store.write_marker(DEPLOYMENT, IntendedMarker("two"), after=first.revision)
        assert usages(subject.store, "t") == {"a": "1"}
        found = subject.store.observe(DEPLOYMENT).marker
        assert found is not None
        assert found.nonce == "two"
        longer = IntendedMarker("longer by far")
        with pytest.raises(StoreFullError):
            subject.store.write_marker(DEPLOYMENT, longer, after=found.revision)
        assert usages(subject.store, "t") == {"a": "1"}


def test_a_delete_marker_has_the_sequence_of_the_deletion(evicting: OPEN) -> None:
    with evicting() as subject:
        (result,) = subject.store.open_tenant("t").raise_counters([order("a", "5")], is_open=always)
        live = subject.store.open_tenant("t")
        assert live.deletion_of(result.order.of, "a") is None
        assert live.deletion_of(result.order.of, "never written") is None
        subject.remove(key("a"))
        deleted = subject.store.open_tenant("t").deletion_of(result.order.of, "a")
        assert deleted == result.revision + 1


def test_a_raised_or_kept_counter_has_the_sequence_of_its_key(evicting: OPEN) -> None:
    with evicting() as subject:
        subject.put(key("kept"), b'{"usage":"7"}')
        orders = [order("kept", "5"), order("raised", "5")]
        results = subject.store.open_tenant("t").raise_counters(orders, is_open=always)
        assert [each.revision for each in results] == [1, 2]


def test_an_expiry_is_known_before_and_after_a_write(evicting: OPEN) -> None:
    with evicting() as subject:
        subject.put(key("hour"), b'{"usage":"1"}', ttl="3600")
        subject.put(key("never"), b'{"usage":"1"}', ttl="never")
        live = subject.store.open_tenant("t")
        orders = [order("hour", "2"), order("never", "2"), order("new", "2")]
        drops = [live.dropped_at(each.of, each.entity) for each in orders]
        now = subject.store.now()
        assert now is not None
        assert drops[0] is not None
        assert abs(drops[0] - now - timedelta(hours=1)) < timedelta(minutes=1)
        assert drops[1:] == [None, None]
        hour, *others = live.raise_counters(orders, is_open=always)
        assert hour.expires_at is not None
        assert abs(hour.expires_at - drops[0]) < timedelta(seconds=3)
        assert {(each.expires_at, each.ages_out_at) for each in others} == {(None, None)}
        assert hour.before == Decimal(1)


@pytest.mark.parametrize("storage", StorageType)
def test_the_room_is_exact_on_nats(nats_server: NatsServer, storage: StorageType) -> None:
    settings: dict[str, Any] = {
        "discard": DiscardPolicy.OLD,
        "max_bytes": 100_000,
        "storage": storage,
    }
    with usage_stores.on_nats(nats_server.url, **settings, allow_msg_ttl=True) as subject:
        subject.put(key("live"), b'{"usage":"1"}', ttl="3600")
        subject.put(key("plain"), b'{"usage":"1"}')
        orders = [
            order("live", "25"),
            order("plain", "2.5"),
            order("new", "5"),
            order("expiring", "5", of=LIFETIME, expiry=60),
        ]
        expected, before = room_for(subject, *orders), used(subject)
        raised(subject, *orders)
        after = used(subject)
        assert expected == Room(after.messages - before.messages, after.bytes - before.bytes)


@pytest.mark.parametrize("has_ttl", [True, False])
def test_the_maximum_age_drops_what_is_not_kept_for_ever(
    nats_server: NatsServer, *, has_ttl: bool
) -> None:
    with usage_stores.on_nats(nats_server.url, max_age=3600, allow_msg_ttl=has_ttl) as subject:
        limits = subject.store.limits()
        assert (limits.max_age, limits.supports_ttl) == (timedelta(hours=1), has_ttl)
        assert not limits.evicts
        if has_ttl:
            subject.put(key("kept"), b'{"usage":"1"}', ttl="never")
        subject.put(key("aging"), b'{"usage":"1"}')
        live = subject.store.open_tenant("t")
        orders = [order("kept", "2"), order("aging", "2")]
        aging = live.dropped_at(orders[1].of, "aging")
        now = subject.store.now()
        assert now is not None
        assert aging is not None
        assert abs(aging - now - timedelta(hours=1)) < timedelta(minutes=1)
        kept, raised_again = live.raise_counters(orders, is_open=always)
        assert (kept.ages_out_at is None) == has_ttl
        assert raised_again.ages_out_at is not None
        assert raised_again.expires_at is None


def test_limits_leave_room_up_to_the_margin() -> None:
    limits = StoreLimits(Room(40, 700), max_messages=100, max_bytes=1000, evicts=True)
    assert limits.shortages(Room(40, 200)) == ()
    (bytes_short,) = limits.shortages(Room(40, 201))
    assert (bytes_short.setting, bytes_short.limit, bytes_short.enough) == ("max_bytes", 1000, 1002)
    assert str(bytes_short) == "max_bytes=1000 leaves 300, and 302 are needed (1.5 x 201)"
    (messages_short,) = limits.shortages(Room(41, 200))
    assert str(messages_short) == "max_msgs=100 leaves 60, and 62 are needed (1.5 x 41)"
    # A limit of which nothing is needed is no reason, even if it is exceeded.
    assert StoreLimits(Room(200, 0), max_messages=100, evicts=True).shortages(Room(0, 500)) == ()
    assert StoreLimits(Room(100, 0), max_messages=100).shortages(Room(50, 50)) == ()
