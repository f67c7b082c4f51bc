"""What is judged of an installation, without any server."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from budget_recovery_dagster.domain import (
    SETTINGS,
    BucketSettings,
    ClusterView,
    Examination,
    Finding,
    Replica,
    State,
    Topic,
    advice,
    judge_cluster,
    judge_credentials,
    judge_host_clock,
    judge_settings,
    judge_store_clock,
    judge_versions,
    not_looked_at,
    ok,
    wrong,
)

NOW = datetime(2026, 11, 30, 14, tzinfo=UTC)
SUBJECT = "$KV.b.>"
USUAL = BucketSettings(
    subjects=(SUBJECT,),
    foreign=(),
    replicas=1,
    is_clustered=False,
    history=1,
    keeps_for=None,
    keeps_ttl=True,
    in_memory=False,
    is_written_late=False,
    allows_direct_get=False,
    denies_purge=False,
    drops_oldest=False,
    most_messages=None,
    messages=3,
    most_bytes=None,
    bytes=300,
    most_message_bytes=None,
    most_consumers=None,
    consumers=2,
    consumers_may_last=None,
    consumers_must_last=timedelta(seconds=30),
)


def judged(name: str, **settings: Any) -> Finding:
    findings = judge_settings(SUBJECT, replace(USUAL, **settings))
    assert [finding.name for finding in findings] == list(SETTINGS)
    (finding,) = [finding for finding in findings if finding.name == name]
    # One setting spoils no other.
    others = {each.state for each in findings if each.name not in (name, "sync", "room")}
    assert others == {State.OK}
    return finding


@pytest.mark.parametrize(
    ("name", "settings", "state", "said"),
    [
        ("kind", {}, State.OK, "messages in it: 3"),
        ("kind", {"subjects": ()}, State.WRONG, "no subjects"),
        ("kind", {"foreign": ("mirror set", "sealed set")}, State.WRONG, "mirror set, sealed set"),
        ("replicas", {"replicas": 1, "is_clustered": True}, State.ADVICE, "1 in a cluster"),
        ("replicas", {"replicas": 2, "is_clustered": True}, State.ADVICE, "than of 1"),
        ("replicas", {"replicas": 3, "is_clustered": True}, State.OK, "3"),
        ("history", {"history": 64}, State.OK, "64 values"),
        ("history", {"history": 65}, State.ADVICE, "Every former value"),
        ("history", {"history": None}, State.ADVICE, "Every former value"),
        ("expiry", {"keeps_ttl": False}, State.OK, "no times to live"),
        ("expiry", {"keeps_for": timedelta(days=91)}, State.ADVICE, "reads as zero"),
        ("expiry", {"keeps_for": timedelta(hours=1)}, State.ADVICE, "0.04167 days"),
        ("expiry", {"keeps_for": timedelta(days=92)}, State.ADVICE, "but a lifetime"),
        ("storage", {"in_memory": True}, State.ADVICE, "In memory"),
        ("sync", {}, State.NOT_LOOKED_AT, "sync_interval"),
        ("sync", {"is_written_late": True}, State.ADVICE, "before they are in the file"),
        ("room", {"most_bytes": 1000}, State.OK, "30% of 1,000 bytes"),
        ("room", {"most_bytes": 333}, State.WRONG, "writings are refused"),
        ("room", {"most_messages": 3}, State.WRONG, "100% of 3 messages"),
        ("room", {"most_bytes": 1000, "drops_oldest": True}, State.ADVICE, "without a word"),
        ("room", {"most_bytes": 333, "drops_oldest": True}, State.WRONG, "oldest counters"),
        ("room", {"drops_oldest": True}, State.OK, "without a limit"),
        ("size of values", {"most_message_bytes": 65535}, State.ADVICE, "65,535 bytes"),
        ("size of values", {"most_message_bytes": 65536}, State.OK, "large enough"),
        ("removal", {"denies_purge": True}, State.OK, "cannot be purged"),
        ("direct get", {"allows_direct_get": True}, State.OK, "we do not use it"),
        ("consumers", {"most_consumers": 2}, State.WRONG, "none is left"),
        ("consumers", {"most_consumers": 3}, State.OK, "2 of at most 3"),
        ("consumers", {"consumers_may_last": timedelta(seconds=29)}, State.WRONG, "29 s"),
        ("consumers", {"consumers_may_last": timedelta(seconds=30)}, State.OK, "without a limit"),
    ],
)
def test_what_the_settings_of_a_bucket_mean(
    name: str, settings: dict[str, Any], state: State, said: str
) -> None:
    finding = judged(name, **settings)
    assert finding.state is state
    assert said in finding.found


@pytest.mark.parametrize(
    ("versions", "state", "said"),
    [
        (["2.15.1"], State.OK, "nats-server 2.15.1"),
        (["2.10.0"], State.OK, "nats-server 2.10.0"),
        (["2.15.1", "2.9.25"], State.ADVICE, "nats-server 2.9.25 does not tell its time"),
        (["2.8.4", "2.15.1"], State.WRONG, "nats-server 2.8.4"),
        ([""], State.WRONG, "of an unknown version"),
        (["2.12.0-RC.1"], State.OK, "2.12.0-RC.1"),
    ],
)
def test_the_oldest_version_counts(versions: list[str], state: State, said: str) -> None:
    finding = judge_versions(versions)
    assert finding.state is state
    assert said in finding.found


@pytest.mark.parametrize(
    ("expire_in", "state"),
    [
        (timedelta(0), State.WRONG),
        (timedelta(days=6), State.ADVICE),
        (timedelta(days=7), State.OK),
        (None, State.OK),
    ],
)
def test_credentials_are_told_a_week_before_they_expire(
    expire_in: timedelta | None, state: State
) -> None:
    expire_at = None if expire_in is None else NOW + expire_in
    assert judge_credentials("/a.creds", expire_at, NOW).state is state
    assert judge_credentials(None, None, NOW).state is State.OK


@pytest.mark.parametrize(
    ("ahead", "state", "said"),
    [
        (0, State.OK, "as the database's"),
        (5, State.OK, "5.0 s ahead of the database's"),
        (-5, State.OK, "5.0 s behind the database's"),
        (5.1, State.WRONG, "nothing is restored"),
        (-60, State.WRONG, "nothing is restored"),
        (61, State.WRONG, "nothing is captured or restored"),
    ],
)
def test_the_clocks_of_store_and_database(ahead: float, state: State, said: str) -> None:
    told = NOW + timedelta(seconds=ahead)
    finding = judge_store_clock(NOW, told, NOW, version="2.15.1")
    assert finding.state is state
    assert said in finding.found


def test_an_answer_that_took_long_is_no_clock_that_is_off() -> None:
    later = NOW + timedelta(seconds=20)
    between = NOW + timedelta(seconds=12)
    assert judge_store_clock(NOW, between, later, version="2.15.1").found == "as the database's"


def test_a_server_that_does_not_tell_its_time_is_advised_about() -> None:
    finding = judge_store_clock(NOW, None, NOW, version="2.9.25")
    assert finding.state is State.ADVICE
    assert "2.9.25" in finding.found


@pytest.mark.parametrize(
    ("database_ahead", "state", "said"),
    [(0, State.OK, "as"), (60, State.OK, "60.0 s behind"), (-61, State.ADVICE, "61.0 s ahead of")],
)
def test_the_clock_of_the_host(database_ahead: float, state: State, said: str) -> None:
    finding = judge_host_clock(NOW, NOW + timedelta(seconds=database_ahead), NOW)
    assert finding.state is state
    assert said in finding.found


def test_a_cluster_is_told_whole_or_not() -> None:
    alone = ClusterView(NOW, None, "n0", None, 1, ())
    whole = ClusterView(
        NOW,
        "C",
        "n0",
        None,
        2,
        (Replica("n1", is_current=True, is_offline=False, lag=0, silent_for=timedelta(0)),),
    )
    assert judge_cluster(alone).found == "a single server"
    assert judge_cluster(whole).found == "C, led by n0, 1 current beside it"
    leaderless = judge_cluster(replace(whole, leader=None))
    assert leaderless.state is State.WRONG
    assert "the stream has no leader" in leaderless.found


def test_findings_say_what_and_what_to_do() -> None:
    with pytest.raises(ValueError, match="what to do about x"):
        wrong(Topic.BUCKET, "x", "It is.", "")
    with pytest.raises(ValueError, match="what to do about x"):
        advice(Topic.BUCKET, "x", "It is.", "")
    with pytest.raises(ValueError, match="nothing is said of x"):
        ok(Topic.BUCKET, "x", "")


def test_what_was_not_looked_at_is_not_counted_as_well() -> None:
    unseen = not_looked_at(Topic.BUCKET, ["x", "y"], "It is not there.")
    advised = advice(Topic.BUCKET, "z", "It is.", "change it.")
    well = Examination(NOW, (*unseen, advised))
    assert well.is_well
    assert [well.count(state) for state in State] == [0, 1, 0, 2]
    assert not Examination(NOW, (*unseen, wrong(Topic.BUCKET, "w", "It is.", "do."))).is_well
