"""Times to live of keys, as NATS writes them in the header ``Nats-TTL``."""

import re

from budget_recovery_dagster.domain.windows import Window

NEVER = "never"
"""The time to live of a key that outlives even the age at which the store drops all others."""

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
# What Go counts a duration in. Longer is more than 292 years.
_MAX_NS = 2**63 - 1
# Far more than any duration needs, and few enough digits for Python to make a number of.
_MAX_CHARACTERS = 200
_SECONDS = re.compile(r"\+?[0-9]+", re.ASCII)
# At least one digit, before the point or after it.
_PART = re.compile(rf"(?=\.?[0-9])([0-9]*)(?:\.([0-9]*))?({'|'.join(_NS_PER_UNIT)})", re.ASCII)
_DURATION = re.compile(rf"\+?(?:{_PART.pattern})+", re.ASCII)


def parse_ttl(text: str) -> int | None:
    """Read a time to live in whole seconds, as the server does; None means never.

    A text that the server would have refused has no effect there, so it means never as well. So
    does more than 2**63 - 1 nanoseconds, and a text of more than 200 characters.
    """
    if len(text) > _MAX_CHARACTERS:
        return None
    if _SECONDS.fullmatch(text):
        nanoseconds = int(text) * _NS_PER_SECOND
    elif _DURATION.fullmatch(text):
        nanoseconds = sum(_nanoseconds(*part) for part in _PART.findall(text))
    else:
        return None
    return nanoseconds // _NS_PER_SECOND if _NS_PER_SECOND <= nanoseconds <= _MAX_NS else None


def _nanoseconds(whole: str, fraction: str, unit: str) -> int:
    # Of each part a fraction of a nanosecond is dropped, as Go does.
    scale: int = 10 ** len(fraction)
    return int(f"0{whole}{fraction}") * _NS_PER_UNIT[unit] // scale


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


class ExpiredKeyError(Exception):
    """A key that has less than a second left to live."""


def remaining_ttl(ttl: str | None, written_ns: int, now_ns: int) -> str | None:
    """Tell the time to live with which a key that is written again expires when it would have.

    Rounded up to whole seconds; None: the key has none. Times are in nanoseconds since 1970.

    Raises:
        ExpiredKeyError: less than a second is left.
    """
    if ttl is None:
        return None
    if ttl.lower() == NEVER:
        return NEVER
    seconds = parse_ttl(ttl)
    if seconds is None:
        return None
    # Clocks that disagree must not give it more than it had.
    return str(min(_seconds_left(written_ns + seconds * _NS_PER_SECOND - now_ns), seconds))


def ttl_of_new_key(expiry_seconds: int | None, window: Window, now_ns: int) -> str | None:
    """Tell the time to live of a key that is made ``now_ns`` and expires as ``expiry_after`` tells.

    Rounded up to whole seconds; None: it never expires.

    Raises:
        ExpiredKeyError: less than a second is left.
    """
    if expiry_seconds is None:
        return None
    left_ns = expiry_seconds * _NS_PER_SECOND
    if window.end is not None:
        left_ns += int(window.end.timestamp()) * _NS_PER_SECOND - now_ns
    return str(min(_seconds_left(left_ns), _MAX_NS // _NS_PER_SECOND))


def _seconds_left(nanoseconds: int) -> int:
    if nanoseconds < _NS_PER_SECOND:
        raise ExpiredKeyError
    return -(-nanoseconds // _NS_PER_SECOND)
