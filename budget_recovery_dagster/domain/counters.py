"""Counters: names, exact usages, how several readings of one counter merge, and budget limits.

Within a window a counter only grows, so the maximum of all readings is the best known usage.
Budget definitions are optional: counters are captured and restored without them.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from decimal import MAX_EMAX, MAX_PREC, MIN_EMIN, Context, Decimal, Inexact
from enum import Enum, StrEnum
from typing import Final, TypeVarTuple

from budget_recovery_dagster.domain.windows import Period, Window

MAX_INTEGER_DIGITS = 20
MAX_DECIMALS = 18
Entity = str | None
"""A user, model, account, agent or metadata value; None is the aggregate of a budget."""
# Long enough for any valid value, with room for zeros; longer texts are not parsed.
_LONGEST_USAGE_TEXT = 100
_NUMBER = re.compile(r"-?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,9})?", re.ASCII)
# The default context rounds normalized values to 28 digits; this one never rounds.
_EXACT = Context(prec=MAX_PREC, Emax=MAX_EMAX, Emin=MIN_EMIN)


class UnreadableUsageError(ValueError):
    """A usage that is not an exact, non-negative decimal within bounds; the message says why."""


class UnusableNameError(ValueError):
    """A tenant, budget or entity name that cannot be stored; the message says why."""


class ValueShape(StrEnum):
    """The form in which the gateway writes a counter's value; a restore uses the same form."""

    TEXT = "object_text"
    NUMBER = "object_number"
    BARE = "bare_number"


class NoExpiry(Enum):
    """The expiry of a key without a time to live; an own type, so that no number equals it.

    NO_EXPIRY: the key has none of its own, so the maximum age of its bucket drops it.
    NEVER_EXPIRES: not even that; the gateway protects the key with a time to live of `never`.
    """

    NO_EXPIRY = "none"
    NEVER_EXPIRES = "never"

    def __repr__(self) -> str:
        return self.name


NO_EXPIRY: Final = NoExpiry.NO_EXPIRY
NEVER_EXPIRES: Final = NoExpiry.NEVER_EXPIRES
KnownExpiry = int | NoExpiry
"""When the store drops a key: so many seconds after the window's end or, for a lifetime, after the
last write of the key."""
Expiry = KnownExpiry | None
"""The same; None: unknown."""
UNKNOWN_EXPIRY = timedelta(days=1)
"""How long after its window's end a key expires at least, if its expiry is unknown."""


def check_name(name: str) -> str:
    """Return ``name`` unchanged.

    Raises:
        UnusableNameError: it is empty (the aggregate is None, not a name), contains a NUL
            character, which PostgreSQL cannot store, or is not valid Unicode.
    """
    if not name:
        raise UnusableNameError("an empty name")
    if "\0" in name:
        raise UnusableNameError("a name with a NUL character, which PostgreSQL cannot store")
    if not name.isascii() and any("\ud800" <= each <= "\udfff" for each in name):
        raise UnusableNameError("a name with half of a surrogate pair")
    return name


def parse_usage(text: str) -> Decimal:
    """Read a usage exactly; trailing zeros are dropped, so equal usages are equal text.

    Raises:
        UnreadableUsageError: not a number, negative, not finite, more than 20 integer digits or
            more than 18 decimals.
    """
    if len(text) > _LONGEST_USAGE_TEXT:
        raise UnreadableUsageError(f"a number written with {len(text)} characters")
    if not _NUMBER.fullmatch(text):
        raise UnreadableUsageError(f"{text!a} is not a decimal number")
    number = Decimal(text)
    if number.is_zero():
        return Decimal(0)
    if number.is_signed():
        raise UnreadableUsageError(f"{text} is negative")
    # The exponent alone decides: 1E400 in plain form would need 401 digits.
    if number.adjusted() >= MAX_INTEGER_DIGITS:
        raise UnreadableUsageError(f"{text} has more than {MAX_INTEGER_DIGITS} integer digits")
    number = number.normalize(_EXACT)
    exponent = number.as_tuple().exponent
    if not isinstance(exponent, int) or -exponent > MAX_DECIMALS:
        raise UnreadableUsageError(f"{text} has more than {MAX_DECIMALS} decimals")
    return number


def format_usage(usage: Decimal) -> str:
    """Write a usage in plain digits, without an exponent: ``0.000000000000000001``."""
    return format(usage, "f")


def shown_entity(entity: Entity) -> str:
    """Name an entity; unprintable characters are escaped."""
    return "the aggregate" if entity is None else repr(entity)


@dataclass(frozen=True, slots=True)
class BudgetWindow:
    """One window of one budget of a tenant: the subject of a record."""

    budget: str
    window: Window

    def __str__(self) -> str:
        return f"{self.budget} {self.window.token}"


@dataclass(frozen=True, slots=True)
class CounterReading:
    """A counter as the store held it.

    ``shape`` and ``expiry`` are None if the counter was read from a leaderboard, which has neither
    the form nor the expiry of the counter's own key.
    """

    of: BudgetWindow
    entity: Entity
    usage: Decimal
    shape: ValueShape | None
    expiry: Expiry


@dataclass(frozen=True, slots=True)
class OmittedCounter:
    """A counter with a valid key and an unreadable value: reported, never guessed.

    In a leaderboard it is an entry, or the whole leaderboard; ``key`` is then that of the
    leaderboard. If ``is_entity_known`` is False, ``entity`` has no meaning.
    """

    of: BudgetWindow
    entity: Entity
    key: str
    reason: str
    is_entity_known: bool = True


@dataclass(frozen=True, slots=True)
class UnlistedEntities:
    """A leaderboard that may not list all entities of its budget and window.

    ``at_most`` is the highest possible usage of an entity that is not listed, None if unknown.
    ``is_truncated``: only the largest spenders are listed, and the list was full.
    """

    of: BudgetWindow
    at_most: Decimal | None
    is_truncated: bool


@dataclass(frozen=True, slots=True)
class UnreadableKey:
    """A key of the source that names no counter or leaderboard; ``key`` is printable ASCII."""

    key: str
    reason: str


_Rest = TypeVarTuple("_Rest")

BOARD_SIZE = 500
"""How many entities a leaderboard lists at most."""


def by_rank(
    usages: Iterable[tuple[Entity, Decimal, *_Rest]],
) -> list[tuple[Entity, Decimal, *_Rest]]:
    """Sort usages, highest first; equal usages by the code points of the names."""
    by_name = sorted(usages, key=lambda each: each[0] or "")
    # A stable sort, also in reverse; to sort by the negated usage would round it.
    return sorted(by_name, key=lambda each: each[1], reverse=True)


def rank(usages: Iterable[tuple[Entity, Decimal]]) -> list[tuple[Entity, Decimal]]:
    """Return the largest usages, in the order of ``by_rank``."""
    return by_rank(usages)[:BOARD_SIZE]


Usages = Mapping[Entity, Decimal]
"""Usage by entity, of one budget and window."""
TenantUsages = Mapping[BudgetWindow, Usages]
"""The usages of one tenant, by budget and window."""


def max_merge(*records: Usages) -> dict[Entity, Decimal]:
    """Return the highest usage of each entity; order and repetition have no effect."""
    merged: dict[Entity, Decimal] = {}
    for usages in records:
        for entity, usage in usages.items():
            known = merged.get(entity)
            if known is None or usage > known:
                merged[entity] = usage
    return merged


def covers(later: Usages, earlier: Usages) -> bool:
    """Whether no entity of ``earlier`` is missing from ``later`` or lower in it."""
    return all(entity in later and later[entity] >= usage for entity, usage in earlier.items())


@dataclass(frozen=True, slots=True)
class Drop:
    """A counter of the recovery point that is missing or lower in the store.

    ``after`` is None if the counter is missing: from the store, or from a full leaderboard in which
    its usage would have a place. This is the only trace of a purge of single keys, which does not
    change the identity of the store.
    """

    of: BudgetWindow
    entity: Entity
    before: Decimal
    after: Decimal | None

    @property
    def usage(self) -> Decimal:
        """The usage that the store lacks."""
        return exact_difference(self.before, self.after or Decimal(0))


def missing_usage(drops: Iterable[Drop]) -> Decimal:
    """Return the usage that the store lacks in one budget and window, given its drops."""
    return budget_usage({drop.entity: drop.usage for drop in drops})


def find_drops(
    point: TenantUsages,
    observed: TenantUsages,
    unknown: Iterable[tuple[BudgetWindow, Entity]],
    unlisted: Iterable[UnlistedEntities],
) -> tuple[Drop, ...]:
    """Return the counters of the point that are missing or lower in the observed store.

    The largest missing usage comes first, so that a list that is cut keeps what matters most.
    An ``unknown`` (unreadable) counter is reported elsewhere, and is no drop. Nor is a counter that
    an ``unlisted`` leaderboard may leave out, unless it had more than any such counter can have.
    """
    unjudged = frozenset(unknown)
    incomplete = {each.of: each for each in unlisted}
    drops = (
        Drop(of, entity, before, after)
        for of, usages in point.items()
        for entity, before in usages.items()
        if (of, entity) not in unjudged
        if _is_drop(before, after := observed.get(of, {}).get(entity), incomplete.get(of))
    )
    by_name = sorted(drops, key=lambda drop: (*order_of(drop.of), drop.entity or ""))
    # A stable sort, also in reverse.
    return tuple(sorted(by_name, key=lambda drop: drop.usage, reverse=True))


def order_of(of: BudgetWindow) -> tuple[str, str]:
    """Return what budgets and windows are sorted by."""
    return of.budget, of.window.token


def _is_drop(before: Decimal, after: Decimal | None, unlisted: UnlistedEntities | None) -> bool:
    if after is not None:
        return after < before
    if unlisted is None:
        return True
    return unlisted.at_most is not None and unlisted.at_most < before


# The default context would round to 28 digits. A usage has at most 38 digits; each further digit
# allows ten times as many usages.
_EXACT_SUMS = Context(prec=80, traps=[Inexact])


def hash_usages(usages: Usages) -> bytes:
    """Digest usages independently of their order; equal contents, and only they, hash alike."""
    digest = hashlib.sha256()
    # The aggregate (None) sorts and digests as "", which no real name can be.
    for name, usage in sorted((entity or "", usage) for entity, usage in usages.items()):
        encoded = name.encode()
        digest.update(f"{len(encoded)}:".encode() + encoded + f"={format_usage(usage)};".encode())
    return digest.digest()


Expiries = Mapping[Entity, KnownExpiry]
"""The expiries of keys by entity, of one budget and window."""


def hash_expiries(expiries: Expiries) -> bytes:
    """Digest expiries as ``hash_usages`` does usages."""
    digest = hashlib.sha256()
    for name, expiry in sorted(
        ((entity or "", expiry) for entity, expiry in expiries.items()), key=lambda each: each[0]
    ):
        encoded = name.encode()
        text = expiry.value if isinstance(expiry, NoExpiry) else str(expiry)
        digest.update(f"{len(encoded)}:".encode() + encoded + f"={text};".encode())
    return digest.digest()


def exact_sum(usages: Iterable[Decimal]) -> Decimal:
    """Add usages exactly; the sum has no exponent and no trailing zeros, as ``parse_usage``.

    Only ``budget_usage`` adds up counters: each request counts in several budgets and windows.
    """
    total = Decimal(0)
    for usage in usages:
        total = _EXACT_SUMS.add(total, usage)
    return _shortened(total)


def exact_difference(usage: Decimal, less: Decimal) -> Decimal:
    """Subtract a usage from another exactly; the result has the form of ``exact_sum``."""
    return _shortened(_EXACT_SUMS.subtract(usage, less))


def _shortened(number: Decimal) -> Decimal:
    # 0.5 and 0.10 add up to 0.60, which looks more precise than the 0.6 of another window.
    if number == number.to_integral_value():
        return number.quantize(Decimal(1), context=_EXACT_SUMS)
    return number.normalize(_EXACT_SUMS)


def increased(usage: Decimal, by: Decimal) -> Decimal:
    """Add exactly to a usage of the same counter, or of the same budget and window."""
    return exact_sum((usage, by))


def budget_usage(usages: Usages) -> Decimal:
    """Return the amount of one budget and window: of its aggregate, or else of all its entities.

    ``usages`` are usages, or by how much usages differ. If the gateway counts both, the sum of all
    would count every request twice. Nothing else is ever added up, neither windows nor budgets.
    """
    aggregate = usages.get(None)
    return exact_sum(usages.values() if aggregate is None else (aggregate,))


class SplitBy(StrEnum):
    """The kind of entity that a budget counts separately; each entity has the whole limit."""

    NOTHING = "nothing"
    USER = "user"
    MODEL = "model"
    VIRTUAL_ACCOUNT = "virtual_account"
    AGENT = "agent"
    METADATA = "metadata"


class Enforcement(StrEnum):
    """What the gateway does at the limit: refuse requests, or only log."""

    ENFORCE = "enforce"
    AUDIT = "audit"


@dataclass(frozen=True, slots=True)
class BudgetDefinition:
    """The limit of one period of one budget; with several periods, a definition for each.

    ``limit`` is in the gateway's currency, for each window; if the budget is split, for each
    entity. ``metadata_key`` names the field of a request's metadata by which the budget is split,
    and is None for every other split.
    """

    tenant: str
    budget: str
    period: Period
    limit: Decimal
    split_by: SplitBy
    enforcement: Enforcement
    metadata_key: str | None = None

    def __post_init__(self) -> None:
        check_name(self.tenant)
        check_name(self.budget)
        if self.limit.is_nan() or not 0 <= self.limit < 10**MAX_INTEGER_DIGITS:
            raise ValueError(f"budget {self.budget!r} has the limit {self.limit}")
        if (self.metadata_key is not None) != (self.split_by is SplitBy.METADATA):
            raise ValueError(
                f"budget {self.budget!r} is split by {self.split_by} with the metadata key "
                f"{self.metadata_key!r}: a split by metadata needs a key, and only that one"
            )

    def is_exhausted_at(self, entity: Entity, usage: Decimal) -> bool:
        """Whether an entity that has used this much may spend no more.

        A budget limits what it is split by: the aggregate of a split budget has no limit, nor has
        an entity of one that is not split.
        """
        is_limited = (entity is None) is (self.split_by is SplitBy.NOTHING)
        return is_limited and usage >= self.limit
