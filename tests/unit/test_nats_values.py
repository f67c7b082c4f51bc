from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from budget_recovery_dagster.adapters.nats import decode_value, shortened
from budget_recovery_dagster.domain import UnreadableUsageError, ValueShape


@pytest.mark.parametrize(
    ("value", "usage", "shape"),
    [
        (b'{"usage":"12.345678","updated_at":"2026-11-29T12:00:00Z"}', "12.345678", "TEXT"),
        (b'{"usage":12.345678}', "12.345678", "NUMBER"),
        (b'{"usage":0.1}', "0.1", "NUMBER"),  # not converted through a float
        (b'{"usage":99999999999999999999.999999999999999999}', "9" * 20 + "." + "9" * 18, "NUMBER"),
        (b'{"usage":"1E2"}', "100", "TEXT"),
        (b'{"usage":1e-18}', "0.000000000000000001", "NUMBER"),
        (b'{"usage":"0.00"}', "0", "TEXT"),
        (b'{"usage":-0.0}', "0", "NUMBER"),
        (b' { "usage" : 3 }\n', "3", "NUMBER"),
        (b"7", "7", "BARE"),
        (b" 7.50\n", "7.5", "BARE"),
    ],
)
def test_a_usage_is_read_exactly(value: bytes, usage: str, shape: str) -> None:
    assert decode_value(value) == (Decimal(usage), ValueShape[shape])


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (b"", "not JSON"),
        (b'""', "neither an object nor a number"),
        (b'"12"', "neither an object nor a number"),
        (b"true", "neither an object nor a number"),
        (b"null", "neither an object nor a number"),
        (b"[1]", "neither an object nor a number"),
        (b"{}", "no field usage"),
        (b'{"Usage":1}', "no field usage"),
        (b'{"usage":true}', "neither a string nor a number"),
        (b'{"usage":null}', "neither a string nor a number"),
        (b'{"usage":{"usage":1}}', "neither a string nor a number"),
        (b"-5", "negative"),
        (b'{"usage":"-0.01"}', "negative"),
        (b"NaN", "'NaN' is not a decimal number"),
        (b'{"usage":Infinity}', "'Infinity' is not a decimal number"),
        (b'{"usage":"-Infinity"}', "not a decimal number"),
        (b'{"usage":""}', "not a decimal number"),
        (b'{"usage":" 1"}', "not a decimal number"),
        (b'{"usage":"1_000"}', "not a decimal number"),
        (b'{"usage":"0x10"}', "not a decimal number"),
        ('{"usage":"\N{ARABIC-INDIC DIGIT ONE}"}'.encode(), "not a decimal number"),
        (b'{"usage":"\\ud800"}', "not a decimal number"),
        (b"1E400", "more than 20 integer digits"),
        (b"1e999999999", "more than 20 integer digits"),
        (b"1e9999999999999", "not a decimal number"),
        (b"1e-400", "more than 18 decimals"),
        (b'{"usage":"0.0000000000000000001"}', "more than 18 decimals"),
        (b"100000000000000000000", "more than 20 integer digits"),
        (b"1" * 5000, "5000 characters"),
        (b'{"usage":"' + b"x" * 100_000 + b'"}', "100000 characters"),
        (b"\xff\xfe1", "not UTF-8"),
        (b"\xef\xbb\xbf1", "not JSON"),
        (b"1 2", "not JSON"),
        (b"{'usage': 1}", "not JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"usage":' * 100_000, "nested too deeply"),
    ],
)
def test_an_unreadable_value_is_rejected_with_the_reason(value: bytes, reason: str) -> None:
    with pytest.raises(UnreadableUsageError) as caught:
        decode_value(value)
    message = str(caught.value)
    assert reason in message
    assert message.isascii()
    assert message.isprintable()
    assert len(message) <= 200


@given(st.binary(max_size=60))
def test_any_value_is_decoded_or_rejected(value: bytes) -> None:
    try:
        usage, _ = decode_value(value)
    except UnreadableUsageError:
        return
    assert usage >= 0


@given(st.decimals(0, 10**20 - 1, places=18, allow_nan=False, allow_infinity=False))
def test_every_usage_in_bounds_is_read_exactly_from_every_shape(usage: Decimal) -> None:
    text = format(usage, "f").encode()
    assert decode_value(b'{"usage":"%s"}' % text) == (usage, ValueShape.TEXT)
    assert decode_value(b'{"usage":%s}' % text) == (usage, ValueShape.NUMBER)
    assert decode_value(text) == (usage, ValueShape.BARE)


def test_a_long_reason_is_cut() -> None:
    assert shortened("x" * 200) == "x" * 200
    assert shortened("x" * 201) == "x" * 197 + "..."
