from datetime import UTC, datetime, timedelta, timezone
from zoneinfo import ZoneInfo

import pytest

from budget_recovery_dagster.domain import Hour, parse_time


def test_an_hour_is_named_by_its_start_in_utc() -> None:
    hour = Hour.parse("2026-11-29-14:00")
    assert hour.start == datetime(2026, 11, 29, 14, tzinfo=UTC)
    assert hour.end == datetime(2026, 11, 29, 15, tzinfo=UTC)
    assert hour.key == "2026-11-29-14:00"


@pytest.mark.parametrize("key", ["2026-11-29-14:30", "2026-11-29", "latest", ""])
def test_invalid_keys_are_refused(key: str) -> None:
    with pytest.raises(ValueError, match=r"not the start|does not match"):
        Hour.parse(key)


def test_times_in_half_hour_zones_belong_to_utc_hours() -> None:
    kolkata = timezone(timedelta(hours=5, minutes=30))
    at = datetime(2026, 11, 29, 20, 15, tzinfo=kolkata)
    assert Hour.containing(at).key == "2026-11-29-14:00"
    assert Hour(datetime(2026, 11, 29, 20, 30, tzinfo=kolkata)).key == "2026-11-29-15:00"


def test_the_night_of_the_autumn_clock_change_has_25_different_hours() -> None:
    new_york = ZoneInfo("America/New_York")
    midnight = datetime(2026, 11, 1, tzinfo=new_york).astimezone(UTC)
    next_midnight = datetime(2026, 11, 2, tzinfo=new_york).astimezone(UTC)
    keys = []
    at = midnight
    while at < next_midnight:
        keys.append(Hour.containing(at.astimezone(new_york)).key)
        at += timedelta(hours=1)
    assert len(keys) == len(set(keys)) == 25


def test_an_hour_closes_exactly_at_its_end() -> None:
    hour = Hour.parse("2026-11-29-14:00")
    last = hour.end - timedelta(microseconds=1)
    assert not hour.is_past(last)
    assert hour.is_past(hour.end)
    assert hour.is_future(hour.start - timedelta(microseconds=1))
    assert not hour.is_future(hour.start)


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("2026-11-29T14:00", datetime(2026, 11, 29, 14, tzinfo=UTC)),
        (" 2026-11-29 14:00:05 UTC ", datetime(2026, 11, 29, 14, 0, 5, tzinfo=UTC)),
        ("2026-11-29T14:00:05.000001Z", datetime(2026, 11, 29, 14, 0, 5, 1, tzinfo=UTC)),
        ("2026-11-29T14:00+05:30", datetime(2026, 11, 29, 8, 30, tzinfo=UTC)),
        ("2026-11-29", datetime(2026, 11, 29, tzinfo=UTC)),
    ],
)
def test_a_time_without_a_zone_is_utc(text: str, at: datetime) -> None:
    assert parse_time(text) == at
    assert parse_time(text).tzinfo is UTC


@pytest.mark.parametrize("text", ["", "UTC", "yesterday", "14:00", "0001-01-01T00:00+01:00"])
def test_an_invalid_time_is_quoted_in_the_error(text: str) -> None:
    with pytest.raises(ValueError, match="is not a time such as 2026-11-29T14:00") as refused:
        parse_time(text)
    assert repr(text) in str(refused.value)
