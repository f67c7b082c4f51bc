"""Times to live of keys, as NATS writes them in the header ``Nats-TTL``."""

import re
from decimal import Decimal

from budget_recovery_dagster.domain.windows import Window

_NS_PER_SECOND = 10**9
# Go's units; both signs for micro are in use.
_NS_PER_UNIT = {
    "ns": 1,
    "us": 10**3,
    "\N{MICRO SIGN}s": 10**3,
    "\N{GREEK SMALL LETTER MU}s": 10**3,
    "ms": 10**6,
    "s": _NS_PER_SECOND,
    "m": 60 * _NS_PER_SECOND,
    "h": 3600 * _NS_PER_SECOND,
}
# No longer than the server's 63 bits of nanoseconds can hold.
_SECONDS = re.compile(r"\+?[0-9]{1,12}", re.ASCII)
_AMOUNT = r"([0-9]{1,20}(?:\.[0-9]{0,20})?|\.[0-9]{1,20})"
_PART = re.compile(rf"{_AMOUNT}({'|'.join(_NS_PER_UNIT)})", re.ASCII)
_DURATION = re.compile(rf"\+?(?:{_PART.pattern})+", re.ASCII)


def parse_ttl(text: str) -> int | None:
    """Read a time to live in whole seconds, as the server does; None means never.

    A text that the server would have refused has no effect there, so it means never as well.
    """
    if _SECONDS.fullmatch(text):
        seconds = int(text)
    elif _DURATION.fullmatch(text):
        parts = _PART.findall(text)
        nanoseconds = sum(Decimal(amount) * _NS_PER_UNIT[unit] for amount, unit in parts)
        seconds = int(nanoseconds // _NS_PER_SECOND)
    else:
        return None
    return seconds if seconds >= 1 else None


def expiry_after(ttl: str | None, written_ns: int, window: Window) -> int | None:
    """Tell when a key that was written at ``written_ns`` expires, in terms of its window.

    Seconds after the window's end (negative: before it), rounded up, because a key kept too long
    does no harm; for a lifetime, which has no end, seconds after its writing. None means never.
    """
    seconds = parse_ttl(ttl) if ttl is not None else None
    if seconds is None or window.end is None:
        return seconds
    end_ns = int(window.end.timestamp()) * _NS_PER_SECOND
    return -((end_ns - written_ns) // _NS_PER_SECOND) + seconds
