"""A usage store for the contract tests, in memory or on NATS, with direct access to its keys."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol
from uuid import uuid4

from budget_recovery_dagster.adapters.nats import open_usage_store
from budget_recovery_dagster.ports import TenantReader, UsageStore
from tests.fakes.usage_store import MemoryUsageStore
from tests.nats_servers import BOARDS, COUNTERS, Bucket, Stored

NO_HEADERS: Mapping[str, str] = {}
UGLY_NAMES = [
    "*",
    ">",
    "a.b",
    "=",
    "openai/gpt-4o:2024",
    "alice@example.com",
    "with spaces  ",
    "東京",
    "tab\tand\r\nlines",
    "\x01\x7f\x85",
    "\N{GRINNING FACE}",
    '"quoted"\\',
    "%2A$KV",
    "é",
    "e\N{COMBINING ACUTE ACCENT}",
]


class Put(Protocol):
    def __call__(
        self,
        key: str,
        value: bytes,
        *,
        ttl: str | None = None,
        headers: Mapping[str, str] = NO_HEADERS,
    ) -> None: ...


class Store(UsageStore, Protocol):
    """The whole interface of a store."""


@dataclass(frozen=True)
class Subject:
    """A store, and direct access to its keys as the gateway has it."""

    store: Store
    put: Put
    remove: Callable[[str], None]
    purge: Callable[[str], None]
    stored: Callable[[str], Stored | None]

    @property
    def counters(self) -> TenantReader:
        return self.store.reader(COUNTERS)

    @property
    def boards(self) -> TenantReader:
        return self.store.reader(BOARDS)


def in_memory() -> Subject:
    store = MemoryUsageStore()
    store.clock = datetime.now(UTC)

    def put(
        key: str, value: bytes, *, ttl: str | None = None, headers: Mapping[str, str] = NO_HEADERS
    ) -> None:
        written_at = datetime.now(UTC)
        store.put(key, value, ttl=ttl, written_at=written_at, headers=tuple(headers.items()))

    def stored(key: str) -> Stored | None:
        revision, value, _ = store.live_key(key)
        if value is None:
            return Stored(revision, b"", {"KV-Operation": "DEL"}) if revision else None
        ttl = {} if value.ttl is None else {"Nats-TTL": value.ttl}
        return Stored(revision, value.data, {**ttl, **dict(value.headers)})

    return Subject(store, put, store.remove, store.purge, stored)


@contextmanager
def on_nats(url: str, **settings: Any) -> Iterator[Subject]:
    """Open a store on its own bucket; require at the end that no consumer is left.

    With ``settings``, the bucket has these instead of the usual ones.
    """
    name = f"contract-{uuid4().hex}"
    with Bucket.connected(url, name) as bucket, open_usage_store(url, name) as store:
        if settings:
            bucket.create_with(**settings)
        else:
            bucket.create()

        def put(
            key: str,
            value: bytes,
            *,
            ttl: str | None = None,
            headers: Mapping[str, str] = NO_HEADERS,
        ) -> None:
            all_headers = {**({} if ttl is None else {"Nats-TTL": ttl}), **headers}
            bucket.put(key, value, all_headers or None)

        yield Subject(store, put, bucket.remove, bucket.purge, bucket.stored)
        assert bucket.consumers() == 0
        bucket.destroy()
