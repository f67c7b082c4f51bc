"""The bucket's stream: its state, its cluster, the live keys in it, and JetStream's errors."""

import base64
import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Any, NamedTuple

import anyio
from nats.aio.msg import Msg

from budget_recovery_dagster.adapters.nats.codec import StoredValue
from budget_recovery_dagster.adapters.nats.connection import Link, NatsConnection, Timeouts
from budget_recovery_dagster.adapters.nats.driver import (
    UNREADABLE_HEADERS,
    HeaderLines,
    parse_headers,
    size_of,
)
from budget_recovery_dagster.domain.falls import Configuration
from budget_recovery_dagster.domain.plan import Room, StoreLimits
from budget_recovery_dagster.domain.store import ClusterView, Replica, StoreIdentity, hears_majority
from budget_recovery_dagster.domain.verdict import CREATION_TOLERANCE, same_creation
from budget_recovery_dagster.errors import (
    SettingsError,
    StoreChangedError,
    StoreError,
    StoreMissingError,
    StoreNoQuorumError,
    StoreReadError,
    StoreRefusedError,
    StoreUnreachableError,
)

Response = Mapping[str, Any]
STATUS = "Status"
"""The header in which the driver returns a status line."""
NO_RESPONDERS = "503"
"""The status of a request that has no receiver."""
TTL_HEADER = "Nats-TTL"
"""The header that gives a key a time to live."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_NO_MESSAGE = 10037
_NO_STREAM = 10059
_JETSTREAM_OFF = frozenset({10039, 10076})
_UNAVAILABLE = 503
_TEMPORARILY_UNAVAILABLE = 10008
_MESSAGE_TOO_LARGE = 10054
# The settings check this too, but a bucket's name can come from elsewhere. In a subject, `*` or `>`
# would match other streams.
_BUCKET = re.compile(r"[A-Za-z0-9_-]{1,200}", re.ASCII)
# An offset past every key: the leader returns only their number.
_NO_SUBJECTS = 2**62
# How many keys may disappear between two pages before the listing must restart.
_OVERLAP = 1000
_MAX_LISTINGS = 3
# Before 2.10 a server that runs alone does not report a name.
_SINGLE_SERVER = "the only server"
# It has the domain and the account before the rest, and may have more fields at the end.
_FIELDS_OF_NEW_FORM = 11
_DELETIONS = frozenset({"DEL", "PURGE"})
_OPERATION = "KV-Operation"
# In lower case. The server acts on headers of this prefix: repeated, some would refuse the write,
# drop it as a duplicate, or remove other keys.
_CONTROL_PREFIX = "nats-"
# A server takes about 0.2 ms for each; the next requests wait at the server, not here.
_COUNTS_IN_FLIGHT = 500
_UNLIMITED = "unlimited"
_NONE = "none"


class LiveKey(NamedTuple):
    """A key's revision and value; the value of a deleted or missing key is None.

    The revision is the sequence of the last write or deletion, which the next write must name. It
    is 0 for a key without either. ``is_expired``: the store dropped the key because of its age.
    """

    revision: int
    value: StoredValue | None
    is_expired: bool = False


NEVER_WRITTEN = LiveKey(0, None)
"""A key that the store has never held, or has forgotten."""


@dataclass(frozen=True, slots=True)
class KeysRead:
    """The keys under a prefix, including deleted ones.

    Partial: two reads returned fewer keys than the server counted. ``read_after`` is the stream's
    sequence before the read.
    """

    keys: Mapping[str, LiveKey]
    is_partial: bool
    read_after: int | None = None

    def values(self) -> Mapping[str, StoredValue]:
        """Return the values of the keys that are not deleted."""
        return {key: live.value for key, live in self.keys.items() if live.value is not None}


@dataclass(frozen=True, slots=True)
class StreamInfo:
    """The stream's state, as reported by its leader.

    ``in_memory``: the stream is not in a file. ``keeps_one``: of each key only the newest message
    is kept. ``is_led``: the responder reaches a majority of the replicas, so no other server can be
    the leader. ``may_have_older``: messages are older than the stream, or that is not reported.

    ``server_time`` is the leader's clock (UTC), None for servers that do not report it. ``leader``
    is None for a stream without replicas, for which no other server can respond.
    ``subject_count`` is the number of requested subjects, including those of deleted keys.
    ``subjects`` is one page of them, in order; ``page_size`` is how many a page has at most.
    """

    identity: StoreIdentity
    limits: StoreLimits
    in_memory: bool
    keeps_one: bool
    is_led: bool
    may_have_older: bool
    server_time: datetime | None
    leader: str | None
    subject_count: int
    page_size: int
    subjects: tuple[str, ...]


# What the server adds to subject, headers and data of a message: in memory, in a file, and in a
# file if the message has headers.
_IN_MEMORY, _IN_FILE, _HEADERS_IN_FILE = 16, 30, 4


@dataclass(frozen=True, slots=True)
class MessageSizes:
    """How a stream counts the bytes of its messages.

    ``keeps_one``: of each key only the newest message is kept.
    """

    subject_prefix: str
    in_memory: bool
    keeps_one: bool

    def of(self, key: str, data: bytes, headers: HeaderLines) -> int:
        """Return the bytes of a message with this value under this key."""
        return self.of_lengths(key, len(data), size_of(headers) if headers else 0)

    def of_lengths(self, key: str, data: int, headers: int) -> int:
        """Return the bytes of a message of this key, from the lengths of data and headers."""
        size = len(self.subject_prefix) + len(key) + data + headers
        if self.in_memory:
            return size + _IN_MEMORY
        return size + _IN_FILE + (_HEADERS_IN_FILE if headers else 0)


class BucketStream:
    """The stream of one bucket; the bucket's name is checked and contains no wildcard."""

    def __init__(self, connection: NatsConnection, bucket: str, timeouts: Timeouts) -> None:
        self.connection = connection
        self.timeouts = timeouts
        self.bucket = check_bucket(bucket)
        self.name = f"KV_{bucket}"
        self.subject_prefix = f"$KV.{bucket}."
        self._pinned: StoreIdentity | None = None

    def pin(self, identity: StoreIdentity) -> None:
        """Require that every later answer, also on a new connection, is of this store.

        Two servers behind one address may show different stores. Later requests raise
        StoreChangedError if the stream's creation time is another one.
        """
        self._pinned = identity
        self.connection.verify = self._verify

    def unpin(self) -> None:
        """Accept the answers of any store again."""
        self._pinned = self.connection.verify = None

    async def ask(self, api: str, request: Response, *, within: float | None = None) -> Response:
        """Send a request to the JetStream API and return the response.

        Raises:
            StoreMissingError: the cluster has no such stream.
            StoreNoQuorumError: JetStream is temporarily unavailable.
            StoreUnreachableError: no response, or JetStream is not enabled.
            StorePermissionError: the user may not send this request.
            StoreReadError: another error, or an unexpected response.
        """
        message = await self.connection.ask(
            f"$JS.API.{api}", json.dumps(request).encode(), within=within
        )
        return self._response_in(message)

    def _response_in(self, message: Msg) -> Response:
        response, error = self._parse_response(message)
        if error is not None:
            raise jetstream_error(self.bucket, error)
        return response

    def _parse_response(self, message: Msg) -> tuple[Response, Response | None]:
        """Parse a response of the JetStream API; the second value is its error, if it is one."""
        if (message.headers or {}).get(STATUS) == NO_RESPONDERS:
            raise jetstream_off(self.bucket)
        with self.parsing():
            response: Response = json.loads(message.data)
            return response, error_in(response)

    async def read_key(self, key: str) -> LiveKey:
        """Read a key from the leader, which is never stale; raises as ``ask``."""
        subject, request = self.key_request(key)
        return self.key_in(await self.connection.ask(subject, request))

    def key_request(self, key: str) -> tuple[str, bytes]:
        """Return the subject and payload of the request that reads a key from the leader."""
        request = {"last_by_subj": f"{self.subject_prefix}{key}"}
        return f"$JS.API.STREAM.MSG.GET.{self.name}", json.dumps(request).encode()

    def key_in(self, message: Msg) -> LiveKey:
        """Parse the response to a ``key_request``; raises as ``ask``."""
        stored = self._message_in(message)
        if stored is None:
            return NEVER_WRITTEN
        with self.parsing():
            return read_stored_message(stored)

    async def read_lengths(self, key: str) -> tuple[int, int] | None:
        """Return the lengths of data and headers of a key's newest message; raises as ``ask``.

        None: the key has no message.
        """
        stored = self._message_in(await self.connection.ask(*self.key_request(key)))
        if stored is None:
            return None
        with self.parsing():
            return len(_decode(stored, "data")), len(_decode(stored, "hdrs"))

    def _message_in(self, message: Msg) -> Mapping[str, Any] | None:
        response, error = self._parse_response(message)
        if error is not None:
            if error.get("err_code") == _NO_MESSAGE:
                return None
            raise jetstream_error(self.bucket, error)
        with self.parsing():
            stored: Mapping[str, Any] = response["message"]
            return stored

    async def info(self) -> StreamInfo:
        """Request the stream's state from its leader; raises as ``ask``."""
        return self._require_pinned(
            self._parse_info(await self.ask(f"STREAM.INFO.{self.name}", {}))
        )

    async def _verify(self, link: Link) -> None:
        """Check on a new connection that it leads to the pinned store."""
        subject = f"$JS.API.STREAM.INFO.{self.name}"
        message = await self.connection.ask_on(link, subject, b"{}")
        self._require_pinned(self._parse_info(self._response_in(message)))

    def _require_pinned(self, info: StreamInfo) -> StreamInfo:
        pinned, created_at = self._pinned, info.identity.created_at
        if pinned is None or same_creation(pinned.created_at, created_at):
            return info
        raise StoreChangedError(
            f"The server shows another store of the bucket {self.bucket} than at the start:"
            f" {info.identity}, not created {pinned.created_at:%Y-%m-%d %H:%M:%S.%f} UTC.",
            "if the bucket was not made anew just now, check that every address in"
            " BUDGET_RECOVERY_NATS_URL leads to the same cluster.",
        )

    async def cluster_view(self, seen_at: datetime) -> ClusterView:
        """Request the servers that hold the stream, seen at ``seen_at``; it may have no leader."""
        response = await self.ask(f"STREAM.INFO.{self.name}", {})
        with self.parsing():
            return read_cluster(response, seen_at)

    async def page(self, prefix: str) -> StreamInfo:
        """Request the stream's state with the first keys under a prefix that ends in a dot.

        The keys include deleted ones.
        """
        return self._parse_info(await self._ask_subjects(prefix, offset=0))

    async def keys(self, prefix: str) -> frozenset[str]:
        """List the keys under ``prefix``, which ends in a dot, including deleted ones.

        Every key that exists during the whole call is listed.
        """
        for _ in range(_MAX_LISTINGS):
            found = await self._list(prefix)
            if found is not None:
                return found
        raise StoreReadError(
            f"Could not list the bucket {self.bucket}: too many keys were removed meanwhile.",
            "wait until the purge has finished, then check what it removed.",
        )

    async def count_matching(self, filters: Sequence[str], *, within: float) -> list[int | None]:
        """Request the number of keys that match each filter, deleted ones included.

        None: not counted in time, or this count failed.

        Raises:
            StoreChangedError: the connection leads to another store, whose counts are no answer.
            StoreUnreachableError: nothing was counted in time.
            StoreError: as ``ask``; nothing was counted.
        """
        counts: list[int | None] = [None] * len(filters)
        left, waiting = iter(enumerate(filters)), dict[str, int]()
        failure: StoreError | None = None
        try:
            async with self.connection.exchange() as exchange:
                with anyio.move_on_after(within):
                    while True:
                        for number, each in islice(left, _COUNTS_IN_FLIGHT - len(waiting)):
                            subject, payload = self._count_request(each)
                            waiting[await exchange.send(subject, payload)] = number
                        if not waiting:
                            break
                        for message in await exchange.receive():
                            number = waiting.pop(message.subject)
                            try:
                                counts[number] = self._count_in(message)
                            except StoreError as error:
                                failure = error
        except StoreChangedError:
            raise
        except StoreError as error:
            failure = error
        if filters and not any(count is not None for count in counts):
            raise failure or StoreUnreachableError(
                f"The bucket {self.bucket} did not count its keys within {within:g} s.",
                "check the NATS servers and the leader of the bucket's stream.",
            )
        return counts

    def _count_in(self, message: Msg) -> int:
        return self._parse_info(self._response_in(message)).subject_count

    def _count_request(self, subject_filter: str) -> tuple[str, bytes]:
        request = {
            "subjects_filter": f"{self.subject_prefix}{subject_filter}",
            "offset": _NO_SUBJECTS,
        }
        return f"$JS.API.STREAM.INFO.{self.name}", json.dumps(request).encode()

    async def configuration(self) -> Configuration:
        """Request the settings that decide what the stream keeps; raises as ``ask``."""
        response = await self.ask(f"STREAM.INFO.{self.name}", {})
        with self.parsing():
            return read_configuration(response["config"])

    async def _list(self, prefix: str) -> frozenset[str] | None:
        """List page by page; None if so many keys were removed that others may be missing."""
        found: set[str] = set()
        offset, last = 0, ""
        while True:
            page = await self._subjects(prefix, offset=offset)
            # Pages are slices of one sorted list, which changes between requests. If a page starts
            # at or before the end of the last one, no key was skipped.
            if offset > 0 and min(page.subjects, default=last) >= last:
                return None
            found.update(subject.removeprefix(self.subject_prefix) for subject in page.subjects)
            # Not by the number of names: those that are not UTF-8 may be equal in the response.
            if offset + page.page_size >= page.subject_count:
                return frozenset(found)
            last = max(page.subjects)
            offset += max(len(page.subjects) - _OVERLAP, 1)

    async def _subjects(self, prefix: str, *, offset: int) -> StreamInfo:
        return self._require_pinned(
            self._parse_info(await self._ask_subjects(prefix, offset=offset))
        )

    async def _ask_subjects(self, prefix: str, *, offset: int) -> Response:
        request = {"subjects_filter": f"{self.subject_prefix}{prefix}>", "offset": offset}
        return await self.ask(f"STREAM.INFO.{self.name}", request)

    def _parse_info(self, response: Response) -> StreamInfo:
        with self.parsing():
            time: str | None = response.get("ts")
            return StreamInfo(
                identity=StoreIdentity(
                    _parse_time(response["created"]), response["state"]["last_seq"]
                ),
                limits=read_limits(response["config"], response["state"]),
                in_memory=response["config"].get("storage") == "memory",
                keeps_one=response["config"].get("max_msgs_per_subject") == 1,
                server_time=None if time is None else _parse_time(time),
                leader=self._leader(response),
                is_led=hears_majority(read_cluster(response, datetime.now(UTC))),
                may_have_older=_may_have_older(response),
                subject_count=response.get("total", 0),
                page_size=response.get("limit", 0),
                subjects=tuple(response["state"].get("subjects") or ()),
            )

    def _leader(self, response: Response) -> str | None:
        """Return the leader's name, after checking that the leader itself responded."""
        if response["config"]["num_replicas"] == 1:
            return None
        cluster = response["cluster"]
        leader: str | None = cluster.get("leader")
        # Without a quorum another server may respond with its own, possibly stale state.
        if not leader or leader in {replica["name"] for replica in cluster.get("replicas") or ()}:
            raise StoreNoQuorumError(
                f"The bucket {self.bucket} has no leader.",
                "restore a quorum of NATS servers, then wait for a leader.",
            )
        return leader

    def error_in_write(self, response: Msg) -> Response | None:
        """Return the error in the response to a write; None: the write is stored.

        Raises:
            StoreNoQuorumError: no server received the write.
            StoreReadError: the response is unexpected.
        """
        if (response.headers or {}).get(STATUS) == NO_RESPONDERS:
            raise StoreNoQuorumError(
                f"No stream accepts writes to the bucket {self.bucket}.",
                "check that the bucket exists, then wait until its stream has a leader.",
            )
        # There are many responses, and nearly all are without an error.
        if response.data and b'"error"' not in response.data:
            return None
        with self.parsing():
            return error_in(json.loads(response.data))

    def sequence_in(self, message: Msg) -> int:
        """Return the sequence of a stored write."""
        with self.parsing():
            return int(json.loads(message.data)["seq"])

    @contextlib.contextmanager
    def parsing(self) -> Iterator[None]:
        """Turn parse errors inside the context into a StoreReadError."""
        try:
            yield
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise StoreReadError(
                f"Unexpected JetStream response for the bucket {self.bucket}.",
                "check that this project supports the version of the NATS server.",
            ) from error


def check_bucket(bucket: str) -> str:
    """Return ``bucket`` unchanged.

    Raises:
        SettingsError: NATS allows no bucket of that name; in a subject it could match others.
    """
    if not _BUCKET.fullmatch(bucket):
        raise SettingsError(
            f"{bucket!a} is not a valid bucket name.",
            "set BUDGET_RECOVERY_BUCKET to letters, digits, - and _.",
        )
    return bucket


def jetstream_off(bucket: str) -> StoreError:
    """Return the error for a server or account without JetStream."""
    return StoreUnreachableError(
        f"JetStream is not enabled, so the bucket {bucket} is not available.",
        "enable JetStream on the NATS server and for the account of the NATS user.",
    )


def jetstream_error(bucket: str, error: Mapping[str, Any]) -> StoreError:
    """Return the error for an error response of JetStream."""
    code, number = error.get("code"), error.get("err_code")
    description = _describe(error)
    if number == _NO_STREAM:
        return StoreMissingError(
            f"The bucket {bucket} does not exist.",
            "correct BUDGET_RECOVERY_BUCKET, or start the gateway, which creates the bucket.",
        )
    if number in _JETSTREAM_OFF:
        return jetstream_off(bucket)
    if code == _UNAVAILABLE:
        return StoreNoQuorumError(
            f"JetStream cannot serve the bucket {bucket}: {description}.",
            "restore a quorum of NATS servers, then wait for a leader.",
        )
    return StoreReadError(
        f"JetStream rejected a request for the bucket {bucket}: {description}.",
        "check the log of the NATS server.",
    )


def write_error(bucket: str, key: str, error: Mapping[str, Any]) -> StoreError:
    """Return the error for a rejected write, other than a revision conflict."""
    number = error.get("err_code")
    if number in {_NO_STREAM, _TEMPORARILY_UNAVAILABLE} or number in _JETSTREAM_OFF:
        return jetstream_error(bucket, error)
    return StoreRefusedError(
        f"The bucket {bucket} rejected the write of {key}: {_describe(error)}.",
        "check the limits of bucket and account, and the disks of the NATS servers.",
    )


def value_error(error: Mapping[str, Any]) -> str | None:
    """Return why JetStream never stores this value; None if the error has another cause."""
    return _describe(error) if error.get("err_code") == _MESSAGE_TOO_LARGE else None


def _describe(error: Mapping[str, Any]) -> str:
    return f"{error.get('description', 'no description')} ({error.get('err_code')})"


def error_in(response: Response) -> Response | None:
    """Return the error in a JetStream response, None if there is none.

    Raises:
        TypeError, AttributeError: the response has another form.
    """
    error = response.get("error")
    if error is not None and not isinstance(error, dict):
        raise TypeError(f"unexpected error: {error!r}")
    return error


def read_cluster(info: Mapping[str, Any], seen_at: datetime) -> ClusterView:
    """Parse the cluster part of a stream's info; the cluster may have no leader.

    Raises:
        KeyError, TypeError, ValueError: the info has another form.
    """
    cluster = info.get("cluster")
    if cluster is None:
        cluster = {"leader": _SINGLE_SERVER}
    since = cluster.get("leader_since")
    return ClusterView(
        seen_at=seen_at,
        cluster=cluster.get("name") or None,
        leader=cluster.get("leader") or None,
        leader_since=None if since is None else datetime.fromisoformat(since).astimezone(UTC),
        replica_count=int(info["config"]["num_replicas"]),
        replicas=tuple(map(_read_replica, cluster.get("replicas") or ())),
    )


def read_configuration(config: Mapping[str, Any]) -> Configuration:
    """Parse the configuration of a stream.

    Raises:
        KeyError, TypeError, AttributeError: the configuration has another form.
    """
    age = _age(config.get("max_age") or 0)
    mirror = config.get("mirror")
    sources = sorted(str(source["name"]) for source in config.get("sources") or ())
    return {
        "max_age": _UNLIMITED if age is None else f"{age.total_seconds():g} s",
        "max_bytes": _shown_limit(config.get("max_bytes")),
        "max_msgs": _shown_limit(config.get("max_msgs")),
        "history": _shown_limit(config.get("max_msgs_per_subject")),
        "discard": str(config.get("discard", "old")),
        "num_replicas": str(config["num_replicas"]),
        "allow_msg_ttl": "on" if config.get("allow_msg_ttl") is True else "off",
        "mirror": str(mirror["name"]) if mirror else _NONE,
        "sources": ", ".join(sources) or _NONE,
    }


def _shown_limit(number: int | None) -> str:
    return str(number) if number is not None and number > 0 else _UNLIMITED


def _read_replica(replica: Mapping[str, Any]) -> Replica:
    return Replica(
        name=replica["name"],
        is_current=replica["current"] is True,
        is_offline=bool(replica.get("offline")),
        lag=int(replica.get("lag") or 0),
        silent_for=timedelta(microseconds=int(replica.get("active") or 0) // 1000),
    )


def read_message(
    data: bytes, headers: Mapping[str, str] | None, revision: int, written_ns: int
) -> LiveKey:
    """Return the live key of a message; unreadable headers make the value unreadable."""
    if not headers:
        return LiveKey(revision, StoredValue(data, None, written_ns))
    # An expired key has a marker message, like a deleted one.
    is_expired = headers.get("Nats-Marker-Reason") == "MaxAge"
    if headers.get(_OPERATION) in _DELETIONS or "Nats-Marker-Reason" in headers:
        return LiveKey(revision, None, is_expired)
    # Without its headers the message may be a deletion.
    fault = "the headers are unreadable" if UNREADABLE_HEADERS in headers else None
    ttl, kept = headers.get(TTL_HEADER), gateway_headers(tuple(headers.items()))
    return LiveKey(revision, StoredValue(data, ttl, written_ns, fault, kept))


def gateway_headers(lines: HeaderLines) -> tuple[tuple[str, str], ...]:
    """Return the headers that are no instructions to the server or to key-value clients."""
    return tuple(
        (name, value)
        for name, value in lines
        if not (lower := name.lower()).startswith(_CONTROL_PREFIX) and lower != _OPERATION.lower()
    )


def read_stored_message(message: Mapping[str, Any]) -> LiveKey:
    """Parse a message of the JetStream API.

    Raises:
        KeyError, TypeError, ValueError: the message has another form.
    """
    return read_message(
        _decode(message, "data"),
        parse_headers(_decode(message, "hdrs")),
        int(message["seq"]),
        nanoseconds(datetime.fromisoformat(message["time"])),
    )


def _decode(message: Mapping[str, Any], field: str) -> bytes:
    return base64.b64decode(message.get(field) or "", validate=True)


def sequence_and_time(reply: str) -> tuple[int, int]:
    """Return a message's stream sequence and its time in nanoseconds since 1970.

    ``$JS.ACK.<stream>.<consumer>.<delivered>.<sequence>.<consumer sequence>.<time>.<pending>``;
    the newer form has the domain and the account after ``ACK``.
    """
    fields = reply.split(".")
    first = 5 if len(fields) < _FIELDS_OF_NEW_FORM else 7
    return int(fields[first]), int(fields[first + 2])


def nanoseconds(time: datetime) -> int:
    """Return the nanoseconds from 1970 to a time (aware)."""
    return (time - _EPOCH) // timedelta(microseconds=1) * 1000


def _parse_time(text: str) -> datetime:
    """Parse a time, truncated to microseconds."""
    return datetime.fromisoformat(text).astimezone(UTC)


def _may_have_older(response: Response) -> bool:
    """Whether the oldest message is older than the stream, or of unknown age."""
    state = response["state"]
    if not state["messages"]:
        return False
    oldest: str | None = state.get("first_ts")
    created_at = _parse_time(response["created"])
    # The two times may come from two servers.
    return oldest is None or _parse_time(oldest) < created_at - CREATION_TOLERANCE


def read_limits(config: Mapping[str, Any], state: Mapping[str, Any]) -> StoreLimits:
    """Parse the limits in the configuration of a stream, and what it holds.

    Raises:
        KeyError, TypeError: one of the two has another form.
    """
    return StoreLimits(
        used=Room(state["messages"], state["bytes"]),
        max_messages=_limit(config.get("max_msgs")),
        max_bytes=_limit(config.get("max_bytes")),
        evicts=config.get("discard") != "new",
        max_age=_age(config.get("max_age") or 0),
        supports_ttl=config.get("allow_msg_ttl") is True,
    )


def _limit(value: int | None) -> int | None:
    """Return a limit; the server reports 0 or -1 where there is none."""
    return value if value is not None and value > 0 else None


def _age(nanoseconds: int) -> timedelta | None:
    return timedelta(microseconds=nanoseconds // 1000) if nanoseconds else None
