"""The stream behind the bucket, asked through the JetStream API in its own JSON.

The driver's own types are passed by: they round what they read, and its calls use subjects that a
confined user may not publish to.
"""

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from nats.aio.msg import Msg

from budget_recovery_dagster.adapters.live_keys import NEVER_WRITTEN, LiveKey
from budget_recovery_dagster.adapters.nats_cluster import read_cluster
from budget_recovery_dagster.adapters.nats_connection import NatsConnection, Timeouts
from budget_recovery_dagster.adapters.nats_failures import jetstream_off, refused_by_jetstream
from budget_recovery_dagster.adapters.nats_messages import read_stored_message
from budget_recovery_dagster.domain.convergence import ClusterView, hears_majority
from budget_recovery_dagster.domain.identity import StoreIdentity
from budget_recovery_dagster.errors import SettingsError, StoreNoQuorumError, StoreReadError

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
