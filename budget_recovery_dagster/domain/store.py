"""The identity of the usage store, and whether an observation shows the accepted store.

An observation is the stream's creation time, its last sequence, our marker, and whether the
answering leader hears a majority.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum

from budget_recovery_dagster.domain.windows import MAX_CLOCK_SKEW, require_aware
from budget_recovery_dagster.errors import SettingsError


@dataclass(frozen=True, slots=True)
class StoreIdentity:
    """When the store's stream was created, and the last sequence it has given out."""

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
    """What we last wrote into the store to know it by: a nonce, and the sequence that it got."""

    nonce: str
    revision: int


@dataclass(frozen=True, slots=True)
class Baseline:
    """The last accepted identity; ``version`` rises whenever any of it is replaced.

    ``marker`` was written at about ``marked_at``; both are None before a first one is known to
    stand in the store. ``intended`` is the nonce of one that may have been written since.
    """

    identity: StoreIdentity
    version: int
    marker: Marker | None = None
    marked_at: datetime | None = None
    intended: str | None = None

    def __post_init__(self) -> None:
        if (self.marker is None) != (self.marked_at is None):
            raise ValueError("a marker and the time of its writing belong together")


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
        """Whether the store no longer holds all that it held at the baseline."""
        return self in (Verdict.RECREATED, Verdict.REGRESSED, Verdict.MARKER_LOST)

    @property
    def is_good(self) -> bool:
        """Whether the store is known to hold all that it held at the baseline."""
        return self in (Verdict.FIRST_SEEN, Verdict.UNCHANGED, Verdict.ADVANCED)


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
    """Compare an identity that was read with authority against the last accepted one."""
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
"""Above the some ten seconds for which a cluster was seen to report a dead replica as current."""
SETTLED_POLLS = 3
"""So that one late answer does not stand for a settled cluster."""
SILENT_FOR = timedelta(seconds=3)
"""A healthy replica is heard of every second; one that is silent for longer may be dead."""


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
    """What one answer says of the servers that hold the store.

    ``replica_count`` is how many the store is configured to have, the leader included;
    ``leader_since`` is None where the server does not tell. A server that is no part of a cluster
    has no ``cluster`` name.
    """

    seen_at: datetime
    cluster: str | None
    leader: str | None
    leader_since: datetime | None
    replica_count: int
    replicas: tuple[Replica, ...]


def hears_majority(view: ClusterView) -> bool:
    """Whether the one who answers has heard lately of so many that nobody else can be the leader.

    One that was cut off from the others goes on answering for seconds after they have a new leader.
    """
    heard = [
        each for each in view.replicas if each.silent_for <= SILENT_FOR and not each.is_offline
    ]
    return 2 * (1 + len(heard)) > view.replica_count


def objection(view: ClusterView) -> str | None:
    """Say why this answer alone rules out that the store has converged; None if it does not."""
    if not view.leader:
        return "the stream has no leader"
    if view.leader in {replica.name for replica in view.replicas}:
        return f"the answer is not the leader's: {view.leader} is among the replicas"
    if view.replica_count == 1:
        return None
    if len(view.replicas) != view.replica_count - 1:
        return (
            f"{len(view.replicas)} of {view.replica_count - 1} replicas beside the leader are known"
        )
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

    A single server has nobody to wait for. In a cluster the newest answers, without an objection
    and with one and the same leader, must be at least three and span twelve seconds.
    """
    if not views:
        return "nothing is known of the servers yet"
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
"""A loss is believed once a second look, this much later, finds the same."""


@dataclass(frozen=True, slots=True)
class FoundMarker:
    """What stands under our marker's key, and under which sequence.

    ``nonce`` is None where it is no marker of ours; if so, ``is_deleted`` tells that somebody has
    deleted the key, which the store remembers.
    """

    nonce: str | None
    revision: int
    is_deleted: bool = False


@dataclass(frozen=True, slots=True)
class Observation:
    """A look at the store, as its leader shows it.

    ``is_led``: it hears of so many replicas that nobody else can be the leader. ``marker`` is None
    where nothing stands under its key. ``keeps_for`` is the age at which the
    store drops a marker that is not renewed, None if it never does.
    """

    identity: StoreIdentity
    marker: FoundMarker | None
    keeps_for: timedelta | None = None
    is_led: bool = True


@dataclass(frozen=True, slots=True)
class Judgement:
    """A verdict and, in a sentence, what it rests on."""

    verdict: Verdict
    reason: str


def judge_observation(
    accepted: Baseline | None, seen: Observation | None, now: datetime
) -> Judgement:
    """Compare a look at the store with what was accepted last; ``seen`` None: the store is gone.

    Gone means that the cluster said so with authority; anything less is no sighting at all. What a
    leader shows who may be none any more proves no loss.
    """
    require_aware(now)
    judgement = _judge(accepted, seen, now)
    if judgement.verdict.is_loss and seen is not None and not seen.is_led:
        return Judgement(
            Verdict.UNKNOWN,
            f"The server that answered may not be the leader any more. {judgement.reason}",
        )
    return judgement


def _judge(accepted: Baseline | None, seen: Observation | None, now: datetime) -> Judgement:
    if seen is None:
        if accepted is None:
            return Judgement(Verdict.UNKNOWN, "There is no store, and none is known of before.")
        was = accepted.identity
        return Judgement(Verdict.RECREATED, f"The store is gone; it was: {was}.")
    verdict = judge(accepted.identity if accepted else None, seen.identity)
    if accepted is None:
        return Judgement(verdict, f"The store is seen for the first time: {seen.identity}.")
    if verdict.is_loss:
        return Judgement(
            verdict, f"The store was {verdict}; it was: {accepted.identity}; now: {seen.identity}."
        )
    if objection := _objection_to_marker(accepted, seen, now):
        return Judgement(Verdict.MARKER_LOST, objection)
    return Judgement(verdict, f"The store is the one that was accepted: {seen.identity}.")


def accepted_marker(accepted: Baseline | None, seen: Observation) -> Marker | None:
    """Return the marker that stands in the store and is ours: the accepted one or its successor."""
    found = seen.marker
    if accepted is None or found is None or found.nonce is None:
        return None
    standing = Marker(found.nonce, found.revision)
    if standing == accepted.marker:
        return standing
    is_later = accepted.marker is None or found.revision > accepted.marker.revision
    return standing if found.nonce == accepted.intended and is_later else None


def _objection_to_marker(accepted: Baseline, seen: Observation, now: datetime) -> str | None:
    """Say why the marker does not stand where it should; None if it does, or if none is known."""
    marker, found = accepted.marker, seen.marker
    if marker is None or accepted_marker(accepted, seen) is not None:
        return None
    due = f"our marker should stand at sequence {marker.revision}"
    if found is None:
        if _has_expired(accepted, seen, now):
            return None
        return f"Part of the store is gone: {due}, and nothing is there."
    if found.revision <= marker.revision:
        return f"The store has gone back to older data: {due}, and at {found.revision} is another."
    if found.is_deleted:
        # The store remembers the deletion, so it has lived on; the next check writes a new marker.
        return None
    return (
        f"The store is not as we left it: {due}, and at {found.revision} is another. Either it went"
        " back to older data, or another installation uses a copy of this database."
    )


def _has_expired(accepted: Baseline, seen: Observation, now: datetime) -> bool:
    """Whether the store has dropped the marker for its age: nobody has renewed it in that time."""
    if accepted.marked_at is None or seen.keeps_for is None:
        return False
    return now + MAX_CLOCK_SKEW >= accepted.marked_at + seen.keeps_for


@dataclass(frozen=True, slots=True)
class Check:
    """One comparison of the store with what was accepted, as it is kept."""

    checked_at: datetime
    checked_by: str
    verdict: Verdict
    reason: str
    identity: StoreIdentity | None
    incident_id: str | None = None

    @property
    def is_good(self) -> bool:
        """Whether the store was found whole: while an incident is open, it is not, for all else."""
        return self.verdict.is_good and self.incident_id is None
