"""Stored messages as the JetStream API returns them."""

from base64 import b64encode
from datetime import UTC, datetime

import pytest

from budget_recovery_dagster.adapters.nats import (
    LiveKey,
    StoredValue,
    nanoseconds,
    read_stored_message,
)

NOON = datetime(2026, 11, 29, 12, tzinfo=UTC)
TIME = "2026-11-29T12:00:00.000001999Z"
WRITTEN = nanoseconds(NOON) + 1000


def read(data: bytes, headers: bytes | None) -> LiveKey:
    message: dict[str, object] = {"subject": "s", "seq": 7, "time": TIME}
    if data:
        message["data"] = b64encode(data).decode()
    if headers is not None:
        message["hdrs"] = b64encode(headers).decode()
    return read_stored_message(message)


def test_a_value_is_read_with_its_revision_and_time() -> None:
    assert read(b"v", None) == LiveKey(7, StoredValue(b"v", None, WRITTEN))
    assert read(b"", None) == LiveKey(7, StoredValue(b"", None, WRITTEN))


def test_the_time_to_live_and_the_gateways_headers_are_read() -> None:
    headers = b"NATS/1.0\r\nA: b:c\r\nNats-TTL: 1h\r\nNats-TTL: 2h\r\nA:d\r\n\r\n"
    kept = (("A", "b:c"), ("A", "d"))
    assert read(b"v", headers) == LiveKey(7, StoredValue(b"v", "1h", WRITTEN, headers=kept))


@pytest.mark.parametrize(
    ("header", "is_expired"),
    [
        (b"KV-Operation: DEL", False),
        (b"KV-Operation:PURGE", False),
        (b"Nats-Marker-Reason: MaxAge", True),
        (b"Nats-Marker-Reason: Remove", False),
    ],
)
def test_a_deletion_has_a_revision_and_no_value(header: bytes, *, is_expired: bool) -> None:
    assert read(b"", b"NATS/1.0\r\n%s\r\n\r\n" % header) == LiveKey(7, None, is_expired)


@pytest.mark.parametrize(
    "headers",
    [
        b"NATS/1.0",
        b"N",
        b"NATS/1.0 404\r\n\r\n",
        b"NATS/1.0\r\nA: b\r\n",
        b"NATS/1.0\r\n\xff: b\r\n\r\n",
        b"NATS/1.0\r\nno colon\r\n\r\n",
        b"NATS/1.0\r\nno name: b\r\n\r\n",
    ],
)
def test_unreadable_headers_make_the_value_unreadable(headers: bytes) -> None:
    live = read(b"v", headers)
    assert live.value is not None
    assert live.value.fault == "the headers are unreadable"
