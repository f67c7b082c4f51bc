"""The results of the checks of `budget-recovery doctor`, without a server."""

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from budget_recovery_dagster.doctor import (
    BUCKET_JUDGEMENTS,
    BucketInfo,
    Check,
    Outcome,
    Report,
    Result,
    fail,
    judge_bucket,
    judge_credentials,
    judge_host_clock,
    judge_store_clock,
    judge_versions,
    ok,
    skipped,
    warn,
)
from budget_recovery_dagster.domain import ClusterView, Replica
from budget_recovery_dagster.errors import StoreMissingError, error_code

NOW = datetime(2026, 11, 30, 14, tzinfo=UTC)
ALONE = ClusterView(NOW, None, "n0", None, 1, ())
CLUSTER = ClusterView(
    NOW,
    "C",
    "n0",
    None,
    2,
    (Replica("n1", is_current=True, is_offline=False, lag=0, silent_for=timedelta(0)),),
)
DAY = 86400 * 10**9
SECOND = 10**9
CONFIG: Mapping[str, Any] = {
    "subjects": ["$KV.b.>"],
    "retention": "limits",
    "num_replicas": 1,
    "max_msgs_per_subject": 1,
    "max_age": 0,
    "allow_msg_ttl": True,
    "storage": "file",
    "discard": "new",
    "max_msgs": -1,
    "max_bytes": -1,
    "max_msg_size": -1,
    "max_consumers": -1,
    "consumer_limits": {},
}
STATE = {"messages": 3, "bytes": 300, "consumer_count": 2}


def bucket(cluster: ClusterView = ALONE, **config: Any) -> BucketInfo:
    return BucketInfo("b", "$KV.b.>", {**CONFIG, **config}, STATE, cluster, NOW)


@pytest.mark.parametrize(
    ("check", "config", "outcome", "code", "message"),
    [
        ("kind", {}, Outcome.OK, "ok", "messages: 3"),
        ("kind", {"subjects": None}, Outcome.FAIL, "not_a_bucket", "subjects are none"),
        (
            "kind",
            {"mirror": {"name": "m"}, "subjects": None},
            Outcome.FAIL,
            "unusable_settings",
            "has mirror.",
        ),
        ("kind", {"mirror": {"name": "m"}}, Outcome.FAIL, "unusable_settings", "has mirror."),
        ("kind", {"sources": [{"name": "s"}]}, Outcome.FAIL, "unusable_settings", "has sources."),
        (
            "kind",
            {"sealed": True, "no_ack": True},
            Outcome.FAIL,
            "unusable_settings",
            "sealed, no_ack",
        ),
        ("replicas", {"num_replicas": 3}, Outcome.OK, "ok", "3, on a single server"),
        ("history", {"max_msgs_per_subject": 64}, Outcome.OK, "ok", "64 values"),
        (
            "history",
            {"max_msgs_per_subject": 65},
            Outcome.WARN,
            "unlimited_history",
            "every earlier value",
        ),
        (
            "history",
            {"max_msgs_per_subject": -1},
            Outcome.WARN,
            "unlimited_history",
            "every earlier value",
        ),
        ("max_age", {"allow_msg_ttl": False}, Outcome.OK, "ok", "not have a TTL"),
        ("max_age", {}, Outcome.OK, "ok", "may have a TTL"),
        ("max_age", {"max_age": 91 * DAY}, Outcome.WARN, "shorter_than_window", "reads as zero"),
        ("max_age", {"max_age": DAY // 24}, Outcome.WARN, "shorter_than_window", "0.04167 days"),
        (
            "max_age",
            {"max_age": 92 * DAY},
            Outcome.WARN,
            "shorter_than_lifetime",
            "Only lifetime windows",
        ),
        ("storage", {"storage": "memory"}, Outcome.WARN, "memory_storage", "Memory storage"),
        ("sync", {}, Outcome.SKIPPED, "sync_interval_unknown", "sync_interval"),
        ("sync", {"storage": "memory"}, Outcome.OK, "ok", "nothing is written to a disk"),
        (
            "sync",
            {"persist_mode": "async"},
            Outcome.WARN,
            "async_persistence",
            "before they are in the file",
        ),
        ("limits", {"max_bytes": 1000}, Outcome.OK, "ok", "30% of 1,000 bytes"),
        ("limits", {"max_bytes": 333}, Outcome.FAIL, "almost_full", "refuses writes"),
        ("limits", {"max_msgs": 3}, Outcome.FAIL, "almost_full", "100% of 3 messages"),
        (
            "limits",
            {"max_bytes": 1000, "discard": "old"},
            Outcome.WARN,
            "discards_old",
            "without any error",
        ),
        (
            "limits",
            {"max_bytes": 333, "discard": "old"},
            Outcome.FAIL,
            "almost_full",
            "oldest counters",
        ),
        # 1.5 x 300 bytes must fit into an empty bucket.
        (
            "limits",
            {"max_bytes": 449, "discard": "old"},
            Outcome.WARN,
            "no_room_to_restore",
            "a restore would wait: max_bytes=449 leaves 449, and 450 are needed (1.5 x 300).",
        ),
        (
            "limits",
            {"max_bytes": 450, "discard": "old"},
            Outcome.WARN,
            "discards_old",
            "67% of 450 bytes",
        ),
        (
            "limits",
            {"max_msgs": 4, "discard": "old"},
            Outcome.WARN,
            "no_room_to_restore",
            "max_msgs=4 leaves 4, and 5 are needed (1.5 x 3)",
        ),
        ("limits", {"max_bytes": 449}, Outcome.OK, "ok", "refuses writes"),
        ("limits", {"discard": "old"}, Outcome.OK, "ok", "300 bytes, no limit"),
        (
            "value_size",
            {"max_msg_size": 65535},
            Outcome.WARN,
            "values_too_small",
            "65,535 bytes",
        ),
        ("value_size", {"max_msg_size": 65536}, Outcome.OK, "ok", "large enough"),
        ("purge", {"deny_purge": True}, Outcome.OK, "ok", "cannot be purged"),
        ("direct_get", {"allow_direct": True}, Outcome.OK, "ok", "allowed; not used"),
        ("consumers", {"max_consumers": 2}, Outcome.FAIL, "no_consumer_left", "2 of at most 2"),
        ("consumers", {"max_consumers": 3}, Outcome.OK, "ok", "2 of at most 3"),
        (
            "consumers",
            {"consumer_limits": {"inactive_threshold": 29 * SECOND}},
            Outcome.FAIL,
            "idle_limit_too_short",
            "idle for 29 s, but a read needs 30 s",
        ),
        (
            "consumers",
            {"consumer_limits": {"inactive_threshold": 30 * SECOND}},
            Outcome.OK,
            "ok",
            "no limit",
        ),
    ],
)
def test_bucket_settings(
    check: str, config: dict[str, Any], outcome: Outcome, code: str, message: str
) -> None:
    result = judge_bucket(f"bucket_{check}", bucket(**config))
    assert (result.outcome, result.code) == (outcome, code)
    assert message in result.message
    # The facts are the settings as NATS reports them.
    assert config.items() <= result.facts.items()
    # One setting does not affect the other checks.
    others = {
        each: judge_bucket(each, bucket(**config)).outcome
        for each in BUCKET_JUDGEMENTS
        if each not in (f"bucket_{check}", "bucket_sync", "bucket_limits")
    }
    if "storage" in config and check == "sync":
        assert others.pop("bucket_storage") is Outcome.WARN
    assert set(others.values()) == {Outcome.OK}


@pytest.mark.parametrize(
    ("replicas", "outcome", "code"),
    [
        (1, Outcome.WARN, "single_replica"),
        (2, Outcome.WARN, "even_replicas"),
        (3, Outcome.OK, "ok"),
    ],
)
def test_replicas_in_a_cluster(replicas: int, outcome: Outcome, code: str) -> None:
    result = judge_bucket("bucket_replicas", bucket(CLUSTER, num_replicas=replicas))
    assert (result.outcome, result.code) == (outcome, code)
    assert result.message.startswith(str(replicas))
    assert result.facts == {"num_replicas": replicas}


def test_convergence_of_the_cluster() -> None:
    assert judge_bucket("bucket_cluster", bucket(ALONE)).message == "single server"
    converged = judge_bucket("bucket_cluster", bucket(CLUSTER))
    assert converged.message == "C, leader n0, current followers: 1"
    leaderless = judge_bucket("bucket_cluster", bucket(replace(CLUSTER, leader=None)))
    assert (leaderless.outcome, leaderless.code) == (Outcome.FAIL, "not_converged")
    assert "the stream has no leader" in leaderless.message


@pytest.mark.parametrize(
    ("versions", "outcome", "message"),
    [
        (["2.15.1"], Outcome.OK, "nats-server 2.15.1"),
        (["2.10.0"], Outcome.OK, "nats-server 2.10.0"),
        (["2.15.1", "2.9.25"], Outcome.WARN, "nats-server 2.9.25 does not report its time"),
        (["2.8.4", "2.15.1"], Outcome.FAIL, "nats-server 2.8.4"),
        ([""], Outcome.FAIL, "of unknown version"),
        (["2.12.0-RC.1"], Outcome.OK, "2.12.0-RC.1"),
    ],
)
def test_the_oldest_version_counts(versions: list[str], outcome: Outcome, message: str) -> None:
    result = judge_versions(versions)
    assert result.outcome is outcome
    assert message in result.message


@pytest.mark.parametrize(
    ("expire_in", "outcome"),
    [
        (timedelta(0), Outcome.FAIL),
        (timedelta(days=6), Outcome.WARN),
        (timedelta(days=7), Outcome.OK),
        (None, Outcome.OK),
    ],
)
def test_credentials_warn_a_week_before_they_expire(
    expire_in: timedelta | None, outcome: Outcome
) -> None:
    expire_at = None if expire_in is None else NOW + expire_in
    result = judge_credentials("/a.creds", expire_at, NOW)
    assert result.outcome is outcome
    assert result.facts == {"file": "/a.creds", "expires_at": expire_at}
    assert judge_credentials(None, None, NOW).outcome is Outcome.OK


@pytest.mark.parametrize(
    ("ahead", "outcome", "message"),
    [
        (0, Outcome.OK, "in sync with PostgreSQL"),
        (5, Outcome.OK, "5.0 s ahead of PostgreSQL"),
        (-5, Outcome.OK, "5.0 s behind PostgreSQL"),
        (5.1, Outcome.FAIL, " Restores are refused."),
        (-60, Outcome.FAIL, " Restores are refused."),
        (61, Outcome.FAIL, " Captures and restores are refused."),
    ],
)
def test_the_clocks_of_store_and_database(ahead: float, outcome: Outcome, message: str) -> None:
    store = NOW + timedelta(seconds=ahead)
    result = judge_store_clock(NOW, store, NOW, version="2.15.1")
    assert result.outcome is outcome
    assert message in result.message
    assert result.facts["skew_seconds"] == ahead


def test_a_slow_response_is_not_clock_skew() -> None:
    later = NOW + timedelta(seconds=20)
    between = NOW + timedelta(seconds=12)
    result = judge_store_clock(NOW, between, later, version="2.15.1")
    assert result.message == "in sync with PostgreSQL"


def test_a_server_that_does_not_report_its_time_is_a_warning() -> None:
    result = judge_store_clock(NOW, None, NOW, version="2.9.25")
    assert (result.outcome, result.code) == (Outcome.WARN, "no_server_time")
    assert "2.9.25" in result.message


@pytest.mark.parametrize(
    ("database_ahead", "outcome", "message"),
    [
        (0, Outcome.OK, "in sync"),
        (60, Outcome.OK, "60.0 s behind"),
        (-61, Outcome.WARN, "61.0 s ahead of"),
    ],
)
def test_the_clock_of_the_host(database_ahead: float, outcome: Outcome, message: str) -> None:
    result = judge_host_clock(NOW, NOW + timedelta(seconds=database_ahead), NOW)
    assert result.outcome is outcome
    assert message in result.message


def test_a_result_has_a_message_and_a_problem_has_a_hint() -> None:
    for problem in (warn, fail):
        with pytest.raises(ValueError, match="the result x has no hint"):
            problem("x", "It is.", "")
    with pytest.raises(ValueError, match="the result ok has no message"):
        ok("")


def test_only_a_failed_check_makes_the_report_fail() -> None:
    unknown, advised = skipped("x", "It is not there."), warn("y", "It is.", "change it.")
    failed = fail("z", "It is.", "change it.")
    passed = report(unknown, unknown, advised)
    assert not passed.has_failed
    assert [passed.count(outcome) for outcome in Outcome] == [0, 1, 0, 2]
    assert report(unknown, failed).has_failed


def report(*results: Result) -> Report:
    def no_check(_: None) -> Result:
        raise AssertionError

    return Report(NOW, tuple((Check(result.code, no_check), result) for result in results))


def test_errors_have_codes() -> None:
    assert error_code(StoreMissingError("It is gone.", "create it.")) == "store_missing"
    assert error_code(KeyError("x")) == "unexpected_error"
