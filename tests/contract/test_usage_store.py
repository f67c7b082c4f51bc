"""The contract of the usage store, in memory and on a NATS server."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pytest

from budget_recovery_dagster.adapters.nats import CounterKey, encode_key
from budget_recovery_dagster.domain import (
    NEVER_EXPIRES,
    NO_EXPIRY,
    BudgetWindow,
    CounterReading,
    TenantReading,
    UnreadableKey,
    ValueShape,
    Window,
)
from budget_recovery_dagster.errors import StoreReadError
from tests.boards import board_key
from tests.contract.usage_stores import UGLY_NAMES, Subject
from tests.identities import identity_of
from tests.nats_servers import COUNTERS, usages

NOVEMBER = Window.parse("2026-11")


NOTHING = TenantReading("t", COUNTERS, (), (), (), is_partial=False, boards=frozenset())


def key(tenant: str, budget: str, entity: str | None, window: Window = NOVEMBER) -> str:
    return encode_key(CounterKey(tenant, BudgetWindow(budget, window), entity))


def test_an_empty_store_has_no_tenants_and_an_empty_reading(subject: Subject) -> None:
    listing = subject.counters.list_tenants()
    assert listing.tenants == frozenset()
    assert listing.unreadable == ()
    assert subject.counters.read("t") == NOTHING


def test_each_write_advances_the_identity_of_the_same_store(subject: Subject) -> None:
    first = identity_of(subject.store)
    assert first.created_at.utcoffset() == timedelta(0)
    subject.put(key("t", "b", "e"), b"1")
    subject.put(key("t", "b", "e"), b"2")
    subject.remove(key("t", "b", "e"))
    last = identity_of(subject.store)
    assert last.created_at == first.created_at
    assert last.last_sequence == first.last_sequence + 3


def test_the_leaders_time_is_in_utc(subject: Subject) -> None:
    now = subject.store.now()
    assert now is not None
    assert now.utcoffset() == timedelta(0)
    assert abs(datetime.now(UTC) - now) < timedelta(seconds=60)


def test_a_purge_does_not_change_the_identity(subject: Subject) -> None:
    subject.put(key("t", "b", "e"), b"1")
    before = identity_of(subject.store)
    subject.purge("usage.t.")
    assert identity_of(subject.store) == before
    assert usages(subject.store, "t") == {}


def test_counters_are_read_exactly_with_their_shape(subject: Subject) -> None:
    quarter = Window.parse("2026-Q4")
    subject.put(key("t", "b", "text"), b'{"usage":"0.1","updated_at":"2026-11-29T12:00:00Z"}')
    subject.put(key("t", "b", "number"), b'{"usage":0.000000000000000001}')
    subject.put(key("t", "b", "bare"), b"99999999999999999999.5")
    subject.put(key("t", "other", None, quarter), b'{"usage":"7"}')
    reading = subject.counters.read("t")
    november, never = BudgetWindow("b", NOVEMBER), NO_EXPIRY
    assert set(reading.counters) == {
        CounterReading(november, "text", Decimal("0.1"), ValueShape.TEXT, never),
        CounterReading(november, "number", Decimal("1E-18"), ValueShape.NUMBER, never),
        CounterReading(
            november, "bare", Decimal("99999999999999999999.5"), ValueShape.BARE, NO_EXPIRY
        ),
        CounterReading(
            BudgetWindow("other", quarter), None, Decimal(7), ValueShape.TEXT, NO_EXPIRY
        ),
    }
    assert reading.omitted == ()
    assert reading.unreadable == ()
    assert not reading.is_partial


def test_the_last_write_counts(subject: Subject) -> None:
    for usage in (b"1", b"2", b"3"):
        subject.put(key("t", "b", "e"), usage)
    assert usages(subject.store, "t") == {"e": "3"}


def test_any_name_is_read_back_and_affects_no_other(subject: Subject) -> None:
    for number, name in enumerate(UGLY_NAMES):
        subject.put(key(name, name, name), b"%d" % number)
    subject.put(key("plain", "b", "e"), b"99")
    assert subject.counters.list_tenants().tenants == {*UGLY_NAMES, "plain"}
    for number, name in enumerate(UGLY_NAMES):
        (counter,) = subject.counters.read(name).counters
        assert (counter.of.budget, counter.entity, counter.usage) == (name, name, Decimal(number))


@pytest.mark.parametrize("tenant", ["a", "ab", "a/b", "a-b", "A"])
def test_tenants_with_similar_names_are_separate(subject: Subject, tenant: str) -> None:
    for other in ("a", "ab", "a/b", "a-b", "A"):
        subject.put(key(other, "b", other), b"1")
    assert usages(subject.store, tenant) == {tenant: "1"}


@pytest.mark.parametrize("tenant", ["", "a\0b", "\ud800", "@" * 400])
def test_a_tenant_name_that_is_invalid_in_a_key_is_refused(subject: Subject, tenant: str) -> None:
    with pytest.raises(StoreReadError, match="cannot occur in a key"):
        subject.counters.read(tenant)


def test_other_keys_are_ignored(subject: Subject) -> None:
    for other in ("leaderboard.t.b.2026-11", "blocked.t.b.2026-11.e", "ratelimit.t", "__guard.x"):
        subject.put(other, b"?")
    subject.put("usages.t.b.2026-11.e", b"1")
    assert subject.counters.list_tenants().tenants == frozenset()
    assert subject.counters.list_tenants().unreadable == ()
    board = BudgetWindow("b", NOVEMBER)
    assert subject.counters.read("t") == replace(NOTHING, boards=frozenset({board}))


def test_a_deleted_leaderboard_is_none(subject: Subject) -> None:
    kept, deleted = (BudgetWindow(budget, NOVEMBER) for budget in ("kept", "deleted"))
    for of in (kept, deleted):
        subject.put(board_key("t", of.budget, of.window.token), b'{"entries":[]}')
    assert subject.counters.read("t").boards == frozenset({kept, deleted})
    subject.remove(board_key("t", "deleted", NOVEMBER.token))
    assert subject.counters.read("t").boards == frozenset({kept})
    subject.remove(board_key("t", "kept", NOVEMBER.token))
    assert subject.counters.read("t").boards == frozenset()


def test_removed_keys_are_absent_and_do_not_make_a_reading_partial(subject: Subject) -> None:
    for entity in ("kept", "removed"):
        subject.put(key("t", "b", entity), b"1")
    subject.remove(key("t", "b", "removed"))
    reading = subject.counters.read("t")
    assert [counter.entity for counter in reading.counters] == ["kept"]
    assert reading.omitted == ()
    assert not reading.is_partial


def test_a_key_written_again_after_its_removal_is_read(subject: Subject) -> None:
    subject.put(key("t", "b", "e"), b"1")
    subject.remove(key("t", "b", "e"))
    subject.put(key("t", "b", "e"), b"2")
    assert usages(subject.store, "t") == {"e": "2"}


def test_invalid_values_are_reported_and_do_not_affect_others(subject: Subject) -> None:
    bad = {
        "empty": b"",
        "nan": b"NaN",
        "negative": b'{"usage":-5}',
        "binary": b"\xff\x00\xfe",
        "deep": b"[" * 100_000,
        "huge": b"1E400",
        "true": b'{"usage":true}',
    }
    for entity, value in bad.items():
        subject.put(key("t", "b", entity), value)
    subject.put(key("t", "b", "good"), b"1")
    reading = subject.counters.read("t")
    assert [counter.entity for counter in reading.counters] == ["good"]
    assert {counter.entity: counter.key for counter in reading.omitted} == {
        entity: key("t", "b", entity) for entity in bad
    }
    assert all(counter.reason.isascii() and counter.reason for counter in reading.omitted)
    assert not reading.is_partial


def test_invalid_keys_are_reported_and_do_not_affect_others(subject: Subject) -> None:
    bad = {
        "usage.t.b.2026-13.e": "window",
        "usage.t.b.2026-11": "parts",
        "usage.t.b.2026-11.e.f": "parts",
        "usage.t.=2b.2026-11.e": "budget",
        "usage.t.b.2026-11.=61": "entity",
        "usage.t.b.2026-11." + "e" * 990: "bytes",
        "usage.t.b.2026-11.e=00": "NUL",
        "usage.t.*.2026-11.e": "budget",
    }
    for name in bad:
        subject.put(name, b"1")
    subject.put(key("t", "b", "good"), b"1")
    subject.put(key("other", "b", "good"), b"1")
    reading = subject.counters.read("t")
    assert [counter.entity for counter in reading.counters] == ["good"]
    reasons = {unreadable.key: unreadable.reason for unreadable in reading.unreadable}
    assert len(reasons) == len(bad)
    for name, reason in bad.items():
        shown = name if len(name) <= 1000 else f"{name[:1000]}... ({len(name)} bytes)"
        assert reason in reasons[shown]
    assert not reading.is_partial
    other = subject.counters.read("other")
    assert len(other.counters) == 1
    assert other.unreadable == ()


def test_non_ascii_characters_of_a_key_are_escaped(subject: Subject) -> None:
    subject.put("usage.t.東.2026-11.e", b"1")
    (unreadable,) = subject.counters.read("t").unreadable
    assert unreadable.key == r"usage.t.\xe6\x9d\xb1.2026-11.e"
    assert unreadable.reason.isascii()


def test_keys_without_a_tenant_are_listed_as_unreadable(subject: Subject) -> None:
    subject.put("usage.=2b.b.2026-11.e", b"1")
    subject.put("usage.*.b.2026-11.e", b"1")
    subject.put("usage.alone", b"1")
    subject.put(key("t", "b", "e"), b"1")
    listing = subject.counters.list_tenants()
    assert listing.tenants == {"t"}
    assert listing.unreadable == (
        UnreadableKey("usage.*.b.2026-11.e", "not an encoded name"),
        UnreadableKey("usage.=2b.b.2026-11.e", "not an encoded name"),
        UnreadableKey("usage.alone", "ends after the tenant"),
    )


def test_an_expiry_is_counted_from_the_end_of_the_window(subject: Subject) -> None:
    now = datetime.now(UTC)
    far = Window.parse(f"{now.year + 1}-11")
    subject.put(key("t", "b", "life", Window.parse("lifetime")), b"1", ttl="1h30m")
    subject.put(key("t", "b", "month", far), b"1", ttl="90s")
    subject.put(key("t", "b", "none", far), b"1")
    subject.put(key("t", "b", "never", far), b"1", ttl="never")
    expiries = {c.entity: c.expiry for c in subject.counters.read("t").counters}
    assert expiries["life"] == 5400
    assert expiries["none"] is NO_EXPIRY
    assert expiries["never"] is NEVER_EXPIRES
    assert far.end is not None
    expiry = expiries["month"]
    assert isinstance(expiry, int)
    expires_at = far.end + timedelta(seconds=expiry)
    assert timedelta(seconds=85) <= expires_at - now <= timedelta(seconds=100)
