"""Captures by leaderboards, and from one source after the other."""

from datetime import timedelta
from decimal import Decimal

import pytest

from budget_recovery_dagster.domain import CaptureSource, NamedDrop
from budget_recovery_dagster.services import TenantAbsent, TenantStored
from tests.boards import board, board_key
from tests.unit.capture_house import LIFETIME, House

COUNTERS, BOARDS = CaptureSource.COUNTERS, CaptureSource.LEADERBOARDS
SIX_HUNDRED: dict[str | None, str] = {f"e{number}": str(number) for number in range(1, 601)}
"""Of which the leaderboard lists e101 and above: the lowest that it lists is 101."""


@pytest.fixture
def house() -> House:
    house = House()
    house.source = BOARDS
    return house


def spend(house: House, usages: dict[str | None, str]) -> None:
    """Have the gateway count usages, and write both of its kinds of keys."""
    for entity, usage in usages.items():
        house.spend("a", usage, entity)
    house.rank("a", usages)


def stored(house: House, source: CaptureSource) -> TenantStored:
    """Capture the one tenant, a minute later than the last time."""
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


def test_the_tenants_are_those_of_the_source(house: House) -> None:
    house.spend("counted", "1")
    house.rank("ranked", {"bob": "2"})
    house.rank("both", {"bob": "3"})
    house.spend("both", "3", "bob")
    captured = house.capture()
    assert [outcome.tenant for outcome in captured.stored] == ["both", "ranked"]
    assert house.known("both", "bob") == Decimal(3)
    (summary,) = [s for s in house.plane.reports.captured_by("a run") if s.tenant == "both"]
    assert (summary.source, summary.entry_count) == (BOARDS, 1)


def test_a_board_without_entries_makes_no_record(house: House) -> None:
    house.rank("a", {})
    captured = house.capture()
    assert [type(outcome) for outcome in captured.outcomes] == [TenantAbsent]
    house.rank("a", {"bob": "2"})
    assert stored(house, BOARDS).entries == 1
    # Whoever was there before is gone from a board that leaves nobody out.
    house.rank("a", {})
    outcome = stored(house, BOARDS)
    assert (outcome.records, outcome.drops) == (0, 1)
    assert drops(house) == {"bob": ("2", None)}


def test_a_full_board_is_marked_and_a_short_one_is_not(house: House) -> None:
    spend(house, SIX_HUNDRED)
    house.store.put(board_key("a", "other", "lifetime"), board({"bob": "1"}))
    outcome = stored(house, BOARDS)
    assert (outcome.records, outcome.entries, outcome.truncated) == (2, 501, 1)


def test_from_counters_to_boards_and_back_nothing_is_called_missing_or_forgotten(
    house: House,
) -> None:
    spend(house, SIX_HUNDRED)
    everything = {entity: Decimal(usage) for entity, usage in SIX_HUNDRED.items()}
    for source, truncated in ((COUNTERS, 0), (BOARDS, 1), (BOARDS, 1), (COUNTERS, 0)):
        outcome = stored(house, source)
        assert (outcome.drops, outcome.omitted, outcome.truncated) == (0, 0, truncated)
        assert point(house) == everything
    assert outcome.entries == 600


def test_from_boards_to_counters_the_rest_is_added(house: House) -> None:
    spend(house, SIX_HUNDRED)
    stored(house, BOARDS)
    assert point(house) == {f"e{number}": Decimal(number) for number in range(101, 601)}
    assert stored(house, COUNTERS).drops == 0
    assert len(point(house)) == 600


def test_after_a_loss_a_full_board_names_what_it_can_tell(house: House) -> None:
    spend(house, SIX_HUNDRED)
    stored(house, COUNTERS)
    lost = SIX_HUNDRED | {"e600": "550", "e200": "50", "e90": "1"}
    del lost["e500"]
    house.store.purge("usage.")
    spend(house, lost)
    # 498 have more than 100; e100 and e99 make the board full, and 99 the lowest that it lists.
    outcome = stored(house, BOARDS)
    assert drops(house) == {"e600": ("600", "550"), "e500": ("500", None), "e200": ("200", None)}
    assert outcome.drops == 3
    assert point(house)["e90"] == Decimal(90)
    # The counters themselves tell all.
    stored(house, COUNTERS)
    assert drops(house) == {
        "e600": ("600", "550"),
        "e500": ("500", None),
        "e200": ("200", "50"),
        "e90": ("90", "1"),
    }


def test_a_board_that_cannot_be_read_costs_no_other_and_calls_nothing_missing(
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


def test_a_board_that_is_gone_is_told(house: House) -> None:
    spend(house, {"bob": "2"})
    house.store.put(board_key("a", "other", "lifetime"), board({"bob": "1"}))
    stored(house, BOARDS)
    house.store.purge("leaderboard.a.spend.")
    assert stored(house, BOARDS).drops == 1
    assert house.plane.reports.drops_of(f"run at {house.clock.now()}") == (
        NamedDrop("a", "spend", "lifetime", "bob", "2", None),
    )
