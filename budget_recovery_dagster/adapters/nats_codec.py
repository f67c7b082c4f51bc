"""How counters and leaderboards are named by keys of the gateway's bucket.

A counter's key is ``usage.<tenant>.<budget>.<window>.<entity>``, that of a leaderboard
``leaderboard.<tenant>.<budget>.<window>``. Names may hold anything, so each is encoded into one
token: letters, digits, ``-``, ``_`` and ``/`` stay, every other byte of its UTF-8 becomes ``=XX``.
A name can therefore neither add a token to a subject nor widen it with ``*`` or ``>``. The bare
token ``=`` is a budget's aggregate, which has no name. Each name has exactly one token; anything
else that stands in a key is refused when read, not guessed at.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, TypeVar

from budget_recovery_dagster.adapters.nats_values import shortened
from budget_recovery_dagster.domain.counters import (
    BudgetWindow,
    Entity,
    UnreadableKey,
    UnusableNameError,
    check_name,
)
from budget_recovery_dagster.domain.windows import InvalidWindowError, Window

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
