"""Captures from leaderboards, and from counters and leaderboards in turn."""

from datetime import timedelta
from decimal import Decimal

import pytest

from budget_recovery_dagster.domain import CaptureSource, NamedDrop
from budget_recovery_dagster.services import TenantAbsent, TenantStored
from tests.boards import board, board_key
from tests.unit.capture_harness import LIFETIME, Harness

COUNTERS, BOARDS = CaptureSource.COUNTERS, CaptureSource.LEADERBOARDS
SIX_HUNDRED: dict[str | None, str] = {f"e{number}": str(number) for number in range(1, 601)}
"""The leaderboard lists e101 and above, so its lowest usage is 101."""


@pytest.fixture
def harness() -> Harness:
    harness = Harness()
    harness.source = BOARDS
    return harness


def spend(harness: Harness, usages: dict[str | None, str]) -> None:
    """Write usages as the gateway does: as counters and as a leaderboard."""
    for entity, usage in usages.items():
        harness.spend("a", usage, entity)
    harness.rank("a", usages)


def stored(harness: Harness, source: CaptureSource) -> TenantStored:
    """Capture the only tenant, one minute after the last capture."""
    harness.source = source
    harness.clock.advance(timedelta(minutes=1))
    captured = harness.capture(f"run at {harness.clock.now()}")
    assert captured.source is source
    (outcome,) = captured.stored
    assert captured.truncated == outcome.truncated
    return outcome


def drops(harness: Harness) -> dict[str | None, tuple[str, str | None]]:
    named = harness.plane.reports.drops_of(f"run at {harness.clock.now()}")
    return {drop.entity: (drop.before, drop.after) for drop in named}


def point(harness: Harness) -> dict[str | None, Decimal]:
    return dict(harness.plane.points.current_usages("a", harness.clock.now())[LIFETIME])


def test_tenants_are_listed_from_the_source(harness: Harness) -> None:
    harness.spend("counted", "1")
    harness.rank("ranked", {"bob": "2"})
    harness.rank("both", {"bob": "3"})
    harness.spend("both", "3", "bob")
    captured = harness.capture()
    assert [outcome.tenant for outcome in captured.stored] == ["both", "ranked"]
    assert harness.known("both", "bob") == Decimal(3)
    (summary,) = [s for s in harness.plane.reports.captured_by("a run") if s.tenant == "both"]
    assert (summary.source, summary.entry_count) == (BOARDS, 1)


def test_a_board_without_entries_creates_no_record(harness: Harness) -> None:
    harness.rank("a", {})
    captured = harness.capture()
    assert [type(outcome) for outcome in captured.outcomes] == [TenantAbsent]
    harness.rank("a", {"bob": "2"})
    assert stored(harness, BOARDS).entries == 1
    # The board is not full, so an entity that is not listed has no usage.
    harness.rank("a", {})
    outcome = stored(harness, BOARDS)
    assert (outcome.records, outcome.drops) == (0, 1)
    assert drops(harness) == {"bob": ("2", None)}


def test_a_full_board_is_marked_truncated_and_a_short_one_is_not(harness: Harness) -> None:
    spend(harness, SIX_HUNDRED)
    harness.store.put(board_key("a", "other", "lifetime"), board({"bob": "1"}))
    outcome = stored(harness, BOARDS)
    assert (outcome.records, outcome.entries, outcome.truncated) == (2, 501, 1)


def test_switching_between_counters_and_boards_drops_and_forgets_nothing(
    harness: Harness,
) -> None:
    spend(harness, SIX_HUNDRED)
    everything = {entity: Decimal(usage) for entity, usage in SIX_HUNDRED.items()}
    for source, truncated in ((COUNTERS, 0), (BOARDS, 1), (BOARDS, 1), (COUNTERS, 0)):
        outcome = stored(harness, source)
        assert (outcome.drops, outcome.omitted, outcome.truncated) == (0, 0, truncated)
        assert point(harness) == everything
    assert outcome.entries == 600


def test_switching_from_boards_to_counters_adds_the_other_entities(harness: Harness) -> None:
    spend(harness, SIX_HUNDRED)
    stored(harness, BOARDS)
    assert point(harness) == {f"e{number}": Decimal(number) for number in range(101, 601)}
    assert stored(harness, COUNTERS).drops == 0
    assert len(point(harness)) == 600


def test_a_full_board_reports_the_drops_above_its_lowest_usage(harness: Harness) -> None:
    spend(harness, SIX_HUNDRED)
    stored(harness, COUNTERS)
    lost = SIX_HUNDRED | {"e600": "550", "e200": "50", "e90": "1"}
    del lost["e500"]
    harness.store.purge("usage.")
    spend(harness, lost)
    # 498 entities exceed 100; e100 and e99 fill the board, so its lowest usage is 99.
    outcome = stored(harness, BOARDS)
    assert drops(harness) == {"e600": ("600", "550"), "e500": ("500", None), "e200": ("200", None)}
    assert outcome.drops == 3
    assert point(harness)["e90"] == Decimal(90)
    # The counters show every drop.
    stored(harness, COUNTERS)
    assert drops(harness) == {
        "e600": ("600", "550"),
        "e500": ("500", None),
        "e200": ("200", "50"),
        "e90": ("90", "1"),
    }


def test_an_unreadable_board_affects_no_other_board_and_reports_no_drop(
    harness: Harness,
) -> None:
    spend(harness, {"bob": "2", None: "5"})
    harness.store.put(board_key("a", "other", "lifetime"), board({"bob": "1"}))
    stored(harness, BOARDS)
    harness.store.put(board_key("a", "spend", "lifetime"), b"?")
    outcome = stored(harness, BOARDS)
    assert (outcome.records, outcome.entries, outcome.omitted, outcome.drops) == (2, 1, 1, 0)
    assert outcome.truncated == 0
    (omission,) = harness.plane.reports.omissions_of(f"run at {harness.clock.now()}")
    assert omission.key == "leaderboard.a.spend.lifetime"
    assert omission.reason == "the value is not JSON"
    assert point(harness) == {"bob": Decimal(2), None: Decimal(5)}


def test_a_missing_board_is_reported_as_a_drop(harness: Harness) -> None:
    spend(harness, {"bob": "2"})
    harness.store.put(board_key("a", "other", "lifetime"), board({"bob": "1"}))
    stored(harness, BOARDS)
    harness.store.purge("leaderboard.a.spend.")
    assert stored(harness, BOARDS).drops == 1
    assert harness.plane.reports.drops_of(f"run at {harness.clock.now()}") == (
        NamedDrop("a", "spend", "lifetime", "bob", "2", None),
    )
