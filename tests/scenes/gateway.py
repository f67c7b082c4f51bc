"""The gateway's side of a store: a bucket, used with the plain NATS client."""

import asyncio
import json
import string
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, TypeVar

import nats
from nats.js import JetStreamContext
from nats.js.api import KeyValueConfig
from nats.js.errors import NotFoundError

Result = TypeVar("Result")
Entity = str | None

_PLAIN = frozenset(string.ascii_letters + string.digits + "-_/")
_WRITTEN_AT = "2026-11-29T14:00:00Z"


def token(name: Entity) -> str:
    """Encode a name as a part of a key; None is the aggregate of a budget."""
    if name is None:
        return "="
    return "".join(
        chr(byte) if chr(byte) in _PLAIN else f"={byte:02X}" for byte in name.encode("utf-8")
    )


@dataclass(frozen=True)
class Gateway:
    """A bucket of a NATS server."""

    url: str
    bucket: str

    def create(self) -> None:
        config = KeyValueConfig(bucket=self.bucket, limit_marker_ttl=60)
        self._do(lambda js: js.create_key_value(config))

    def destroy(self) -> None:
        async def delete(js: JetStreamContext) -> None:
            try:
                await js.delete_stream(self._stream)
            except NotFoundError:
                return

        self._do(delete)

    def recreate(self) -> None:
        self.destroy()
        self.create()

    def limit(self, max_bytes: int) -> None:
        """Set the maximum size of the bucket in bytes; -1: unlimited."""

        async def update(js: JetStreamContext) -> None:
            config = (await js.stream_info(self._stream)).config
            config.max_bytes = max_bytes
            await js.update_stream(config)

        self._do(update)

    def put(self, key: str, value: str, ttl: str | None = None) -> None:
        headers = {"Nats-TTL": ttl} if ttl else None
        self._do(lambda js: js.publish(self._subject(key), value.encode(), headers=headers))

    def spend(
        self,
        tenant: str,
        budget: str,
        window: str,
        usages: Mapping[Entity, str],
        ttl: str | None = None,
    ) -> None:
        """Set counters to these usages."""
        for entity, usage in usages.items():
            value = json.dumps({"usage": usage, "updated_at": _WRITTEN_AT})
            self.put(self.counter(tenant, budget, window, entity), value, ttl)

    def rank(self, tenant: str, budget: str, window: str, usages: Mapping[Entity, str]) -> None:
        """Set a leaderboard to the 500 largest of these usages."""
        ranked = sorted(usages.items(), key=lambda each: Decimal(each[1]), reverse=True)
        entries = [{"entity": entity, "usage": usage} for entity, usage in ranked[:500]]
        value = json.dumps({"entries": entries, "updated_at": _WRITTEN_AT})
        self.put(f"leaderboard.{token(tenant)}.{token(budget)}.{window}", value)

    def counter(self, tenant: str, budget: str, window: str, entity: Entity) -> str:
        """Return the key of a counter."""
        return f"usage.{token(tenant)}.{token(budget)}.{window}.{token(entity)}"

    def purge(self, key: str) -> None:
        """Purge a key without a trace."""
        self._do(lambda js: js.purge_stream(self._stream, subject=self._subject(key)))

    def contents(self) -> dict[str, dict[str, Any]]:
        """Return value and headers of all keys, by key."""

        async def read(js: JetStreamContext) -> dict[str, dict[str, Any]]:
            found: dict[str, dict[str, Any]] = {}
            info = await js.stream_info(self._stream, subjects_filter=">")
            for subject in sorted(info.state.subjects or {}):
                message = await js.get_msg(self._stream, subject=subject, direct=False)
                found[subject.removeprefix(self._subject(""))] = {
                    "value": (message.data or b"").decode(errors="backslashreplace"),
                    "headers": dict(sorted((message.headers or {}).items())),
                }
            return found

        return self._do(read)

    @property
    def _stream(self) -> str:
        return f"KV_{self.bucket}"

    def _subject(self, key: str) -> str:
        return f"$KV.{self.bucket}.{key}"

    def _do(self, work: Callable[[JetStreamContext], Awaitable[Result]]) -> Result:
        async def connected() -> Result:
            client = await nats.connect(self.url, inbox_prefix="_INBOX_gateway")
            try:
                return await work(client.jetstream())
            finally:
                await client.close()

        return asyncio.run(connected())
