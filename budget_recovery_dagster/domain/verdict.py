"""Is this the accepted store? One observation, compared with what was accepted, by one table.

An observation is the stream's creation time, its last sequence, our marker, and whether the
answering leader hears a majority. ``facts_of`` compares it with the accepted baseline and with what
the database remembers; the first matching row of ``TABLE`` is the verdict.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

from budget_recovery_dagster.domain.store import Baseline, Marker, StoreIdentity
from budget_recovery_dagster.domain.windows import MAX_CLOCK_SKEW, in_words, require_aware

AGREEING_AFTER = timedelta(seconds=2)
"""A second observation, this much later, must confirm every verdict but SAME and UNKNOWN."""
CREATION_TOLERANCE = timedelta(seconds=5)
"""Creation times less than this apart are equal.

The servers of a stream that was restored from a backup disagree by some 60 ms, so that every change
of the leader changes it.
"""
PREDATES_BY = timedelta(seconds=60)
"""A store is no rebuilt one if it is older than the last good observation by more than this."""


class Verdict(StrEnum):
    """What an observation means, compared with what was accepted."""

    UNKNOWN = "unknown"
    FIRST_SEEN = "first_seen"
    SAME = "same"
    LOST = "lost"
    DATABASE_BEHIND = "database_behind"
    OTHER_STORE = "other_store"

    @property
    def is_alarm(self) -> bool:
        """Whether the store or the database is not, or may not be, the one that was accepted."""
        return self in (Verdict.LOST, Verdict.DATABASE_BEHIND, Verdict.OTHER_STORE)

    @property
    def is_good(self) -> bool:
        """Whether the store is known to hold all data of the baseline."""
        return self in (Verdict.FIRST_SEEN, Verdict.SAME)


class Evidence(StrEnum):
    """What an alarm rests on, or what is reported of the accepted store."""

    GONE = "gone"
    RECREATED = "recreated"
    SEQUENCE_BACK = "sequence_back"
    OLDER_COPY = "older_copy"
    MARKER_GONE = "marker_gone"
    LANDMARK_MISSING = "landmark_missing"
    NUMBER_AHEAD = "number_ahead"
    FORMER_STORE = "former_store"
    FOREIGN_MARKER = "foreign_marker"
    PREDATES = "predates"
    MARKER_REMOVED = "marker_removed"
    MARKER_NOT_WRITTEN = "marker_not_written"


@dataclass(frozen=True, slots=True)
class FoundMarker:
    """The value under our marker's key, and its sequence.

    ``nonce`` is None if it is not our marker; ``is_deleted`` is then whether the key was deleted,
    which the store remembers, and ``is_expired`` whether that was because of its age. ``number``
    and ``landmark`` are those of our marker; a marker of the first version has 0 and None.
    """

    nonce: str | None
    revision: int
    is_deleted: bool = False
    is_expired: bool = False
    number: int = 0
    landmark: str | None = None

    @property
    def ours(self) -> Marker | None:
        """Our marker; None if it is none of ours."""
        return None if self.nonce is None else Marker(self.nonce, self.revision, self.number)


@dataclass(frozen=True, slots=True)
class Observation:
    """The identity and marker of the store, as its leader reports them.

    ``is_led``: the leader hears a majority, so no other server can be the leader. ``marker`` is
    None if its key does not exist. ``keeps_for`` is the age at which the store drops a marker that
    is not renewed, None if it never does. ``leader_time`` is the leader's clock (UTC), None if its
    server does not report it. ``others`` are the deployments with a marker of their own.
    ``may_have_older``: the stream holds messages from before its creation, as one does that was
    restored from a backup, or its server does not report that.
    """

    identity: StoreIdentity
    marker: FoundMarker | None
    keeps_for: timedelta | None = None
    is_led: bool = True
    leader_time: datetime | None = None
    others: frozenset[str] = frozenset()
    may_have_older: bool = True

    @property
    def our_marker(self) -> Marker | None:
        """Our marker in the store, whichever it is; None if there is none."""
        return None if self.marker is None else self.marker.ours


def began_empty(accepted: Baseline | None, seen: Observation | None) -> bool:
    """Whether the observed store was provably created empty since the accepted one was good.

    A backup of a store brings back its messages with their times, and our marker with them. Another
    installation, which has its own marker, may have restored counters before. Neither proves that
    nobody else wrote older values into the new store.
    """
    if accepted is None or seen is None or accepted.seen_at is None:
        return False
    created_at = seen.identity.created_at
    return (
        not same_creation(created_at, accepted.identity.created_at)
        and created_at > accepted.seen_at - CREATION_TOLERANCE
        and seen.marker is None
        and not seen.others
        and not seen.may_have_older
    )


@dataclass(frozen=True, slots=True)
class Memory:
    """What the database remembers besides the baseline, read after the observation.

    ``number`` is the highest that it gave to a marker, and ``nonce`` that marker's. Whether it
    ``has_landmark`` that the observed marker names; a marker that names none counts as known. A
    creation time ``was_replaced`` if it was accepted before another one replaced it.
    """

    number: int = 0
    nonce: str | None = None
    has_landmark: bool = True
    was_replaced: bool = False


class Answer(StrEnum):
    """Who answered: no server with authority, the cluster without the store, or its leader."""

    WITHOUT_AUTHORITY = "without_authority"
    GONE = "gone"
    PRESENT = "present"


class Found(StrEnum):
    """Our marker's key, compared with what was left there.

    AS_LEFT: the accepted marker, or its intended successor. AHEAD: a marker that this database
    cannot have written. NOT_AS_LEFT: any other marker of ours. NEVER: no marker of ours, and none
    was known. REMOVED: none, but it was deleted or became too old. MISSING: none, without a reason.
    """

    AS_LEFT = "as_left"
    AHEAD = "ahead"
    NOT_AS_LEFT = "not_as_left"
    NEVER = "never"
    REMOVED = "removed"
    MISSING = "missing"


@dataclass(frozen=True, slots=True)
class StoreFacts:
    """The inputs of the table; those after ``is_known`` have no meaning for a store that is gone.

    ``is_known``: a store was accepted, or captured. ``was_replaced``: the creation time was
    accepted before another one replaced it. ``has_foreign_marker``: a deployment has a marker that
    the accepted store did not hold. ``predates``: it is too old to have been built since the last
    good observation.
    """

    answer: Answer
    is_known: bool
    marker: Found
    is_same_creation: bool
    is_sequence_lower: bool
    was_replaced: bool
    has_foreign_marker: bool
    predates: bool

    @property
    def is_intact(self) -> bool:
        """Whether creation time and sequence are as they should be."""
        return self.is_same_creation and not self.is_sequence_lower

    @property
    def is_unmarked(self) -> bool:
        """Whether no marker of ours is there."""
        return self.marker in (Found.NEVER, Found.REMOVED, Found.MISSING)


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the table: a verdict, and when it is given."""

    verdict: Verdict
    when: str
    matches: Callable[[StoreFacts], bool]


TABLE = (
    Row(
        Verdict.UNKNOWN,
        "no authoritative answer",
        lambda facts: facts.answer is Answer.WITHOUT_AUTHORITY,
    ),
    Row(
        Verdict.UNKNOWN,
        "gone, and nothing was ever accepted",
        lambda facts: facts.answer is Answer.GONE and not facts.is_known,
    ),
    Row(Verdict.FIRST_SEEN, "no baseline and no captures", lambda facts: not facts.is_known),
    Row(Verdict.LOST, "gone, with authority", lambda facts: facts.answer is Answer.GONE),
    Row(
        Verdict.DATABASE_BEHIND,
        "a marker that this database cannot have written",
        lambda facts: facts.marker is Found.AHEAD,
    ),
    Row(
        Verdict.OTHER_STORE,
        "a creation time that another one replaced, and the marker is not as left",
        lambda facts: facts.was_replaced and facts.marker is not Found.AS_LEFT,
    ),
    Row(
        Verdict.SAME,
        "the marker as left, same creation time, sequence not lower",
        lambda facts: facts.marker is Found.AS_LEFT and facts.is_intact,
    ),
    Row(Verdict.LOST, "any other marker of ours", lambda facts: not facts.is_unmarked),
    Row(
        Verdict.SAME,
        "no marker of ours, for a harmless reason; same creation time, sequence not lower",
        lambda facts: facts.marker in (Found.NEVER, Found.REMOVED) and facts.is_intact,
    ),
    Row(
        Verdict.OTHER_STORE,
        "another creation time, and a foreign marker, or too old to be a rebuilt store",
        lambda facts: not facts.is_same_creation and (facts.has_foreign_marker or facts.predates),
    ),
    Row(Verdict.LOST, "anything else", lambda _: True),
)
"""Tried from the top; the last row always matches."""


def verdict_on(facts: StoreFacts) -> Verdict:
    """Return the verdict of the first row that matches."""
    return next(row.verdict for row in TABLE if row.matches(facts))


def same_creation(one: datetime, other: datetime) -> bool:
    """Whether two creation times are equal, within the tolerance."""
    return abs(one - other) < CREATION_TOLERANCE


def facts_of(
    accepted: Baseline | None, seen: Observation | None, memory: Memory, now: datetime
) -> StoreFacts:
    """Compare an observation with the accepted baseline; ``seen`` None: the store is gone."""
    require_aware(now)
    if seen is None or accepted is None:
        return StoreFacts(
            answer=_answer(seen),
            is_known=accepted is not None,
            marker=Found.NEVER,
            is_same_creation=False,
            is_sequence_lower=False,
            was_replaced=False,
            has_foreign_marker=False,
            predates=False,
        )
    created_at = seen.identity.created_at
    is_same_creation = same_creation(created_at, accepted.identity.created_at)
    return StoreFacts(
        answer=_answer(seen),
        is_known=True,
        marker=_found(accepted, seen, memory, now),
        is_same_creation=is_same_creation,
        is_sequence_lower=seen.identity.last_sequence < accepted.identity.last_sequence,
        # A person may have released a store that was replaced; it is then the restore target.
        was_replaced=memory.was_replaced and not is_same_creation,
        # Unknown others: none of them can be called new.
        has_foreign_marker=accepted.others is not None and bool(seen.others - accepted.others),
        predates=accepted.seen_at is not None and created_at < accepted.seen_at - PREDATES_BY,
    )


def _answer(seen: Observation | None) -> Answer:
    if seen is None:
        return Answer.GONE
    return Answer.PRESENT if seen.is_led else Answer.WITHOUT_AUTHORITY


def _found(accepted: Baseline, seen: Observation, memory: Memory, now: datetime) -> Found:
    found = seen.marker
    if found is not None and found.nonce is not None:
        return _found_ours(accepted, seen, found, memory)
    if accepted.marker is None:
        return Found.NEVER
    if found is not None and found.is_deleted and not found.is_expired:
        # The store remembers the deletion, so it lost no data; the next check writes a new marker.
        is_removed = found.revision > accepted.marker.revision
    else:
        is_removed = _is_too_old(accepted, now)
    return Found.REMOVED if is_removed else Found.MISSING


def _found_ours(accepted: Baseline, seen: Observation, found: FoundMarker, memory: Memory) -> Found:
    if _is_ahead(found, memory):
        return Found.AHEAD
    if accepted_marker(accepted, seen) or _is_newest_of_unknown(accepted, found, memory):
        return Found.AS_LEFT
    is_of_version_1 = accepted.marker is None and not found.number
    return Found.NEVER if is_of_version_1 else Found.NOT_AS_LEFT


def _is_ahead(found: FoundMarker, memory: Memory) -> bool:
    if not memory.has_landmark or found.number > memory.number:
        return True
    # A marker of the first version has no number to compare.
    return found.number == memory.number > 0 and found.nonce != memory.nonce


def _is_newest_of_unknown(accepted: Baseline, found: FoundMarker, memory: Memory) -> bool:
    """Whether a lost baseline, which knows no marker, left the newest one that was given out."""
    is_newest = found.number == memory.number > 0 and found.nonce == memory.nonce
    return accepted.marker is None and is_newest


def _is_too_old(accepted: Baseline, now: datetime) -> bool:
    """Whether no check renewed the marker before the store drops it because of its age."""
    if accepted.marked_at is None or accepted.keeps_for is None:
        return False
    return now + MAX_CLOCK_SKEW >= accepted.marked_at + accepted.keeps_for


def accepted_marker(accepted: Baseline | None, seen: Observation) -> Marker | None:
    """Return our marker in the store: the accepted one or its successor; None if neither."""
    present = seen.our_marker
    if accepted is None or present is None:
        return None
    if present == accepted.marker:
        return present
    intended = accepted.intended
    is_later = accepted.marker is None or present.revision > accepted.marker.revision
    return (
        present if intended is not None and present.nonce == intended.nonce and is_later else None
    )


@dataclass(frozen=True, slots=True)
class Judgement:
    """A verdict and its reason: a sentence, and a code if something is lost or reported."""

    verdict: Verdict
    reason: str
    evidence: Evidence | None = None


def judge_observation(
    accepted: Baseline | None, seen: Observation | None, memory: Memory, now: datetime
) -> Judgement:
    """Judge an observation made at ``now`` (aware); ``seen`` None: the store is gone.

    Gone means that the cluster reported it with authority; other failures are no observation.
    """
    facts = facts_of(accepted, seen, memory, now)
    verdict = verdict_on(facts)
    if verdict is Verdict.UNKNOWN:
        return Judgement(verdict, _why_unknown(facts, seen))
    if seen is None or accepted is None:
        if seen is not None:
            return Judgement(verdict, f"The store is seen for the first time: {seen.identity}.")
        was = "" if accepted is None else f"; it was: {accepted.identity}"
        return Judgement(verdict, f"The store is gone{was}.", Evidence.GONE)
    evidence = _evidence(facts, verdict, seen, memory)
    return Judgement(verdict, _reason(evidence, accepted, seen, memory), evidence)


def _why_unknown(facts: StoreFacts, seen: Observation | None) -> str:
    if facts.answer is Answer.GONE:
        return "The store does not exist, and none was accepted."
    observed = "" if seen is None else f"; observed: {seen.identity}"
    return f"The server that answered may no longer be the leader{observed}."


def _evidence(
    facts: StoreFacts, verdict: Verdict, seen: Observation, memory: Memory
) -> Evidence | None:
    if verdict is Verdict.SAME:
        return Evidence.MARKER_REMOVED if facts.marker is Found.REMOVED else None
    if verdict is Verdict.DATABASE_BEHIND:
        return Evidence.NUMBER_AHEAD if memory.has_landmark else Evidence.LANDMARK_MISSING
    if verdict is Verdict.OTHER_STORE:
        reasons = {
            Evidence.FORMER_STORE: facts.was_replaced,
            Evidence.FOREIGN_MARKER: facts.has_foreign_marker,
            Evidence.PREDATES: facts.predates,
        }
    else:
        reasons = {
            Evidence.RECREATED: not facts.is_same_creation,
            Evidence.SEQUENCE_BACK: facts.is_sequence_lower,
            Evidence.OLDER_COPY: seen.our_marker is not None,
            Evidence.MARKER_GONE: True,
        }
    return next(evidence for evidence, holds in reasons.items() if holds)


_BEHIND = "The control-plane database is older than the store: "
_WHY_BEHIND = " The database was restored from a backup, or another installation uses a copy of it."
_REASONS = {
    None: "The store is the accepted one: {now}.",
    Evidence.MARKER_REMOVED: (
        "The store is the accepted one: {now}. Our marker was deleted or became too old."
    ),
    Evidence.RECREATED: "The store was recreated; it was: {was}; now: {now}.",
    Evidence.SEQUENCE_BACK: ("The store went back to an earlier state; it was: {was}; now: {now}."),
    Evidence.OLDER_COPY: (
        "The store went back to older data, or our marker was overwritten: {expected}{found} has"
        " another one."
    ),
    Evidence.MARKER_GONE: (
        "Part of the store is gone, or our marker was overwritten: it should be at sequence {left},"
        " but {instead}."
    ),
    Evidence.LANDMARK_MISSING: (
        f"{_BEHIND}our marker in the store names an event that the database does not"
        f" have.{_WHY_BEHIND}"
    ),
    Evidence.NUMBER_AHEAD: (
        f"{_BEHIND}the store has marker number {{number}}, and the database gave out {{given}}."
        f"{_WHY_BEHIND}"
    ),
    Evidence.FORMER_STORE: (
        "The server shows a store that was replaced by another one before; it was: {was}; now:"
        " {now}."
    ),
    Evidence.FOREIGN_MARKER: (
        "The server shows a store with a marker of another installation, which the accepted store"
        " did not have; it was: {was}; now: {now}."
    ),
    Evidence.PREDATES: (
        "The server shows a store that existed {older} before the last good check of the accepted"
        " one; it was: {was}; now: {now}."
    ),
}


def _reason(
    evidence: Evidence | None, accepted: Baseline, seen: Observation, memory: Memory
) -> str:
    left, found = accepted.marker, seen.marker
    # A lost baseline, which knows no marker, does not know the sequence either.
    expected = f"it should be at sequence {left.revision}, but " if left else "sequence "
    seen_at = accepted.seen_at or seen.identity.created_at
    return _REASONS[evidence].format(
        was=accepted.identity,
        now=seen.identity,
        expected=expected,
        left="unknown" if left is None else left.revision,
        found="none" if found is None else found.revision,
        instead="it does not exist" if _is_absent(found) else "another value is there",
        number=0 if found is None else found.number,
        given=memory.number,
        older=in_words(seen_at - seen.identity.created_at),
    )


def _is_absent(found: FoundMarker | None) -> bool:
    return found is None or found.is_deleted


def confirms(one: Observation | None, two: Observation | None) -> bool:
    """Whether a later observation shows the same store as an earlier one, not rolled back.

    None: the store is gone.
    """
    if one is None or two is None:
        return one is two
    return continues(one.identity, two.identity)


def continues(one: StoreIdentity, two: StoreIdentity) -> bool:
    """Whether a later identity is of the same store as an earlier one, not rolled back."""
    return same_creation(one.created_at, two.created_at) and two.last_sequence >= one.last_sequence


def baseline_of(seen: Observation, at: datetime, *, known: Baseline | None = None) -> Baseline:
    """Return the baseline that accepts a store as observed at ``at``.

    It takes over whatever marker of ours the store has. ``known`` is what is known of the same
    store: its version, its intended marker, and when its marker was written.
    """
    marker = seen.our_marker
    is_known = known is not None and marker == known.marker
    marked_at = known.marked_at if known is not None and is_known else at
    return Baseline(
        identity=seen.identity,
        version=known.version if known else 1,
        marker=marker,
        marked_at=marked_at if marker else None,
        intended=known.intended if known else None,
        keeps_for=known.keeps_for if known is not None and is_known else seen.keeps_for,
        seen_at=seen.leader_time,
        others=seen.others,
    )


@dataclass(frozen=True, slots=True)
class Check:
    """A stored comparison of the store with the accepted baseline, or with a restore target."""

    checked_at: datetime
    checked_by: str
    verdict: Verdict
    reason: str
    identity: StoreIdentity | None
    incident_id: str | None = None
    evidence: Evidence | None = None

    @property
    def is_good(self) -> bool:
        """Whether the check found the store intact; never while an incident is open."""
        return self.verdict.is_good and self.incident_id is None
