"""The identity of the usage store, and whether an observation shows the accepted store.

An observation is the stream's creation time, its last sequence, our marker, and whether the
answering leader hears a majority.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum

from budget_recovery_dagster.domain.windows import MAX_CLOCK_SKEW, require_aware
from budget_recovery_dagster.errors import SettingsError


@dataclass(frozen=True, slots=True)
class StoreIdentity:
    """The creation time of the store's stream, and its last sequence."""

    created_at: datetime
    last_sequence: int

    def __post_init__(self) -> None:
        require_aware(self.created_at)
        if self.last_sequence < 0:
            raise ValueError(f"last_sequence is {self.last_sequence}, below zero")

    def __str__(self) -> str:
        created_at = f"{self.created_at.astimezone(UTC):%Y-%m-%d %H:%M:%S.%f}"
        return f"created {created_at} UTC, sequence {self.last_sequence}"


@dataclass(frozen=True, slots=True)
class Marker:
    """Our own key in the store, which identifies it: a nonce, and the sequence of the write."""

    nonce: str
    revision: int


@dataclass(frozen=True, slots=True)
class Baseline:
    """The last accepted identity; ``version`` rises with every change.

    ``marker`` was written at about ``marked_at``; both are None until a first marker is known to be
    in the store. ``intended`` is the nonce of a marker that may have been written since.
    """

    identity: StoreIdentity
    version: int
    marker: Marker | None = None
    marked_at: datetime | None = None
    intended: str | None = None

    def __post_init__(self) -> None:
        if (self.marker is None) != (self.marked_at is None):
            raise ValueError("a marker needs the time of its write, and the time needs a marker")


class Verdict(StrEnum):
    """What an observed identity means, compared with the baseline."""

    UNKNOWN = "unknown"
    FIRST_SEEN = "first_seen"
    UNCHANGED = "unchanged"
    ADVANCED = "advanced"
    RECREATED = "recreated"
    REGRESSED = "regressed"
    MARKER_LOST = "marker_lost"

    @property
    def is_loss(self) -> bool:
        """Whether the store has lost data since the baseline."""
        return self in (Verdict.RECREATED, Verdict.REGRESSED, Verdict.MARKER_LOST)

    @property
    def is_good(self) -> bool:
        """Whether the store is known to hold all data of the baseline."""
        return self in (Verdict.FIRST_SEEN, Verdict.UNCHANGED, Verdict.ADVANCED)


WHAT_HAPPENED: Mapping[Verdict, str] = {
    Verdict.RECREATED: "was recreated",
    Verdict.REGRESSED: "went back to an earlier state",
}
"""What a loss that ``judge`` found means, for a sentence that begins with the store."""


def require_bucket(claimed: str, bucket: str) -> None:
    """Refuse to work on another bucket than the one that was claimed.

    Raises:
        SettingsError: it is another.
    """
    if bucket != claimed:
        raise SettingsError(
            f"BUDGET_RECOVERY_BUCKET is {bucket!r}, but this database belongs to the bucket"
            f" {claimed!r}.",
            "use one database for each bucket, or set the bucket back.",
        )


def judge(baseline: StoreIdentity | None, observed: StoreIdentity) -> Verdict:
    """Compare an identity that the leader reported with the last accepted one."""
    if baseline is None:
        return Verdict.FIRST_SEEN
    if observed.created_at != baseline.created_at:
        return Verdict.RECREATED
    if observed.last_sequence < baseline.last_sequence:
        return Verdict.REGRESSED
    if observed.last_sequence == baseline.last_sequence:
        return Verdict.UNCHANGED
    return Verdict.ADVANCED


SETTLED_FOR = timedelta(seconds=12)
"""Longer than the ten seconds or so for which a cluster reports a dead replica as current."""
SETTLED_POLLS = 3
"""One late answer alone must not prove a settled cluster."""
SILENT_FOR = timedelta(seconds=3)
"""A healthy replica reports every second; one that is silent for longer may be dead."""


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
    """The servers of the store, according to one answer.

    ``replica_count`` is the configured number of replicas, including the leader. ``leader_since``
    is None if the server does not report it. A server outside a cluster has no ``cluster`` name.
    """

    seen_at: datetime
    cluster: str | None
    leader: str | None
    leader_since: datetime | None
    replica_count: int
    replicas: tuple[Replica, ...]


def hears_majority(view: ClusterView) -> bool:
    """Whether the server that answers hears a majority, so that no other can be the leader.

    A leader that was cut off still answers for seconds after the others have a new leader.
    """
    heard = [
        each for each in view.replicas if each.silent_for <= SILENT_FOR and not each.is_offline
    ]
    return 2 * (1 + len(heard)) > view.replica_count


def objection(view: ClusterView) -> str | None:
    """Return why this answer proves that the store has not converged; None if it does not."""
    if not view.leader:
        return "the stream has no leader"
    if view.leader in {replica.name for replica in view.replicas}:
        return f"the answer is not from the leader: {view.leader} is listed as a replica"
    if view.replica_count == 1:
        return None
    if len(view.replicas) != view.replica_count - 1:
        return f"{len(view.replicas)} of {view.replica_count - 1} replicas of the leader are known"
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

    A single server has no replica to wait for. In a cluster, the newest answers must be without an
    objection and from the same leader: at least three of them, over at least twelve seconds.
    """
    if not views:
        return "the servers have not answered yet"
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


AGREEING_AFTER = timedelta(seconds=2)
"""A second observation, this much later, must confirm a loss."""


@dataclass(frozen=True, slots=True)
class FoundMarker:
    """The value under our marker's key, and its sequence.

    ``nonce`` is None if it is not our marker; ``is_deleted`` is then whether the key was deleted,
    which the store remembers.
    """

    nonce: str | None
    revision: int
    is_deleted: bool = False


@dataclass(frozen=True, slots=True)
class Observation:
    """The identity and marker of the store, as its leader reports them.

    ``is_led``: the leader hears a majority, so no other server can be the leader. ``marker`` is
    None if its key does not exist. ``keeps_for`` is the age at which the store drops a marker that
    is not renewed, None if it never does.
    """

    identity: StoreIdentity
    marker: FoundMarker | None
    keeps_for: timedelta | None = None
    is_led: bool = True


@dataclass(frozen=True, slots=True)
class Judgement:
    """A verdict and its reason, in a sentence."""

    verdict: Verdict
    reason: str


def judge_observation(
    accepted: Baseline | None, seen: Observation | None, now: datetime
) -> Judgement:
    """Compare an observation with the accepted baseline; ``seen`` None: the store is gone.

    Gone means that the cluster reported it with authority; other failures are no observation. An
    answer of a server that may no longer be the leader proves no loss.
    """
    require_aware(now)
    judgement = _judge(accepted, seen, now)
    if judgement.verdict.is_loss and seen is not None and not seen.is_led:
        return Judgement(
            Verdict.UNKNOWN,
            f"The server that answered may no longer be the leader. {judgement.reason}",
        )
    return judgement


def _judge(accepted: Baseline | None, seen: Observation | None, now: datetime) -> Judgement:
    if seen is None:
        if accepted is None:
            return Judgement(Verdict.UNKNOWN, "The store does not exist, and none was accepted.")
        was = accepted.identity
        return Judgement(Verdict.RECREATED, f"The store is gone; it was: {was}.")
    verdict = judge(accepted.identity if accepted else None, seen.identity)
    if accepted is None:
        return Judgement(verdict, f"The store is seen for the first time: {seen.identity}.")
    if verdict.is_loss:
        return Judgement(
            verdict,
            f"The store {WHAT_HAPPENED[verdict]}; it was: {accepted.identity}; now:"
            f" {seen.identity}.",
        )
    if objection := _objection_to_marker(accepted, seen, now):
        return Judgement(Verdict.MARKER_LOST, objection)
    return Judgement(verdict, f"The store is the accepted one: {seen.identity}.")


def accepted_marker(accepted: Baseline | None, seen: Observation) -> Marker | None:
    """Return our marker in the store: the accepted one or its successor; None if neither."""
    found = seen.marker
    if accepted is None or found is None or found.nonce is None:
        return None
    present = Marker(found.nonce, found.revision)
    if present == accepted.marker:
        return present
    is_later = accepted.marker is None or found.revision > accepted.marker.revision
    return present if found.nonce == accepted.intended and is_later else None


def _objection_to_marker(accepted: Baseline, seen: Observation, now: datetime) -> str | None:
    """Return why the marker proves a loss; None if it does not, or if no marker is known."""
    marker, found = accepted.marker, seen.marker
    if marker is None or accepted_marker(accepted, seen) is not None:
        return None
    due = f"our marker should be at sequence {marker.revision}"
    if found is None:
        if _has_expired(accepted, seen, now):
            return None
        return f"Part of the store is gone: {due}, but it does not exist."
    if found.revision <= marker.revision:
        return f"The store went back to older data: {due}, but {found.revision} has another marker."
    if found.is_deleted:
        # The store remembers the deletion, so it lost no data; the next check writes a new marker.
        return None
    return (
        f"The store has a foreign marker: {due}, but {found.revision} has another one. Either the"
        " store went back to older data, or another installation uses a copy of this database."
    )


def _has_expired(accepted: Baseline, seen: Observation, now: datetime) -> bool:
    """Whether the store dropped the marker because of its age: no check renewed it in time."""
    if accepted.marked_at is None or seen.keeps_for is None:
        return False
    return now + MAX_CLOCK_SKEW >= accepted.marked_at + seen.keeps_for


@dataclass(frozen=True, slots=True)
class Check:
    """A stored comparison of the store with the accepted baseline."""

    checked_at: datetime
    checked_by: str
    verdict: Verdict
    reason: str
    identity: StoreIdentity | None
    incident_id: str | None = None

    @property
    def is_good(self) -> bool:
        """Whether the check found the store intact; never while an incident is open."""
        return self.verdict.is_good and self.incident_id is None
