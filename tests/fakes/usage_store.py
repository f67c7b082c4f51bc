"""Fake usage store."""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Self

from budget_recovery_dagster.adapters.nats import (
    BOARDS,
    COUNTERS,
    MAX_CONFLICTS,
    NEVER,
    NEVER_WRITTEN,
    SOURCES,
    BoardChange,
    Change,
    ChangeResults,
    CounterKey,
    KeysRead,
    LiveKey,
    MessageSizes,
    Outcome,
    SourceReader,
    StoredValue,
    Write,
    WriteTerms,
    board_changes,
    changes_too_fast,
    counter_changes,
    decode_name,
    deletions_in,
    dropped_at,
    encode_key,
    found_marker,
    gateway_headers,
    list_tenants,
    marker_conflict,
    marker_does_not_fit,
    marker_key,
    marker_value,
    nanoseconds,
    prefix_to_read,
    read_counters,
    rebuild,
    room_for_changes,
    window_filter,
)
from budget_recovery_dagster.domain import (
    BoardOrder,
    BoardResult,
    BudgetWindow,
    CaptureSource,
    ClusterView,
    Configuration,
    Deletions,
    Entity,
    IntendedMarker,
    IsOpen,
    Marker,
    Observation,
    RaiseOrder,
    RaiseResult,
    Room,
    StoreIdentity,
    StoreLimits,
    TenantReading,
    TenantWindow,
    Window,
)
from budget_recovery_dagster.errors import StoreError, StoreMissingError, StoreWriteError


class MemoryLiveTenant:
    """A tenant's counters and leaderboards in memory."""

    def __init__(self, keys: "MemoryUsageStore", tenant: str) -> None:
        self._keys = keys
        self._tenant = tenant
        self._counters = keys.read_keys(prefix_to_read(COUNTERS, tenant))
        self._reading = read_counters(tenant, self._counters)

    @property
    def reading(self) -> TenantReading:
        return self._reading

    def deletion_of(self, of: BudgetWindow, entity: Entity) -> int | None:
        live = self._live(of, entity)
        return live.revision if live.value is None and live.revision else None

    def dropped_at(self, of: BudgetWindow, entity: Entity) -> datetime | None:
        value = self._live(of, entity).value
        return None if value is None else dropped_at(value, self._keys.keeps_for)

    def room_for(
        self, orders: Sequence[RaiseOrder], boards: Sequence[BoardOrder], *, is_open: IsOpen
    ) -> Room:
        terms = self._keys.terms(is_open)
        counters = counter_changes(self._tenant, orders, terms)
        changes = [
            change
            for change in board_changes(self._tenant, boards, terms)
            if not isinstance(change, str)
        ]
        ranked = self._keys.read_keys(prefix_to_read(BOARDS, self._tenant)).keys
        return room_for_changes(counters, self._counters.keys, SIZES) + room_for_changes(
            changes, ranked, SIZES
        )

    def raise_counters(
        self, orders: Sequence[RaiseOrder], *, is_open: IsOpen
    ) -> tuple[RaiseResult, ...]:
        changes = counter_changes(self._tenant, orders, self._keys.terms(is_open))
        return tuple(self._write(changes, self._counters).all())

    def rebuild_boards(
        self, orders: Sequence[BoardOrder], *, is_open: IsOpen
    ) -> tuple[BoardResult, ...]:
        terms = self._keys.terms(is_open)
        boards = self._keys.read_keys(prefix_to_read(BOARDS, self._tenant))

        def write(changes: Sequence[BoardChange]) -> list[BoardResult | str]:
            return self._write(changes, boards).all_or_reasons()

        return rebuild(self._tenant, orders, terms, write)

    def _live(self, of: BudgetWindow, entity: Entity) -> LiveKey:
        key = encode_key(CounterKey(self._tenant, of, entity))
        return self._counters.keys.get(key, NEVER_WRITTEN)

    def _write(self, changes: Sequence[Change[Outcome]], known: KeysRead) -> ChangeResults[Outcome]:
        results = ChangeResults(changes)
        for number, change in enumerate(changes):
            if results.is_given_up:
                break
            try:
                self._settle(results, number, change, known)
            except StoreWriteError as error:
                results.reject(number, error)
        return results

    def _settle(
        self,
        results: ChangeResults[Outcome],
        number: int,
        change: Change[Outcome],
        known: KeysRead,
    ) -> None:
        live = known.keys.get(change.key, NEVER_WRITTEN)
        for _ in range(MAX_CONFLICTS + 1):
            outcome, write = change.decide(live)
            if write is None:
                return results.skip(number, outcome)
            if reason := self._keys.refusal_of(write):
                return results.reject_value(number, outcome, reason)
            if self._keys.write_over(change.key, live.revision, write):
                return results.store(number, outcome, self._keys.live_key(change.key).revision)
            live = self._keys.live_key(change.key)
        raise changes_too_fast("in memory", change.key)


SIZES = MessageSizes("$KV.memory.", in_memory=True, keeps_one=True)
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def _size(key: str, live: LiveKey) -> int:
    if live.value is None:
        return SIZES.of(key, b"", ())
    ttl, headers = live.value.ttl, tuple(live.value.headers)
    known = headers if ttl is None else (("Nats-TTL", ttl), *headers)
    return SIZES.of(key, live.value.data, known)


def alone(seen_at: datetime) -> ClusterView:
    """Return the view of a single server."""
    return ClusterView(seen_at, None, "memory", None, 1, ())


class MemoryUsageStore:
    """Counters and leaderboards by key, as the gateway would have written them.

    Every write gets the next sequence. These attributes change the next calls:

    - ``stream`` is the reported identity, ``clock`` the time, ``keeps_for`` the maximum age of
      keys, and ``cluster`` describes the servers;
    - ``is_gone``: the bucket does not exist; not ``is_led``: the responding server may no longer be
      the leader;
    - ``identity_failure`` is raised by calls that report identity or time, ``observe_failure`` by
      observations, ``listing_failure`` by listings, ``cluster_failure`` by views of the cluster,
      ``marker_failure`` by writes of markers, and ``failures`` for single tenants;
    - ``during_read`` is called with the tenant during each read, after half of its keys;
    - ``before_write`` is called with the key between the decision on a write and the write;
    - ``max_messages`` and ``max_bytes`` are limits; a full store deletes its oldest keys. Not
      ``supports_ttl``: keys have no TTL of their own;
    - ``settings`` are the settings of the bucket; ``count_failure`` is raised by counts of keys,
      which leave out those in ``uncounted``, and ``deletion_failure`` by reads of deletions;
    - ``max_value`` is the maximum size of a counter or leaderboard in bytes;
    - ``write_failures`` are raised instead of the writes of counters and leaderboards with these
      numbers, from 1; ``writes`` counts the tried ones. A StoreWriteError is a refusal for a
      reason other than the value.
    """

    def __init__(self, created_at: datetime = EPOCH) -> None:
        self.stream = StoreIdentity(created_at, 0)
        self.clock: datetime | None = None
        self.keeps_for: timedelta | None = None
        self.cluster: Callable[[datetime], ClusterView] = alone
        self.is_gone = False
        self.is_led = True
        self.identity_failure: StoreError | None = None
        self.observe_failure: StoreError | None = None
        self.listing_failure: StoreError | None = None
        self.cluster_failure: StoreError | None = None
        self.marker_failure: StoreError | None = None
        self.failures: dict[str, StoreError] = {}
        self.during_read: Callable[[str], None] | None = None
        self.before_write: Callable[[str], None] | None = None
        self.settings: dict[str, str] = {"max_age": "unlimited", "discard": "new"}
        self.count_failure: StoreError | None = None
        self.uncounted: frozenset[TenantWindow] = frozenset()
        self.deletion_failure: StoreError | None = None
        self.max_value: int | None = None
        self.max_messages: int | None = None
        self.max_bytes: int | None = None
        self.supports_ttl = True
        self.write_failures: dict[int, StoreError] = {}
        self.writes = 0
        self._keys: dict[str, LiveKey] = {}
        self._stream_of: dict[str, datetime] = {}

    def put(
        self,
        key: str,
        value: bytes,
        *,
        ttl: str | None = None,
        written_at: datetime = EPOCH,
        headers: Sequence[tuple[str, str]] = (),
    ) -> None:
        """Write any key with any value, valid or not, like the gateway."""
        self._store(
            key, StoredValue(value, ttl, nanoseconds(written_at), headers=gateway_headers(headers))
        )

    def put_usage(self, tenant: str, budget: str, window: str, entity: Entity, usage: str) -> None:
        """Write a counter as the gateway usually does."""
        of = BudgetWindow(budget, Window.parse(window))
        self.put(encode_key(CounterKey(tenant, of, entity)), b'{"usage":"%s"}' % usage.encode())

    def remove(self, key: str) -> None:
        """Delete a key like the gateway: the deletion has its own sequence."""
        self._store(key, None)

    def expire(self, key: str, *, leaves_mark: bool) -> None:
        """Drop a key because of its age; the mark of the deletion has its own sequence."""
        if leaves_mark:
            self.remove(key)
            self._keys[key] = self._keys[key]._replace(is_expired=True)
        else:
            del self._keys[key]

    def copy(self) -> Self:
        """Return another store, made from a copy of the files."""
        other = copy(self)
        other._keys, other._stream_of = dict(self._keys), dict(self._stream_of)
        return other

    def purge(self, prefix: str = "") -> None:
        """Purge the keys that begin with ``prefix``, without changing the identity."""
        self._keys = {key: live for key, live in self._keys.items() if not key.startswith(prefix)}

    def recreate(self, created_at: datetime) -> None:
        """Replace the store by an empty one, created at another time."""
        self._keys.clear()
        self.stream = StoreIdentity(created_at, 0)

    def now(self) -> datetime | None:
        """Return the time that was set, unless the leader fails to report its identity."""
        self._answer(self.identity_failure)
        return self.clock

    def observe(self, deployment_id: str) -> Observation:
        self._answer(self.identity_failure, self.observe_failure)
        own = marker_key(deployment_id)
        guard, _, deployment = own.partition(".")
        return Observation(
            identity=self.stream,
            marker=found_marker(self.live_key(own)),
            keeps_for=self.keeps_for,
            is_led=self.is_led,
            leader_time=self.clock,
            others=frozenset(key.removeprefix(f"{guard}.") for key in self._under(f"{guard}."))
            - {deployment},
            may_have_older=any(
                self._stream_of[key] != self.stream.created_at for key in self._keys
            ),
        )

    def write_marker(self, deployment_id: str, marker: IntendedMarker, *, after: int) -> Marker:
        self._answer(self.marker_failure)
        key = marker_key(deployment_id)
        live = self.live_key(key)
        if live.revision != after:
            raise marker_conflict("in memory", key, after)
        written = StoredValue(marker_value(marker), NEVER, nanoseconds(self._time()))
        old = 0 if key not in self._keys else _size(key, live)
        added = Room(0 if old else 1, _size(key, LiveKey(after, written)) - old)
        if not self.limits().has_room_for(added):
            raise marker_does_not_fit("in memory", key)
        self.put(key, marker_value(marker), ttl=NEVER)
        return Marker(marker.nonce, self.stream.last_sequence, marker.number)

    def limits(self) -> StoreLimits:
        """Return the limits that were set, and what the store holds."""
        self._answer(self.identity_failure)
        return StoreLimits(
            used=Room(len(self._keys), self._used_bytes()),
            max_messages=self.max_messages,
            max_bytes=self.max_bytes,
            evicts=True,
            max_age=self.keeps_for,
            supports_ttl=self.supports_ttl,
        )

    def cluster_view(self, seen_at: datetime) -> ClusterView:
        """Return the state of the servers."""
        self._answer(self.cluster_failure)
        return self.cluster(seen_at)

    def configuration(self) -> Configuration:
        self._answer(self.identity_failure)
        return dict(self.settings)

    def count_keys(
        self, wanted: Mapping[TenantWindow, int], *, within: timedelta
    ) -> Mapping[TenantWindow, int]:
        assert within > timedelta(0)
        self._answer(self.count_failure)
        counts = {}
        for each in wanted.keys() - self.uncounted:
            prefix = window_filter(each.tenant, each.of).removesuffix("*")
            found = self._under(prefix)
            counts[each] = sum("." not in key.removeprefix(prefix) for key in found)
        return counts

    def read_deletions(self, after: int, *, at_most: int, within: timedelta) -> Deletions:
        assert within > timedelta(0)
        self._answer(self.deletion_failure)
        changed = sorted(
            (live.revision, key)
            for key, live in self._keys.items()
            if live.revision > after and key.startswith(f"{COUNTERS}.")
        )
        read = {key: self._keys[key] for _, key in changed[:at_most]}
        is_cut = len(changed) > at_most
        until = changed[at_most - 1][0] if is_cut else self.stream.last_sequence
        return deletions_in(read, until)

    def open_tenant(self, tenant: str) -> MemoryLiveTenant:
        return MemoryLiveTenant(self, tenant)

    def reader(self, source: CaptureSource) -> SourceReader:
        return SourceReader(
            SOURCES[source],
            find_tenants=lambda first: list_tenants(first, self._list_keys(f"{first}.")),
            present_keys=self._list_keys,
            read_keys=self.read_keys,
        )

    def read_keys(self, prefix: str) -> KeysRead:
        """Read all keys under a prefix that ends in a dot, deleted ones too."""
        _, token, _ = prefix.split(".")
        tenant = decode_name(token)
        self._answer(self.failures.get(tenant))
        found = self._read_once(tenant, prefix)
        return self._read_once(tenant, prefix) if found.is_partial else found

    def live_key(self, key: str) -> LiveKey:
        """Read one key."""
        self._answer()
        return self._keys.get(key, NEVER_WRITTEN)

    def refusal_of(self, write: Write) -> str | None:
        """Return why the store refuses this value for good, or None if it accepts it."""
        if self.max_value is None or len(write.data) <= self.max_value:
            return None
        return f"its {len(write.data)} bytes are more than {self.max_value}"

    def write_over(self, key: str, revision: int, write: Write) -> bool:
        """Write a key over this revision; return False if it has another."""
        if self.before_write is not None:
            self.before_write(key)
        self.writes += 1
        self._answer(self.write_failures.get(self.writes))
        if self.live_key(key).revision != revision:
            return False
        self.put(key, write.data, ttl=write.ttl, written_at=self._time(), headers=write.headers)
        return True

    def terms(self, is_open: IsOpen) -> WriteTerms:
        """Return the terms for writes of counters and leaderboards."""
        self._answer()
        return WriteTerms(is_open=is_open, now=self._time, limits=self.limits())

    def _time(self) -> datetime:
        return self.clock or datetime.now(UTC)

    def _list_keys(self, prefix: str) -> list[str]:
        self._answer(self.listing_failure)
        return [key for key in self._under(prefix) if self._keys[key].value is not None]

    def _read_once(self, tenant: str, prefix: str) -> KeysRead:
        before, announced = self.stream.last_sequence, self._under(prefix)
        middle = len(announced) // 2
        found = {key: self._keys[key] for key in announced[:middle]}
        if self.during_read is not None:
            self.during_read(tenant)
        found |= {key: self._keys[key] for key in self._under(prefix) if key not in found}
        return KeysRead(found, len(found) < len(announced), before)

    def _under(self, prefix: str) -> list[str]:
        return [key for key in self._keys if key.startswith(prefix) and key != prefix]

    def _store(self, key: str, value: StoredValue | None) -> None:
        self.stream = replace(self.stream, last_sequence=self.stream.last_sequence + 1)
        self._keys[key] = LiveKey(self.stream.last_sequence, value)
        self._stream_of[key] = self.stream.created_at
        while self._is_over():
            del self._keys[min(self._keys, key=lambda key: self._keys[key].revision)]

    def _is_over(self) -> bool:
        if self.max_messages is not None and len(self._keys) > self.max_messages:
            return True
        return self.max_bytes is not None and self._used_bytes() > self.max_bytes

    def _used_bytes(self) -> int:
        return sum(_size(key, live) for key, live in self._keys.items())

    def _answer(self, *failures: StoreError | None) -> None:
        """Raise the failures that were set."""
        if self.is_gone:
            raise StoreMissingError("The bucket in memory does not exist.", "let it be there.")
        for failure in failures:
            if failure is not None:
                raise failure
