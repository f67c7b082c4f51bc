"""Looking at the usage store: servers, permissions, and how the bucket is made."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime

from budget_recovery_dagster.domain.bucket_settings import SETTINGS, judge_settings
from budget_recovery_dagster.domain.findings import (
    Finding,
    State,
    Topic,
    advice,
    is_wrong,
    not_looked_at,
    ok,
    wrong,
)
from budget_recovery_dagster.domain.server_findings import (
    CLUSTER,
    CREDENTIALS,
    VERSION,
    judge_cluster,
    judge_credentials,
    judge_versions,
)
from budget_recovery_dagster.examination_ports import (
    BucketSeen,
    Grant,
    Permission,
    StoreExamination,
    StoreServer,
)
from budget_recovery_dagster.services.looking import failed, look

_CONNECTION = "connection"
_ANSWERS = "receiving answers"
_EXISTS = "existence"
_READING = "a reading"

STORE_CHECKS: Mapping[Topic, tuple[str, ...]] = {
    Topic.SERVERS: (CREDENTIALS, _CONNECTION, VERSION),
    Topic.PERMISSIONS: (_ANSWERS, *Permission),
    Topic.BUCKET: (_EXISTS, *SETTINGS, CLUSTER, _READING),
}
"""What is looked at, in order."""

_BUCKET_IS_WRONG = "The setting of the bucket is wrong."
# What it takes to make a consumer, read from it, and remove it again.
_FOR_READING = (Permission.ASK, Permission.READ_COUNTERS, Permission.PULL, Permission.TIDY)


@dataclass(frozen=True, slots=True)
class StoreLook:
    """How the store can be asked again, None where it cannot, and its server's version."""

    ask: Callable[[], BucketSeen] | None = None
    version: str = ""


def look_at_store(
    store: StoreExamination, bucket: str | None, now: datetime
) -> tuple[StoreLook, list[Finding]]:
    """Look at a store; ``bucket`` None: its setting is wrong. ``now`` is this host's time."""
    findings = [look(Topic.SERVERS, CREDENTIALS, lambda: _credentials(store, now))]
    servers = store.servers()
    findings.append(_connection(servers))
    versions = [each.version for each in servers if each.version is not None]
    if not versions:
        why = "No NATS server lets us in."
        return StoreLook(), [
            *findings,
            *not_looked_at(Topic.SERVERS, [VERSION], why),
            *_rest(why),
        ]
    findings.append(judge_versions(versions))
    answers = look(Topic.PERMISSIONS, _ANSWERS, store.require_answers)
    findings.append(answers)
    if answers.state is not State.OK:
        why = "No answer can be received."
        return StoreLook(), [*findings, *_rest(why)[1:]]
    if bucket is None:
        return StoreLook(), [*findings, *_rest(_BUCKET_IS_WRONG)[1:]]
    findings += _permissions(store, bucket)
    seen, found = _bucket(store, bucket, findings)
    ask = None if seen is None else lambda: store.look(bucket)
    return StoreLook(ask, versions[0]), [*findings, *found]


def _credentials(store: StoreExamination, now: datetime) -> Finding:
    used = store.credentials
    if used is None:
        return judge_credentials(None, None, now)
    return judge_credentials(str(used.file), used.expire_at, now)


def _connection(servers: tuple[StoreServer, ...]) -> Finding:
    failures = [each.failure for each in servers if each.failure is not None]
    reached = [each.url for each in servers if each.failure is None]
    if not failures:
        return ok(Topic.SERVERS, _CONNECTION, ", ".join(reached))
    said = " ".join(dict.fromkeys(failure.message for failure in failures))
    to_do = " ".join(dict.fromkeys(failure.hint for failure in failures))
    if not reached:
        return wrong(Topic.SERVERS, _CONNECTION, said, to_do)
    return advice(Topic.SERVERS, _CONNECTION, f"{said} In use: {', '.join(reached)}.", to_do)


def _permissions(store: StoreExamination, bucket: str) -> list[Finding]:
    topic = Topic.PERMISSIONS
    try:
        grants = store.grants(bucket)
    except Exception as error:  # noqa: BLE001 - told by name; no check stops another
        first, *others = Permission
        why = "The permissions could not be found out."
        return [failed(topic, first, error), *not_looked_at(topic, others, why)]
    return [_permission(permission, grants[permission]) for permission in Permission]


def _permission(permission: Permission, grant: Grant) -> Finding:
    topic = Topic.PERMISSIONS
    if grant.failure is not None:
        return failed(topic, permission, grant.failure)
    if grant.is_granted:
        return ok(topic, permission, "granted")
    return wrong(
        topic,
        permission,
        f"The NATS user may not publish to {grant.subject}",
        f"grant it to the NATS user: {_WITHOUT[permission]}.",
    )


_WITHOUT: Mapping[Permission, str] = {
    Permission.ASK: "without it nothing can be checked, captured or restored",
    Permission.READ_KEY: "without it no check can be made, and nothing restored",
    Permission.READ_COUNTERS: "without it nothing can be captured or restored",
    Permission.READ_BOARDS: "without it leaderboards can neither be captured nor rebuilt",
    Permission.PULL: "without it nothing can be captured or restored",
    Permission.TIDY: "without it every reading fails, and leaves a consumer for 30 s",
    Permission.MARK: "without it fewer losses are noticed",
    Permission.RAISE: "without it every restore fails",
    Permission.REBUILD: "without it a restore leaves the leaderboards as they are, and fails",
}


def _bucket(
    store: StoreExamination, bucket: str, before: list[Finding]
) -> tuple[BucketSeen | None, list[Finding]]:
    topic = Topic.BUCKET
    existence, *others = STORE_CHECKS[topic]
    if is_wrong(before, Permission.ASK):
        why = "The NATS user cannot look at it; see its permissions."
        return None, not_looked_at(topic, STORE_CHECKS[topic], why)
    try:
        seen = store.look(bucket)
    except Exception as error:  # noqa: BLE001 - told by name; no check stops another
        why = "Nothing is known of the bucket."
        return None, [failed(topic, existence, error), *not_looked_at(topic, others, why)]
    findings = [
        ok(topic, existence, bucket),
        *judge_settings(seen.subject, seen.settings),
        judge_cluster(seen.cluster),
    ]
    denied = [permission for permission in _FOR_READING if is_wrong(before, permission)]
    if denied:
        why = f"It takes what is not known to be granted: {', '.join(denied)}."
        return seen, [*findings, *not_looked_at(topic, [_READING], why)]
    return seen, [*findings, look(topic, _READING, lambda: _reading(store, bucket))]


def _reading(store: StoreExamination, bucket: str) -> str:
    store.read_nothing(bucket)
    return "a consumer was made, read to its end, and removed"


def _rest(why: str) -> list[Finding]:
    """Return that neither permissions nor bucket were looked at."""
    return [
        finding
        for topic in (Topic.PERMISSIONS, Topic.BUCKET)
        for finding in not_looked_at(topic, STORE_CHECKS[topic], why)
    ]
