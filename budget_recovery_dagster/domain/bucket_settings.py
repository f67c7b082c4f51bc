"""How the gateway has configured its bucket, and what each setting means for counters.

The bucket is the gateway's: nothing here is ever changed by us.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

from budget_recovery_dagster.domain.findings import Finding, State, Topic, advice, ok, wrong

LONGEST_WINDOW = timedelta(days=92)
"""The longest quarter; only a lifetime is longer, and has no end."""

FEW_BYTES = 64 * 1024
"""A leaderboard of 500 entries has half as many."""

_ALMOST_FULL = 0.9
_MOST_HISTORY = 64
_BUCKET = Topic.BUCKET


@dataclass(frozen=True, slots=True)
class BucketSettings:
    """What the stream's leader says of the bucket's stream. Limits are None where there are none.

    ``foreign`` are the settings, in the server's words, with which a stream is no bucket that can
    be restored. ``consumers_must_last`` is how long a consumer of ours has to be allowed to be
    idle, ``consumers_may_last`` how long the stream lets any.
    """

    subjects: tuple[str, ...]
    foreign: tuple[str, ...]
    replicas: int
    is_clustered: bool
    history: int | None
    keeps_for: timedelta | None
    keeps_ttl: bool
    in_memory: bool
    is_written_late: bool
    allows_direct_get: bool
    denies_purge: bool
    drops_oldest: bool
    most_messages: int | None
    messages: int
    most_bytes: int | None
    bytes: int
    most_message_bytes: int | None
    most_consumers: int | None
    consumers: int
    consumers_may_last: timedelta | None
    consumers_must_last: timedelta


def judge_settings(subject: str, settings: BucketSettings) -> list[Finding]:
    """Judge the settings of a bucket whose keys should all be under ``subject``."""
    return [_kind(subject, settings), *(judge(settings) for judge in _JUDGES.values())]


def _kind(subject: str, settings: BucketSettings) -> Finding:
    name = "kind"
    if settings.subjects != (subject,):
        return wrong(
            _BUCKET,
            name,
            f"The stream holds {', '.join(settings.subjects) or 'no subjects'}, not {subject}: it"
            " is no key-value bucket.",
            "correct BUDGET_RECOVERY_BUCKET, or let the gateway make the bucket as NATS makes it.",
        )
    if settings.foreign:
        return wrong(
            _BUCKET,
            name,
            f"The stream has {', '.join(settings.foreign)}: counters cannot be kept in it, or not"
            " be restored.",
            "make the bucket without that.",
        )
    return ok(_BUCKET, name, f"a key-value bucket; messages in it: {settings.messages:,}")


def _replicas(settings: BucketSettings) -> Finding:
    count = settings.replicas
    if not settings.is_clustered:
        return ok(_BUCKET, "replicas", f"{count}, on a single server")
    if count == 1:
        return advice(
            _BUCKET,
            "replicas",
            "1 in a cluster: with that server's disk every counter is lost.",
            "give the bucket 3 replicas.",
        )
    if count % 2 == 0:
        return advice(
            _BUCKET,
            "replicas",
            f"{count}: no more of them may fail than of {count - 1}.",
            f"give the bucket {count + 1} replicas.",
        )
    return ok(_BUCKET, "replicas", str(count))


def _history(settings: BucketSettings) -> Finding:
    if settings.history is None or settings.history > _MOST_HISTORY:
        return advice(
            _BUCKET,
            "history",
            "Every former value of a counter is kept: the bucket grows with each request.",
            "set the history to 1; only the newest value is ever read.",
        )
    of = "value" if settings.history == 1 else "values"
    return ok(_BUCKET, "history", f"{settings.history} {of} of each key")


def _expiry(settings: BucketSettings) -> Finding:
    own = "keys may have times to live" if settings.keeps_ttl else "keys have no times to live"
    if settings.keeps_for is None:
        return ok(_BUCKET, "expiry", f"no key is dropped for its age; {own} of their own")
    days = f"{settings.keeps_for / timedelta(days=1):.4g} days"
    if settings.keeps_for < LONGEST_WINDOW:
        return advice(
            _BUCKET,
            "expiry",
            f"A counter that nobody adds to for {days} is dropped, though its window may be open:"
            " it reads as zero then, and no loss is noticed.",
            "let the bucket keep keys without limit, and give each a time to live beyond its"
            " window.",
        )
    return advice(
        _BUCKET,
        "expiry",
        f"Keys are dropped after {days} without a writing: longer than any window but a lifetime.",
        "if budgets have lifetime windows, let the bucket keep keys without limit.",
    )


def _storage(settings: BucketSettings) -> Finding:
    if settings.in_memory:
        return advice(
            _BUCKET,
            "storage",
            "In memory: when all its servers have restarted, the bucket is gone.",
            "let the gateway make the bucket with file storage.",
        )
    return ok(_BUCKET, "storage", "file")


def _sync(settings: BucketSettings) -> Finding:
    name = "sync"
    if settings.is_written_late:
        return advice(
            _BUCKET,
            name,
            "Writings are confirmed before they are in the file: a crash of the server loses some.",
            "set the stream's persist_mode back to its default.",
        )
    if settings.in_memory:
        return ok(_BUCKET, name, "nothing is written to a disk")
    return Finding(
        _BUCKET,
        name,
        State.NOT_LOOKED_AT,
        "NATS does not tell clients its sync_interval; by default it is 2 minutes.",
        "see the servers' configuration: a power cut takes what was written since."
        if settings.replicas == 1
        else "nothing, as long as the replicas do not lose power together.",
    )


def _room(settings: BucketSettings) -> Finding:
    limits = [
        (f"{held / most:.0%} of {most:,} {of}", held / most)
        for held, most, of in (
            (settings.bytes, settings.most_bytes, "bytes"),
            (settings.messages, settings.most_messages, "messages"),
        )
        if most is not None
    ]
    if not limits:
        return ok(_BUCKET, "room", f"{settings.bytes:,} bytes, without a limit")
    held, share = max(limits, key=lambda limit: limit[1])
    more = "raise the limits of the bucket."
    if share >= _ALMOST_FULL:
        then = (
            "the oldest counters are dropped" if settings.drops_oldest else "writings are refused"
        )
        return wrong(_BUCKET, "room", f"{held} are used; once it is full, {then}.", more)
    if settings.drops_oldest:
        return advice(
            _BUCKET,
            "room",
            f"{held} are used; once it is full, the oldest counters are dropped without a word.",
            "set the discard policy to new, or remove the limits.",
        )
    return ok(_BUCKET, "room", f"{held} are used; once it is full, writings are refused")


def _message_size(settings: BucketSettings) -> Finding:
    most = settings.most_message_bytes
    if most is not None and most < FEW_BYTES:
        return advice(
            _BUCKET,
            "size of values",
            f"{most:,} bytes at most: a long leaderboard may not fit.",
            f"allow {FEW_BYTES:,} bytes.",
        )
    return ok(_BUCKET, "size of values", "large enough for leaderboards")


def _removal(settings: BucketSettings) -> Finding:
    if settings.denies_purge:
        return ok(_BUCKET, "removal", "the bucket cannot be purged")
    return ok(_BUCKET, "removal", "the bucket can be purged; our marker tells of that")


def _direct_get(settings: BucketSettings) -> Finding:
    if settings.allows_direct_get:
        return ok(_BUCKET, "direct get", "allowed; we do not use it, for replicas may be behind")
    return ok(_BUCKET, "direct get", "not allowed; we do not use it")


def _consumers(settings: BucketSettings) -> Finding:
    name = "consumers"
    may, must = settings.consumers_may_last, settings.consumers_must_last
    if may is not None and may < must:
        return wrong(
            _BUCKET,
            name,
            f"The stream lets no consumer be idle for more than {may.total_seconds():g} s, and a"
            f" reading asks for {must.total_seconds():g} s: no snapshot can be taken.",
            "raise consumer_limits.inactive_threshold of the stream, or remove it.",
        )
    if settings.most_consumers is None:
        return ok(_BUCKET, name, f"{settings.consumers}, without a limit")
    used = f"{settings.consumers} of at most {settings.most_consumers}"
    if settings.consumers >= settings.most_consumers:
        return wrong(
            _BUCKET, name, f"{used}: none is left to read with.", "raise max_consumers of it."
        )
    return ok(_BUCKET, name, used)


_JUDGES: dict[str, Callable[[BucketSettings], Finding]] = {
    "replicas": _replicas,
    "history": _history,
    "expiry": _expiry,
    "storage": _storage,
    "sync": _sync,
    "room": _room,
    "size of values": _message_size,
    "removal": _removal,
    "direct get": _direct_get,
    "consumers": _consumers,
}

SETTINGS = ("kind", *_JUDGES)
"""The names of what is judged, in order."""
