"""Keys and values of the gateway's bucket as bytes: names, usages, expiries.

Values are edited in place: bytes that are not ours stay as they are.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from typing import NamedTuple, TypeGuard, TypeVar

from budget_recovery_dagster.domain.counters import (
    BudgetWindow,
    Entity,
    UnreadableKey,
    UnreadableUsageError,
    UnusableNameError,
    ValueShape,
    check_name,
    parse_usage,
)
from budget_recovery_dagster.domain.windows import InvalidWindowError, Window

# Numbers are passed over as text: no digit is lost, and none is too many.
_TEXT_DECODER = json.JSONDecoder(parse_int=str, parse_float=str, parse_constant=str)
_WHITESPACE = " \t\n\r"


def replace_members(
    text: str, replacements: Mapping[str, str], in_place_of_texts: Mapping[str, str]
) -> str:
    """Put JSON texts in the place of top-level members; those that are not there stay away.

    ``in_place_of_texts`` are put there only where a JSON string stands. ``text`` must be a sound
    JSON object. Of a name that occurs more than once the last one counts, as it does to readers.
    """
    spans = _members(text)
    found = [(spans[name], new) for name, new in replacements.items() if name in spans]
    for name, new in in_place_of_texts.items():
        if name in spans and text.startswith('"', spans[name][0]):
            found.append((spans[name], new))
    for (start, end), new in sorted(found, reverse=True):
        text = text[:start] + new + text[end:]
    return text


def replace_all(text: str, replacement: str) -> str:
    """Put a JSON text in the place of a whole value; only the space around it stays."""
    bare = text.strip(_WHITESPACE)
    return text.replace(bare, replacement, 1)


def _members(text: str) -> dict[str, tuple[int, int]]:
    """Return where the values of the top-level members begin and end."""
    spans: dict[str, tuple[int, int]] = {}
    at = _skip(text, _skip(text, 0) + 1)
    while text[at] != "}":
        name, at = _TEXT_DECODER.raw_decode(text, at)
        start = _skip(text, _skip(text, at) + 1)
        _, end = _TEXT_DECODER.raw_decode(text, start)
        spans[name] = start, end
        at = _skip(text, end)
        if text[at] == ",":
            at = _skip(text, at + 1)
    return spans


def _skip(text: str, at: int) -> int:
    """Return where the white space that begins at a place ends."""
    while text[at] in _WHITESPACE:
        at += 1
    return at


_MAX_REASON = 200


def decode_value(value: bytes) -> tuple[Decimal, ValueShape]:
    """Read a counter's value: a JSON object with ``usage``, or a bare JSON number.

    Raises:
        UnreadableUsageError: it holds no usage; the message is short printable ASCII.
    """
    content = decode_json(value)
    if isinstance(content, _Number):
        return _usage(content), ValueShape.BARE
    if not isinstance(content, dict):
        raise UnreadableUsageError("the value is neither an object nor a number")
    return usage_of(content)


def decode_json(value: bytes) -> object:
    """Read a value as JSON whose numbers keep their own text.

    Raises:
        UnreadableUsageError: it is none; the message is short printable ASCII.
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


def usage_of(content: Mapping[str, object]) -> tuple[Decimal, ValueShape]:
    """Read the field ``usage`` of a JSON object: a JSON text or number.

    Raises:
        UnreadableUsageError: it holds no usage; the message is short printable ASCII.
    """
    if "usage" not in content:
        raise UnreadableUsageError("the value has no field usage")
    match content["usage"]:
        case _Number() as number:
            return _usage(number), ValueShape.NUMBER
        case str() as text:
            return _usage(text), ValueShape.TEXT
        case _:
            raise UnreadableUsageError("usage is neither text nor a number")


def is_json_text(content: object) -> TypeGuard[str]:
    """Whether a part of a JSON value is a text, and not the text of a number."""
    return isinstance(content, str) and not isinstance(content, _Number)


def shortened(reason: str) -> str:
    """Cut a reason that quotes something long."""
    return reason if len(reason) <= _MAX_REASON else f"{reason[: _MAX_REASON - 3]}..."


class _Number(str):
    """The text of a JSON number: told from a JSON text by its type, and never made a float."""

    __slots__ = ()


_DECODER = json.JSONDecoder(parse_int=_Number, parse_float=_Number, parse_constant=_Number)


def _usage(text: str) -> Decimal:
    try:
        return parse_usage(str(text))
    except UnreadableUsageError as error:
        raise UnreadableUsageError(shortened(str(error))) from error


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


COUNTERS = "usage"
"""The first token of every counter's key."""
BOARDS = "leaderboard"
"""The first token of every leaderboard's key."""
MAX_KEY_BYTES = 1000
"""Far below the server's limit of a control line, which cuts the connection that passes it."""
Name = TypeVar("Name", str, Entity)
Key = TypeVar("Key")
_AGGREGATE = "="
_COUNTER_TOKENS = ("tenant", "budget", "window", "entity")
_BOARD_TOKENS = ("tenant", "budget", "window")
_KEPT = re.compile(r"[A-Za-z0-9_/-]+", re.ASCII)
_OTHER_BYTE = re.compile(rb"[^A-Za-z0-9_/-]")
_TOKEN = re.compile(r"(?:[A-Za-z0-9_/-]|=[0-9A-F]{2})+", re.ASCII)
_ESCAPE = re.compile(rb"=([0-9A-F]{2})")


class UnreadableKeyError(ValueError):
    """A key that names nothing of its kind; the message says why, in short printable ASCII."""


@dataclass(frozen=True, slots=True)
class CounterKey:
    """What a counter's key says."""

    tenant: str
    of: BudgetWindow
    entity: Entity


@dataclass(frozen=True, slots=True)
class BoardKey:
    """What a leaderboard's key says."""

    tenant: str
    of: BudgetWindow


class StoredValue(NamedTuple):
    """A key's value as the store holds it.

    ``ttl`` is the text with which the key was given a time to live, ``written_ns`` when it was last
    written, in nanoseconds since 1970. ``fault`` tells in short printable ASCII why the value means
    nothing, whatever its data.
    """

    data: bytes
    ttl: str | None
    written_ns: int
    fault: str | None = None


@dataclass(frozen=True, slots=True)
class KeysRead:
    """What was found under a prefix. Partial: fewer keys came than were announced, twice."""

    values: dict[str, StoredValue]
    is_partial: bool


def encode_name(name: str) -> str:
    """Write a tenant's, budget's or entity's name as a token.

    Raises:
        UnusableNameError: no key may hold this name.
    """
    if _KEPT.fullmatch(name):
        return name
    encoded = _in_utf8(check_name(name))
    return _OTHER_BYTE.sub(lambda byte: b"=%02X" % ord(byte[0]), encoded).decode("ascii")


def require_encodable(name: str) -> str:
    """Return ``name`` unchanged.

    Raises:
        UnusableNameError: it cannot be encoded, however long a key may be.
    """
    _in_utf8(check_name(name))
    return name


def decode_name(token: str) -> str:
    """Read the name that a token holds.

    Raises:
        UnusableNameError: it holds none, or one that would be written differently.
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
        raise UnusableNameError("escapes a character that is kept as it is")
    return name


def encode_entity(entity: Entity) -> str:
    """Write an entity as a token; the aggregate, None, is ``=``.

    Raises:
        UnusableNameError: no key may hold this name.
    """
    return _AGGREGATE if entity is None else encode_name(entity)


def decode_entity(token: str) -> Entity:
    """Read the entity that a token holds.

    Raises:
        UnusableNameError: it holds none, or one that would be written differently.
    """
    return None if token == _AGGREGATE else decode_name(token)


def tenant_prefix(first: str, tenant: str) -> str:
    """Return the prefix that all keys of this first token and tenant share, and no others.

    Raises:
        UnusableNameError: no key may hold this name.
    """
    return _within_limit(f"{first}.{encode_name(tenant)}.")


def encode_key(counter: CounterKey) -> str:
    """Write a counter's key.

    Raises:
        UnusableNameError: a name that no key may hold, or a key of more than 1,000 bytes.
    """
    budget, entity = encode_name(counter.of.budget), encode_entity(counter.entity)
    prefix = tenant_prefix(COUNTERS, counter.tenant)
    return _within_limit(f"{prefix}{budget}.{counter.of.window.token}.{entity}")


def decode_key(key: str) -> CounterKey:
    """Read a counter's key.

    Raises:
        UnreadableKeyError: it names no counter.
    """
    tenant, budget, window, entity = _tokens(key, "counter", COUNTERS, _COUNTER_TOKENS)
    return CounterKey(
        _part("tenant", decode_name, tenant),
        _budget_window(budget, window),
        _part("entity", decode_entity, entity),
    )


def encode_board_key(board: BoardKey) -> str:
    """Write a leaderboard's key.

    Raises:
        UnusableNameError: a name that no key may hold, or a key of more than 1,000 bytes.
    """
    prefix = tenant_prefix(BOARDS, board.tenant)
    return _within_limit(f"{prefix}{encode_name(board.of.budget)}.{board.of.window.token}")


def require_counter_key(counter: CounterKey, *, beside: str) -> None:
    """Check that a counter can have a key; ``beside`` is that of its leaderboard.

    Raises:
        UnusableNameError: it cannot.
    """
    # Nearly all names are short enough at a glance: a character takes up to twelve bytes.
    if len(beside) + 12 * len(counter.entity or "") > MAX_KEY_BYTES:
        encode_key(counter)


def decode_board_key(key: str) -> BoardKey:
    """Read a leaderboard's key.

    Raises:
        UnreadableKeyError: it names no leaderboard.
    """
    tenant, budget, window = _tokens(key, "leaderboard", BOARDS, _BOARD_TOKENS)
    return BoardKey(_part("tenant", decode_name, tenant), _budget_window(budget, window))


def decode_keys(
    keys: Iterable[str], decode: Callable[[str], Key]
) -> tuple[list[tuple[str, Key]], tuple[UnreadableKey, ...]]:
    """Read keys, in their order; those that cannot be read are named apart."""
    decoded: list[tuple[str, Key]] = []
    unreadable: list[UnreadableKey] = []
    for key in sorted(keys):
        try:
            decoded.append((key, decode(key)))
        except UnreadableKeyError as error:
            unreadable.append(UnreadableKey(printable(key), str(error)))
    return decoded, tuple(unreadable)


def printable(key: str) -> str:
    """Write a key, or part of one, in printable ASCII that is not endless."""
    # Bytes that were not UTF-8 stand in the key as surrogates, one each.
    raw = key.encode(errors="surrogateescape")
    shown = "".join(
        chr(byte) if 0x20 <= byte < 0x7F else f"\\x{byte:02x}" for byte in raw[:MAX_KEY_BYTES]
    )
    return shown if len(raw) <= MAX_KEY_BYTES else f"{shown}... ({len(raw)} bytes)"


def _in_utf8(name: str) -> bytes:
    try:
        return name.encode()
    except UnicodeEncodeError as error:
        raise UnusableNameError("a name with half of a surrogate pair") from error


def _tokens(key: str, kind: str, first: str, parts: tuple[str, ...]) -> list[str]:
    """Return the tokens behind the first one, as many as there are ``parts``."""
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
    """Decode what many keys have in common, once."""
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
