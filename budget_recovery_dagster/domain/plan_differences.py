"""What has changed between a preview and the plan that is applied."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from enum import StrEnum

from budget_recovery_dagster.domain.counters import BudgetWindow, Entity
from budget_recovery_dagster.domain.plan import Action, PlannedEntry


class Change(StrEnum):
    """In what an entry is not as it was previewed."""

    RECORDED = "the snapshots say another usage"
    CLOSED = "its window has closed"
    UNREADABLE = "its live counter has become unreadable"
    READABLE = "its live counter has become readable"
    NEW = "it was not in the preview"
    GONE = "it is in no snapshot any more"
    LIVE = "its live usage has moved"


@dataclass(frozen=True, slots=True)
class Difference:
    """One entry that is not as it was previewed; ``previewed`` and ``found`` are what changed.

    They are usages: of a live counter (None: there was none), of the snapshots, or, where the
    change is none of usages, what the counter was to have, and is to have now.
    """

    tenant: str
    of: BudgetWindow
    entity: Entity
    change: Change
    previewed: Decimal | None
    found: Decimal | None


def differences(
    tenant: str, previewed: Iterable[PlannedEntry], planned: Iterable[PlannedEntry]
) -> tuple[Difference, ...]:
    """Compare what is planned for a tenant with what was previewed, entry by entry."""
    before = {(entry.of, entry.entity): entry for entry in previewed}
    found: list[Difference] = []
    for entry in planned:
        earlier = before.pop((entry.of, entry.entity), None)
        if earlier is None:
            found.append(Difference(tenant, entry.of, entry.entity, Change.NEW, None, entry.result))
            continue
        found.extend(
            Difference(tenant, entry.of, entry.entity, change, was, now)
            for change, was, now in _changes(earlier, entry)
        )
    found.extend(
        Difference(tenant, entry.of, entry.entity, Change.GONE, entry.result, None)
        for entry in before.values()
    )
    return tuple(found)


def _changes(
    before: PlannedEntry, now: PlannedEntry
) -> Iterator[tuple[Change, Decimal | None, Decimal | None]]:
    if before.recorded != now.recorded:
        yield Change.RECORDED, before.recorded, now.recorded
    was_closed, is_closed = (each.action is Action.SKIP_CLOSED for each in (before, now))
    if is_closed:
        if not was_closed:
            yield Change.CLOSED, before.result, now.live
        # Of a closed window the live counter means nothing.
        return
    was_unread, is_unread = (each.action is Action.SKIP_UNREADABLE for each in (before, now))
    if was_unread != is_unread:
        change = Change.UNREADABLE if is_unread else Change.READABLE
        yield change, before.result, now.result
    elif before.live != now.live:
        yield Change.LIVE, before.live, now.live
