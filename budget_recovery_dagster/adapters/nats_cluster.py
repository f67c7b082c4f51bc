"""The servers that hold the bucket's stream, as whoever answers for it sees them."""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from budget_recovery_dagster.domain.convergence import ClusterView, Replica

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
