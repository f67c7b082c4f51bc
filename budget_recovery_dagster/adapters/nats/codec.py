"""Encoding of the gateway's keys and values: names, usages, times to live.

Values are edited in place: bytes that this project does not own are preserved.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from functools import lru_cache
from typing import NamedTuple, TypeGuard, TypeVar

from budget_recovery_dagster.domain.counters import (
    NEVER_EXPIRES,
    NO_EXPIRY,
    BudgetWindow,
    Entity,
    KnownExpiry,
    UnreadableKey,
    UnreadableUsageError,
    UnusableNameError,
    ValueShape,
    check_name,
    parse_usage,
)
from budget_recovery_dagster.domain.windows import InvalidWindowError, Window

COUNTERS = "usage"
"""The first token of every counter key."""
BOARDS = "leaderboard"
"""The first token of every leaderboard key."""
MAX_KEY_BYTES = 1000
"""Far below the limit of a control line; above it the server closes the connection."""
NEVER = "never"
"""The time to live of a key that never expires, whatever the bucket's maximum age."""
Name = TypeVar("Name", str, Entity)
Key = TypeVar("Key")
_AGGREGATE = "="
_COUNTER_TOKENS = ("tenant", "budget", "window", "entity")
_BOARD_TOKENS = ("tenant", "budget", "window")
_KEPT = re.compile(r"[A-Za-z0-9_/-]+", re.ASCII)
_OTHER_BYTE = re.compile(rb"[^A-Za-z0-9_/-]")
_TOKEN = re.compile(r"(?:[A-Za-z0-9_/-]|=[0-9A-F]{2})+", re.ASCII)
_ESCAPE = re.compile(rb"=([0-9A-F]{2})")
_MAX_REASON = 200


class UnreadableKeyError(ValueError):
    """A key does not have the expected form; the message is short printable ASCII."""


@dataclass(frozen=True, slots=True)
class CounterKey:
    """The parts of a counter's key."""

    tenant: str
    of: BudgetWindow
    entity: Entity


@dataclass(frozen=True, slots=True)
class BoardKey:
    """The parts of a leaderboard's key."""

    tenant: str
    of: BudgetWindow


class StoredValue(NamedTuple):
    """A key's value as stored.

    ``ttl`` is the text of the time to live header, ``written_ns`` the time of the last write in
    nanoseconds since 1970. ``fault`` gives the reason, in short printable ASCII, why the value is
    unreadable whatever its data. ``headers`` are those of the gateway, in their order: all except
    instructions to NATS.
    """

    data: bytes
    ttl: str | None
    written_ns: int
    fault: str | None = None
    headers: tuple[tuple[str, str], ...] = ()


def encode_key(counter: CounterKey) -> str:
    """Encode a counter's key.

    Raises:
        UnusableNameError: no key can contain a name, or the key exceeds 1,000 bytes.
    """
    budget, entity = encode_name(counter.of.budget), encode_entity(counter.entity)
    prefix = tenant_prefix(COUNTERS, counter.tenant)
    return _within_limit(f"{prefix}{budget}.{counter.of.window.token}.{entity}")


def decode_key(key: str) -> CounterKey:
    """Decode a counter's key.

    Raises:
        UnreadableKeyError: it is not the key of a counter.
    """
    tenant, budget, window, entity = _tokens(key, "counter", COUNTERS, _COUNTER_TOKENS)
    return CounterKey(
        _part("tenant", decode_name, tenant),
        _budget_window(budget, window),
        _part("entity", decode_entity, entity),
    )


def encode_board_key(board: BoardKey) -> str:
    """Encode a leaderboard's key.

    Raises:
        UnusableNameError: no key can contain a name, or the key exceeds 1,000 bytes.
    """
    prefix = tenant_prefix(BOARDS, board.tenant)
    return _within_limit(f"{prefix}{encode_name(board.of.budget)}.{board.of.window.token}")


def decode_board_key(key: str) -> BoardKey:
    """Decode a leaderboard's key.

    Raises:
        UnreadableKeyError: it is not the key of a leaderboard.
    """
    tenant, budget, window = _tokens(key, "leaderboard", BOARDS, _BOARD_TOKENS)
    return BoardKey(_part("tenant", decode_name, tenant), _budget_window(budget, window))


def require_counter_key(counter: CounterKey, *, board_key: str) -> None:
    """Check that a listed counter can have a key; ``board_key`` is its leaderboard's.

    Raises:
        UnusableNameError: no key can contain the counter's name.
    """
    # Encoding is needed only for long names: a character takes up to twelve bytes.
    if len(board_key) + 12 * len(counter.entity or "") > MAX_KEY_BYTES:
        encode_key(counter)


def tenant_prefix(first: str, tenant: str) -> str:
    """Return the prefix of all keys with this first token and tenant, and of no others.

    Raises:
        UnusableNameError: no key can contain this name.
    """
    return _within_limit(f"{first}.{encode_name(tenant)}.")


def window_filter(tenant: str, of: BudgetWindow) -> str:
    """Return the filter that matches the keys of all counters in a budget and window.

    Raises:
        UnusableNameError: no key can contain a name.
    """
    prefix = tenant_prefix(COUNTERS, tenant)
    return f"{prefix}{encode_name(of.budget)}.{of.window.token}.*"


def decode_keys(
    keys: Iterable[str], decode: Callable[[str], Key]
) -> tuple[list[tuple[str, Key]], tuple[UnreadableKey, ...]]:
    """Decode keys in sorted order; return unreadable keys separately, with a reason."""
    decoded: list[tuple[str, Key]] = []
    unreadable: list[UnreadableKey] = []
    for key in sorted(keys):
        try:
            decoded.append((key, decode(key)))
        except UnreadableKeyError as error:
            unreadable.append(UnreadableKey(printable(key), str(error)))
    return decoded, tuple(unreadable)


def encode_name(name: str) -> str:
    """Encode the name of a tenant, budget or entity as a token.

    Raises:
        UnusableNameError: no key can contain this name.
    """
    if _KEPT.fullmatch(name):
        return name
    encoded = _in_utf8(check_name(name))
    return _OTHER_BYTE.sub(lambda byte: b"=%02X" % ord(byte[0]), encoded).decode("ascii")


def require_encodable(name: str) -> str:
    """Return ``name`` unchanged.

    Raises:
        UnusableNameError: the name cannot be encoded, whatever the length of a key.
    """
    _in_utf8(check_name(name))
    return name


def decode_name(token: str) -> str:
    """Decode the name in a token.

    Raises:
        UnusableNameError: the token is not the encoding of any name.
    """
    if _KEPT.fullmatch(token):
        return token
    if not _TOKEN.fullmatch(token):
        raise UnusableNameError("an empty name" if token in ("", "=") else "not an encoded name")
    raw = _ESCAPE.sub(lambda escape: bytes.fromhex(escape[1].decode()), token.encode("ascii"))
    try:
        name = raw.decode()
    except UnicodeDecodeError as error:
        raise UnusableNameError("not UTF-8") from error
    if encode_name(name) != token:
        raise UnusableNameError("escapes a character that needs no escape")
    return name


def encode_entity(entity: Entity) -> str:
    """Encode an entity as a token; the aggregate, None, is ``=``.

    Raises:
        UnusableNameError: no key can contain this name.
    """
    return _AGGREGATE if entity is None else encode_name(entity)


def decode_entity(token: str) -> Entity:
    """Decode the entity in a token.

    Raises:
        UnusableNameError: the token is not the encoding of any entity.
    """
    return None if token == _AGGREGATE else decode_name(token)


def printable(key: str) -> str:
    """Return a key, or part of one, as printable ASCII, cut after 1,000 bytes."""
    # Bytes that are not UTF-8 appear in the key as one surrogate each.
    raw = key.encode(errors="surrogateescape")
    shown = "".join(
        chr(byte) if 0x20 <= byte < 0x7F else f"\\x{byte:02x}" for byte in raw[:MAX_KEY_BYTES]
    )
    return shown if len(raw) <= MAX_KEY_BYTES else f"{shown}... ({len(raw)} bytes)"


def shortened(reason: str) -> str:
    """Cut a reason to 200 characters."""
    return reason if len(reason) <= _MAX_REASON else f"{reason[: _MAX_REASON - 3]}..."


def _in_utf8(name: str) -> bytes:
    try:
        return name.encode()
    except UnicodeEncodeError as error:
        raise UnusableNameError("a name with half of a surrogate pair") from error


def _tokens(key: str, kind: str, first: str, parts: tuple[str, ...]) -> list[str]:
    """Return the tokens after the first one, one for each of ``parts``."""
    try:
        tokens = _within_limit(key).split(".")
    except UnusableNameError as error:
        raise UnreadableKeyError(str(error)) from error
    if len(tokens) != len(parts) + 1 or tokens[0] != first:
        raise UnreadableKeyError(
            f"has {len(tokens)} parts where a {kind}'s key has {len(parts) + 1}, "
            f"{'.'.join((first, *parts))}"
        )
    return tokens[1:]


@lru_cache(maxsize=4096)
def _budget_window(budget: str, window: str) -> BudgetWindow:
    """Decode the part that many keys share; cached."""
    name = _part("budget", decode_name, budget)
    try:
        return BudgetWindow(name, Window.parse(window))
    except InvalidWindowError as error:
        raise UnreadableKeyError(shortened(f"'{printable(window)}' is not a window")) from error


def _part(kind: str, decode: Callable[[str], Name], token: str) -> Name:
    try:
        return decode(token)
    except UnusableNameError as error:
        raise UnreadableKeyError(shortened(f"{kind} '{printable(token)}': {error}")) from error


def _within_limit(key: str) -> str:
    size = len(key.encode(errors="surrogateescape"))
    if size > MAX_KEY_BYTES:
        raise UnusableNameError(f"a key of {size} bytes, more than {MAX_KEY_BYTES}")
    return key


class _Number(str):
    """The text of a JSON number: a type of its own, never converted to a float."""

    __slots__ = ()


# Numbers keep their text, so that any number of digits is allowed.
_DECODER = json.JSONDecoder(parse_int=_Number, parse_float=_Number, parse_constant=_Number)


def usage_in(value: StoredValue) -> tuple[Decimal, ValueShape]:
    """Decode a counter's value as stored; raises as ``decode_value``."""
    if value.fault is not None:
        raise UnreadableUsageError(value.fault)
    return decode_value(value.data)


def decode_value(value: bytes) -> tuple[Decimal, ValueShape]:
    """Decode a counter's value: a JSON object with ``usage``, or a bare JSON number.

    Raises:
        UnreadableUsageError: the value has no usage; the message is short printable ASCII.
    """
    content = decode_json(value)
    if isinstance(content, _Number):
        return _usage(content), ValueShape.BARE
    if not isinstance(content, dict):
        raise UnreadableUsageError("the value is neither an object nor a number")
    return usage_of(content)


def usage_of(content: Mapping[str, object]) -> tuple[Decimal, ValueShape]:
    """Read the field ``usage`` of a JSON object: a JSON string or number.

    Raises:
        UnreadableUsageError: there is no usage; the message is short printable ASCII.
    """
    if "usage" not in content:
        raise UnreadableUsageError("the value has no field usage")
    match content["usage"]:
        case _Number() as number:
            return _usage(number), ValueShape.NUMBER
        case str() as text:
            return _usage(text), ValueShape.TEXT
        case _:
            raise UnreadableUsageError("usage is neither a string nor a number")


def decode_json(value: bytes) -> object:
    """Decode JSON; numbers keep their text.

    Raises:
        UnreadableUsageError: the value is not JSON; the message is short printable ASCII.
    """
    try:
        content: object = _DECODER.decode(value.decode())
    except UnicodeDecodeError as error:
        raise UnreadableUsageError("the value is not UTF-8") from error
    except json.JSONDecodeError as error:
        raise UnreadableUsageError("the value is not JSON") from error
    except RecursionError as error:
        raise UnreadableUsageError("the value is nested too deeply") from error
    return content


def is_json_text(content: object) -> TypeGuard[str]:
    """Whether a part of decoded JSON is a string, not the text of a number."""
    return isinstance(content, str) and not isinstance(content, _Number)


def _usage(text: str) -> Decimal:
    try:
        return parse_usage(str(text))
    except UnreadableUsageError as error:
        raise UnreadableUsageError(shortened(str(error))) from error


_WHITESPACE = " \t\n\r"


def replace_members(
    text: str, replacements: Mapping[str, str], string_replacements: Mapping[str, str]
) -> str:
    """Replace the values of top-level members by JSON texts; missing members are not added.

    ``string_replacements`` apply only if the present value is a JSON string. ``text`` must be a
    valid JSON object. If a name occurs more than once, the last one counts, as it does to readers.
    """
    spans = _members(text)
    found = [(spans[name], new) for name, new in replacements.items() if name in spans]
    for name, new in string_replacements.items():
        if name in spans and text.startswith('"', spans[name][0]):
            found.append((spans[name], new))
    for (start, end), new in sorted(found, reverse=True):
        text = text[:start] + new + text[end:]
    return text


def replace_all(text: str, replacement: str) -> str:
    """Replace a whole value by a JSON text; only the white space around it stays."""
    bare = text.strip(_WHITESPACE)
    return text.replace(bare, replacement, 1)


def member_texts(text: str) -> Mapping[str, str]:
    """Return the JSON text of each top-level member's value; ``text`` must be a valid JSON object.

    Raises:
        UnreadableUsageError: a value is nested too deeply.
    """
    try:
        return {name: text[start:end] for name, (start, end) in _members(text).items()}
    except RecursionError as error:
        raise UnreadableUsageError("the value is nested too deeply") from error


def element_texts(text: str) -> list[str]:
    """Return the JSON text of each element of a valid JSON list.

    Raises:
        UnreadableUsageError: an element is nested too deeply.
    """
    texts: list[str] = []
    at = _skip(text, _skip(text, 0) + 1)
    try:
        while text[at] != "]":
            _, end = _DECODER.raw_decode(text, at)
            texts.append(text[at:end])
            at = _skip(text, end)
            if text[at] == ",":
                at = _skip(text, at + 1)
    except RecursionError as error:
        raise UnreadableUsageError("the value is nested too deeply") from error
    return texts


def _members(text: str) -> dict[str, tuple[int, int]]:
    """Return the start and end of each top-level member's value."""
    spans: dict[str, tuple[int, int]] = {}
    at = _skip(text, _skip(text, 0) + 1)
    while text[at] != "}":
        name, at = _DECODER.raw_decode(text, at)
        start = _skip(text, _skip(text, at) + 1)
        _, end = _DECODER.raw_decode(text, start)
        spans[name] = start, end
        at = _skip(text, end)
        if text[at] == ",":
            at = _skip(text, at + 1)
    return spans


def _skip(text: str, at: int) -> int:
    """Return the position after the white space that starts at ``at``."""
    while text[at] in _WHITESPACE:
        at += 1
    return at


_NS_PER_SECOND = 10**9
# Units of Go durations; both signs for micro occur.
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
# The longest duration in Go: 292 years.
_MAX_NS = 2**63 - 1
# More than any duration needs, and few enough digits for Python's int().
_MAX_CHARACTERS = 200
_SECONDS = re.compile(r"\+?[0-9]+", re.ASCII)
# At least one digit, before or after the point.
_PART = re.compile(rf"(?=\.?[0-9])([0-9]*)(?:\.([0-9]*))?({'|'.join(_NS_PER_UNIT)})", re.ASCII)
_DURATION = re.compile(rf"\+?(?:{_PART.pattern})+", re.ASCII)


class ExpiredKeyError(Exception):
    """The key expires in less than a second."""


def parse_ttl(text: str) -> int | None:
    """Parse a time to live in whole seconds, as the server does; None: it is not a time.

    A text that the server rejects has no effect there. The same applies to more than 2**63 - 1
    nanoseconds and to texts of more than 200 characters.
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


def expiry_after(ttl: str | None, written_ns: int, window: Window) -> KnownExpiry:
    """Return when a key expires, in seconds after its window's end (negative: before it).

    Rounded up, because keeping a key too long does no harm. A lifetime has no end: there it is
    seconds after the write. ``written_ns`` is in nanoseconds since 1970.
    """
    if ttl is None:
        return NO_EXPIRY
    if ttl.lower() == NEVER:
        return NEVER_EXPIRES
    seconds = parse_ttl(ttl)
    if seconds is None:
        return NO_EXPIRY
    if window.end is None:
        return seconds
    end_ns = int(window.end.timestamp()) * _NS_PER_SECOND
    return -((end_ns - written_ns) // _NS_PER_SECOND) + seconds


def remaining_ttl(ttl: str | None, written_ns: int, now_ns: int) -> str | None:
    """Return the time to live that keeps a key's expiry when the key is written again.

    Rounded up to whole seconds; None: the key has none. Times are nanoseconds since 1970.

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
    # Clock skew must not extend the time to live.
    return str(min(_seconds_left(written_ns + seconds * _NS_PER_SECOND - now_ns), seconds))


def ttl_of_new_key(expiry: KnownExpiry, window: Window, now_ns: int) -> str | None:
    """Return the time to live of a key created at ``now_ns``; see ``expiry_after``.

    Rounded up to whole seconds; None: the key has none.

    Raises:
        ExpiredKeyError: less than a second is left.
    """
    if expiry is NO_EXPIRY:
        return None
    if expiry is NEVER_EXPIRES:
        return NEVER
    left_ns = expiry * _NS_PER_SECOND
    if window.end is not None:
        left_ns += int(window.end.timestamp()) * _NS_PER_SECOND - now_ns
    return str(min(_seconds_left(left_ns), _MAX_NS // _NS_PER_SECOND))


def drop_times(
    ttl: str | None, written_at: datetime, max_age: timedelta | None
) -> tuple[datetime | None, datetime | None]:
    """Return when the store drops a key: by its TTL, and by the maximum age of the bucket.

    None: never. No TTL but `never` protects a key from the maximum age.
    """
    if ttl is not None and ttl.lower() == NEVER:
        return None, None
    seconds = None if ttl is None else parse_ttl(ttl)
    expiry = None if seconds is None else timedelta(seconds=seconds)
    return _later(written_at, expiry), _later(written_at, max_age)


def dropped_at(value: StoredValue, max_age: timedelta | None) -> datetime | None:
    """Return when the store drops a value that it holds; None: never."""
    written_at = datetime.fromtimestamp(value.written_ns // _NS_PER_SECOND, UTC)
    times = drop_times(value.ttl, written_at, max_age)
    return min((at for at in times if at is not None), default=None)


def _later(at: datetime, by: timedelta | None) -> datetime | None:
    """Return the later time; None if it is beyond the calendar."""
    try:
        return None if by is None else at + by
    except OverflowError:
        return None


def _nanoseconds(whole: str, fraction: str, unit: str) -> int:
    # Fractions of a nanosecond are dropped part by part, as Go does.
    scale: int = 10 ** len(fraction)
    return int(f"0{whole}{fraction}") * _NS_PER_UNIT[unit] // scale


def _seconds_left(nanoseconds: int) -> int:
    if nanoseconds < _NS_PER_SECOND:
        raise ExpiredKeyError
    return -(-nanoseconds // _NS_PER_SECOND)
