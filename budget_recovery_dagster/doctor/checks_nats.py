"""Checks of the usage store with the permissions of the NATS user, which leave it unchanged.

The response to a request shows whether the user may publish to its subject. A server that denies
it reports a permission violation. Any other response, even an error, means that the user may. So
each request is invalid, and its receiver rejects it. A write expects another stream than the bucket
and a sequence that no stream reaches. A request for a consumer names another stream in its subject
than in its body. Only direct subscribers of the subject receive such a write: it is empty, and no
tenant has its key.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import cached_property, partial
from secrets import token_hex
from typing import Any

import anyio
from anyio.from_thread import BlockingPortal, start_blocking_portal

from budget_recovery_dagster.adapters.nats.codec import BOARDS, COUNTERS
from budget_recovery_dagster.adapters.nats.connection import (
    INBOX_PREFIX,
    Access,
    NatsConnection,
    ServerAddress,
    Timeouts,
    credentials_expiry,
    open_access,
    read_credentials,
)
from budget_recovery_dagster.adapters.nats.consumers import CONSUMER_PREFIX, INACTIVE_SECONDS
from budget_recovery_dagster.adapters.nats.reader import read_keys
from budget_recovery_dagster.adapters.nats.store import GUARD
from budget_recovery_dagster.adapters.nats.stream import BucketStream, read_cluster, read_limits
from budget_recovery_dagster.doctor.checks_postgres import Database, judge_store_clock
from budget_recovery_dagster.doctor.model import (
    Check,
    Result,
    fail,
    failed_with,
    joined,
    ok,
    skipped,
    warn,
)
from budget_recovery_dagster.domain.plan import Room
from budget_recovery_dagster.domain.store import ClusterView, objection
from budget_recovery_dagster.errors import StoreError, StorePermissionError, error_code
from budget_recovery_dagster.settings import Settings

OLDEST_NATS = (2, 9)
"""The first version in which a user can be confined to the keys that a consumer reads."""

REPORTS_TIME = (2, 10)
"""The first version that reports its time together with the stream."""

LONGEST_WINDOW = timedelta(days=92)
"""The longest quarter; only a lifetime is longer, and has no end."""

SMALLEST_MAX_VALUE = 64 * 1024
"""Bytes that every bucket should accept: twice the size of a leaderboard with 500 entries."""

_EXPIRES_SOON = timedelta(days=7)
_VERSION = re.compile(r"(\d+)\.(\d+)")
_RENEW = "renew the file that BUDGET_RECOVERY_NATS_CREDS names; no restart is needed."

# No tenant and no deployment has this name: an encoded name never has more after a lone `=`.
_NO_NAME = "=nobody"
_NO_STREAM = "no-stream-has-this-name"
_NO_EFFECT = (
    ("Nats-Expected-Stream", _NO_STREAM),
    ("Nats-Expected-Last-Sequence", str(2**63 - 1)),
)

_ALMOST_FULL = 0.9
_LONGEST_HISTORY = 64
# With any of these a stream drops, refuses or transforms what it is given.
_UNUSABLE = ("mirror", "sources", "subject_transform", "sealed", "allow_msg_counter", "no_ack")


@dataclass(frozen=True, slots=True)
class BucketInfo:
    """What the stream's leader reports: ``config`` and ``state`` have NATS's own keys.

    ``keys_subject`` is the one subject that a bucket of this name has. ``server_time`` is None if
    the server does not report it.
    """

    name: str
    keys_subject: str
    config: Mapping[str, Any]
    state: Mapping[str, Any]
    cluster: ClusterView
    server_time: datetime | None

    def limit(self, setting: str) -> int | None:
        """Return a limit of the configuration. NATS writes 0 or -1 where there is none."""
        limit: int | None = self.config.get(setting)
        return limit if limit is not None and limit > 0 else None


async def read_bucket_info(stream: BucketStream) -> BucketInfo:
    """Ask the stream's leader about the bucket.

    Raises:
        StoreMissingError: the bucket does not exist.
        StoreError: there is no answer, or it cannot be understood.
    """
    answer = await stream.ask(f"STREAM.INFO.{stream.name}", {})
    with stream.parsing():
        time: str | None = answer.get("ts")
        return BucketInfo(
            name=stream.bucket,
            keys_subject=f"{stream.subject_prefix}>",
            config=answer["config"],
            state=answer["state"],
            cluster=read_cluster(answer, datetime.now(UTC)),
            server_time=None if time is None else datetime.fromisoformat(time).astimezone(UTC),
        )


@dataclass(frozen=True)
class Store:
    """The usage store: one connection, and one more to each server while it is tried.

    Coroutines run on the event loop of ``portal``. ``database`` opens the database when it is first
    called.
    """

    portal: BlockingPortal
    access: Access
    stream: BucketStream
    database: Callable[[], Database]

    @cached_property
    def servers(self) -> Mapping[str, str | StoreError]:
        """The version of each server of the URL, or why it cannot be reached."""
        return self.portal.call(_try_servers, self.stream.connection, self.access.servers)

    @property
    def versions(self) -> list[str]:
        """The versions of the servers that can be reached."""
        return [each for each in self.servers.values() if isinstance(each, str)]

    @cached_property
    def permissions(self) -> Mapping[str, Result]:
        """The results of all checks of permissions to publish, by code."""
        return self.portal.call(_try_permissions, self.stream)

    @cached_property
    def bucket(self) -> BucketInfo:
        """What the stream's leader reported first; raises as ``read_bucket_info``."""
        return self.portal.call(read_bucket_info, self.stream)


@contextmanager
def open_store(settings: Settings, database: Callable[[], Database]) -> Iterator[Store]:
    """Give access to the store of the settings; it connects when it is first used.

    Raises:
        SettingsError: the URL is not set, or a setting is wrong; the message names it.
    """
    access = open_access(settings.require_nats_url(), settings.nats_creds, settings.nats_ca)
    timeouts = Timeouts(
        answer=settings.answer_timeout_seconds, reading=settings.read_timeout_seconds
    )
    with start_blocking_portal("asyncio") as portal:
        connection = NatsConnection(access, timeouts)
        try:
            stream = BucketStream(connection, settings.bucket, timeouts)
            yield Store(portal, access, stream, database)
        finally:
            portal.call(connection.close)


async def _try_servers(
    connection: NatsConnection, servers: Sequence[ServerAddress]
) -> Mapping[str, str | StoreError]:
    # In the order of the URL, whichever answers first.
    found: dict[str, str | StoreError] = {server.url: "" for server in servers}

    async def connect(server: ServerAddress) -> None:
        try:
            found[server.url] = await connection.version_of(server)
        except StoreError as error:
            found[server.url] = error

    async with anyio.create_task_group() as tasks:
        for server in servers:
            tasks.start_soon(connect, server)
    return found


def judge_servers(servers: Mapping[str, str | StoreError]) -> Result:
    """Judge the servers by URL: all should be reachable, and one is enough to work."""
    errors = {url: each for url, each in servers.items() if isinstance(each, StoreError)}
    reachable = [url for url in servers if url not in errors]
    if not errors:
        return ok(", ".join(reachable), reachable=reachable, unreachable=[])
    code = error_code(next(iter(errors.values())))
    message = " ".join(dict.fromkeys(error.message for error in errors.values()))
    hint = joined(error.hint for error in errors.values())
    if not reachable:
        return fail(code, message, hint, reachable=[], unreachable=list(errors))
    message = f"{message} In use: {', '.join(reachable)}."
    return warn(code, message, hint, reachable=reachable, unreachable=list(errors))


def nats_credentials(store: Store) -> Result:
    """Check the credentials file by the clock of this host."""
    file = store.access.credentials
    expire_at = None if file is None else credentials_expiry(read_credentials(file))
    return judge_credentials(None if file is None else str(file), expire_at, datetime.now(UTC))


def judge_credentials(file: str | None, expire_at: datetime | None, now: datetime) -> Result:
    """Judge when a credentials file expires, if there is one; it should last for a week."""
    facts = {"file": file, "expires_at": expire_at}
    if file is None:
        return ok("no credentials file; the URL names the user", **facts)
    if expire_at is None:
        return ok(f"{file} never expires", **facts)
    when = f"{expire_at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"
    if expire_at <= now:
        return fail("credentials_expired", f"{file} expired at {when}.", _RENEW, **facts)
    if expire_at - now < _EXPIRES_SOON:
        return warn("credentials_expire_soon", f"{file} expires at {when}.", _RENEW, **facts)
    return ok(f"{file} expires at {when}", **facts)


def judge_versions(versions: Iterable[str]) -> Result:
    """Judge the versions of at least one server by the oldest."""
    version = min(versions, key=_number)
    name = f"nats-server {version}" if version else "nats-server of unknown version"
    upgrade = "upgrade to nats-server 2.10 or newer."
    if _number(version) < OLDEST_NATS:
        return fail(
            "unsupported_version",
            f"{name} is too old: it lacks the consumers that snapshots need.",
            upgrade,
            version=version,
        )
    if _number(version) < REPORTS_TIME:
        return warn(
            "no_server_time",
            f"{name} does not report its time, so clock skew is not detected.",
            upgrade,
            version=version,
        )
    return ok(name, version=version)


def _number(version: str) -> tuple[int, int]:
    found = _VERSION.match(version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


@dataclass(frozen=True, slots=True)
class Request:
    """A request without effect, and ``pattern``: the subject that the user must be allowed."""

    pattern: str
    subject: str
    payload: bytes
    headers: Sequence[tuple[str, str]] | None = None


_WITHOUT_PERMISSION: Mapping[str, str] = {
    "permission_stream_info": "no check, capture or restore can run",
    "permission_read_key": "no check and no restore can run",
    "permission_read_counters": "no capture and no restore can run",
    "permission_read_leaderboards": "leaderboards can be neither captured nor rebuilt",
    "permission_fetch": "no capture and no restore can run",
    "permission_delete_consumer": "every read fails and leaves a consumer for 30 s",
    "permission_write_marker": "fewer losses are detected",
    "permission_raise_counters": "every restore fails",
    "permission_rebuild_leaderboards": "a restore does not rebuild leaderboards, and fails",
}
# What it takes to create a consumer, read from it, and delete it again.
_FOR_READING = (
    "permission_stream_info",
    "permission_read_counters",
    "permission_fetch",
    "permission_delete_consumer",
)


def _permission_requests(stream: BucketStream) -> Mapping[str, Request]:
    """Return the requests that try the permissions to publish, by the code of the check."""
    info = f"$JS.API.STREAM.INFO.{stream.name}"
    read_key, key_request = stream.key_request(f"{GUARD}.{_NO_NAME}")
    create = f"$JS.API.CONSUMER.CREATE.{stream.name}"
    fetch = f"$JS.API.CONSUMER.MSG.NEXT.{stream.name}"
    delete = f"$JS.API.CONSUMER.DELETE.{stream.name}"
    name = f"{CONSUMER_PREFIX}{token_hex(8)}"
    elsewhere = json.dumps({"stream_name": _NO_STREAM, "config": {"name": name}}).encode()
    fetch_one = b'{"batch":1,"no_wait":true}'

    def read(first: str) -> Request:
        keys = f"{stream.subject_prefix}{first}"
        subject = f"{create}.{name}.{keys}.{_NO_NAME}.>"
        return Request(f"{create}.*.{keys}.>", subject, elsewhere)

    def write(first: str, rest: str) -> Request:
        keys = f"{stream.subject_prefix}{first}"
        return Request(f"{keys}.>", f"{keys}.{rest}", b"", _NO_EFFECT)

    # The keys have as many tokens as real ones: a user may be confined to such keys.
    budget = f"{_NO_NAME}.{_NO_NAME}.lifetime"
    return {
        "permission_stream_info": Request(info, info, b"{}"),
        "permission_read_key": Request(read_key, read_key, key_request),
        "permission_read_counters": read(COUNTERS),
        "permission_read_leaderboards": read(BOARDS),
        "permission_fetch": Request(f"{fetch}.*", f"{fetch}.{name}", fetch_one),
        "permission_delete_consumer": Request(f"{delete}.*", f"{delete}.{name}", b"{}"),
        "permission_write_marker": write(GUARD, _NO_NAME),
        "permission_raise_counters": write(COUNTERS, f"{budget}.{_NO_NAME}"),
        "permission_rebuild_leaderboards": write(BOARDS, budget),
    }


async def _try_permissions(stream: BucketStream) -> Mapping[str, Result]:
    results: dict[str, Result] = {}

    async def attempt(code: str, request: Request) -> None:
        try:
            await stream.connection.ask(request.subject, request.payload, request.headers)
            results[code] = ok("granted", subject=request.pattern)
        except StorePermissionError:
            results[code] = fail(
                "permission_denied",
                f"The NATS user may not publish to {request.pattern}.",
                f"grant it to the NATS user. Without it, {_WITHOUT_PERMISSION[code]}.",
                subject=request.pattern,
            )
        except StoreError as error:
            results[code] = failed_with(error)

    async with anyio.create_task_group() as tasks:
        for code, request in _permission_requests(stream).items():
            tasks.start_soon(attempt, code, request)
    return results


def judge_bucket(code: str, bucket: BucketInfo) -> Result:
    """Judge what the check ``code`` is about. Its facts are the settings of NATS that count."""
    judge, settings = BUCKET_JUDGEMENTS[code]
    facts = {name: bucket.config.get(name, bucket.state.get(name)) for name in settings}
    return replace(judge(bucket), facts=facts)


def _kind(bucket: BucketInfo) -> Result:
    """Judge whether it is a bucket at all: another stream may drop or transform counters."""
    subjects = bucket.config.get("subjects") or []
    # A mirror has no subjects of its own.
    if subjects != [bucket.keys_subject] and not bucket.config.get("mirror"):
        return fail(
            "not_a_bucket",
            f"The stream is no key-value bucket: its subjects are {', '.join(subjects) or 'none'},"
            f" not {bucket.keys_subject}.",
            "correct BUDGET_RECOVERY_BUCKET, or have the gateway create the bucket as NATS does.",
        )
    unusable = [name for name in _UNUSABLE if bucket.config.get(name)]
    if bucket.config["retention"] != "limits":
        unusable.append(f"retention {bucket.config['retention']}")
    if unusable:
        return fail(
            "unusable_settings",
            f"The stream has {', '.join(unusable)}. It cannot store or restore counters.",
            "create the bucket without these settings.",
        )
    copies = (bucket.config.get("republish") or {}).get("dest")
    return ok(
        f"key-value bucket; messages: {bucket.state['messages']:,}"
        + (f"; subscribers of {copies} also receive what a restore writes" if copies else "")
    )


def _replicas(bucket: BucketInfo) -> Result:
    """Judge how many servers may lose their disk; an even number adds no tolerance."""
    count = bucket.config["num_replicas"]
    if bucket.cluster.cluster is None:
        return ok(f"{count}, on a single server")
    if count == 1:
        return warn(
            "single_replica",
            "1 replica in a cluster. If its server loses the disk, all counters are lost.",
            "give the bucket 3 replicas.",
        )
    if count % 2 == 0:
        return warn(
            "even_replicas",
            f"{count} replicas tolerate no more failed servers than {count - 1}.",
            f"give the bucket {count + 1} replicas.",
        )
    return ok(str(count))


def _history(bucket: BucketInfo) -> Result:
    """Judge how many values are kept: only the newest one is read."""
    history = bucket.limit("max_msgs_per_subject")
    if history is None or history > _LONGEST_HISTORY:
        return warn(
            "unlimited_history",
            "The bucket keeps every earlier value of a counter, so it grows with each request.",
            "set the history to 1. Only the newest value is ever read.",
        )
    return ok(f"{history} {'value' if history == 1 else 'values'} of each key")


def _max_age(bucket: BucketInfo) -> Result:
    """Judge whether counters can expire in a window that is still open."""
    nanoseconds = bucket.limit("max_age")
    if nanoseconds is None:
        has_ttl = bucket.config.get("allow_msg_ttl") is True
        return ok(f"no maximum age; keys may {'have' if has_ttl else 'not have'} a TTL")
    age = timedelta(microseconds=nanoseconds // 1000)
    days = f"{age / timedelta(days=1):.4g} days"
    if age < LONGEST_WINDOW:
        return warn(
            "shorter_than_window",
            f"NATS deletes a counter that is not written for {days}, even in an open window. It"
            " then reads as zero. A check reports it as gone. This includes restored counters.",
            "remove the maximum age, and give each key a TTL beyond its window.",
        )
    return warn(
        "shorter_than_lifetime",
        f"NATS deletes keys that are not written for {days}. Only lifetime windows are longer.",
        "if budgets have lifetime windows, remove the maximum age.",
    )


def _storage(bucket: BucketInfo) -> Result:
    """Judge whether the bucket survives a restart of its servers."""
    if bucket.config["storage"] == "memory":
        return warn(
            "memory_storage",
            "Memory storage: the bucket is lost when all its servers have restarted.",
            "have the gateway create the bucket with file storage.",
        )
    return ok("file")


def _sync(bucket: BucketInfo) -> Result:
    """Judge which confirmed writes a crash can lose, as far as NATS reports it."""
    if bucket.config.get("persist_mode") == "async":
        return warn(
            "async_persistence",
            "NATS confirms writes before they are in the file. A server crash loses some.",
            "set the stream's persist_mode back to its default.",
        )
    if bucket.config["storage"] == "memory":
        return ok("memory storage; nothing is written to a disk")
    return skipped(
        "sync_interval_unknown",
        "NATS does not report its sync_interval to clients. The default is 2 minutes.",
        "check the servers' configuration; a power failure loses the writes of one interval."
        if bucket.config["num_replicas"] == 1
        else "check that the replicas cannot lose power at the same time.",
    )


def _limits(bucket: BucketInfo) -> Result:
    """Judge how full the bucket is, and what it does to counters when it is full."""
    limits = [
        (used / limit, f"{used / limit:.0%} of {limit:,} {unit}")
        for used, limit, unit in (
            (bucket.state["bytes"], bucket.limit("max_bytes"), "bytes"),
            (bucket.state["messages"], bucket.limit("max_msgs"), "messages"),
        )
        if limit is not None
    ]
    if not limits:
        return ok(f"{bucket.state['bytes']:,} bytes, no limit")
    share, used = max(limits)
    discards_old = bucket.config.get("discard") != "new"
    when_full = "deletes the oldest counters" if discards_old else "refuses writes"
    if share >= _ALMOST_FULL:
        return fail(
            "almost_full",
            f"{used} are used. A full bucket {when_full}.",
            "raise the limits of the bucket.",
        )
    if shortages := _shortages_when_lost(bucket):
        return warn(
            "no_room_to_restore",
            f"{used} are used. If the bucket were lost and had the same limits again, a restore"
            f" would wait: {'; '.join(shortages)}.",
            "raise the limits to twice what is used, or set the discard policy to new.",
        )
    if discards_old:
        return warn(
            "discards_old",
            f"{used} are used. A full bucket {when_full} without any error.",
            "set the discard policy to new, or remove the limits.",
        )
    return ok(f"{used} are used; a full bucket {when_full}")


def _shortages_when_lost(bucket: BucketInfo) -> list[str]:
    """Return the limits at which a restore of everything into an empty bucket would wait."""
    limits = read_limits(bucket.config, bucket.state)
    return [str(each) for each in replace(limits, used=Room()).shortages(limits.used)]


def bucket_ttl(store: Store) -> Result:
    """Check that keys can expire, if those in the snapshots did."""
    has_ttl = store.bucket.config.get("allow_msg_ttl") is True
    if has_ttl:
        return ok("keys may have a TTL", allow_msg_ttl=True)
    if store.database().has_expiries():
        return warn(
            "no_key_ttl",
            "Captured keys of open windows had a TTL, but this bucket has none for single keys. Its"
            " counters never expire, even those that a restore creates.",
            "have the gateway create the bucket with TTLs for single keys (allow_msg_ttl).",
            allow_msg_ttl=False,
        )
    return ok("keys have no TTL, as in the snapshots", allow_msg_ttl=False)


def _value_size(bucket: BucketInfo) -> Result:
    """Judge whether a leaderboard of 500 entries fits into a value."""
    limit = bucket.limit("max_msg_size")
    if limit is not None and limit < SMALLEST_MAX_VALUE:
        return warn(
            "values_too_small",
            f"Values are limited to {limit:,} bytes. A long leaderboard may not fit.",
            f"raise max_msg_size to {SMALLEST_MAX_VALUE:,} bytes.",
        )
    return ok("large enough for leaderboards")


def _purge(bucket: BucketInfo) -> Result:
    """Report whether users can purge the bucket. Either setting is accepted."""
    if bucket.config.get("deny_purge") is True:
        return ok("the bucket cannot be purged")
    return ok("the bucket can be purged; a check detects it by the marker")


def _direct_get(bucket: BucketInfo) -> Result:
    """Report whether direct get is allowed. Either setting is accepted: reads use the leader."""
    is_allowed = bucket.config.get("allow_direct") is True
    return ok(f"{'allowed' if is_allowed else 'not allowed'}; not used, replicas may be behind")


def _consumers(bucket: BucketInfo) -> Result:
    """Judge whether a consumer can be created that lasts as long as a read may pause."""
    limits = bucket.config.get("consumer_limits") or {}
    idle_seconds = (limits.get("inactive_threshold") or 0) / 10**9
    if 0 < idle_seconds < INACTIVE_SECONDS:
        return fail(
            "idle_limit_too_short",
            f"The stream deletes consumers that are idle for {idle_seconds:g} s, but a read needs"
            f" {INACTIVE_SECONDS} s. No snapshot can be taken.",
            "raise consumer_limits.inactive_threshold of the stream, or remove it.",
        )
    count, limit = bucket.state.get("consumer_count") or 0, bucket.limit("max_consumers")
    if limit is None:
        return ok(f"{count}, no limit")
    if count >= limit:
        return fail(
            "no_consumer_left",
            f"{count} of at most {limit} consumers exist. No snapshot can be taken.",
            "raise max_consumers of the stream.",
        )
    return ok(f"{count} of at most {limit}")


def _cluster(bucket: BucketInfo) -> Result:
    """Judge one answer about the servers; a restore observes them for longer."""
    view = bucket.cluster
    problem = objection(view)
    if problem is not None:
        return fail(
            "not_converged",
            f"The bucket has not converged: {problem}. A restore waits.",
            "bring back the missing servers, or remove them from the replicas.",
        )
    if view.cluster is None:
        return ok("single server")
    return ok(f"{view.cluster}, leader {view.leader}, current followers: {len(view.replicas)}")


BUCKET_JUDGEMENTS: Mapping[str, tuple[Callable[[BucketInfo], Result], tuple[str, ...]]] = {
    "bucket_kind": (_kind, ("subjects", "retention", "republish", *_UNUSABLE)),
    "bucket_replicas": (_replicas, ("num_replicas",)),
    "bucket_history": (_history, ("max_msgs_per_subject",)),
    "bucket_max_age": (_max_age, ("max_age", "allow_msg_ttl")),
    "bucket_storage": (_storage, ("storage",)),
    "bucket_sync": (_sync, ("persist_mode", "storage", "num_replicas")),
    "bucket_limits": (_limits, ("max_bytes", "bytes", "max_msgs", "messages", "discard")),
    "bucket_value_size": (_value_size, ("max_msg_size",)),
    "bucket_purge": (_purge, ("deny_purge",)),
    "bucket_direct_get": (_direct_get, ("allow_direct",)),
    "bucket_consumers": (_consumers, ("max_consumers", "consumer_count", "consumer_limits")),
    "bucket_cluster": (_cluster, ("num_replicas",)),
}
"""How each check of the bucket judges it, and the settings of NATS that it judges."""


def permission_receive_answers(store: Store) -> Result:
    """Check that the user may subscribe to the subjects of answers."""
    store.portal.call(store.stream.connection.require_answers)
    return ok(f"{INBOX_PREFIX}.>", subject=f"{INBOX_PREFIX}.>")


def bucket_exists(store: Store) -> Result:
    """Check that the bucket exists, whatever its configuration."""
    return ok(store.bucket.name, bucket=store.bucket.name)


def bucket_read(store: Store) -> Result:
    """Read the counters of a tenant that cannot exist, in the same way as a capture."""
    store.portal.call(read_keys, store.stream, f"{COUNTERS}.{_NO_NAME}.")
    return ok("created a consumer, read to its end, and deleted it")


def store_clock(store: Store) -> Result:
    """Compare the clock of the stream's leader with PostgreSQL's."""
    return judge_store_clock(
        store.database().now(),
        store.portal.call(read_bucket_info, store.stream).server_time,
        store.database().now(),
        version=store.versions[0],
    )


def _permission(code: str, store: Store) -> Result:
    return store.permissions[code]


def _bucket(code: str, store: Store) -> Result:
    return judge_bucket(code, store.bucket)


_PERMISSION_NEEDS = ("permission_receive_answers", "BUDGET_RECOVERY_BUCKET")

NATS_CHECKS: tuple[Check[Store], ...] = (
    Check("nats_connection", lambda store: judge_servers(store.servers)),
    Check("nats_credentials", nats_credentials),
    Check("nats_version", lambda store: judge_versions(store.versions), ("nats_connection",)),
    Check("permission_receive_answers", permission_receive_answers, ("nats_connection",)),
    *(Check(code, partial(_permission, code), _PERMISSION_NEEDS) for code in _WITHOUT_PERMISSION),
    Check("bucket_exists", bucket_exists, ("permission_stream_info",)),
    *(Check(code, partial(_bucket, code), ("bucket_exists",)) for code in BUCKET_JUDGEMENTS),
    Check("bucket_ttl", bucket_ttl, ("database_schema", "bucket_exists")),
    Check("bucket_read", bucket_read, ("bucket_exists", *_FOR_READING)),
    Check("store_clock", store_clock, ("database_connection", "bucket_exists")),
)
