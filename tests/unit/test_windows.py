from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from budget_recovery_dagster.domain import InvalidWindowError, Period, Window


def utc(year: int, month: int, day: int, hour: int = 0, minute: int = 0) -> datetime:
    return datetime(year, month, day, hour, minute, tzinfo=UTC)


@pytest.mark.parametrize(
    ("token", "period", "start", "end"),
    [
        ("2026-11-29", Period.DAY, utc(2026, 11, 29), utc(2026, 11, 30)),
        ("2028-02-29", Period.DAY, utc(2028, 2, 29), utc(2028, 3, 1)),
        ("2026-12-31", Period.DAY, utc(2026, 12, 31), utc(2027, 1, 1)),
        ("2026-W48", Period.WEEK, utc(2026, 11, 23), utc(2026, 11, 30)),
        ("2026-W53", Period.WEEK, utc(2026, 12, 28), utc(2027, 1, 4)),
        ("2025-W01", Period.WEEK, utc(2024, 12, 30), utc(2025, 1, 6)),
        ("2026-02", Period.MONTH, utc(2026, 2, 1), utc(2026, 3, 1)),
        ("2026-12", Period.MONTH, utc(2026, 12, 1), utc(2027, 1, 1)),
        ("2026-Q1", Period.QUARTER, utc(2026, 1, 1), utc(2026, 4, 1)),
        ("2026-Q4", Period.QUARTER, utc(2026, 10, 1), utc(2027, 1, 1)),
        ("lifetime", Period.LIFETIME, None, None),
    ],
)
def test_a_token_names_a_calendar_period(
    token: str, period: Period, start: datetime | None, end: datetime | None
) -> None:
    window = Window.parse(token)
    assert (window.token, window.period, window.start, window.end) == (token, period, start, end)


@pytest.mark.parametrize(
    "token",
    [
        "",
        "2026",
        "2026-13",
        "2026-00",
        "2026-02-29",
        "2025-W53",
        "2026-W54",
        "2026-W00",
        "2026-Q5",
        "2026-Q0",
        "2026-11-29 ",
        "2026-11-29\n",
        "26-11-29",
        "\u0662\u0660\u0662\u0666-11-29",
        "2026-w48",
        "Lifetime",
        "9999-12-31",
        "9999-12",
        "9999-Q4",
        "9999-W52",
        "0000-01",
        "2026-11-29T00",
    ],
)
def test_any_other_token_is_refused(token: str) -> None:
    with pytest.raises(InvalidWindowError, match="is not a budget window"):
        Window.parse(token)


def test_windows_are_half_open() -> None:
    day = Window.parse("2026-05-31")
    assert day.is_current(utc(2026, 5, 31))
    assert day.is_current(utc(2026, 6, 1) - timedelta(microseconds=1))
    assert not day.is_current(utc(2026, 6, 1))
    assert not day.is_current(utc(2026, 5, 31) - timedelta(microseconds=1))


def test_windows_are_compared_in_utc() -> None:
    kolkata = timezone(timedelta(hours=5, minutes=30))
    local_june = datetime(2026, 6, 1, 5, 29, tzinfo=kolkata)
    assert Window.parse("2026-05").is_current(local_june)
    assert Window.containing(Period.DAY, local_june).token == "2026-05-31"


def test_a_time_without_a_zone_is_refused() -> None:
    with pytest.raises(ValueError, match="no time zone"):
        Window.parse("lifetime").is_current(datetime(2026, 6, 1))  # noqa: DTZ001


@pytest.mark.parametrize(
    ("at", "week"),
    [
        (utc(2026, 11, 29, 23, 30), "2026-W48"),
        (utc(2026, 11, 30, 0, 10), "2026-W49"),
        (utc(2027, 1, 3, 23, 59), "2026-W53"),
        (utc(2027, 1, 4), "2027-W01"),
    ],
)
def test_a_week_runs_from_monday(at: datetime, week: str) -> None:
    assert Window.containing(Period.WEEK, at).token == week


@given(
    st.sampled_from(Period),
    st.datetimes(
        min_value=datetime(1, 1, 8),  # noqa: DTZ001 - hypothesis adds the zone
        max_value=datetime(9998, 12, 1),  # noqa: DTZ001 - hypothesis adds the zone
        timezones=st.just(UTC),
    ),
)
def test_every_time_is_in_its_window_and_every_token_is_parsed_back(
    period: Period, at: datetime
) -> None:
    window = Window.containing(period, at)
    assert window.is_current(at)
    assert Window.parse(window.token) == window
