"""How counters are written as keys and values of the gateway's bucket.

A key is ``usage.<tenant>.<budget>.<window>.<entity>``. Names may hold anything, so each is encoded
into one token: letters, digits, ``-``, ``_`` and ``/`` stay, every other byte of its UTF-8 becomes
``=XX``. A name can therefore neither add a token to a subject nor widen it with ``*`` or ``>``. The
bare token ``=`` is a budget's aggregate, which has no name. Each name has exactly one token;
anything else that stands in a key is refused when read, not guessed at.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, TypeVar

from budget_recovery_dagster.adapters.nats_ttl import expiry_after
from budget_recovery_dagster.adapters.nats_values import decode_value, shortened
from budget_recovery_dagster.domain.counters import (
    BudgetWindow,
    CounterReading,
    Entity,
    OmittedCounter,
    TenantReading,
    UnreadableKey,
    UnreadableUsageError,
    UnusableNameError,
    check_name,
)
from budget_recovery_dagster.domain.windows import InvalidWindowError, Window
from budget_recovery_dagster.errors import StoreReadError
from budget_recovery_dagster.ports import TenantListing

COUNTERS = "usage"
"""The first token of every counter's key."""

MAX_KEY_BYTES = 1000
"""Far below the server's limit of a control line, which cuts the connection that passes it."""

Name = TypeVar("Name", str, Entity)

_AGGREGATE = "="
_TOKENS_OF_A_COUNTER = 5

_KEPT = re.compile(r"[A-Za-z0-9_/-]+", re.ASCII)
_OTHER_BYTE = re.compile(rb"[^A-Za-z0-9_/-]")
_TOKEN = re.compile(r"(?:[A-Za-z0-9_/-]|=[0-9A-F]{2})+", re.ASCII)
_ESCAPE = re.compile(rb"=([0-9A-F]{2})")


class UnreadableKeyError(ValueError):
    """A key that names no counter; the message says why, in short printable ASCII."""


@dataclass(frozen=True, slots=True)
class CounterKey:
    """What a counter's key says."""

    tenant: str
    of: BudgetWindow
    entity: Entity


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


def encode_name(name: str) -> str:
    """Write a tenant's, budget's or entity's name as a token.

    Raises:
        UnusableNameError: no key may hold this name.
    """
    if _KEPT.fullmatch(name):
        return name
    try:
        encoded = check_name(name).encode()
    except UnicodeEncodeError as error:
        raise UnusableNameError("a name with half of a surrogate pair") from error
    return _OTHER_BYTE.sub(lambda byte: b"=%02X" % ord(byte[0]), encoded).decode("ascii")


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


def tenant_prefix(tenant: str) -> str:
    """Return the prefix that all keys of this tenant share, and no others.

    Raises:
        UnusableNameError: no key may hold this name.
    """
    return _within_limit(f"{COUNTERS}.{encode_name(tenant)}.")


def prefix_to_read(tenant: str) -> str:
    """Return the prefix under which all that belongs to a tenant is read.

    Raises:
        StoreReadError: no counter can belong to a tenant of this name.
    """
    try:
        return tenant_prefix(tenant)
    except UnusableNameError as error:
        raise StoreReadError(
            f"No counter can belong to the tenant {tenant[:100]!a}: {error}.",
            "use the name of a tenant as the gateway knows it.",
        ) from error


def encode_key(counter: CounterKey) -> str:
    """Write a counter's key.

    Raises:
        UnusableNameError: a name that no key may hold, or a key of more than 1,000 bytes.
    """
    budget, entity = encode_name(counter.of.budget), encode_entity(counter.entity)
    prefix = tenant_prefix(counter.tenant)
    return _within_limit(f"{prefix}{budget}.{counter.of.window.token}.{entity}")


def decode_key(key: str) -> CounterKey:
    """Read a counter's key.

    Raises:
        UnreadableKeyError: it names no counter.
    """
    try:
        tokens = _within_limit(key).split(".")
    except UnusableNameError as error:
        raise UnreadableKeyError(str(error)) from error
    if len(tokens) != _TOKENS_OF_A_COUNTER or tokens[0] != COUNTERS:
        raise UnreadableKeyError(
            f"has {len(tokens)} parts where a counter's key has {_TOKENS_OF_A_COUNTER}, "
            f"{COUNTERS}.tenant.budget.window.entity"
        )
    _, tenant, budget, window, entity = tokens
    return CounterKey(
        _part("tenant", decode_name, tenant),
        _budget_window(budget, window),
        _part("entity", decode_entity, entity),
    )


def list_tenants(keys: Iterable[str]) -> TenantListing:
    """Tell the tenants that these keys among the counters belong to."""
    tenants: dict[str, str] = {}
    unreadable: list[UnreadableKey] = []
    for key in keys:
        token, goes_on, _ = key.removeprefix(f"{COUNTERS}.").partition(".")
        try:
            if not goes_on:
                raise UnusableNameError("ends after the tenant")
            if token not in tenants:
                tenants[token] = decode_name(token)
                tenant_prefix(tenants[token])
        except UnusableNameError as error:
            tenants.pop(token, None)
            unreadable.append(UnreadableKey(printable(key), str(error)))
    return TenantListing(
        frozenset(tenants.values()), tuple(sorted(unreadable, key=lambda key: key.key))
    )


def read_tenant(
    tenant: str, stored: Mapping[str, StoredValue], *, is_partial: bool
) -> TenantReading:
    """Decode all that was found under a tenant's prefix; what cannot be read is named."""
    counters: list[CounterReading] = []
    omitted: list[OmittedCounter] = []
    unreadable: list[UnreadableKey] = []
    for key in sorted(stored):
        value = stored[key]
        try:
            counter = decode_key(key)
        except UnreadableKeyError as error:
            unreadable.append(UnreadableKey(printable(key), str(error)))
            continue
        try:
            if value.fault is not None:
                raise UnreadableUsageError(value.fault)
            usage, shape = decode_value(value.data)
        except UnreadableUsageError as error:
            omitted.append(OmittedCounter(counter.of, counter.entity, key, str(error)))
            continue
        expiry = expiry_after(value.ttl, value.written_ns, counter.of.window)
        counters.append(CounterReading(counter.of, counter.entity, usage, shape, expiry))
    return TenantReading(tenant, tuple(counters), tuple(omitted), tuple(unreadable), is_partial)


def printable(key: str) -> str:
    """Write a key, or part of one, in printable ASCII that is not endless."""
    # Bytes that were not UTF-8 stand in the key as surrogates, one each.
    raw = key.encode(errors="surrogateescape")
    shown = "".join(
        chr(byte) if 0x20 <= byte < 0x7F else f"\\x{byte:02x}" for byte in raw[:MAX_KEY_BYTES]
    )
    return shown if len(raw) <= MAX_KEY_BYTES else f"{shown}... ({len(raw)} bytes)"


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
