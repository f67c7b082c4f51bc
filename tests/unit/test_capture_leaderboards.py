"""Captures from leaderboards, and from counters and leaderboards in turn."""

from datetime import timedelta
from decimal import Decimal

import pytest

from budget_recovery_dagster.domain import CaptureSource, NamedDrop
from budget_recovery_dagster.services import TenantAbsent, TenantStored
from tests.boards import board, board_key
from tests.unit.capture_house import LIFETIME, House

COUNTERS, BOARDS = CaptureSource.COUNTERS, CaptureSource.LEADERBOARDS
SIX_HUNDRED: dict[str | None, str] = {f"e{number}": str(number) for number in range(1, 601)}
"""The leaderboard lists e101 and above, so its lowest usage is 101."""


@pytest.fixture
def house() -> House:
    house = House()
    house.source = BOARDS
    return house


def spend(house: House, usages: dict[str | None, str]) -> None:
    """Write usages as the gateway does: as counters and as a leaderboard."""
    for entity, usage in usages.items():
        house.spend("a", usage, entity)
    house.rank("a", usages)


def stored(house: House, source: CaptureSource) -> TenantStored:
    """Capture the only tenant, one minute after the last capture."""
    house.source = source
    house.clock.advance(timedelta(minutes=1))
    captured = house.capture(f"run at {house.clock.now()}")
    assert captured.source is source
    (outcome,) = captured.stored
    assert captured.truncated == outcome.truncated
    return outcome


def drops(house: House) -> dict[str | None, tuple[str, str | None]]:
    named = house.plane.reports.drops_of(f"run at {house.clock.now()}")
    return {drop.entity: (drop.before, drop.after) for drop in named}


def point(house: House) -> dict[str | None, Decimal]:
    return dict(house.plane.points.current_usages("a", house.clock.now())[LIFETIME])


def test_tenants_are_listed_from_the_source(house: House) -> None:
    house.spend("counted", "1")
    house.rank("ranked", {"bob": "2"})
    house.rank("both", {"bob": "3"})
    house.spend("both", "3", "bob")
    captured = house.capture()
    assert [outcome.tenant for outcome in captured.stored] == ["both", "ranked"]
    assert house.known("both", "bob") == Decimal(3)
    (summary,) = [s for s in house.plane.reports.captured_by("a run") if s.tenant == "both"]
    assert (summary.source, summary.entry_count) == (BOARDS, 1)


def test_a_board_without_entries_creates_no_record(house: House) -> None:
    house.rank("a", {})
    captured = house.capture()
    assert [type(outcome) for outcome in captured.outcomes] == [TenantAbsent]
    house.rank("a", {"bob": "2"})
    assert stored(house, BOARDS).entries == 1
    # The board is not full, so an entity that is not listed has no usage.
    house.rank("a", {})
    outcome = stored(house, BOARDS)
    assert (outcome.records, outcome.drops) == (0, 1)
    assert drops(house) == {"bob": ("2", None)}


def test_a_full_board_is_marked_truncated_and_a_short_one_is_not(house: House) -> None:
    spend(house, SIX_HUNDRED)
    house.store.put(board_key("a", "other", "lifetime"), board({"bob": "1"}))
    outcome = stored(house, BOARDS)
    assert (outcome.records, outcome.entries, outcome.truncated) == (2, 501, 1)


def test_switching_between_counters_and_boards_drops_and_forgets_nothing(
    house: House,
) -> None:
    spend(house, SIX_HUNDRED)
    everything = {entity: Decimal(usage) for entity, usage in SIX_HUNDRED.items()}
    for source, truncated in ((COUNTERS, 0), (BOARDS, 1), (BOARDS, 1), (COUNTERS, 0)):
        outcome = stored(house, source)
        assert (outcome.drops, outcome.omitted, outcome.truncated) == (0, 0, truncated)
        assert point(house) == everything
    assert outcome.entries == 600


def test_switching_from_boards_to_counters_adds_the_other_entities(house: House) -> None:
    spend(house, SIX_HUNDRED)
    stored(house, BOARDS)
    assert point(house) == {f"e{number}": Decimal(number) for number in range(101, 601)}
    assert stored(house, COUNTERS).drops == 0
    assert len(point(house)) == 600


def test_a_full_board_reports_the_drops_above_its_lowest_usage(house: House) -> None:
    spend(house, SIX_HUNDRED)
    stored(house, COUNTERS)
    lost = SIX_HUNDRED | {"e600": "550", "e200": "50", "e90": "1"}
    del lost["e500"]
    house.store.purge("usage.")
    spend(house, lost)
    # 498 entities exceed 100; e100 and e99 fill the board, so its lowest usage is 99.
    outcome = stored(house, BOARDS)
    assert drops(house) == {"e600": ("600", "550"), "e500": ("500", None), "e200": ("200", None)}
    assert outcome.drops == 3
    assert point(house)["e90"] == Decimal(90)
    # The counters show every drop.
    stored(house, COUNTERS)
    assert drops(house) == {
        "e600": ("600", "550"),
        "e500": ("500", None),
        "e200": ("200", "50"),
        "e90": ("90", "1"),
    }


def test_an_unreadable_board_affects_no_other_board_and_reports_no_drop(
    house: House,
) -> None:
    spend(house, {"bob": "2", None: "5"})
    house.store.put(board_key("a", "other", "lifetime"), board({"bob": "1"}))
    stored(house, BOARDS)
    house.store.put(board_key("a", "spend", "lifetime"), b"?")
    outcome = stored(house, BOARDS)
    assert (outcome.records, outcome.entries, outcome.omitted, outcome.drops) == (2, 1, 1, 0)
    assert outcome.truncated == 0
    (omission,) = house.plane.reports.omissions_of(f"run at {house.clock.now()}")
    assert omission.key == "leaderboard.a.spend.lifetime"
    assert omission.reason == "the value is not JSON"
    assert point(house) == {"bob": Decimal(2), None: Decimal(5)}


def test_a_missing_board_is_reported_as_a_drop(house: House) -> None:
    spend(house, {"bob": "2"})
    house.store.put(board_key("a", "other", "lifetime"), board({"bob": "1"}))
    stored(house, BOARDS)
    house.store.purge("leaderboard.a.spend.")
    assert stored(house, BOARDS).drops == 1
    assert house.plane.reports.drops_of(f"run at {house.clock.now()}") == (
        NamedDrop("a", "spend", "lifetime", "bob", "2", None),
    )
