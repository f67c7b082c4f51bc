"""The expiry of restored keys, in memory and on a NATS server."""

from datetime import UTC, datetime

from budget_recovery_dagster.domain import BudgetWindow, Window, Written
from tests.contract.restore_orders import (
    LIFETIME,
    key,
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
    assert raised(subject, order("e", "2", expiry_seconds=7200)) == [Written.RAISED]
    assert 3540 <= seconds(stored(subject, key("e"))) <= 3600


def test_a_raised_counter_that_never_expires_still_never_expires(subject: Subject) -> None:
    subject.put(key("none"), b"1")
    subject.put(key("never"), b"1", ttl="never")
    raised(subject, *(order(entity, "2", expiry_seconds=5) for entity in ("none", "never")))
    assert stored(subject, key("none")).ttl is None
    assert stored(subject, key("never")).ttl == "never"


def test_a_new_counter_expires_after_its_window_or_its_write(subject: Subject) -> None:
    now = datetime.now(UTC)
    far = BudgetWindow("b", Window.parse(f"{now.year + 1}-11"))
    assert far.window.end is not None
    raised(
        subject,
        order("window", "1", far, expiry_seconds=3600),
        order("life", "1", LIFETIME, expiry_seconds=3600),
        order("never", "1", far),
    )
    expected = (far.window.end - now).total_seconds() + 3600
    assert abs(seconds(stored(subject, key("window", far))) - expected) < 60
    assert seconds(stored(subject, key("life", LIFETIME))) == 3600
    assert stored(subject, key("never", far)).ttl is None


def test_a_new_counter_that_would_have_expired_is_not_created(subject: Subject) -> None:
    past = BudgetWindow("b", Window.parse("2020-11"))
    assert (
        raised(
            subject,
            order("e", "1", past, expiry_seconds=3600),
            order("f", "1", LIFETIME, expiry_seconds=0),
        )
        == [Written.EXPIRED] * 2
    )
    assert subject.stored(key("e", past)) is None
