"""Detection: what a look at the store means, compared with what we last accepted.

Creation time and sequence alone leave holes: a store that was rolled back to an older copy and then
overtaken by traffic shows neither, nor does a purge of the whole stream. So we keep a marker of our
own in it, and look whether it still stands where we wrote it.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta

from budget_recovery_dagster.domain.identity import Baseline, Marker, StoreIdentity, Verdict, judge
from budget_recovery_dagster.domain.moments import MAX_CLOCK_SKEW, require_aware

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
class Sighting:
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


def judge_sighting(accepted: Baseline | None, seen: Sighting | None, now: datetime) -> Judgement:
    """Compare a look at the store with what was accepted last; ``seen`` None: the store is gone.

    Gone means that the cluster said so with authority; anything less is no sighting at all. What a
    leader shows who may be none any more proves no loss.
    """
    require_aware(now)
    judgement = _judge(accepted, seen, now)
    if judgement.verdict.is_loss and seen is not None and not seen.is_led:
        return Judgement(
            Verdict.UNKNOWN,
            f"Whoever answered may not be the leader any more. {judgement.reason}",
        )
    return judgement


def _judge(accepted: Baseline | None, seen: Sighting | None, now: datetime) -> Judgement:
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


def accepted_marker(accepted: Baseline | None, seen: Sighting) -> Marker | None:
    """Return the marker that stands in the store and is ours: the accepted one or its successor."""
    found = seen.marker
    if accepted is None or found is None or found.nonce is None:
        return None
    standing = Marker(found.nonce, found.revision)
    if standing == accepted.marker:
        return standing
    is_later = accepted.marker is None or found.revision > accepted.marker.revision
    return standing if found.nonce == accepted.intended and is_later else None


def _objection_to_marker(accepted: Baseline, seen: Sighting, now: datetime) -> str | None:
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


def _has_expired(accepted: Baseline, seen: Sighting, now: datetime) -> bool:
    """Whether the store has dropped the marker for its age: nobody has renewed it in that time."""
    if accepted.marked_at is None or seen.keeps_for is None:
        return False
    return now + MAX_CLOCK_SKEW >= accepted.marked_at + seen.keeps_for
