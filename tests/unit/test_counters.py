from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from budget_recovery_dagster.domain import (
    UnreadableUsageError,
    UnusableNameError,
    check_name,
    format_usage,
    parse_usage,
)


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("0", "0"),
        ("-0", "0"),
        ("0.000", "0"),
        ("0E400", "0"),
        ("12.345678", "12.345678"),
        ("12.50", "12.5"),
        ("16777216.01", "16777216.01"),
        ("1E-18", "0.000000000000000001"),
        ("1e3", "1000"),
        (".5", "0.5"),
        ("5.", "5"),
        ("12.3400000000000000000000000", "12.34"),
        ("99999999999999999999.999999999999999999", "99999999999999999999.999999999999999999"),
    ],
)
def test_a_usage_is_read_exactly(text: str, plain: str) -> None:
    assert format_usage(parse_usage(text)) == plain


def test_small_costs_add_up_exactly() -> None:
    total = parse_usage("0")
    for _ in range(6620):
        total += parse_usage("0.0001")
    assert total == Decimal("0.662")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "not a decimal number"),
        (" 5", "not a decimal number"),
        ("NaN", "not a decimal number"),
        ("Infinity", "not a decimal number"),
        ("1_000", "not a decimal number"),
        ("\u0665", "not a decimal number"),
        ("+5", "not a decimal number"),
        ("5\n", "not a decimal number"),
        ("1E9999999999", "not a decimal number"),
        ("-5", "negative"),
        ("-1E-18", "negative"),
        ("1E400", "integer digits"),
        ("1E20", "integer digits"),
        ("100000000000000000000", "integer digits"),
        ("1E-19", "decimals"),
        ("0.0000000000000000001", "decimals"),
        ("9" * 101, "101 characters"),
    ],
)
def test_an_invalid_usage_is_refused_with_the_reason(text: str, why: str) -> None:
    with pytest.raises(UnreadableUsageError, match=why):
        parse_usage(text)


@given(
    st.decimals(
        min_value=0,
        max_value=Decimal("99999999999999999999.999999999999999999"),
        allow_nan=False,
        places=18,
    )
)
def test_every_usage_in_bounds_survives_a_round_trip(usage: Decimal) -> None:
    assert parse_usage(format_usage(usage)) == usage
    assert parse_usage(str(usage)) == usage


@pytest.mark.parametrize("name", ["*", ">", "a.b", "team a / 東京", "\n\x01", "=", " "])
def test_a_valid_name_is_kept_unchanged(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize("name", ["", "a\0b"])
def test_names_that_cannot_be_stored_are_refused(name: str) -> None:
    with pytest.raises(UnusableNameError):
        check_name(name)
