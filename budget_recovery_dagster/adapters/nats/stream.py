"""The bucket's stream: its description, stored messages, and live keys."""

import base64
import contextlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from nats.aio.msg import Msg

from budget_recovery_dagster.adapters.nats.codec import KeysRead, StoredValue
from budget_recovery_dagster.adapters.nats.connection import (
    UNREADABLE_HEADERS,
    NatsConnection,
    Timeouts,
)
from budget_recovery_dagster.adapters.nats.failures import jetstream_off, refused_by_jetstream
from budget_recovery_dagster.domain.store import ClusterView, Replica, StoreIdentity, hears_majority
from budget_recovery_dagster.errors import (
    SettingsError,
    StoreNoQuorumError,
    StoreReadError,
    StoreWriteError,
)
from budget_recovery_dagster.ports import IsOpen

Outcome = TypeVar("Outcome")
Outcome_co = TypeVar("Outcome_co", covariant=True)
TRIES = 50
"""How often a key is read again because somebody else has written it; then it is given up on."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class LiveKey(NamedTuple):
    """A key as it stands: its value, None where it is deleted, and its revision.

    The revision is the sequence of its last writing or deletion, which the next writing must name;
    0 where the store knows of neither.
    """

    revision: int
    value: StoredValue | None


NEVER_WRITTEN = LiveKey(0, None)
"""A key of which the store knows nothing."""


@dataclass(frozen=True, slots=True)
class LiveKeysRead:
    """What was found under a prefix, deleted keys too. Partial: as of ``KeysRead``."""

    keys: dict[str, LiveKey]
    is_partial: bool

    def without_deleted(self) -> KeysRead:
        """Return the values, which deleted keys have not."""
        values = {key: live.value for key, live in self.keys.items() if live.value is not None}
        return KeysRead(values, self.is_partial)


class Write(NamedTuple):
    """A value to be written, with the text of its time to live, if it is to have one."""

    data: bytes
    ttl: str | None


class Decision(NamedTuple, Generic[Outcome_co]):
    """What becomes of a key; with a ``write``, once the store has taken that."""

    outcome: Outcome_co
    write: Write | None = None


class Change(Protocol[Outcome]):
    """What is wanted of one key."""

    @property
    def key(self) -> str:
        """The key."""
        ...

    def decide(self, live: LiveKey) -> Decision[Outcome]:
        """Decide what is to be written over what stands there; to be called right before it is."""
        ...

    def refused(self, outcome: Outcome, reason: str) -> Outcome:
        """Return what becomes of the key in place of ``outcome`` if the store refuses the value."""
        ...


@dataclass(frozen=True, slots=True)
class WritingTerms:
    """What every writing depends on besides its key.

    ``now`` tells the store's time (aware); ``keeps_ttl`` whether the store knows times to live of
    single keys. Where it does not, a key is kept too long, which does no harm.
    """

    is_open: IsOpen
    now: Callable[[], datetime]
    keeps_ttl: bool


def nanoseconds(moment: datetime) -> int:
    """Count the nanoseconds from 1970 to a moment (aware)."""
    return (moment - _EPOCH) // timedelta(microseconds=1) * 1000


def written_at(moment: datetime) -> str:
    """Write a moment (aware) as it stands in values: in UTC, to the second."""
    return moment.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def changes_too_fast(bucket: str, key: str) -> StoreWriteError:
    """Say that a key could not be written because others never stopped doing so."""
    return StoreWriteError(
        f"{key} in the bucket {bucket} was written by others {TRIES} times in a row.",
        "see who writes it so often; restore again once it is quieter.",
    )


# Servers of before 2.10 do not say who they are where there are no others.
_ALONE = "the only server"


def read_cluster(info: Mapping[str, Any], seen_at: datetime) -> ClusterView:
    """Read what an answer about a stream says of its servers; it may have no leader.

    Raises:
        KeyError, TypeError, ValueError: it says something else.
    """
    cluster = info.get("cluster")
    if cluster is None:
        cluster = {"leader": _ALONE}
    since = cluster.get("leader_since")
    return ClusterView(
        seen_at=seen_at,
        cluster=cluster.get("name") or None,
        leader=cluster.get("leader") or None,
        leader_since=None if since is None else datetime.fromisoformat(since).astimezone(UTC),
        replica_count=int(info["config"]["num_replicas"]),
        replicas=tuple(map(_read_replica, cluster.get("replicas") or ())),
    )


def _read_replica(replica: Mapping[str, Any]) -> Replica:
    return Replica(
        name=replica["name"],
        is_current=replica["current"] is True,
        is_offline=bool(replica.get("offline")),
        lag=int(replica.get("lag") or 0),
        silent_for=timedelta(microseconds=int(replica.get("active") or 0) // 1000),
    )


# Domain and account stand before the rest, and more may follow it.
_FIELDS_OF_NEWER_FORM = 11


def sequence_and_time(reply: str) -> tuple[int, int]:
    """Read a message's stream sequence, and when it was written, in nanoseconds since 1970.

    ``$JS.ACK.<stream>.<consumer>.<delivered>.<sequence>.<consumer sequence>.<time>.<pending>``;
    the newer form has the domain and the account after ``ACK``.
    """
    fields = reply.split(".")
    first = 5 if len(fields) < _FIELDS_OF_NEWER_FORM else 7
    return int(fields[first]), int(fields[first + 2])


TTL_HEADER = "Nats-TTL"
"""The header that gives a key a time to live."""
_DELETIONS = frozenset({"DEL", "PURGE"})
_FIRST_LINE = "NATS/1.0"


def read_message(
    data: bytes, headers: Mapping[str, str], revision: int, written_ns: int
) -> LiveKey:
    """Read a message; where its headers cannot be read, its value means nothing."""
    # The server marks a key that it has dropped for its age as if somebody had deleted it.
    if headers.get("KV-Operation") in _DELETIONS or "Nats-Marker-Reason" in headers:
        return LiveKey(revision, None)
    # Without headers nobody knows whether it is a deletion.
    fault = "its headers cannot be read" if UNREADABLE_HEADERS in headers else None
    return LiveKey(revision, StoredValue(data, headers.get(TTL_HEADER), written_ns, fault))


def read_stored_message(message: Mapping[str, Any]) -> LiveKey:
    """Read a message as the JetStream API shows it.

    Raises:
        KeyError, TypeError, ValueError: it shows something else.
    """
    return read_message(
        base64.b64decode(message.get("data") or "", validate=True),
        _parse_headers(base64.b64decode(message.get("hdrs") or "", validate=True)),
        int(message["seq"]),
        nanoseconds(datetime.fromisoformat(message["time"])),
    )


def _parse_headers(raw: bytes) -> dict[str, str]:
    """Read a block of headers; one that is not as it should be is unreadable as a whole."""
    if not raw:
        return {}
    unreadable = {UNREADABLE_HEADERS: ""}
    try:
        first, *lines = raw.decode().split("\r\n")
    except UnicodeDecodeError:
        return unreadable
    if first != _FIRST_LINE or lines[-2:] != ["", ""]:
        return unreadable
    pairs = [line.partition(":") for line in lines[:-2]]
    if not all(name and colon for name, colon, _ in pairs):
        return unreadable
    # Of several lines of one name the server itself takes the first.
    return {name: value.strip() for name, _, value in reversed(pairs)}


STATUS = "Status"
"""The header under which the driver shows a status line."""
NO_RESPONDERS = "503"
"""The status with which the server itself answers what nobody else would."""
_NO_MESSAGE = 10037
# As in the settings, and here once more: whoever opens a store need not have its name from there,
# and in a subject `*` or `>` would reach into other streams.
_BUCKET = re.compile(r"[A-Za-z0-9_-]{1,200}", re.ASCII)
# Past every key: then the leader tells only how many there are.
_NO_SUBJECTS = 2**62
# Keys that may vanish between two pages without the listing having to begin again.
_OVERLAP = 1000
_LISTINGS = 3
Answer = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class StreamInfo:
    """What the stream's leader says of it.

    ``keeps_for`` is the age at which it drops whatever it holds, None if it never does;
    ``keeps_ttl`` whether it knows times to live of single keys; ``is_led`` whether the one who
    answered hears of so many replicas that nobody else can be the leader.

    ``told_at`` is the leader's time when it answered, None where its server does not tell it.
    ``leader`` is None where the stream has no replicas, so that no other server could answer.
    ``subject_count`` and ``subjects`` are about the subjects that were asked for, which include
    those of deleted keys; ``subjects`` is a part of them in their order, the whole of which may
    take several questions.
    """

    identity: StoreIdentity
    keeps_for: timedelta | None
    keeps_ttl: bool
    is_led: bool
    told_at: datetime | None
    leader: str | None
    subject_count: int
    subjects: tuple[str, ...]


class BucketStream:
    """The stream of one bucket; its name can name no other stream and no pattern."""

    def __init__(self, connection: NatsConnection, bucket: str, timeouts: Timeouts) -> None:
        self.connection = connection
        self.timeouts = timeouts
        self.bucket = check_bucket(bucket)
        self.name = f"KV_{bucket}"
        self.subject_prefix = f"$KV.{bucket}."

    async def ask(self, api: str, request: Answer, *, within: float | None = None) -> Answer:
        """Ask the JetStream API and return its answer.

        Raises:
            StoreMissingError: the cluster has no such stream.
            StoreNoQuorumError: JetStream cannot serve now.
            StoreUnreachableError: no answer, or no JetStream.
            StorePermissionError: the user may not ask this.
            StoreReadError: another refusal, or no sense in the answer.
        """
        message = await self.connection.ask(
            f"$JS.API.{api}", json.dumps(request).encode(), within=within
        )
        answer, error = self._read_answer(message)
        if error is not None:
            raise refused_by_jetstream(self.bucket, error)
        return answer

    def _read_answer(self, message: Msg) -> tuple[Answer, Answer | None]:
        """Read an answer of the JetStream API, and the error that it may be."""
        if (message.headers or {}).get(STATUS) == NO_RESPONDERS:
            raise jetstream_off(self.bucket)
        with self.making_sense():
            answer: Answer = json.loads(message.data)
            return answer, error_in(answer)

    async def read_key(self, key: str) -> LiveKey:
        """Read a key from the leader, which is never behind."""
        subject, request = self.key_request(key)
        return self.key_in(await self.connection.ask(subject, request))

    def key_request(self, key: str) -> tuple[str, bytes]:
        """Return the subject and the request by which the leader is asked for a key."""
        request = {"last_by_subj": f"{self.subject_prefix}{key}"}
        return f"$JS.API.STREAM.MSG.GET.{self.name}", json.dumps(request).encode()

    def key_in(self, message: Msg) -> LiveKey:
        """Read the leader's answer about a key; raises as ``ask``."""
        answer, error = self._read_answer(message)
        if error is not None:
            if error.get("err_code") == _NO_MESSAGE:
                return NEVER_WRITTEN
            raise refused_by_jetstream(self.bucket, error)
        with self.making_sense():
            return read_stored_message(answer["message"])

    async def info(self) -> StreamInfo:
        """Ask the leader for the stream's identity and its own time."""
        return self._understand(await self.ask(f"STREAM.INFO.{self.name}", {}))

    async def cluster_view(self, seen_at: datetime) -> ClusterView:
        """Ask for the servers that hold the stream; it may have no leader."""
        answer = await self.ask(f"STREAM.INFO.{self.name}", {})
        with self.making_sense():
            return read_cluster(answer, seen_at)

    async def count(self, prefix: str) -> StreamInfo:
        """Ask the leader how many keys, deleted ones too, begin with a prefix that ends in a dot.

        In the same moment it tells the identity.
        """
        return await self._subjects(prefix, offset=_NO_SUBJECTS)

    async def keys(self, prefix: str) -> frozenset[str]:
        """List the keys, deleted ones too, that begin with ``prefix``, which ends in a dot.

        Every key that was there all the time is among them.
        """
        for _ in range(_LISTINGS):
            found = await self._list(prefix)
            if found is not None:
                return found
        raise StoreReadError(
            f"So many keys vanished from the bucket {self.bucket} that they could not be listed.",
            "wait until the purge is over; then look at what was removed.",
        )

    async def _list(self, prefix: str) -> frozenset[str] | None:
        """List page by page; None if so many keys vanished that others may have been passed by."""
        found: set[str] = set()
        offset, last = 0, ""
        while True:
            page = await self._subjects(prefix, offset=offset)
            # Pages are cut from one sorted list that changes in between. If this one begins no
            # later than the last one ended, nothing lies between the two.
            if offset > 0 and min(page.subjects, default=last) >= last:
                return None
            found.update(subject.removeprefix(self.subject_prefix) for subject in page.subjects)
            if offset + len(page.subjects) >= page.subject_count:
                return frozenset(found)
            last = max(page.subjects)
            offset += max(len(page.subjects) - _OVERLAP, 1)

    async def _subjects(self, prefix: str, *, offset: int) -> StreamInfo:
        request = {"subjects_filter": f"{self.subject_prefix}{prefix}>", "offset": offset}
        return self._understand(await self.ask(f"STREAM.INFO.{self.name}", request))

    def _understand(self, answer: Answer) -> StreamInfo:
        with self.making_sense():
            told_at: str | None = answer.get("ts")
            return StreamInfo(
                identity=StoreIdentity(_moment(answer["created"]), answer["state"]["last_seq"]),
                keeps_for=_age(answer["config"].get("max_age") or 0),
                keeps_ttl=answer["config"].get("allow_msg_ttl") is True,
                told_at=None if told_at is None else _moment(told_at),
                leader=self._leader(answer),
                is_led=hears_majority(read_cluster(answer, datetime.now(UTC))),
                subject_count=answer.get("total", 0),
                subjects=tuple(answer["state"].get("subjects") or ()),
            )

    def _leader(self, answer: Answer) -> str | None:
        """Return the leader's name, having seen that it is the leader who answers."""
        if answer["config"]["num_replicas"] == 1:
            return None
        cluster = answer["cluster"]
        leader: str | None = cluster.get("leader")
        # Without a quorum another server may answer for the stream, with what it happens to hold.
        if not leader or leader in {replica["name"] for replica in cluster.get("replicas") or ()}:
            raise StoreNoQuorumError(
                f"The bucket {self.bucket} has no leader.",
                "bring back enough NATS servers for a quorum, then wait for a leader.",
            )
        return leader

    def sequence_in(self, message: Msg) -> int:
        """Return the sequence under which a writing was stored."""
        with self.making_sense():
            return int(json.loads(message.data)["seq"])

    @contextlib.contextmanager
    def making_sense(self) -> Iterator[None]:
        """Turn whatever goes wrong in reading an answer into a StoreReadError."""
        try:
            yield
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise StoreReadError(
                f"An answer of JetStream about the bucket {self.bucket} makes no sense.",
                "see whether the NATS server has a version that this project knows.",
            ) from error


def error_in(answer: Answer) -> Answer | None:
    """Return the error that an answer of JetStream tells, None if it tells of none.

    Raises:
        TypeError, AttributeError: there is no sense in it.
    """
    error = answer.get("error")
    if error is not None and not isinstance(error, dict):
        raise TypeError(f"an error that is {error!r}")
    return error


def _age(nanoseconds: int) -> timedelta | None:
    return timedelta(microseconds=nanoseconds // 1000) if nanoseconds else None


def _moment(text: str) -> datetime:
    """Read a moment, its nanoseconds cut to microseconds."""
    return datetime.fromisoformat(text).astimezone(UTC)


def check_bucket(bucket: str) -> str:
    """Return ``bucket`` unchanged.

    Raises:
        SettingsError: NATS allows no bucket of that name; in a subject it could mean others.
    """
    if not _BUCKET.fullmatch(bucket):
        raise SettingsError(
            f"{bucket!a} is no bucket's name.",
            "set BUDGET_RECOVERY_BUCKET to letters, digits, - and _.",
        )
    return bucket
