"""Looking at the usage store with the rights of the NATS user, and leaving it as it was.

Whether the user may publish is seen from the answer: a server that refuses the user says so, and
whatever else is answered, an error too, has come through. So each request is one that is refused by
whoever gets it. A writing names another stream than the bucket's and a sequence that no stream
reaches, and a consumer is asked for in another stream than the one that is asked. Of such a writing
only those hear who subscribe to the subjects and not to the bucket: empty, under a key that is
nobody's.
"""

import contextlib
import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from secrets import token_hex
from typing import Any

import anyio
from anyio.from_thread import BlockingPortal, start_blocking_portal

from budget_recovery_dagster.adapters.nats.address import (
    Access,
    credentials_expiry,
    open_access,
    read_credentials,
)
from budget_recovery_dagster.adapters.nats.codec import BOARDS, COUNTERS
from budget_recovery_dagster.adapters.nats.connection import INBOX_PREFIX, NatsConnection, Timeouts
from budget_recovery_dagster.adapters.nats.reader import INACTIVE_SECONDS, read_keys
from budget_recovery_dagster.adapters.nats.store import GUARD
from budget_recovery_dagster.adapters.nats.stream import BucketStream, read_cluster
from budget_recovery_dagster.domain.bucket_settings import BucketSettings
from budget_recovery_dagster.errors import StoreError, StorePermissionError
from budget_recovery_dagster.examination_ports import (
    BucketSeen,
    Credentials,
    Grant,
    Permission,
    StoreServer,
)

# No tenant and no deployment has it: an encoded name is never a lone `=` with more after it.
_NOBODY = "=nobody"
# As long as those that are really written: a user may be confined to keys of that length.
_NOBODYS_KEYS = {
    Permission.MARK: (GUARD, f"{GUARD}.{_NOBODY}"),
    Permission.RAISE: (COUNTERS, f"{COUNTERS}.{_NOBODY}.{_NOBODY}.lifetime.{_NOBODY}"),
    Permission.REBUILD: (BOARDS, f"{BOARDS}.{_NOBODY}.{_NOBODY}.lifetime"),
}
_NO_STREAM = "no-stream-has-this-name"
_EXPECTED_STREAM = "Nats-Expected-Stream"
_EXPECTED_SEQUENCE = "Nats-Expected-Last-Sequence"
_NEVER_REACHED = 2**63 - 1
# With any of these a stream drops what it was given, refuses it, or turns it into something else.
_FOREIGN = ("mirror", "subject_transform", "sealed", "allow_msg_counter", "no_ack")
_KEEPS_ALL = "limits"


@contextlib.contextmanager
def open_examination(
    url: str,
    *,
    credentials: Path | None = None,
    certificate_authority: Path | None = None,
    timeouts: Timeouts | None = None,
) -> Iterator["NatsExamination"]:
    """Open an examination of the store at ``url`` (more servers after a comma).

    Raises:
        SettingsError: the URL or a file is wrong; the message names it.
    """
    access = open_access(url, credentials, certificate_authority)
    with start_blocking_portal("asyncio") as portal:
        examination = NatsExamination(portal, access, timeouts or Timeouts())
        try:
            yield examination
        finally:
            portal.call(examination.close)


class NatsExamination:
    """The port, on one connection, and on more for as long as each server is tried."""

    def __init__(self, portal: BlockingPortal, access: Access, timeouts: Timeouts) -> None:
        self._portal = portal
        self._access = access
        self._timeouts = timeouts
        self._connection = NatsConnection(access, timeouts)

    @property
    def credentials(self) -> Credentials | None:
        """The credentials file that is in use, if one is."""
        file = self._access.credentials
        return (
            None if file is None else Credentials(file, credentials_expiry(read_credentials(file)))
        )

    def servers(self) -> tuple[StoreServer, ...]:
        """Connect to each server of the URL, in its order."""
        return self._portal.call(self._servers)

    def require_answers(self) -> str:
        """See that the user may receive answers; return the subject that it may subscribe to."""
        self._portal.call(self._connection.require_answers)
        return f"{INBOX_PREFIX}.>"

    def grants(self, bucket: str) -> Mapping[Permission, Grant]:
        """Find out all permissions, whether or not the bucket exists."""
        return self._portal.call(self._grants, self._stream(bucket))

    def look(self, bucket: str) -> BucketSeen:
        """Ask the stream's leader about the bucket."""
        return self._portal.call(_look, self._stream(bucket))

    def read_nothing(self, bucket: str) -> None:
        """Read the counters of a tenant that cannot exist, in the way in which all are read."""
        self._portal.call(read_keys, self._stream(bucket), f"{COUNTERS}.{_NOBODY}.")

    async def close(self) -> None:
        """Disconnect."""
        await self._connection.close()

    def _stream(self, bucket: str) -> BucketStream:
        return BucketStream(self._connection, bucket, self._timeouts)

    async def _servers(self) -> tuple[StoreServer, ...]:
        found: list[StoreServer | None] = [None] * len(self._access.servers)

        async def connect(number: int) -> None:
            url = self._access.servers[number].url
            try:
                version = await self._connection.version_of(self._access.servers[number])
                found[number] = StoreServer(url, version, None)
            except StoreError as error:
                found[number] = StoreServer(url, None, error)

        async with anyio.create_task_group() as tasks:
            for number in range(len(found)):
                tasks.start_soon(connect, number)
        return tuple(server for server in found if server is not None)

    async def _grants(self, stream: BucketStream) -> Mapping[Permission, Grant]:
        grants: dict[Permission, Grant] = {}

        async def find_out(permission: Permission) -> None:
            grants[permission] = await _grant(stream, permission)

        async with anyio.create_task_group() as tasks:
            for permission in Permission:
                tasks.start_soon(find_out, permission)
        return {permission: grants[permission] for permission in Permission}


async def _grant(stream: BucketStream, permission: Permission) -> Grant:
    pattern, subject, payload, headers = _request(stream, permission)
    try:
        await stream.connection.ask(subject, payload, headers)
    except StorePermissionError:
        return Grant(pattern, is_granted=False)
    except StoreError as error:
        return Grant(pattern, is_granted=False, failure=error)
    return Grant(pattern, is_granted=True)


def _request(
    stream: BucketStream, permission: Permission
) -> tuple[str, str, bytes, Mapping[str, str] | None]:
    """Return what the user must be allowed, and a request of that kind that has no effect."""
    api, bucket = "$JS.API", stream.subject_prefix
    consumer = f"budget-recovery-{token_hex(8)}"
    elsewhere = json.dumps({"stream_name": _NO_STREAM, "config": {"name": consumer}}).encode()
    impossible = {_EXPECTED_STREAM: _NO_STREAM, _EXPECTED_SEQUENCE: str(_NEVER_REACHED)}
    match permission:
        case Permission.ASK:
            subject = f"{api}.STREAM.INFO.{stream.name}"
            return subject, subject, b"{}", None
        case Permission.READ_KEY:
            subject, payload = stream.key_request(f"{GUARD}.{_NOBODY}")
            return subject, subject, payload, None
        case Permission.READ_COUNTERS | Permission.READ_BOARDS:
            first = COUNTERS if permission is Permission.READ_COUNTERS else BOARDS
            create = f"{api}.CONSUMER.CREATE.{stream.name}"
            read = f"{create}.{consumer}.{bucket}{first}.{_NOBODY}.>"
            return f"{create}.*.{bucket}{first}.>", read, elsewhere, None
        case Permission.PULL:
            pull = f"{api}.CONSUMER.MSG.NEXT.{stream.name}"
            return f"{pull}.*", f"{pull}.{consumer}", b'{"batch":1,"no_wait":true}', None
        case Permission.TIDY:
            delete = f"{api}.CONSUMER.DELETE.{stream.name}"
            return f"{delete}.*", f"{delete}.{consumer}", b"{}", None
        case Permission.MARK | Permission.RAISE | Permission.REBUILD:
            first, key = _NOBODYS_KEYS[permission]
            return f"{bucket}{first}.>", f"{bucket}{key}", b"", impossible


async def _look(stream: BucketStream) -> BucketSeen:
    answer = await stream.ask(f"STREAM.INFO.{stream.name}", {})
    with stream.making_sense():
        told_at: str | None = answer.get("ts")
        return BucketSeen(
            subject=f"{stream.subject_prefix}>",
            settings=_settings(answer["config"], answer["state"], answer.get("cluster") or {}),
            cluster=read_cluster(answer, datetime.now(UTC)),
            told_at=None if told_at is None else datetime.fromisoformat(told_at).astimezone(UTC),
        )


def _settings(
    config: Mapping[str, Any], state: Mapping[str, Any], cluster: Mapping[str, Any]
) -> BucketSettings:
    consumer_limits = config.get("consumer_limits") or {}
    foreign = [f"{name} set" for name in _FOREIGN if config.get(name)]
    if config["retention"] != _KEEPS_ALL:
        foreign.append(f"the retention {config['retention']}")
    return BucketSettings(
        subjects=tuple(config.get("subjects") or ()),
        foreign=tuple(foreign),
        replicas=config["num_replicas"],
        is_clustered=bool(cluster.get("name")),
        history=_limit(config.get("max_msgs_per_subject")),
        keeps_for=_span(config.get("max_age")),
        keeps_ttl=config.get("allow_msg_ttl") is True,
        in_memory=config["storage"] == "memory",
        is_written_late=config.get("persist_mode") == "async",
        allows_direct_get=config.get("allow_direct") is True,
        denies_purge=config.get("deny_purge") is True,
        drops_oldest=config.get("discard") != "new",
        most_messages=_limit(config.get("max_msgs")),
        messages=state["messages"],
        most_bytes=_limit(config.get("max_bytes")),
        bytes=state["bytes"],
        most_message_bytes=_limit(config.get("max_msg_size")),
        most_consumers=_limit(config.get("max_consumers")),
        consumers=state.get("consumer_count") or 0,
        consumers_may_last=_span(consumer_limits.get("inactive_threshold")),
        consumers_must_last=timedelta(seconds=INACTIVE_SECONDS),
    )


def _limit(number: int | None) -> int | None:
    """Read a limit, which the server writes as 0 or -1 where there is none."""
    return number if number is not None and number > 0 else None


def _span(nanoseconds: int | None) -> timedelta | None:
    return timedelta(microseconds=nanoseconds // 1000) if nanoseconds else None
