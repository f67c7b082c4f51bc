from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from budget_recovery_dagster.adapters.nats import (
    ExpiredKeyError,
    expiry_after,
    parse_ttl,
    remaining_ttl,
    ttl_of_new_key,
)
from budget_recovery_dagster.domain import NEVER_EXPIRES, NO_EXPIRY, KnownExpiry, Window

NOON = int(datetime(2026, 11, 29, 12, tzinfo=UTC).timestamp()) * 10**9
UNITS = st.sampled_from(["ns", "us", "ms", "s", "m", "h"])
DAY = Window.parse("2026-11-29")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("60", 60),
        ("90s", 90),
        ("1h30m", 5400),
        ("1h0m0.9s", 3600),
        ("1.5h", 5400),
        (".5m", 30),
        ("1500ms", 1),
        ("1000000us", 1),
        ("1000000\N{MICRO SIGN}s", 1),
        ("1000000\N{GREEK SMALL LETTER MU}s", 1),
        ("2000000000ns", 2),
        ("+5s", 5),
        ("0.9999999999s1ns", 1),  # fractions of a nanosecond are dropped in each part
        ("00000000000000000000000000000000000060", 60),
        ("9223372036", 9_223_372_036),
        ("9223372036854775807ns", 9_223_372_036),
        ("2562047h47m16.854775807s", 9_223_372_036),
    ],
)
def test_a_time_to_live_is_read_in_whole_seconds(text: str, seconds: int) -> None:
    assert parse_ttl(text) == seconds


@pytest.mark.parametrize(
    "text", ["never", "NEVER", "0", "-1", "500ms", "abc", "", "1x", "1h-5m", "s", ".s", "1 h"]
)
def test_never_and_rejected_texts_mean_never(text: str) -> None:
    assert parse_ttl(text) is None


@pytest.mark.parametrize(
    "text",
    [
        "9223372037",
        "9223372036854775808ns",
        "2562047h47m16.854775808s",
        "99999999999999999999h",
        "99999999999999999999.99999999999999999999h" * 4,
        "9" * 200,
        "9" * 10_000,
        "1s" * 100_000,
        "9" * 10_000 + "h",
        "0." + "9" * 10_000 + "h",
    ],
    ids=lambda text: f"{text[:30]} ({len(text)})",
)
def test_a_duration_beyond_the_servers_limit_is_no_expiry(text: str) -> None:
    assert parse_ttl(text) is None
    assert expiry_after(text, NOON, DAY) is NO_EXPIRY


durations = st.lists(
    st.tuples(st.integers(0, 10**25), st.sampled_from(["", ".", ".5", f".{'9' * 40}"]), UNITS),
    min_size=1,
    max_size=5,
)


@given(durations)
def test_any_duration_fits_in_the_database(parts: list[tuple[int, str, str]]) -> None:
    seconds = parse_ttl("".join(f"{whole}{fraction}{unit}" for whole, fraction, unit in parts))
    assert seconds is None or 1 <= seconds <= 2**63 // 10**9


@given(st.text(max_size=30))
def test_any_text_means_a_number_of_seconds_or_none(text: str) -> None:
    seconds = parse_ttl(text)
    assert seconds is None or seconds >= 1


@pytest.mark.parametrize(
    ("ttl", "written_ns", "expiry"),
    [
        (None, NOON, NO_EXPIRY),
        ("never", NOON, NEVER_EXPIRES),
        ("Never", NOON, NEVER_EXPIRES),  # the server ignores case
        ("nevermore", NOON, NO_EXPIRY),
        ("12h", NOON, 0),
        ("86400", NOON, 43_200),
        ("1h", NOON, -39_600),
        ("12h", NOON + 1, 1),  # a fraction later: rounded up
        ("12h", NOON - 1, 0),
    ],
)
def test_an_expiry_counts_from_the_end_of_the_window(
    ttl: str | None, written_ns: int, expiry: KnownExpiry
) -> None:
    assert expiry_after(ttl, written_ns, DAY) == expiry


def test_the_expiry_of_a_lifetime_counts_from_the_write() -> None:
    assert expiry_after("12h", NOON, Window.parse("lifetime")) == 43_200


SECOND = 10**9


@pytest.mark.parametrize(
    ("ttl", "passed_ns", "left"),
    [
        ("1h", 0, "3600"),
        ("1h", SECOND, "3599"),
        ("1h", 1, "3600"),
        ("1h", SECOND + 1, "3599"),
        ("1h", 3599 * SECOND, "1"),
        ("1h", -5 * SECOND, "3600"),  # by a clock that is behind the server's
        ("NEVER", 10**18, "never"),
        ("rubbish", 10**18, None),
        (None, 10**18, None),
    ],
)
def test_the_remaining_time_to_live_is_rounded_up(
    ttl: str | None, passed_ns: int, left: str | None
) -> None:
    assert remaining_ttl(ttl, NOON, NOON + passed_ns) == left


@pytest.mark.parametrize("passed_ns", [3599 * SECOND + 1, 3600 * SECOND, 10**18])
def test_a_key_with_less_than_a_second_left_counts_as_expired(passed_ns: int) -> None:
    with pytest.raises(ExpiredKeyError):
        remaining_ttl("1h", NOON, NOON + passed_ns)


def test_a_new_key_expires_after_the_end_of_its_window() -> None:
    # Twelve hours before the end of the window.
    assert ttl_of_new_key(60, DAY, NOON) == str(12 * 3600 + 60)
    assert ttl_of_new_key(60, DAY, NOON + 1) == str(12 * 3600 + 60)
    assert ttl_of_new_key(1 - 12 * 3600, DAY, NOON) == "1"
    with pytest.raises(ExpiredKeyError):
        ttl_of_new_key(1 - 12 * 3600, DAY, NOON + 1)
    assert ttl_of_new_key(NO_EXPIRY, DAY, NOON) is None
    assert ttl_of_new_key(NEVER_EXPIRES, DAY, NOON) == "never"


def test_a_new_key_of_a_lifetime_expires_after_its_write() -> None:
    lifetime = Window.parse("lifetime")
    assert ttl_of_new_key(60, lifetime, NOON) == "60"
    with pytest.raises(ExpiredKeyError):
        ttl_of_new_key(0, lifetime, NOON)


@given(st.integers(1, 10**9), st.integers(0, 10**18))
def test_a_recreated_key_has_the_recorded_expiry(seconds: int, later_ns: int) -> None:
    expiry = expiry_after(str(seconds), NOON, DAY)
    expires_ns = NOON + seconds * SECOND
    now_ns = NOON + later_ns
    try:
        ttl = ttl_of_new_key(expiry, DAY, now_ns)
    except ExpiredKeyError:
        assert expires_ns - now_ns < SECOND
    else:
        assert ttl is not None
        assert 0 <= now_ns + int(ttl) * SECOND - expires_ns < 2 * SECOND


def test_no_time_to_live_exceeds_the_servers_limit() -> None:
    assert ttl_of_new_key(9_223_372_036, DAY, NOON) == "9223372036"
