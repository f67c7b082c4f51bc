"""Gateways that follow docs/integration.md write what the code reads."""

from decimal import Decimal

import pytest

from budget_recovery_dagster.adapters.nats import (
    BoardKey,
    CounterKey,
    KeysRead,
    LiveKey,
    StoredValue,
    UnreadableKeyError,
    decode_entity,
    decode_key,
    decode_value,
    encode_board_key,
    encode_key,
    encode_name,
    read_boards,
)
from budget_recovery_dagster.domain import (
    BudgetWindow,
    Enforcement,
    Period,
    SplitBy,
    UnreadableUsageError,
    Window,
)
from tests.documentation import blocks, code, rows

PAGE = "docs/integration.md"


@pytest.mark.parametrize(("name", "token"), rows(PAGE, "name", "token"))
def test_each_name_has_the_documented_token(name: str, token: str) -> None:
    assert encode_name(code(name)) == code(token)
    assert decode_entity(code(token)) == code(name)


@pytest.mark.parametrize(
    ("tenant", "budget", "window", "entity", "key"),
    rows(PAGE, "tenant", "budget", "window", "entity", "key"),
)
def test_each_counter_has_the_documented_key(
    tenant: str, budget: str, window: str, entity: str, key: str
) -> None:
    who = None if entity == "the aggregate" else code(entity)
    of = BudgetWindow(code(budget), Window.parse(code(window)))
    counter = CounterKey(code(tenant), of, who)
    assert encode_key(counter) == code(key)
    assert decode_key(code(key)) == counter


@pytest.mark.parametrize(("key", "why"), rows(PAGE, "key", "why it is not read"))
def test_each_unreadable_key_is_refused_with_the_documented_reason(key: str, why: str) -> None:
    with pytest.raises(UnreadableKeyError) as refused:
        decode_key(code(key))
    assert why in str(refused.value)


@pytest.mark.parametrize(("value", "usage"), rows(PAGE, "value", "usage"))
def test_each_value_is_read_as_documented(value: str, usage: str) -> None:
    assert decode_value(code(value).encode())[0] == Decimal(usage)


@pytest.mark.parametrize(("value", "why"), rows(PAGE, "value", "why it is not read"))
def test_each_unreadable_value_is_refused_with_the_documented_reason(value: str, why: str) -> None:
    with pytest.raises(UnreadableUsageError) as refused:
        decode_value(code(value).encode())
    assert why in str(refused.value)


@pytest.mark.parametrize(("token", "start", "end"), rows(PAGE, "token", "from", "until"))
def test_each_window_has_the_documented_bounds(token: str, start: str, end: str) -> None:
    window = Window.parse(code(token))
    bounds = [f"{edge:%Y-%m-%d}" if edge else "" for edge in (window.start, window.end)]
    assert bounds == [start, end]


def test_the_documented_leaderboard_is_read() -> None:
    (shown,) = blocks(PAGE, "json")
    of = BudgetWindow("team", Window.parse("2026-11"))
    key = encode_board_key(BoardKey("acme", of))
    reading = read_boards(
        "acme", KeysRead({key: LiveKey(1, StoredValue(shown.encode(), None, 0))}, is_partial=False)
    )
    assert [(each.entity, each.usage) for each in reading.counters] == [
        ("user:alice@example.com", Decimal("12.34"))
    ]


def test_the_columns_of_a_definition_accept_the_documented_values() -> None:
    documented = dict(rows(PAGE, "column", "one of"))
    for column, choices in (
        ("period", Period),
        ("split_by", SplitBy),
        ("enforcement", Enforcement),
    ):
        for choice in choices:
            assert f"`{choice.value}`" in documented[f"`{column}`"]
