"""``budget-recovery doctor`` on a cluster that loses a server."""

from pathlib import Path

from nats.errors import Error

from tests.free_ports import unused_port
from tests.integration.doctor_command import Checked, doctor
from tests.nats_cluster import NAMES, Cluster
from tests.nats_servers import Bucket
from tests.waiting import wait_until

REPLICAS, CLUSTER = "bucket_replicas", "bucket_cluster"


def test_replicas_and_a_missing_server_are_reported(server_dir: Path) -> None:
    with Cluster.started(server_dir / "doctor-cluster") as cluster:
        wait_until(lambda: cluster.meta_leader() is not None)
        urls = cluster.urls

        def checked(bucket: str) -> Checked:
            return doctor(
                BUDGET_RECOVERY_NATS_URL=",".join(urls),
                BUDGET_RECOVERY_BUCKET=bucket,
                BUDGET_RECOVERY_POSTGRES_URL=f"postgresql://127.0.0.1:{unused_port()}/none",
            )

        leader = cluster.meta_leader()
        # The meta leader and the server that the test uses stay up.
        others = [name for name in NAMES if name != leader]
        url = cluster.servers[others[0]].url
        with Bucket.connected(url, "one") as one, Bucket.connected(url, "three") as three:
            one.create()
            three.create(replicas=3)
            single = checked("one")
            assert single[REPLICAS]["outcome"] == "warn"
            assert single[REPLICAS]["code"] == "single_replica"
            assert single[CLUSTER]["outcome"] == "ok"

            whole = checked("three")
            assert (whole[REPLICAS]["outcome"], whole[REPLICAS]["message"]) == ("ok", "3")
            assert whole[CLUSTER]["message"].endswith("current followers: 2")
            assert whole["bucket_read"]["outcome"] == "ok"
            assert three.info().state.last_seq == 0

            gone = cluster.servers[others[1]].url
            cluster.kill(others[1])
            # After a write the leader reports the replica that lags.
            wait_until(lambda: _put(three) and CLUSTER in checked("three").failed)
            missing = checked("three")
            assert missing[CLUSTER]["code"] == "not_converged"
            problem = missing[CLUSTER]["message"]
            assert others[1] in problem or "no leader" in problem
            assert missing["nats_connection"]["outcome"] == "warn"
            assert gone in missing["nats_connection"]["message"]


def _put(bucket: Bucket) -> bool:
    try:
        bucket.put("usage.acme.total.lifetime.=", b"1")
    except Error:  # until another leads it
        return False
    return True
