"""Histories on the fakes."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from datetime import datetime, timedelta
from typing import Any

from budget_recovery_dagster.domain import (
    Observation,
)
from budget_recovery_dagster.ports import UsageStore
from tests.fakes.control_plane import ManualClock, MemoryState, StoredSnapshot
from tests.fakes.plane import MemoryControlPlane
from tests.fakes.usage_store import MemoryUsageStore
from tests.histories.worlds import FOREIGN_MARKER, Raw, World


def _copied(value: Any) -> Any:
    """Copy the containers of a fake's state; what they contain never changes, except snapshots."""
    if isinstance(value, dict):
        return {key: _copied(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_copied(each) for each in value]
    return replace(value, records=dict(value.records)) if _is_snapshot(value) else value


def _is_snapshot(value: object) -> bool:
    return isinstance(value, StoredSnapshot)


class FakeWorld(World):
    """The fakes, in which keys also expire."""

    def __init__(self, now: datetime) -> None:
        super().__init__()
        self._plane = MemoryControlPlane.at(now)
        self._plane.registry.claim()
        self._own = MemoryUsageStore(now)
        self._other = MemoryUsageStore(now - timedelta(days=3))
        self._other.put(FOREIGN_MARKER, b"{}")
        self._store_copy = self._content()
        self._database_copy: dict[str, Any] = {}

    @property
    def plane(self) -> MemoryControlPlane:
        return self._plane

    @property
    def clock(self) -> ManualClock:
        return self._plane.clock

    @property
    def _store(self) -> MemoryUsageStore:
        return self._other if self.is_at_other else self._own

    @contextmanager
    def _connected(self) -> Iterator[UsageStore]:
        store = self._store
        store.clock = self.store_time
        store.supports_ttl = self.supports_ttl
        store.before_write = lambda _: self.touch("write")
        yield store

    def judged_by_clock(self, seen: Observation) -> Observation:
        return replace(seen, leader_time=self.store_time)

    @property
    def exists(self) -> bool:
        return not self._store.is_gone

    def keys(self) -> dict[str, Raw]:
        if not self.exists:
            return {}
        return {
            key: Raw(live.revision, live.value.data, live.value.ttl == "never")
            for key, live in self._store._keys.items()
            if live.value is not None
        }

    def get(self, key: str) -> bytes | None:
        live = self._store.live_key(key)
        return None if live.value is None else live.value.data

    def put(self, key: str, value: bytes, ttl: str | None = None) -> None:
        ttl = ttl if self.supports_ttl else None
        self._store.put(key, value, ttl=ttl, written_at=self.store_time)

    def remove(self, key: str) -> None:
        self._store.remove(key)

    def purge(self, prefix: str = "") -> None:
        self._store.purge(prefix)

    def drop(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._store._keys.pop(key, None)

    def create(self) -> None:
        self._store.recreate(self.store_time)
        self._store.is_gone = False

    def destroy(self) -> None:
        self._store.recreate(self.store_time)
        self._store.is_gone = True

    def limit(self, room: int) -> None:
        self._store.max_messages = len(self._store._keys) + room

    def lift_limits(self) -> None:
        self._own.max_messages = self._other.max_messages = None

    def copy_store(self) -> None:
        self._store_copy = self._content()

    def set_store_back(self) -> None:
        keys, self._own.stream, self._own.is_gone = self._store_copy
        self._own._keys = dict(keys)

    def _content(self) -> tuple[Any, ...]:
        return dict(self._own._keys), self._own.stream, self._own.is_gone

    def show(self, *, other: bool) -> None:
        self.is_at_other = other

    def expire(self) -> None:
        now = self.store_time.timestamp()
        for key, live in list(self._store._keys.items()):
            ttl = None if live.value is None else live.value.ttl
            if live.value is None or ttl is None or not ttl.rstrip("s").isdecimal():
                continue
            if live.value.written_ns / 1e9 + int(ttl.rstrip("s")) <= now:
                self._store.remove(key)

    def copy_database(self) -> None:
        self._database_copy = _copied(self._state())

    def set_database_back(self) -> None:
        for name, value in _copied(self._database_copy).items():
            setattr(self._plane.state, name, value)

    def landmarks(self) -> frozenset[str]:
        return frozenset(each.landmark_id for each in self._plane.state.landmarks)

    def _state(self) -> dict[str, Any]:
        kept = {each.name for each in fields(MemoryState)} - {"clock", "lock"}
        return {name: getattr(self._plane.state, name) for name in kept}
