"""The cluster state in JetStream's description of a stream."""

from datetime import UTC, datetime, timedelta

import pytest

from budget_recovery_dagster.adapters.nats import read_cluster
from budget_recovery_dagster.domain import ClusterView, Replica, objection

NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)


def test_replicas_are_read_as_the_leader_reports_them() -> None:
    info = {
        "config": {"num_replicas": 3},
        "cluster": {
            "name": "C",
            "raft_group": "S-R3F-x",
            "leader": "n0",
            "leader_since": "2026-11-29T13:00:00.123456789+01:00",
            "replicas": [
                {"name": "n1", "current": True, "active": 100_000_000, "peer": "x"},
                {
                    "name": "n2",
                    "current": False,
                    "offline": True,
                    "active": 4_000_000_000,
                    "lag": 9,
                },
            ],
        },
    }
    assert read_cluster(info, NOW) == ClusterView(
        seen_at=NOW,
        cluster="C",
        leader="n0",
        leader_since=NOW.replace(microsecond=123456),
        replica_count=3,
        replicas=(
            Replica(
                "n1", is_current=True, is_offline=False, lag=0, silent_for=timedelta(seconds=0.1)
            ),
            Replica(
                "n2", is_current=False, is_offline=True, lag=9, silent_for=timedelta(seconds=4)
            ),
        ),
    )


def test_a_stream_without_a_leader_is_reported() -> None:
    replicas = [{"name": f"n{n}", "current": True, "active": 0} for n in range(3)]
    view = read_cluster(
        {"config": {"num_replicas": 3}, "cluster": {"name": "C", "replicas": replicas}}, NOW
    )
    assert (view.leader, len(view.replicas)) == (None, 3)
    assert objection(view) == "the stream has no leader"


def test_a_stream_with_one_replica_in_a_cluster_has_the_clusters_name() -> None:
    info = {"config": {"num_replicas": 1}, "cluster": {"name": "C", "leader": "n0"}}
    assert read_cluster(info, NOW) == ClusterView(NOW, "C", "n0", None, 1, ())


@pytest.mark.parametrize("cluster", [{}, {"cluster": None}, {"cluster": {"leader": "z"}}])
def test_a_single_server_is_in_no_cluster(cluster: dict[str, object]) -> None:
    view = read_cluster({"config": {"num_replicas": 1}, **cluster}, NOW)
    assert (view.cluster, view.replicas) == (None, ())
    assert objection(view) is None


@pytest.mark.parametrize(
    "info",
    [{}, {"config": {}}, {"config": {"num_replicas": 3}, "cluster": {"replicas": [{"name": "n"}]}}],
)
def test_an_incomplete_description_raises_an_error(info: dict[str, object]) -> None:
    with pytest.raises(KeyError):
        read_cluster(info, NOW)
