"""The leaderboard and the blocks that the counters of a window require."""

import json
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from decimal import Decimal

from budget_recovery_dagster.adapters.nats import CounterKey, decode_board_key
from budget_recovery_dagster.domain import BudgetDefinition, Enforcement, Period, SplitBy
from budget_recovery_dagster.sandbox.gateway import (
    NOTHING,
    Group,
    Seen,
    Standing,
    board_entries,
    shown_entries,
    wanted_blocks,
    wanted_board,
    write_board,
)

AT = datetime(2026, 11, 29, 14, tzinfo=UTC)
LIMIT_OF_5 = BudgetDefinition("t", "b", Period.DAY, Decimal(5), SplitBy.USER, Enforcement.ENFORCE)


def group(usages: Mapping[str, str | None], blocked: Mapping[str, bytes | None]) -> Group:
    of = decode_board_key("leaderboard.t.b.2026-11-29")
    counters = {
        entity: Standing(
            CounterKey(of.tenant, of.of, entity), None if usage is None else Decimal(usage), 1
        )
        for entity, usage in usages.items()
    }
    return Group(of, counters, {entity: Seen(1, data) for entity, data in blocked.items()})


def test_a_board_shows_the_500_largest_and_breaks_ties_by_name() -> None:
    # e000 has used nothing, e001 one, ... e498 498; e499 and e500 have used 498, too.
    usages = [(f"e{number:03}", Decimal(min(number, 498))) for number in range(501)]
    entries = board_entries(usages)
    assert len(entries) == 500
    assert [entry["entity"] for entry in entries[:4]] == ["e498", "e499", "e500", "e497"]
    assert entries[-1] == {"entity": "e001", "usage": "1"}
    assert board_entries(reversed(usages)) == entries


def test_an_aggregate_is_one_entry_without_a_name() -> None:
    entries = board_entries([(None, Decimal("1E+3"))])
    assert entries == [{"entity": None, "usage": "1000"}]
    board = write_board(entries, AT)
    assert board == (
        b'{"entries":[{"entity":null,"usage":"1000"}],"updated_at":"2026-11-29T14:00:00.000Z"}'
    )
    assert shown_entries(Seen(1, board)) == entries


def test_a_missing_board_has_no_entries_and_a_broken_one_equals_none() -> None:
    assert shown_entries(NOTHING) == []
    assert shown_entries(Seen(1, b"{")) is None
    assert shown_entries(Seen(1, b"7")) is None


def test_an_entity_is_blocked_at_its_limit() -> None:
    usages = {"under": "4.999999999999999999", "at": "5", "over": "6"}
    blocks = wanted_blocks(group(usages, {}), LIMIT_OF_5, b"v")
    assert blocks == (["at", "over"], [])


def test_a_block_lasts_while_its_counter_is_at_the_limit() -> None:
    usages = {"same": "5", "lower": "4", "other": "5", "again": "5"}
    blocked = {"same": b"v", "lower": b"v", "gone": b"v", "other": b"w", "again": None}
    blocks = wanted_blocks(group(usages, blocked), LIMIT_OF_5, b"v")
    assert blocks == (["again", "other"], ["gone", "lower"])


def test_an_unreadable_counter_changes_no_block() -> None:
    blocks = wanted_blocks(group({"a": None, "b": None}, {"a": b"v"}), LIMIT_OF_5, b"v")
    assert blocks == ([], [])


def test_an_unreadable_counter_keeps_its_leaderboard_entry() -> None:
    usages = {"b": "2", "a": None, "new": None, "odd": None}
    of = group(usages, {})
    assert wanted_board(of) == [{"entity": "b", "usage": "2"}]
    entry = {"entity": "a", "usage": "3"}
    odd = [{"entity": "odd", "usage": "NaN"}, {"entity": ["new"], "usage": "1"}, 7, entry]
    shown = [entry, {"entity": "b", "usage": "1"}, {"entity": "gone", "usage": "9"}, *odd]
    of.board = Seen(1, json.dumps({"entries": shown}).encode())
    assert wanted_board(of) == [entry, {"entity": "b", "usage": "2"}]


def test_a_budget_without_a_definition_blocks_no_entity() -> None:
    assert wanted_blocks(group({"a": "7"}, {"a": b"v"}), None, b"v") == ([], ["a"])


def test_a_group_closes_at_the_end_of_its_window() -> None:
    midnight = datetime(2026, 11, 30, tzinfo=UTC)
    assert not group({}, {}).is_closed(midnight - timedelta(microseconds=1))
    assert group({}, {}).is_closed(midnight)
    assert not Group(decode_board_key("leaderboard.t.b.lifetime")).is_closed(midnight)
