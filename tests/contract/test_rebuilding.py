"""The contract of rebuilding leaderboards, in memory and on a NATS server."""

import json
from datetime import UTC, datetime
from decimal import Decimal

import pytest

from budget_recovery_dagster.adapters.nats import BoardKey, encode_board_key
from budget_recovery_dagster.domain import NO_EXPIRY, BoardOrder, BoardResult, BudgetWindow, Window
from budget_recovery_dagster.sandbox.gateway import board_entries, write_board
from tests.contract.restore_orders import (
    LIFETIME,
    NOVEMBER,
    always,
    board_order,
    never,
    open_after,
)
from tests.contract.usage_stores import UGLY_NAMES, Subject
from tests.nats_servers import BOARDS, Stored

KEY = "leaderboard.t.b.2026-11"


def rebuilt(subject: Subject, order: BoardOrder) -> BoardResult:
    (result,) = subject.store.open_tenant("t").rebuild_boards([order], is_open=always)
    assert result.of == order.of
    return result


def stored(subject: Subject, name: str = KEY) -> Stored:
    found = subject.stored(name)
    assert found is not None
    return found


def entries(subject: Subject) -> object:
    return json.loads(stored(subject).data)["entries"]


def written(*entries: object, **others: object) -> bytes:
    return json.dumps({**others, "entries": entries}).encode()


def test_a_missing_board_is_created_in_the_format_of_the_contract(subject: Subject) -> None:
    assert rebuilt(subject, board_order({"a": "1.50", "b": "12.34", None: "3"})).is_written
    start, _, end = stored(subject).data.decode().partition(',"updated_at":"')
    assert start == (
        '{"entries":[{"entity":"b","usage":"12.34"},{"entity":null,"usage":"3"},'
        '{"entity":"a","usage":"1.5"}]'
    )
    assert end.endswith('Z"}')


def test_each_entity_gets_the_higher_of_board_and_usages(subject: Subject) -> None:
    subject.put(
        KEY,
        written(
            {"entity": "a", "usage": "5"},
            {"entity": "only board", "usage": 4},
            {"entity": "b", "usage": "1"},
            updated_at="2020-01-01T00:00:00Z",
            by={"x": 1},
        ),
    )
    assert rebuilt(subject, board_order({"a": "2", "b": "3", "only usages": "9"})).is_written
    content = json.loads(stored(subject).data)
    assert [(each["entity"], each["usage"]) for each in content["entries"]] == [
        ("only usages", "9"),
        ("a", "5"),
        ("only board", 4),
        ("b", "3"),
    ]
    assert content["by"] == {"x": 1}
    assert content["updated_at"] > "2026"


def test_a_missing_board_that_the_gateway_does_not_keep_is_not_created(subject: Subject) -> None:
    result = rebuilt(subject, board_order({"a": "1"}, may_create=False))
    assert result == BoardResult(NOVEMBER, is_written=False, is_missing=True)
    assert subject.stored(KEY) is None
    subject.put(KEY, written())
    subject.remove(KEY)
    assert rebuilt(subject, board_order({"a": "1"}, may_create=False)).is_missing
    subject.put(KEY, written())
    assert rebuilt(subject, board_order({"a": "1"}, may_create=False)).is_written


def test_entries_and_fields_of_a_board_keep_every_byte_that_is_not_raised(
    subject: Subject,
) -> None:
    subject.put(
        KEY,
        b'{ "v" : 1.0e2, "entries":[ {"usage":  9.50, "entity":"kept", "team":{"x":[1.0, 2]}} ,\n'
        b' {"rank":"usage","entity":"raised","usage":7.25,"usage_share":0.10,"n":null},'
        b'{"entity":null,"usage":"3.0","\\u0061":"\\u00e9"}],"updated_at":17, "x":{"entries":[]} }',
    )
    order = board_order({"raised": "8.125", "new": "5", None: "3", "kept": "1"})
    assert rebuilt(subject, order).is_written
    assert stored(subject).data == (
        b'{ "v" : 1.0e2, "entries":[{"usage":  9.50, "entity":"kept", "team":{"x":[1.0, 2]}},'
        b'{"rank":"usage","entity":"raised","usage":8.125,"usage_share":0.10,"n":null},'
        b'{"entity":"new","usage":5},'
        b'{"entity":null,"usage":"3.0","\\u0061":"\\u00e9"}],"updated_at":17, "x":{"entries":[]} }'
    )


@pytest.mark.parametrize(
    ("live", "raised"),
    [
        ([{"entity": "a", "usage": 1}], [{"entity": "b", "usage": 4}, {"entity": "a", "usage": 2}]),
        (
            [{"entity": "a", "usage": "1"}],
            [{"entity": "b", "usage": "4"}, {"entity": "a", "usage": "2"}],
        ),
        (
            [
                {"entity": "c", "usage": 3},
                {"entity": "d", "usage": 3},
                {"entity": "a", "usage": "1"},
            ],
            [
                {"entity": "b", "usage": 4},
                {"entity": "c", "usage": 3},
                {"entity": "d", "usage": 3},
                {"entity": "a", "usage": "2"},
            ],
        ),
    ],
)
def test_usages_of_a_board_keep_the_form_of_the_gateway(
    subject: Subject, live: list[object], raised: list[object]
) -> None:
    subject.put(KEY, written(*live))
    assert rebuilt(subject, board_order({"a": "2", "b": "4"})).is_written
    assert entries(subject) == raised


def test_a_board_without_a_higher_usage_keeps_every_byte(subject: Subject) -> None:
    """Its order of equal usages, its repeated entries and its forms are the gateway's own."""
    data = (
        b'{"entries":[{"entity":"b","usage":1.50},{"entity":"a","usage":"1.5"},'
        b'{"entity":"b","usage":1}, {"entity":"c","usage":1e1}]}'
    )
    subject.put(KEY, data)
    before = stored(subject)
    usages: dict[str | None, str] = {"a": "1.50", "b": "1.5", "c": "10"}
    assert rebuilt(subject, board_order(usages)) == BoardResult(NOVEMBER, is_written=False)
    assert stored(subject) == before


def test_a_board_never_gets_shorter(subject: Subject) -> None:
    live = [{"entity": f"e{n:04}", "usage": str(n)} for n in range(600, 0, -1)]
    subject.put(KEY, written({"entity": "e0600", "usage": "5"}, *live))
    assert rebuilt(subject, board_order({"e0001": "700"})).is_written
    found = json.loads(stored(subject).data)["entries"]
    # Of a repeated entity only the highest entry is raised.
    assert found[:2] == [{"entity": "e0001", "usage": "700"}, {"entity": "e0600", "usage": "600"}]
    assert len(found) == 601
    assert {"entity": "e0600", "usage": "5"} in found


def test_a_rewritten_board_keeps_the_gateways_headers(subject: Subject) -> None:
    subject.put(KEY, written(), ttl="1h", headers={"Team": "blue"})
    assert rebuilt(subject, board_order({"a": "1"})).is_written
    assert stored(subject).headers["Team"] == "blue"
    assert 3540 <= int(stored(subject).ttl or "0") <= 3600


def test_a_board_that_the_gateway_would_write_is_not_rewritten(subject: Subject) -> None:
    usages = {"b": Decimal("1.5"), "a": Decimal("1.5"), "c": Decimal(7), None: Decimal("1E-18")}
    subject.put(KEY, write_board(board_entries(usages.items()), datetime.now(UTC)))
    before = stored(subject)
    same = {**usages, "b": Decimal("1.50")}
    result = rebuilt(subject, BoardOrder(NOVEMBER, same, NO_EXPIRY, may_create=True))
    assert result == BoardResult(NOVEMBER, is_written=False)
    assert stored(subject) == before


def test_a_rebuilt_board_equals_the_one_of_the_gateway(subject: Subject) -> None:
    # More digits than the default decimal context distinguishes.
    usages: dict[str | None, Decimal] = {
        "b": Decimal("99999999999999999999.000000000000000001"),
        "a": Decimal("99999999999999999999.000000000000000002"),
        "東京": Decimal("1E+3"),
        '"': Decimal("1000.0"),
    }
    rebuilt(subject, BoardOrder(NOVEMBER, usages, NO_EXPIRY, may_create=True))
    data = stored(subject).data
    expected = write_board(board_entries(usages.items()), datetime.now(UTC)).decode()
    plain = expected.replace("1000.0", "1000").partition(',"updated_at"')[0]
    assert data.decode().partition(',"updated_at"')[0] == plain
    assert [each["entity"] for each in json.loads(data)["entries"]] == ["a", "b", '"', "東京"]


def test_a_board_of_a_thousand_entities_keeps_the_500_largest(subject: Subject) -> None:
    live = [{"entity": f"e{n:04}", "usage": str(n)} for n in range(999, 499, -1)]
    subject.put(KEY, written(*live))
    # In the smaller half, even entities exceed every usage on the board.
    usages: dict[str | None, str] = {
        f"e{n:04}": str(n + 1000 if n % 2 == 0 and n < 500 else n) for n in range(1000)
    }
    assert rebuilt(subject, board_order(usages)).is_written
    expected = sorted(usages.items(), key=lambda each: Decimal(each[1]), reverse=True)[:500]
    assert entries(subject) == [{"entity": name, "usage": usage} for name, usage in expected]
    (unlisted,) = subject.store.reader(BOARDS).read("t").unlisted
    assert unlisted.is_truncated
    assert rebuilt(subject, board_order(usages)) == BoardResult(NOVEMBER, is_written=False)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (b"{", "not JSON"),
        (b'{"entries":7}', "not a list"),
        (b'{"entries":[{"entity":"a","usage":"NaN"}]}', "entry 1"),
        (b'{"entries":[{"usage":"1"}]}', "no field entity"),
    ],
)
def test_an_unreadable_board_is_not_changed(subject: Subject, value: bytes, reason: str) -> None:
    subject.put(KEY, value)
    before = stored(subject)
    result = rebuilt(subject, board_order({"b": "1"}))
    assert not result.is_written
    assert reason in result.reason
    assert stored(subject) == before


def test_a_board_of_a_closed_window_is_not_written(subject: Subject) -> None:
    live = subject.store.open_tenant("t")
    (result,) = live.rebuild_boards([board_order({"a": "1"})], is_open=never)
    assert not result.is_written
    assert "closed" in result.reason
    assert subject.stored(KEY) is None


def test_a_board_that_the_gateway_writes_meanwhile_is_merged(subject: Subject) -> None:
    subject.put(KEY, written({"entity": "a", "usage": "1"}))
    live = subject.store.open_tenant("t")
    meanwhile = written({"entity": "a", "usage": "7"}, {"entity": "new", "usage": "2"}, x=1)
    (result,) = live.rebuild_boards(
        [board_order({"a": "5", "b": "6"})],
        is_open=open_after(lambda: subject.put(KEY, meanwhile)),
    )
    assert result.is_written
    assert entries(subject) == [
        {"entity": "a", "usage": "7"},
        {"entity": "b", "usage": "6"},
        {"entity": "new", "usage": "2"},
    ]
    assert json.loads(stored(subject).data)["x"] == 1


def test_a_board_removed_meanwhile_is_recreated(subject: Subject) -> None:
    subject.put(KEY, written({"entity": "a", "usage": "1"}, x=1))
    live = subject.store.open_tenant("t")
    (result,) = live.rebuild_boards(
        [board_order({"a": "5"})], is_open=open_after(lambda: subject.remove(KEY))
    )
    assert result.is_written
    assert set(json.loads(stored(subject).data)) == {"entries", "updated_at"}


def test_a_board_keeps_its_remaining_time_to_live(subject: Subject) -> None:
    subject.put(KEY, written(), ttl="1h")
    assert rebuilt(subject, board_order({"a": "1"}, expiry=9)).is_written
    assert 3540 <= int(stored(subject).ttl or "0") <= 3600


def test_a_new_board_expires_like_a_counter(subject: Subject) -> None:
    rebuilt(subject, board_order({"a": "1"}, LIFETIME, expiry=3600))
    assert stored(subject, "leaderboard.t.b.lifetime").ttl == "3600"
    past = BudgetWindow("b", Window.parse("2020-11"))
    result = rebuilt(subject, board_order({"a": "1"}, past, expiry=3600))
    assert not result.is_written
    assert "expired" in result.reason


def test_a_board_without_entities_is_not_created(subject: Subject) -> None:
    assert rebuilt(subject, board_order({})) == BoardResult(NOVEMBER, is_written=False)
    assert subject.stored(KEY) is None


def test_boards_of_any_name_are_rebuilt_without_touching_other_keys(subject: Subject) -> None:
    others = ["usage.t.b.2026-11.e", "blocked.t.b.2026-11.e", "leaderboard.u.b.2026-11"]
    for name in others:
        subject.put(name, b"1")
    before = {name: stored(subject, name) for name in others}
    usages: dict[str | None, str] = dict.fromkeys(UGLY_NAMES, "1")
    orders = [board_order(usages, BudgetWindow(name, NOVEMBER.window)) for name in UGLY_NAMES]
    results = subject.store.open_tenant("t").rebuild_boards(orders, is_open=always)
    assert [result.of for result in results] == [order.of for order in orders]
    for name in UGLY_NAMES:
        key = encode_board_key(BoardKey("t", BudgetWindow(name, NOVEMBER.window)))
        content = json.loads(stored(subject, key).data)
        assert {each["entity"] for each in content["entries"]} == set(UGLY_NAMES)
    assert {name: stored(subject, name) for name in others} == before


def test_a_board_without_a_valid_key_does_not_affect_others(subject: Subject) -> None:
    unnamed = BudgetWindow("@" * 400, NOVEMBER.window)
    orders = [board_order({"a": "1"}, of) for of in (unnamed, NOVEMBER)]
    results = subject.store.open_tenant("t").rebuild_boards(orders, is_open=always)
    assert [(each.of, each.is_written) for each in results] == [(unnamed, False), (NOVEMBER, True)]
    assert results[0].reason.startswith("No valid key: ")


def test_a_board_under_constant_writes_is_not_written_and_reported(subject: Subject) -> None:
    def is_open(_: Window) -> bool:
        subject.put(KEY, written())
        return True

    live = subject.store.open_tenant("t")
    (result,) = live.rebuild_boards([board_order({"a": "1"})], is_open=is_open)
    assert not result.is_written
    assert result.reason.startswith(f"Could not write {KEY} in the bucket ")
