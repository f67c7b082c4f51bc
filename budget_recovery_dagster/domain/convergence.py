"""Convergence: whether every server that holds the store has caught up, so that one may restore.

A cluster reports a replica as current for seconds after it has died or lost its disk, and a leader
that has just been elected may still be replaced. So one good answer proves nothing: the same
leader must give good answers for longer than a cluster is known to be blind.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

SETTLED_FOR = timedelta(seconds=12)
"""Above the some ten seconds for which a cluster was seen to report a dead replica as current."""

SETTLED_POLLS = 3
"""So that one late answer does not stand for a settled cluster."""

SILENT_FOR = timedelta(seconds=3)
"""A healthy replica is heard of every second; one that is silent for longer may be dead."""


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
    """What one answer says of the servers that hold the store.

    ``replica_count`` is how many the store is configured to have, the leader included;
    ``leader_since`` is None where the server does not tell. A server that is no part of a cluster
    has no ``cluster`` name.
    """

    seen_at: datetime
    cluster: str | None
    leader: str | None
    leader_since: datetime | None
    replica_count: int
    replicas: tuple[Replica, ...]


def hears_majority(view: ClusterView) -> bool:
    """Whether the one who answers has heard lately of so many that nobody else can be the leader.

    One that was cut off from the others goes on answering for seconds after they have a new leader.
    """
    heard = [
        each for each in view.replicas if each.silent_for <= SILENT_FOR and not each.is_offline
    ]
    return 2 * (1 + len(heard)) > view.replica_count


def objection(view: ClusterView) -> str | None:
    """Say why this answer alone rules out that the store has converged; None if it does not."""
    if not view.leader:
        return "the stream has no leader"
    if view.leader in {replica.name for replica in view.replicas}:
        return f"the answer is not the leader's: {view.leader} is among the replicas"
    if view.replica_count == 1:
        return None
    if len(view.replicas) != view.replica_count - 1:
        return (
            f"{len(view.replicas)} of {view.replica_count - 1} replicas beside the leader are known"
        )
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

    A single server has nobody to wait for. In a cluster the newest answers, without an objection
    and with one and the same leader, must be at least three and span twelve seconds.
    """
    if not views:
        return "nothing is known of the servers yet"
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
