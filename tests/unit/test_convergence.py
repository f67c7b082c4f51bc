from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from budget_recovery_dagster.domain import (
    ClusterView,
    Replica,
    hears_majority,
    objection,
    why_not_converged,
)

START = datetime(2026, 11, 25, 12, tzinfo=UTC)
SECOND = timedelta(seconds=1)
ELECTED = START - timedelta(hours=1)


def follower(name: str) -> Replica:
    return Replica(name, is_current=True, is_offline=False, lag=0, silent_for=SECOND / 2)


def view(seconds: float = 0) -> ClusterView:
    """Return what the leader of a healthy cluster of three reports after so many seconds."""
    return ClusterView(
        seen_at=START + seconds * SECOND,
        cluster="C1",
        leader="a",
        leader_since=ELECTED,
        replica_count=3,
        replicas=(follower("b"), follower("c")),
    )


SOUND = [view(0), view(6), view(12)]


def test_a_single_server_has_converged() -> None:
    alone = ClusterView(START, None, "a", None, 1, ())
    assert why_not_converged([alone]) is None


def test_a_cluster_has_converged_after_twelve_settled_seconds_and_three_answers() -> None:
    assert why_not_converged(SOUND) is None
    assert why_not_converged([view(0), view(12)]) == (
        "the cluster has been settled for 12 s of 12 s in 2 answers of 3"
    )
    assert why_not_converged([view(0), view(6), view(11.5)]) == (
        "the cluster has been settled for 11 s of 12 s in 3 answers of 3"
    )
    assert why_not_converged([]) == "the servers have not answered yet"


def test_a_bucket_with_one_replica_in_a_cluster_needs_a_stable_leader() -> None:
    alone = [replace(each, replica_count=1, replicas=(), leader_since=None) for each in SOUND]
    assert why_not_converged(alone) is None
    assert why_not_converged(alone[:1]) is not None


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (replace(view(), leader=None), "the stream has no leader"),
        (
            replace(view(), replicas=(follower("a"), follower("b"), follower("c"))),
            "the answer is not from the leader: a is listed as a replica",
        ),
        (
            replace(view(), replicas=(follower("b"),)),
            "1 of 2 replicas of the leader are known",
        ),
        (replace(view(), replicas=()), "0 of 2 replicas of the leader are known"),
        (
            replace(view(), replicas=(follower("b"), replace(follower("c"), is_offline=True))),
            "replica c is offline",
        ),
        (
            replace(
                view(), replicas=(replace(follower("b"), is_current=False, lag=50), follower("c"))
            ),
            "replica b is not current, 50 operations behind",
        ),
        (
            replace(view(), replicas=(replace(follower("b"), lag=1), follower("c"))),
            "replica b is 1 operations behind",
        ),
        (
            replace(
                view(), replicas=(replace(follower("b"), silent_for=3.1 * SECOND), follower("c"))
            ),
            "replica b was last heard of 3.1 s ago",
        ),
    ],
)
def test_a_bad_answer_restarts_the_wait(bad: ClusterView, reason: str) -> None:
    assert objection(bad) == reason
    assert why_not_converged([*SOUND, replace(bad, seen_at=START + 13 * SECOND)]) == reason
    # After a bad answer, only later answers count.
    amid = [view(0), replace(bad, seen_at=START + 6 * SECOND), view(12), view(18), view(23.9)]
    assert why_not_converged(amid) is not None
    assert why_not_converged([*amid, view(24)]) is None


def test_a_replica_may_be_silent_for_three_seconds() -> None:
    quiet = replace(follower("b"), silent_for=3 * SECOND)
    assert objection(replace(view(), replicas=(quiet, follower("c")))) is None


def test_a_new_leader_or_election_restarts_the_wait() -> None:
    other = [
        replace(each, leader="b", replicas=(follower("a"), follower("c")))
        for each in (view(18), view(24), view(29.9))
    ]
    assert why_not_converged([*SOUND, *other]) is not None
    again = [replace(each, leader_since=START) for each in (view(18), view(24), view(30))]
    assert why_not_converged([*SOUND, *again[:2]]) is not None
    assert why_not_converged([*SOUND, *again]) is None


@pytest.mark.parametrize(
    ("silent", "offline", "hears"),
    [
        ((0.5, 0.5), (), True),
        # With one dead follower of two the leader still hears a majority; with two it does not.
        ((0.5, 90), (), True),
        ((3, 90), (), True),
        ((3.1, 90), (), False),
        ((0.5, 0.5), ("b", "c"), False),
    ],
)
def test_a_leader_is_trusted_only_while_it_hears_a_majority(
    silent: tuple[float, float], offline: tuple[str, ...], hears: object
) -> None:
    replicas = tuple(
        replace(follower(name), silent_for=seconds * SECOND, is_offline=name in offline)
        for name, seconds in zip("bc", silent, strict=True)
    )
    assert hears_majority(replace(view(), replicas=replicas)) is hears


def test_a_stream_without_replicas_needs_no_majority() -> None:
    assert hears_majority(replace(view(), replica_count=1, replicas=()))
