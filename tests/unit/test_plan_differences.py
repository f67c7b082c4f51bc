"""Differences between a plan and its preview."""

from dataclasses import replace
from decimal import Decimal

import pytest

from budget_recovery_dagster.domain import (
    Action,
    BudgetWindow,
    Change,
    Difference,
    PlannedEntry,
    Window,
    differences,
)
from budget_recovery_dagster.presentation.text import most_relevant

MONTH = BudgetWindow("team", Window.parse("2026-11"))


def entry(
    live: int | None,
    recorded: int = 10,
    action: Action = Action.RAISE,
    entity: str | None = "alice",
) -> PlannedEntry:
    known = None if live is None else Decimal(live)
    return PlannedEntry(MONTH, entity, Decimal(recorded), known, action)


RAISED = entry(3)


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        (RAISED, RAISED, []),
        (RAISED, entry(4), [(Change.LIVE, 3, 4)]),
        (entry(None), entry(4), [(Change.LIVE, None, 4)]),
        (RAISED, entry(None), [(Change.LIVE, 3, None)]),
        (RAISED, entry(12, action=Action.KEEP), [(Change.LIVE, 3, 12)]),
        (RAISED, entry(3, 11), [(Change.RECORDED, 10, 11)]),
        (RAISED, entry(4, 11), [(Change.RECORDED, 10, 11), (Change.LIVE, 3, 4)]),
        # Changes of live counters in a closed window do not matter.
        (RAISED, entry(7, action=Action.SKIP_CLOSED), [(Change.CLOSED, 10, 7)]),
        (entry(3, action=Action.SKIP_CLOSED), entry(7, action=Action.SKIP_CLOSED), []),
        (RAISED, entry(None, action=Action.SKIP_UNREADABLE), [(Change.UNREADABLE, 10, None)]),
        (entry(None, action=Action.SKIP_UNREADABLE), RAISED, [(Change.READABLE, None, 10)]),
    ],
)
def test_each_change_is_reported_with_old_and_new_values(
    before: PlannedEntry, now: PlannedEntry, expected: list[tuple[Change, int | None, int | None]]
) -> None:
    assert differences("acme", [before], [now]) == tuple(
        Difference(
            "acme",
            MONTH,
            "alice",
            change,
            None if was is None else Decimal(was),
            None if found is None else Decimal(found),
        )
        for change, was, found in expected
    )


def test_new_and_missing_entries_are_reported() -> None:
    other = entry(1, 2, entity=None)
    assert differences("acme", [RAISED], [other]) == (
        Difference("acme", MONTH, None, Change.NEW, None, Decimal(2)),
        Difference("acme", MONTH, "alice", Change.GONE, Decimal(10), None),
    )


def test_a_list_that_is_cut_begins_with_the_largest_difference() -> None:
    small = [entry(1, 2, entity=f"reserved {number:03}") for number in range(99)]
    zoe = entry(None, 40, entity="zoe")
    live = entry(10, 90, entity="live")
    found = differences("acme", [live], [*small, zoe, replace(live, live=Decimal(80))])
    first, *rest = most_relevant(found)
    assert first == Difference("acme", MONTH, "zoe", Change.NEW, None, Decimal(40))
    assert len(rest) == 100
    # Traffic causes larger differences all the time.
    assert rest[-1] == Difference("acme", MONTH, "live", Change.LIVE, Decimal(10), Decimal(80))
