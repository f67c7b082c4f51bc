"""The contract of reading leaderboards, in memory and on a NATS server."""

from decimal import Decimal

import pytest

from budget_recovery_dagster.adapters.nats import CounterKey, encode_key
from budget_recovery_dagster.domain import (
    BudgetWindow,
    Entity,
    TenantReading,
    UnlistedEntities,
    UnreadableKey,
    Window,
)
from budget_recovery_dagster.errors import StoreReadError
from tests.boards import board, board_key, entries
from tests.contract.usage_stores import UGLY_NAMES, Subject
from tests.nats_servers import BOARDS

NOVEMBER = "2026-11"
OF = BudgetWindow("b", Window.parse(NOVEMBER))

NOTHING = TenantReading("t", BOARDS, (), (), (), is_partial=False, boards=frozenset())
Figures = dict[tuple[BudgetWindow, Entity], Decimal]


def figures(reading: TenantReading) -> Figures:
    assert reading.omitted == ()
    assert reading.unreadable == ()
    assert not reading.is_partial
    found = {(each.of, each.entity): each.usage for each in reading.counters}
    assert len(found) == len(reading.counters)
    return found


def count_and_rank(
    subject: Subject, tenant: str, budget: str, window: str, usages: dict[Entity, str]
) -> None:
    """Write counters and their leaderboard, as the gateway does."""
    of = BudgetWindow(budget, Window.parse(window))
    for entity, usage in usages.items():
        subject.put(encode_key(CounterKey(tenant, of, entity)), b'{"usage":"%s"}' % usage.encode())
    subject.put(board_key(tenant, budget, window), board(usages))


def test_an_empty_store_has_no_tenants_and_an_empty_reading(subject: Subject) -> None:
    assert subject.boards.list_tenants() == subject.counters.list_tenants()
    assert subject.boards.list_tenants().tenants == frozenset()
    assert subject.boards.read("t") == NOTHING


def test_boards_of_fewer_than_500_entities_equal_the_counters(subject: Subject) -> None:
    ugly: dict[Entity, str] = {name: f"{n}.5" for n, name in enumerate(UGLY_NAMES)}
    count_and_rank(subject, "t", "per user", NOVEMBER, ugly)
    count_and_rank(subject, "t", "total", NOVEMBER, {None: "16777216.01"})
    count_and_rank(subject, "t", "total", "lifetime", {None: "99999999999999999999.5"})
    count_and_rank(subject, "t", "both", "2026-Q4", {None: "3", "a": "0.000000000000000001"})
    count_and_rank(subject, "t", "equal", "2026-W48", dict.fromkeys(("a", "b", "c"), "0"))
    count_and_rank(subject, "other", "total", NOVEMBER, {None: "1"})
    by_boards = subject.boards.read("t")
    assert figures(by_boards) == figures(subject.counters.read("t"))
    assert len(by_boards.counters) == len(ugly) + 7
    assert by_boards.unlisted == ()


@pytest.mark.parametrize(
    ("count", "listed", "lowest"), [(499, 499, None), (500, 500, "1"), (501, 500, "2")]
)
def test_boards_of_500_entities_contain_the_largest_and_are_truncated(
    subject: Subject, count: int, listed: int, lowest: str | None
) -> None:
    usages: dict[Entity, str] = {f"e{number}": str(number) for number in range(1, count + 1)}
    subject.put(board_key("t", "b", NOVEMBER), board(usages))
    reading = subject.boards.read("t")
    assert figures(reading) == {
        (OF, f"e{number}"): Decimal(number) for number in range(count - listed + 1, count + 1)
    }
    assert reading.unlisted == (
        () if lowest is None else (UnlistedEntities(OF, Decimal(lowest), is_truncated=True),)
    )


def test_any_name_is_read_back_and_affects_no_other(subject: Subject) -> None:
    for number, name in enumerate(UGLY_NAMES):
        subject.put(board_key(name, name, NOVEMBER), board({name: str(number)}))
    subject.put(board_key("plain", "b", NOVEMBER), board({"e": "99"}))
    assert subject.boards.list_tenants().tenants == {*UGLY_NAMES, "plain"}
    for number, name in enumerate(UGLY_NAMES):
        (counter,) = subject.boards.read(name).counters
        assert (counter.of.budget, counter.entity, counter.usage) == (name, name, Decimal(number))


def test_other_keys_are_ignored(subject: Subject) -> None:
    others = ("usage.t.b.2026-11.e", "blocked.t.b.2026-11.e", "ratelimit.t", "__guard.x")
    for other in (*others, "leaderboards.t.b.2026-11"):
        subject.put(other, board({"e": "1"}))
    assert subject.boards.list_tenants().tenants == frozenset()
    assert subject.boards.list_tenants().unreadable == ()
    assert subject.boards.read("t") == NOTHING


def test_both_sources_are_read_from_one_store(subject: Subject) -> None:
    boards, counters = subject.boards, subject.counters
    subject.put("usage.counted.b.2026-11.e", b"1")
    subject.put("leaderboard.ranked.b.2026-11", board({"e": "2"}))
    assert counters.list_tenants().tenants == {"counted"}
    assert boards.list_tenants().tenants == {"ranked"}
    assert [each.usage for each in counters.read("counted").counters] == [Decimal(1)]
    assert [each.usage for each in boards.read("ranked").counters] == [Decimal(2)]
    assert boards.read("counted").counters == ()
    assert counters.read("ranked").counters == ()


@pytest.mark.parametrize("tenant", ["", "a\0b", "\ud800", "@" * 400])
def test_a_tenant_name_that_is_invalid_in_a_key_is_refused(subject: Subject, tenant: str) -> None:
    with pytest.raises(StoreReadError, match="cannot occur in a key"):
        subject.boards.read(tenant)


def test_the_last_write_counts_and_removed_boards_are_absent(subject: Subject) -> None:
    subject.put("leaderboard.t.b.2026-11", board({"old": "1"}))
    subject.put("leaderboard.t.gone.2026-11", board({"e": "1"}))
    subject.put("leaderboard.t.b.2026-11", board({"new": "2"}))
    subject.remove("leaderboard.t.gone.2026-11")
    assert figures(subject.boards.read("t")) == {(OF, "new"): Decimal(2)}
    subject.purge("leaderboard.t.")
    assert subject.boards.read("t").counters == ()


def test_invalid_boards_and_entries_are_reported_and_do_not_affect_others(subject: Subject) -> None:
    bad = {
        "json": (b"?", "the value is not JSON"),
        "deep": (b"[" * 100_000, "the value is nested too deeply"),
        "number": (b"5", "the value is not an object"),
        "fields": (b'{"usage":"5"}', "the value has no field entries"),
        "list": (b'{"entries":{}}', "entries is not a list"),
        "empty": (b"", "the value is not JSON"),
    }
    for budget, (value, _) in bad.items():
        subject.put(board_key("t", budget, NOVEMBER), value)
    good = {"entity": "good", "usage": "1"}
    unnamed = {"entity": "\ud800", "usage": "1"}
    lower = {"entity": "lower", "usage": "-5"}
    subject.put(board_key("t", "b", NOVEMBER), entries(good, 5, unnamed, lower))
    reading = subject.boards.read("t")
    assert [(each.of, each.entity) for each in reading.counters] == [(OF, "good")]
    assert {each.key: each.reason for each in reading.omitted if each.of != OF} == {
        board_key("t", budget, NOVEMBER): reason for budget, (_, reason) in bad.items()
    }
    assert [(each.entity, each.reason) for each in reading.omitted if each.of == OF] == [
        (None, "entry 2: not an object"),
        (None, "entry 3: a name with half of a surrogate pair"),
        ("lower", "entry 4, 'lower': -5 is negative"),
    ]
    assert {each.of.budget: each.at_most for each in reading.unlisted} == dict.fromkeys((*bad, "b"))
    assert not any(each.is_truncated for each in reading.unlisted)
    assert not reading.is_partial


def test_invalid_keys_are_reported_and_do_not_affect_others(subject: Subject) -> None:
    bad = {
        "leaderboard.t.b.2026-13": "window",
        "leaderboard.t.b": "parts",
        "leaderboard.t.b.2026-11.e": "parts",
        "leaderboard.t.=2b.2026-11": "budget",
        "leaderboard.t." + "b" * 990 + ".2026-11": "bytes",
    }
    for name in bad:
        subject.put(name, board({"e": "1"}))
    subject.put("leaderboard.t.b.2026-11", board({"good": "1"}))
    reading = subject.boards.read("t")
    assert [counter.entity for counter in reading.counters] == ["good"]
    reasons = {unreadable.key: unreadable.reason for unreadable in reading.unreadable}
    assert len(reasons) == len(bad)
    for name, reason in bad.items():
        shown = name if len(name) <= 1000 else f"{name[:1000]}... ({len(name)} bytes)"
        assert reason in reasons[shown]
    assert reading.unlisted == ()
    assert not reading.is_partial


def test_keys_without_a_tenant_are_listed_as_unreadable(subject: Subject) -> None:
    subject.put("leaderboard.=2b.b.2026-11", board({"e": "1"}))
    subject.put("leaderboard.alone", board({"e": "1"}))
    subject.put("leaderboard.t.b.2026-11", board({"e": "1"}))
    listing = subject.boards.list_tenants()
    assert listing.tenants == {"t"}
    assert listing.unreadable == (
        UnreadableKey("leaderboard.=2b.b.2026-11", "not an encoded name"),
        UnreadableKey("leaderboard.alone", "ends after the tenant"),
    )


def test_both_sources_tell_which_windows_have_a_leaderboard(subject: Subject) -> None:
    count_and_rank(subject, "t", "ranked", NOVEMBER, {"a": "1"})
    count_and_rank(subject, "t", "a.b", "lifetime", {"a": "1"})
    # Unreadable, but there.
    subject.put(board_key("t", "odd", NOVEMBER), b"?")
    subject.put("usage.t.counted.2026-11.e", b"1")
    subject.put("leaderboard.t.not.a.board", b"{}")
    subject.put(board_key("other", "counted", NOVEMBER), board({"a": "1"}))
    names = {("ranked", NOVEMBER), ("a.b", "lifetime"), ("odd", NOVEMBER)}
    expected = {BudgetWindow(budget, Window.parse(token)) for budget, token in names}
    for source in (subject.boards, subject.counters):
        assert source.read("t").boards == frozenset(expected)
    # Not looked up by a restore, which does not need to know.
    assert subject.store.open_tenant("t").reading.boards is None
