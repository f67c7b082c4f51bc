"""The expiry of restored keys, in memory and on a NATS server."""

from datetime import UTC, datetime
from decimal import Decimal

import pytest

from budget_recovery_dagster.domain import (
    NEVER_EXPIRES,
    NO_EXPIRY,
    BudgetWindow,
    KnownExpiry,
    Window,
    Written,
)
from tests.contract.restore_orders import (
    LIFETIME,
    always,
    board_order,
    key,
    open_after,
    order,
    raised,
    stored,
)
from tests.contract.usage_stores import Subject
from tests.nats_servers import Stored


def seconds(found: Stored) -> int:
    assert found.ttl is not None
    return int(found.ttl)


def test_a_raised_counter_keeps_its_remaining_time_to_live(subject: Subject) -> None:
    subject.put(key("e"), b"1", ttl="1h")
    assert raised(subject, order("e", "2", expiry=7200)) == [Written.RAISED]
    assert 3540 <= seconds(stored(subject, key("e"))) <= 3600


@pytest.mark.parametrize("recorded", [5, NO_EXPIRY, NEVER_EXPIRES])
def test_a_raised_counter_that_never_expires_still_never_expires(
    subject: Subject, recorded: KnownExpiry
) -> None:
    subject.put(key("none"), b"1")
    subject.put(key("never"), b"1", ttl="never")
    raised(subject, *(order(entity, "2", expiry=recorded) for entity in ("none", "never")))
    assert stored(subject, key("none")).ttl is None
    assert stored(subject, key("never")).ttl == "never"


@pytest.mark.parametrize("before", [None, "2h", "never"])
@pytest.mark.parametrize("meanwhile", [None, "1h", "never"])
def test_a_counter_that_the_gateway_writes_meanwhile_keeps_its_new_time_to_live(
    subject: Subject, before: str | None, meanwhile: str | None
) -> None:
    subject.put(key("e"), b"1", ttl=before)
    live = subject.store.open_tenant("t")
    (result,) = live.raise_counters(
        [order("e", "5", expiry=60)],
        is_open=open_after(lambda: subject.put(key("e"), b"2", ttl=meanwhile)),
    )
    found = stored(subject, key("e"))
    assert (result.written, result.before, found.data) == (Written.RAISED, Decimal(2), b"5")
    if meanwhile == "1h":
        assert 3540 <= seconds(found) <= 3600
    else:
        assert found.ttl == meanwhile


@pytest.mark.parametrize(
    ("expiry", "expires"),
    [(3600, True), (NO_EXPIRY, False), (NEVER_EXPIRES, False)],
    ids=["in an hour", "none", "never"],
)
def test_a_result_tells_whether_the_written_key_expires(
    subject: Subject,
    expiry: KnownExpiry,
    expires: bool,  # noqa: FBT001 - a value to be compared with
) -> None:
    subject.put(key("live", LIFETIME), b"1", ttl="1h")
    subject.put(key("lasting", LIFETIME), b"1", ttl="never")
    entities = ("new", "live", "lasting")
    results = subject.store.open_tenant("t").raise_counters(
        [order(entity, "2", LIFETIME, expiry=expiry) for entity in entities], is_open=always
    )
    assert [result.expires_at is not None for result in results] == [expires, True, False]


def test_a_new_counter_expires_after_its_window_or_its_write(subject: Subject) -> None:
    now = datetime.now(UTC)
    far = BudgetWindow("b", Window.parse(f"{now.year + 1}-11"))
    assert far.window.end is not None
    raised(
        subject,
        order("window", "1", far, expiry=3600),
        order("life", "1", LIFETIME, expiry=3600),
        order("none", "1", far),
        order("never", "1", far, expiry=NEVER_EXPIRES),
    )
    expected = (far.window.end - now).total_seconds() + 3600
    assert abs(seconds(stored(subject, key("window", far))) - expected) < 60
    assert seconds(stored(subject, key("life", LIFETIME))) == 3600
    assert stored(subject, key("none", far)).ttl is None
    assert stored(subject, key("never", far)).ttl == "never"


@pytest.mark.parametrize(("expiry", "ttl"), [(NO_EXPIRY, None), (NEVER_EXPIRES, "never")])
def test_a_new_leaderboard_is_protected_only_if_a_counter_was(
    subject: Subject, expiry: KnownExpiry, ttl: str | None
) -> None:
    live = subject.store.open_tenant("t")
    (result,) = live.rebuild_boards([board_order({"a": "1"}, expiry=expiry)], is_open=always)
    assert result.is_written
    assert stored(subject, "leaderboard.t.b.2026-11").ttl == ttl


def test_a_new_counter_that_would_have_expired_is_not_created(subject: Subject) -> None:
    past = BudgetWindow("b", Window.parse("2020-11"))
    assert (
        raised(
            subject,
            order("e", "1", past, expiry=3600),
            order("f", "1", LIFETIME, expiry=0),
        )
        == [Written.EXPIRED] * 2
    )
    assert subject.stored(key("e", past)) is None
