"""Histories on two NATS servers and a PostgreSQL server."""

import asyncio
import base64
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
from nats.js.api import DiscardPolicy
from psycopg import sql

from budget_recovery_dagster.adapters.nats import Timeouts, open_usage_store
from budget_recovery_dagster.domain import (
    Observation,
)
from budget_recovery_dagster.embedded import PostgresServer
from budget_recovery_dagster.ports import UsageStore
from tests.contract.control_planes import ControlPlane as TestedControlPlane
from tests.contract.control_planes import on_postgres
from tests.fakes.control_plane import ManualClock
from tests.histories.worlds import FOREIGN_MARKER, Raw, World
from tests.integration.own_store import BUCKET, OwnStore
from tests.nats_servers import Bucket

# Waiting moves the test's clock at once, and leaves no time to renew a lease meanwhile.
_LEASE = timedelta(seconds=110)
_PROMPT = Timeouts(connect=5.0, answer=5.0, reading=30.0)


class Servers:
    """Two NATS servers at fixed addresses and a PostgreSQL server, shared by many histories."""

    def __init__(self, directory: Path, postgres: PostgresServer, template: str) -> None:
        self.own = OwnStore(directory / "own")
        self.other = OwnStore(directory / "other")
        self.postgres = postgres
        self.template = template

    @contextmanager
    def running(self) -> Iterator["Servers"]:
        with self.own.server, self.other.server:
            yield self


class ServerWorld(World):
    """A bucket and a database on running servers; ``close`` removes both.

    The server reports real times. Streams are shown with the test's time of their creation.
    """

    def __init__(self, servers: Servers, now: datetime) -> None:
        super().__init__()
        self._servers = servers
        self._created: dict[datetime, datetime] = {}
        self._databases: list[str] = []
        self._database = self._cloned(servers.template)
        self._database_copy: str | None = None
        self._open_plane = ExitStack()
        self._plane = self._open_plane.enter_context(self._opened_plane())
        self._plane.clock.set(now)
        self._connections = ExitStack()
        self._buckets: dict[bool, Bucket] = {}
        self._connect()

    def close(self) -> None:
        for bucket in self._buckets.values():
            if bucket_exists(bucket):
                bucket.destroy()
        self._connections.close()
        self._open_plane.close()
        for name in self._databases:
            self._on_server(sql.SQL("drop database {} with (force)"), name)

    @property
    def plane(self) -> TestedControlPlane:
        return self._plane

    @property
    def clock(self) -> ManualClock:
        return self._plane.clock

    @property
    def _bucket(self) -> Bucket:
        return self._buckets[self.is_at_other]

    @property
    def _server(self) -> OwnStore:
        return self._servers.other if self.is_at_other else self._servers.own

    def _connect(self) -> None:
        for is_other, store in ((False, self._servers.own), (True, self._servers.other)):
            connected = Bucket.connected(store.server.url, BUCKET)
            self._buckets[is_other] = self._connections.enter_context(connected)

    @contextmanager
    def _connected(self) -> Iterator[UsageStore]:
        with open_usage_store(self._server.server.url, BUCKET, timeouts=_PROMPT) as store:
            yield store

    def judged_by_clock(self, seen: Observation) -> Observation:
        created_at = self._created.get(seen.identity.created_at, seen.identity.created_at)
        identity = replace(seen.identity, created_at=created_at)
        return replace(seen, identity=identity, leader_time=self.store_time)

    @property
    def exists(self) -> bool:
        return bucket_exists(self._bucket)

    def keys(self) -> dict[str, Raw]:
        bucket = self._bucket
        if not bucket_exists(bucket):
            return {}
        return bucket._portal.call(_all_keys, bucket)

    def get(self, key: str) -> bytes | None:
        stored = self._bucket.stored(key)
        is_deleted = stored is None or _is_deleted(stored.headers)
        return None if stored is None or is_deleted else stored.data

    def put(self, key: str, value: bytes, ttl: str | None = None) -> None:
        headers = {"Nats-TTL": ttl} if ttl is not None and self.supports_ttl else None
        self._bucket.put(key, value, headers)

    def remove(self, key: str) -> None:
        self._bucket.remove(key)

    def purge(self, prefix: str = "") -> None:
        self._bucket.purge(prefix)

    def drop(self, keys: Sequence[str]) -> None:
        bucket = self._bucket
        for key in keys:
            if (stored := bucket.stored(key)) is not None:
                revision = stored.revision
                bucket._do(lambda js, at=revision: js.delete_msg(bucket.stream, at))  # type: ignore[misc]

    def create(self) -> None:
        self._create(self.store_time)

    def _create(self, created_at: datetime) -> None:
        self._bucket.create_with(allow_msg_ttl=self.supports_ttl)
        created = self._bucket.info().created
        self._created[created.astimezone(UTC)] = created_at
        if self.is_at_other:
            self._bucket.put(FOREIGN_MARKER, b"{}")

    def destroy(self) -> None:
        self._bucket.destroy()

    def limit(self, room: int) -> None:
        enough = self._bucket.messages() + room
        self._bucket.reconfigure(max_msgs=enough, discard=DiscardPolicy.OLD)

    def lift_limits(self) -> None:
        for bucket in self._buckets.values():
            if bucket_exists(bucket):
                bucket.reconfigure(max_msgs=-1, discard=DiscardPolicy.NEW)

    def copy_store(self) -> None:
        self._restart(self._servers.own.copy)

    def set_store_back(self) -> None:
        self._restart(self._servers.own.set_back)

    def _restart(self, change: Callable[[], None]) -> None:
        self._connections.close()
        change()
        self._connect()

    def show(self, *, other: bool) -> None:
        self.is_at_other = other
        if not self.exists:
            self._create(self.store_time - timedelta(days=3))

    def expire(self) -> None:
        """Do nothing: keys on a server expire by its own clock."""

    def copy_database(self) -> None:
        now = self._leave_database()
        self._database_copy = self._cloned(self._database)
        self._enter_database(now)

    def set_database_back(self) -> None:
        if self._database_copy is None:
            raise ValueError("no copy was made")
        now = self._leave_database()
        self._database = self._cloned(self._database_copy)
        self._enter_database(now)

    def landmarks(self) -> frozenset[str]:
        with psycopg.connect(self._url(self._database)) as connection:
            rows = connection.execute("select landmark_id::text from budget_recovery.landmark")
            return frozenset(row[0] for row in rows)

    def _leave_database(self) -> datetime:
        self._open_plane.close()
        return self._plane.clock.now()

    def _enter_database(self, now: datetime) -> None:
        self._open_plane = ExitStack()
        self._plane = self._open_plane.enter_context(self._opened_plane())
        self._plane.clock.set(now)

    def _opened_plane(self) -> AbstractContextManager[TestedControlPlane]:
        return on_postgres(self._url(self._database), lease_duration=_LEASE)

    def _cloned(self, template: str) -> str:
        name = f"history_{uuid4().hex[:12]}"
        self._on_server(
            sql.SQL("create database {} template {} strategy file_copy"), name, template
        )
        self._databases.append(name)
        return name

    def _on_server(self, statement: sql.SQL, *names: str) -> None:
        with psycopg.connect(self._servers.postgres.url(), autocommit=True) as connection:
            connection.execute(statement.format(*map(sql.Identifier, names)))

    def _url(self, name: str) -> str:
        return self._servers.postgres.url(name)


def bucket_exists(bucket: Bucket) -> bool:
    """Whether the stream of a bucket exists."""
    found = bucket._portal.call(_stream_info, bucket)
    return "error" not in found


async def _stream_info(bucket: Bucket, **request: str) -> dict[str, Any]:
    api = f"$JS.API.STREAM.INFO.{bucket.stream}"
    answer = await bucket._client.request(api, json.dumps(request).encode(), 5.0)
    found: dict[str, Any] = json.loads(answer.data)
    return found


async def _all_keys(bucket: Bucket) -> dict[str, Raw]:
    """Read all messages at once, each from the leader."""
    info = await _stream_info(bucket, subjects_filter=">")
    subjects = info["state"].get("subjects") or {}
    api = f"$JS.API.STREAM.MSG.GET.{bucket.stream}"

    async def get(subject: str) -> Any:
        request = json.dumps({"last_by_subj": subject}).encode()
        answer = await bucket._client.request(api, request, 5.0)
        return subject, json.loads(answer.data).get("message")

    found = {}
    for subject, message in await asyncio.gather(*map(get, subjects)):
        headers = base64.b64decode((message or {}).get("hdrs", ""))
        if message is not None and not _has_delete_mark(headers):
            key = subject.removeprefix(bucket.subject(""))
            data = base64.b64decode(message.get("data", ""))
            found[key] = Raw(message["seq"], data, b"Nats-TTL: never\r\n" in headers)
    return found


def _has_delete_mark(headers: bytes) -> bool:
    return b"KV-Operation:" in headers or b"Nats-Marker-Reason:" in headers


def _is_deleted(headers: dict[str, str]) -> bool:
    return "KV-Operation" in headers or "Nats-Marker-Reason" in headers
