"""Which decisions are right, judged by the truth, and which wrong ones are known risks.

Nothing here uses the product's table: only what happened counts.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

from budget_recovery_dagster.adapters.nats import marker_key
from tests.detection_model.truth import Accepted, Database, Installation, Store, Write

TOLERANCE = timedelta(seconds=5)
MINUTE = timedelta(minutes=1)
DAY = timedelta(days=1)


class Decision(StrEnum):
    """What a check or a capture decided."""

    UNKNOWN = "unknown"
    FIRST_SEEN = "first seen"
    SAME = "same"
    LOST = "lost"
    OTHER_STORE = "other store, held"
    BEHIND = "database behind, held"
    RENEWALS_ACCEPTED = "database behind, accepted"


class Harm(StrEnum):
    """What a wrong decision leads to."""

    LOSS_OVERLOOKED = "loss overlooked"
    OTHER_STORE_ACCEPTED = "other store accepted"
    OTHER_STORE_RAISED = "other store raised"
    OLDER_DATABASE_USED = "older database used"
    FALSE_ALARM = "false alarm"


class Risk(StrEnum):
    """A known reason for a wrong decision; docs/decisions/0016-a-table-of-verdicts.md has all."""

    COPY_OVERTAKEN = "copy overtaken"
    MARKER_REMOVED = "marker removed"
    NEVER_MARKED = "never marked"
    YOUNG_STORE = "young store"
    SAME_SECONDS = "same seconds"
    NEW_NEIGHBOUR = "new neighbour"
    LEADERS_APART = "leaders apart"
    FORMER_COPY = "former copy"
    MARKER_DATED_LATE = "marker dated late"
    RESET_NOT_MARKED = "reset not marked"
    EVENT_NOT_MARKED = "event not marked"
    DATABASE_CLONE = "database clone"
    BOTH_BACK = "both back"


@dataclass(frozen=True, slots=True)
class Situation:
    """What a decision is about; ``store`` None: the cluster reports that it does not exist.

    ``is_answered``: a leader with a majority answers. ``owed`` are contents that the accepted store
    reached, apart from those of its ``accepted_site``.
    """

    installation: Installation
    database: Database
    store: Store | None
    is_answered: bool
    owed: tuple[Write, ...]
    accepted_site: Store | None
    now: datetime
    max_age: timedelta | None


@dataclass(frozen=True, slots=True)
class Facts:
    """The true relation of a store that answers to one that was accepted."""

    situation: Situation
    store: Store
    accepted: Accepted

    @property
    def deployment(self) -> str:
        return self.situation.database.deployment

    @property
    def is_continued(self) -> bool:
        """Whether the accepted content is in the store."""
        return self.accepted.head.is_in(self.store.head)

    @property
    def has_all_usage(self) -> bool:
        """Whether no usage is gone that the accepted store ever had."""
        return self._has_accepted_usage and all(
            each.usage.is_in(self.store.head) for each in self._owed
        )

    @property
    def _has_accepted_usage(self) -> bool:
        head = self.accepted.head
        return head.usage.is_in(self.store.head) and head.purges == self.store.head.purges

    @property
    def _owed(self) -> list[Write]:
        situation = self.situation
        owed = list(situation.owed)
        if situation.accepted_site is not None:
            owed.append(situation.accepted_site.head)
        return [each for each in owed if self.accepted.head.is_in(each)]

    @property
    def is_same_creation(self) -> bool:
        return self.store.creation == self.accepted.creation

    @property
    def is_former(self) -> bool:
        return self.store.creation in self.situation.database.former

    @property
    def is_copy(self) -> bool:
        """Whether the content began as that of the accepted store."""
        return self.accepted.head.shares_origin_with(self.store.head)

    @property
    def is_of_gateway(self) -> bool:
        return self.store.gateway == self.accepted.gateway

    @property
    def unknown_marker(self) -> int | None:
        """Return the number of our marker in the store if this database did not write it."""
        marker = self.store.head.markers.get(self.deployment)
        if marker is None or marker.number in self.situation.database.renewals:
            return None
        return marker.number

    @property
    def lacking_events(self) -> set[str]:
        """Return the kinds of events that this database lacks."""
        found = self.situation
        known = found.database.events | found.database.settled
        return {kind for number, kind in found.installation.events.items() if number not in known}

    @property
    def lacks_renewals(self) -> bool:
        found = self.situation
        return not found.installation.renewals <= found.database.renewals | found.database.settled

    @property
    def lacks_only_renewals(self) -> bool:
        found = self.situation
        marker = self.store.head.markers.get(self.deployment)
        if marker is None or found.database.accepted is None:
            return False
        at = found.database.renewals_lost_at
        return (
            marker.events <= found.database.events
            and not self.lacking_events
            and (at is None or found.now - at > DAY)
        )

    @property
    def has_clone(self) -> bool:
        return len(self.situation.installation.databases) > 1


def right_decisions(situation: Situation) -> frozenset[Decision]:
    """Return the decisions that are right in this situation."""
    if not situation.is_answered:
        return frozenset({Decision.UNKNOWN})
    accepted, store = situation.database.accepted, situation.store
    if accepted is None:
        return frozenset({Decision.UNKNOWN if store is None else Decision.FIRST_SEEN})
    if store is None:
        return frozenset({Decision.LOST})
    return _of_present(Facts(situation, store, accepted))


def _of_present(facts: Facts) -> frozenset[Decision]:
    right = _of_continued(facts) if facts.is_continued or facts.is_same_creation else _of_new(facts)
    if facts.unknown_marker in facts.situation.database.settled:
        harmless = {Decision.RENEWALS_ACCEPTED} if facts.has_all_usage else set()
        return right | {Decision.BEHIND, *harmless}
    if facts.unknown_marker is not None:
        return _of_marker(facts)
    if facts.lacking_events and Decision.OTHER_STORE not in right:
        return frozenset({Decision.BEHIND})
    return right


def _of_marker(facts: Facts) -> frozenset[Decision]:
    is_intact = facts.is_continued and facts.is_same_creation and facts.has_all_usage
    if not is_intact or not facts.lacks_only_renewals or facts.has_clone:
        # A person decides in both cases.
        former = {Decision.OTHER_STORE} if facts.is_former else set()
        return frozenset({Decision.BEHIND, *former})
    # It may have been about to write that very marker.
    was_about_to = {Decision.SAME} if facts.situation.database.is_writing else set()
    return frozenset({Decision.RENEWALS_ACCEPTED, *was_about_to})


def _of_continued(facts: Facts) -> frozenset[Decision]:
    """Judge a store with the accepted content or creation."""
    if not facts.is_same_creation:
        # Made anew from a backup; if that was complete, nothing is lost.
        harmless = {Decision.SAME} if facts.has_all_usage else set()
        return frozenset({Decision.LOST, Decision.OTHER_STORE, *harmless})
    if not facts.has_all_usage:
        return frozenset({Decision.LOST})
    # If only markers went back, nothing is lost.
    harmless = set() if facts.is_continued else {Decision.LOST}
    return frozenset({Decision.SAME, *harmless})


def _of_new(facts: Facts) -> frozenset[Decision]:
    """Judge a store with another content and creation."""
    if facts.is_former:
        return frozenset({Decision.OTHER_STORE})
    # An older copy, or a store that the gateway already had, but that was never accepted.
    is_earlier = facts.is_of_gateway and facts.store.created_at < facts.accepted.at
    if facts.is_copy or is_earlier:
        return frozenset({Decision.LOST, Decision.OTHER_STORE})
    return frozenset({Decision.LOST if facts.is_of_gateway else Decision.OTHER_STORE})


def risk_of(situation: Situation, decision: Decision) -> Risk | None:
    """Return the known risk that explains a wrong decision; None: it is a fault."""
    accepted, store = situation.database.accepted, situation.store
    if accepted is None or store is None or not situation.is_answered:
        return None
    facts = Facts(situation, store, accepted)
    return next((risk for risk, applies in _RISKS.items() if applies(facts, decision)), None)


def _seems_continued(facts: Facts) -> bool:
    """Whether creation time and sequence are as they would be without a loss."""
    apart = abs(facts.store.shown_creation - facts.accepted.shown_creation)
    return apart < TOLERANCE and facts.store.head.sequence >= facts.accepted.head.sequence


def _is_overlooked(facts: Facts, decision: Decision) -> bool:
    """Whether a loss is taken for the accepted store, and nothing but the marker can show it."""
    has_lost = not (facts.is_continued and facts.has_all_usage)
    is_ours = facts.is_same_creation or facts.is_copy or facts.is_of_gateway
    return decision is Decision.SAME and has_lost and is_ours and _seems_continued(facts)


def _is_copy_overtaken(facts: Facts, decision: Decision) -> bool:
    marker, database = facts.store.head.markers.get(facts.deployment), facts.situation.database
    # The database may not know whether it has written its newest marker.
    is_newest = marker is not None and marker.number == max(database.renewals, default=None)
    is_as_left = marker == facts.accepted.marker or (database.is_writing and is_newest)
    return _is_overlooked(facts, decision) and marker is not None and is_as_left


def _is_marker_removed(facts: Facts, decision: Decision) -> bool:
    marker = facts.store.head.markers.get(facts.deployment)
    had_one = facts.accepted.marker is not None
    is_wrong = _is_overlooked(facts, decision) or _is_behind_unseen(facts, decision)
    return is_wrong and marker is None and had_one


def _is_never_marked(facts: Facts, decision: Decision) -> bool:
    marker = facts.store.head.markers.get(facts.deployment)
    is_wrong = _is_overlooked(facts, decision) or _is_behind_unseen(facts, decision)
    return is_wrong and facts.accepted.marker is None and marker is None


def _is_foreign(facts: Facts) -> bool:
    return not (facts.is_copy or facts.is_former or facts.is_of_gateway)


def _is_young_store(facts: Facts, decision: Decision) -> bool:
    is_young = facts.store.shown_creation >= facts.accepted.at - MINUTE
    strangers = neighbours_of(facts.store, facts.deployment) - facts.accepted.neighbours
    return decision is Decision.LOST and _is_foreign(facts) and is_young and not strangers


def _is_same_seconds(facts: Facts, decision: Decision) -> bool:
    apart = abs(facts.store.shown_creation - facts.accepted.shown_creation)
    is_other = facts.is_former or _is_foreign(facts)
    return decision in (Decision.LOST, Decision.SAME) and is_other and apart < TOLERANCE


def _is_new_neighbour(facts: Facts, decision: Decision) -> bool:
    strangers = neighbours_of(facts.store, facts.deployment) - facts.accepted.neighbours
    is_rebuilt = facts.is_of_gateway and not facts.is_same_creation
    return decision is Decision.OTHER_STORE and is_rebuilt and bool(strangers)


def _are_leaders_apart(facts: Facts, decision: Decision) -> bool:
    apart = abs(facts.store.shown_creation - facts.accepted.shown_creation)
    is_false_alarm = decision in (Decision.LOST, Decision.OTHER_STORE)
    return is_false_alarm and facts.is_same_creation and apart >= TOLERANCE


def _is_former_copy(facts: Facts, decision: Decision) -> bool:
    bears_marker = facts.deployment in facts.store.head.markers
    return decision is Decision.LOST and not facts.is_of_gateway and bears_marker


def _is_marker_dated_late(facts: Facts, decision: Decision) -> bool:
    marker, max_age = facts.accepted.marker, facts.situation.max_age
    if marker is None or max_age is None or facts.deployment in facts.store.head.markers:
        return False
    is_intact = facts.is_continued and facts.is_same_creation and facts.has_all_usage
    return decision is Decision.LOST and is_intact and marker.at + max_age <= facts.situation.now


def _is_behind_unseen(facts: Facts, decision: Decision) -> bool:
    is_seen = decision in (Decision.BEHIND, Decision.OTHER_STORE, Decision.UNKNOWN)
    return not is_seen and bool(facts.lacking_events)


def _is_database_clone(facts: Facts, decision: Decision) -> bool:
    is_unseen = decision not in (Decision.BEHIND, Decision.OTHER_STORE, Decision.UNKNOWN)
    lacks = bool(facts.lacking_events) or facts.lacks_renewals
    return is_unseen and lacks and facts.has_clone and not _names_new_event(facts)


def _are_both_back(facts: Facts, decision: Decision) -> bool:
    is_intact = facts.is_continued and facts.is_same_creation and facts.has_all_usage
    is_unseen = decision not in (Decision.BEHIND, Decision.OTHER_STORE, Decision.UNKNOWN)
    is_settled = facts.unknown_marker in facts.situation.database.settled
    is_behind = bool(facts.lacking_events) or facts.lacks_renewals or is_settled
    return is_unseen and not is_intact and is_behind


def _is_reset_not_marked(facts: Facts, decision: Decision) -> bool:
    return _is_behind_unseen(facts, decision) and "reset" in _unmarked(facts)


def _is_event_not_marked(facts: Facts, decision: Decision) -> bool:
    return _is_behind_unseen(facts, decision) and bool(_unmarked(facts))


def _unmarked(facts: Facts) -> set[str]:
    """Return the kinds of events that this database lacks, if the marker names none of them."""
    marker = facts.store.head.markers.get(facts.deployment)
    return set() if marker is None or _names_new_event(facts) else facts.lacking_events


def _names_new_event(facts: Facts) -> bool:
    """Whether our marker in the store names an event that this database lacks."""
    marker = facts.store.head.markers.get(facts.deployment)
    return marker is not None and not marker.events <= facts.situation.database.events


def neighbours_of(store: Store, deployment: str) -> frozenset[str]:
    """Return the keys of markers of other deployments in a store; a server lists deleted ones."""
    markers = {key for key in store.fake._keys if key.startswith("__guard.")}
    return frozenset(markers - {marker_key(deployment)})


_RISKS = {
    Risk.LEADERS_APART: _are_leaders_apart,
    Risk.DATABASE_CLONE: _is_database_clone,
    Risk.BOTH_BACK: _are_both_back,
    Risk.RESET_NOT_MARKED: _is_reset_not_marked,
    Risk.EVENT_NOT_MARKED: _is_event_not_marked,
    Risk.COPY_OVERTAKEN: _is_copy_overtaken,
    Risk.NEVER_MARKED: _is_never_marked,
    Risk.MARKER_REMOVED: _is_marker_removed,
    Risk.SAME_SECONDS: _is_same_seconds,
    Risk.YOUNG_STORE: _is_young_store,
    Risk.NEW_NEIGHBOUR: _is_new_neighbour,
    Risk.FORMER_COPY: _is_former_copy,
    Risk.MARKER_DATED_LATE: _is_marker_dated_late,
}


def harm_of(decision: Decision, risk: Risk) -> Harm:
    """Return what a wrong decision leads to."""
    if risk in (Risk.LEADERS_APART, Risk.NEW_NEIGHBOUR, Risk.MARKER_DATED_LATE):
        return Harm.FALSE_ALARM
    if risk in (Risk.YOUNG_STORE, Risk.SAME_SECONDS, Risk.FORMER_COPY):
        is_same = decision is Decision.SAME
        return Harm.OTHER_STORE_ACCEPTED if is_same else Harm.OTHER_STORE_RAISED
    if risk in (Risk.COPY_OVERTAKEN, Risk.MARKER_REMOVED, Risk.NEVER_MARKED):
        return Harm.LOSS_OVERLOOKED
    return Harm.OLDER_DATABASE_USED
