"""The identity of the usage store, the accepted baseline, and whether its cluster has converged."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum

from budget_recovery_dagster.domain.windows import require_aware
from budget_recovery_dagster.errors import SettingsError


@dataclass(frozen=True, slots=True)
class StoreIdentity:
    """The creation time of the store's stream, and its last sequence."""

    created_at: datetime
    last_sequence: int

    def __post_init__(self) -> None:
        require_aware(self.created_at)
        if self.last_sequence < 0:
            raise ValueError(f"last_sequence is {self.last_sequence}, below zero")

    def __str__(self) -> str:
        created_at = f"{self.created_at.astimezone(UTC):%Y-%m-%d %H:%M:%S.%f}"
        return f"created {created_at} UTC, sequence {self.last_sequence}"


@dataclass(frozen=True, slots=True)
class Marker:
    """Our own key in the store, which identifies it: a nonce, the sequence of the write, a number.

    The number is one higher for each marker that the database intends; that of the first version of
    a marker is 0.
    """

    nonce: str
    revision: int
    number: int = 0


@dataclass(frozen=True, slots=True)
class IntendedMarker:
    """A marker that may have been written; it is recorded before the write.

    ``landmark`` is the id of the newest landmark at that time, None if there was none.
    """

    nonce: str
    number: int = 0
    landmark: str | None = None


class LandmarkKind(StrEnum):
    """What a landmark records: an event that an older copy of the database lacks."""

    CAPTURE = "capture"
    RESET = "reset"
    INCIDENT_OPENED = "incident_opened"
    INCIDENT_CLOSED = "incident_closed"
    ACCEPTANCE = "acceptance"
    RENEWALS_LOST = "renewals_lost"


@dataclass(frozen=True, slots=True)
class Baseline:
    """The last accepted identity; ``version`` rises with every change.

    ``marker`` was written at about ``marked_at``; both are None until a first marker is known to be
    in the store. ``keeps_for`` is the age at which the store drops it, as of its writing; None:
    never. ``intended`` is a marker that may have been written since. ``seen_at`` is the leader's
    time at the last good observation, None if unknown. ``others`` are the deployments that had a
    marker of their own in the store, None if unknown.
    """

    identity: StoreIdentity
    version: int
    marker: Marker | None = None
    marked_at: datetime | None = None
    intended: IntendedMarker | None = None
    keeps_for: timedelta | None = None
    seen_at: datetime | None = None
    others: frozenset[str] | None = None

    def __post_init__(self) -> None:
        if (self.marker is None) != (self.marked_at is None):
            raise ValueError("a marker needs the time of its write, and the time needs a marker")


def require_bucket(claimed: str, bucket: str) -> None:
    """Refuse to work on another bucket than the one that was claimed.

    Raises:
        SettingsError: it is another.
    """
    if bucket != claimed:
        raise SettingsError(
            f"BUDGET_RECOVERY_BUCKET is {bucket!r}, but this database belongs to the bucket"
            f" {claimed!r}.",
            "use one database for each bucket, or set the bucket back.",
        )


SETTLED_FOR = timedelta(seconds=12)
"""Longer than the ten seconds or so for which a cluster reports a dead replica as current."""
SETTLED_POLLS = 3
"""One late answer alone must not prove a settled cluster."""
SILENT_FOR = timedelta(seconds=3)
"""A healthy replica reports every second; one that is silent for longer may be dead."""


@dataclass(frozen=True, slots=True)
class Replica:
    """A server that follows the leader, as the leader sees it; ``lag`` in operations."""

    name: str
    is_current: bool
    is_offline: bool
    lag: int
    silent_for: timedelta


@dataclass(frozen=True, slots=True)
class ClusterView:
    """The servers of the store, according to one answer.

    ``replica_count`` is the configured number of replicas, including the leader. ``leader_since``
    is None if the server does not report it. A server outside a cluster has no ``cluster`` name.
    """

    seen_at: datetime
    cluster: str | None
    leader: str | None
    leader_since: datetime | None
    replica_count: int
    replicas: tuple[Replica, ...]


def hears_majority(view: ClusterView) -> bool:
    """Whether the server that answers hears a majority, so that no other can be the leader.

    A leader that was cut off still answers for seconds after the others have a new leader.
    """
    heard = [
        each for each in view.replicas if each.silent_for <= SILENT_FOR and not each.is_offline
    ]
    return 2 * (1 + len(heard)) > view.replica_count


def objection(view: ClusterView) -> str | None:
    """Return why this answer proves that the store has not converged; None if it does not."""
    if not view.leader:
        return "the stream has no leader"
    if view.leader in {replica.name for replica in view.replicas}:
        return f"the answer is not from the leader: {view.leader} is listed as a replica"
    if view.replica_count == 1:
        return None
    if len(view.replicas) != view.replica_count - 1:
        return f"{len(view.replicas)} of {view.replica_count - 1} replicas of the leader are known"
    return next(filter(None, map(_objection_to, view.replicas)), None)


def _objection_to(replica: Replica) -> str | None:
    if replica.is_offline:
        return f"replica {replica.name} is offline"
    if not replica.is_current:
        return f"replica {replica.name} is not current, {replica.lag} operations behind"
    if replica.lag > 0:
        return f"replica {replica.name} is {replica.lag} operations behind"
    if replica.silent_for > SILENT_FOR:
        silent_for = replica.silent_for.total_seconds()
        return f"replica {replica.name} was last heard of {silent_for:.1f} s ago"
    return None


def why_not_converged(views: Sequence[ClusterView]) -> str | None:
    """Judge a series of answers, oldest first; None once the store has converged.

    A single server has no replica to wait for. In a cluster, the newest answers must be without an
    objection and from the same leader: at least three of them, over at least twelve seconds.
    """
    if not views:
        return "the servers have not answered yet"
    newest = views[-1]
    if reason := objection(newest):
        return reason
    if newest.cluster is None:
        return None
    settled = _settled(views)
    span = newest.seen_at - settled[0].seen_at
    if len(settled) >= SETTLED_POLLS and span >= SETTLED_FOR:
        return None
    return (
        f"the cluster has been settled for {int(span.total_seconds())} s of "
        f"{int(SETTLED_FOR.total_seconds())} s in {len(settled)} answers of {SETTLED_POLLS}"
    )


def _settled(views: Sequence[ClusterView]) -> list[ClusterView]:
    """Return the newest answers that agree with the last one, oldest first."""
    newest = views[-1]
    settled: list[ClusterView] = []
    for view in reversed(views):
        same = (view.leader, view.leader_since) == (newest.leader, newest.leader_since)
        if not same or objection(view):
            break
        settled.append(view)
    return settled[::-1]
