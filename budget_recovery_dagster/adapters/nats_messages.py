"""Messages of the bucket's stream, read as keys: a value, or the trace of a deletion."""

import base64
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from budget_recovery_dagster.adapters.live_keys import LiveKey, nanoseconds
from budget_recovery_dagster.adapters.nats_codec import StoredValue
from budget_recovery_dagster.adapters.nats_link import UNREADABLE_HEADERS

TTL_HEADER = "Nats-TTL"
"""The header that gives a key a time to live."""

_DELETIONS = frozenset({"DEL", "PURGE"})
_FIRST_LINE = "NATS/1.0"


def read_message(
    data: bytes, headers: Mapping[str, str], revision: int, written_ns: int
) -> LiveKey:
    """Read a message; where its headers cannot be read, its value means nothing."""
    # The server marks a key that it has dropped for its age as if somebody had deleted it.
    if headers.get("KV-Operation") in _DELETIONS or "Nats-Marker-Reason" in headers:
        return LiveKey(revision, None)
    # Without headers nobody knows whether it is a deletion.
    fault = "its headers cannot be read" if UNREADABLE_HEADERS in headers else None
    return LiveKey(revision, StoredValue(data, headers.get(TTL_HEADER), written_ns, fault))


def read_stored_message(message: Mapping[str, Any]) -> LiveKey:
    """Read a message as the JetStream API shows it.

    Raises:
        KeyError, TypeError, ValueError: it shows something else.
    """
    return read_message(
        base64.b64decode(message.get("data") or "", validate=True),
        _parse_headers(base64.b64decode(message.get("hdrs") or "", validate=True)),
        int(message["seq"]),
        nanoseconds(datetime.fromisoformat(message["time"])),
    )


def _parse_headers(raw: bytes) -> dict[str, str]:
    """Read a block of headers; one that is not as it should be is unreadable as a whole."""
    if not raw:
        return {}
    unreadable = {UNREADABLE_HEADERS: ""}
    try:
        first, *lines = raw.decode().split("\r\n")
    except UnicodeDecodeError:
        return unreadable
    if first != _FIRST_LINE or lines[-2:] != ["", ""]:
        return unreadable
    pairs = [line.partition(":") for line in lines[:-2]]
    if not all(name and colon for name, colon, _ in pairs):
        return unreadable
    # Of several lines of one name the server itself takes the first.
    return {name: value.strip() for name, _, value in reversed(pairs)}
