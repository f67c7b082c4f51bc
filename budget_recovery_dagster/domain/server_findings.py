"""What is judged of the NATS servers: versions, credentials, and whether a cluster is whole."""

import re
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta

from budget_recovery_dagster.domain.findings import Finding, Topic, advice, ok, wrong
from budget_recovery_dagster.domain.store import ClusterView, objection

OLDEST_NATS = (2, 9)
"""The first that lets a user be confined to the keys that a consumer reads."""

TELLS_TIME = (2, 10)
"""The first that tells its time together with the stream."""

CREDENTIALS = "credentials"
VERSION = "version"
CLUSTER = "cluster"

_SOON = timedelta(days=7)
_VERSION = re.compile(r"(\d+)\.(\d+)")


def judge_versions(versions: Iterable[str]) -> Finding:
    """Judge the versions of NATS servers, of which there is one at least, by the oldest."""
    version = min(versions, key=_number)
    number = _number(version)
    said = f"nats-server {version or 'of an unknown version'}"
    if number < OLDEST_NATS:
        return wrong(
            Topic.SERVERS,
            VERSION,
            f"{said}: consumers cannot be made in the way in which snapshots need them.",
            "use nats-server 2.10 or newer.",
        )
    if number < TELLS_TIME:
        return advice(
            Topic.SERVERS,
            VERSION,
            f"{said} does not tell its time: clocks that disagree are not noticed.",
            "use nats-server 2.10 or newer.",
        )
    return ok(Topic.SERVERS, VERSION, said)


def _number(version: str) -> tuple[int, int]:
    found = _VERSION.match(version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def judge_credentials(file: str | None, expire_at: datetime | None, now: datetime) -> Finding:
    """Judge the credentials file of the user, if there is one, at ``now`` of this host."""
    if file is None:
        return ok(Topic.SERVERS, CREDENTIALS, "no file; whoever the URL names connects")
    if expire_at is None:
        return ok(Topic.SERVERS, CREDENTIALS, f"{file} never expires")
    when = f"{expire_at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"
    renew = "renew the file that BUDGET_RECOVERY_NATS_CREDS names; no restart is needed."
    if expire_at <= now:
        return wrong(Topic.SERVERS, CREDENTIALS, f"{file} expired at {when}.", renew)
    if expire_at - now < _SOON:
        return advice(Topic.SERVERS, CREDENTIALS, f"{file} expires at {when}.", renew)
    return ok(Topic.SERVERS, CREDENTIALS, f"{file} expires at {when}")


def judge_cluster(view: ClusterView) -> Finding:
    """Judge one look at the servers that hold the bucket; a restore looks for longer."""
    problem = objection(view)
    if problem is not None:
        return wrong(
            Topic.BUCKET,
            CLUSTER,
            f"The bucket has not converged: {problem}. A restore would wait.",
            "bring back the servers that are missing, or take them out of the replicas.",
        )
    if view.cluster is None:
        return ok(Topic.BUCKET, CLUSTER, "a single server")
    others = len(view.replicas)
    followers = "no replica" if not others else f"{others} current"
    return ok(Topic.BUCKET, CLUSTER, f"{view.cluster}, led by {view.leader}, {followers} beside it")
