"""The contract of marker and cluster state, in memory and on a NATS server."""

import json
from datetime import UTC, datetime
from uuid import uuid4

import pytest

from budget_recovery_dagster.domain import FoundMarker, IntendedMarker, Marker, why_not_converged
from budget_recovery_dagster.errors import MarkerConflictError
from tests.contract.usage_stores import Subject
from tests.identities import identity_of

DEPLOYMENT = str(uuid4())
KEY = f"__guard.{DEPLOYMENT}"


def found(subject: Subject) -> FoundMarker | None:
    return subject.store.observe(DEPLOYMENT).marker


def test_an_observation_without_a_marker_has_the_identity(subject: Subject) -> None:
    subject.put("usage.t.b.2026-11.e", b"1")
    seen = subject.store.observe(DEPLOYMENT)
    assert seen.identity == identity_of(subject.store)
    assert seen.marker is None
    assert seen.keeps_for is None


def test_a_marker_is_found_at_its_revision(subject: Subject) -> None:
    first = subject.store.write_marker(DEPLOYMENT, IntendedMarker("one"), after=0)
    assert found(subject) == FoundMarker("one", first.revision)
    second = subject.store.write_marker(DEPLOYMENT, IntendedMarker("two"), after=first.revision)
    assert second == Marker("two", first.revision + 1)
    assert found(subject) == FoundMarker("two", second.revision)
    assert identity_of(subject.store).last_sequence == second.revision


def test_a_marker_names_its_writer_and_never_expires(subject: Subject) -> None:
    subject.store.write_marker(DEPLOYMENT, IntendedMarker("one"), after=0)
    stored = subject.stored(KEY)
    assert stored is not None
    assert json.loads(stored.data) == {"nonce": "one", "written_by": "budget-recovery"}
    assert stored.ttl == "never"


def test_each_deployment_has_its_own_marker(subject: Subject) -> None:
    subject.store.write_marker("another", IntendedMarker("one"), after=0)
    assert found(subject) is None


@pytest.mark.parametrize("after", [0, 1, 3, 99])
def test_a_marker_is_written_only_over_the_expected_revision(subject: Subject, after: int) -> None:
    for nonce, seen in (("one", 0), ("two", 1)):
        subject.store.write_marker(DEPLOYMENT, IntendedMarker(nonce), after=seen)
    with pytest.raises(MarkerConflictError, match=KEY):
        subject.store.write_marker(DEPLOYMENT, IntendedMarker("three"), after=after)
    assert found(subject) == FoundMarker("two", 2)


def test_a_marker_is_not_written_over_a_purged_one(subject: Subject) -> None:
    first = subject.store.write_marker(DEPLOYMENT, IntendedMarker("one"), after=0)
    subject.purge("__guard.")
    assert found(subject) is None
    with pytest.raises(MarkerConflictError):
        subject.store.write_marker(DEPLOYMENT, IntendedMarker("two"), after=first.revision)
    assert (
        subject.store.write_marker(DEPLOYMENT, IntendedMarker("two"), after=0).revision
        == first.revision + 1
    )


def test_a_deleted_marker_differs_from_none_and_can_be_overwritten(subject: Subject) -> None:
    first = subject.store.write_marker(DEPLOYMENT, IntendedMarker("one"), after=0)
    subject.remove(KEY)
    assert found(subject) == FoundMarker(None, first.revision + 1, is_deleted=True)
    second = subject.store.write_marker(DEPLOYMENT, IntendedMarker("two"), after=first.revision + 1)
    assert found(subject) == FoundMarker("two", second.revision)


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"\xff",
        b"7",
        b"[" * 100_000,
        b'{"nonce":"n"}',
        b'{"nonce":7,"written_by":"budget-recovery"}',
        b'{"nonce":"n","written_by":"somebody else"}',
    ],
)
def test_a_foreign_marker_has_no_nonce(subject: Subject, value: bytes) -> None:
    subject.put(KEY, value)
    assert found(subject) == FoundMarker(None, 1)


def test_a_single_server_has_converged(subject: Subject) -> None:
    now = datetime.now(UTC)
    view = subject.store.cluster_view(now)
    assert (view.seen_at, view.cluster, view.replica_count, view.replicas) == (now, None, 1, ())
    assert view.leader
    assert why_not_converged([view]) is None
