"""Counters: names, exact usages, and how several readings of one counter merge.

Within a window a counter only grows, so the maximum of all readings is the best known usage.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import MAX_EMAX, MAX_PREC, MIN_EMIN, Context, Decimal, Inexact
from enum import StrEnum

from budget_recovery_dagster.domain.windows import Window

MAX_INTEGER_DIGITS = 20
MAX_DECIMALS = 18
Entity = str | None
"""Who spends: a user, model, account, agent or metadata value; None is a budget's aggregate."""
# Long enough for any value in bounds with room for zeros; what is longer is not worth parsing.
_LONGEST_USAGE_TEXT = 100
_NUMBER = re.compile(r"-?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,9})?", re.ASCII)
# The default context rounds normalized values to 28 digits; this one never rounds.
_EXACT = Context(prec=MAX_PREC, Emax=MAX_EMAX, Emin=MIN_EMIN)


class UnreadableUsageError(ValueError):
    """A usage that is no exact, non-negative decimal within bounds; the message says why."""


class UnusableNameError(ValueError):
    """A tenant, budget or entity name that cannot be kept; the message says why."""


class ValueShape(StrEnum):
    """The form in which the gateway writes a counter's value, kept so that a restore can use it."""

    TEXT = "object_text"
    NUMBER = "object_number"
    BARE = "bare_number"


def check_name(name: str) -> str:
    """Return ``name`` unchanged.

    Raises:
        UnusableNameError: it is empty (the aggregate entity is None, not a name) or holds a NUL
            character, which PostgreSQL text cannot, or no Unicode text.
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
    # Judged on the exponent alone: writing 1E400 out would need 401 digits.
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


@dataclass(frozen=True, slots=True)
class BudgetWindow:
    """One window of one budget of a tenant: what a record is about."""

    budget: str
    window: Window

    def __str__(self) -> str:
        return f"{self.budget} {self.window.token}"


@dataclass(frozen=True, slots=True)
class CounterReading:
    """A counter as the store held it.

    ``shape`` is None where it was read from a leaderboard, which tells neither how the counter's
    own key is written nor when it expires. Else ``expiry_seconds`` is when the store drops the
    key: seconds after the window's end, or, for a lifetime, after the key's last writing. None
    means never.
    """

    of: BudgetWindow
    entity: Entity
    usage: Decimal
    shape: ValueShape | None
    expiry_seconds: int | None


@dataclass(frozen=True, slots=True)
class OmittedCounter:
    """A counter whose key is sound and whose value cannot be read: named, never guessed.

    Of a leaderboard it is an entry, or the whole of one; ``key`` is then the leaderboard's. Where
    ``is_entity_known`` is False, nobody can tell whose usage it is, and ``entity`` means nothing.
    """

    of: BudgetWindow
    entity: Entity
    key: str
    reason: str
    is_entity_known: bool = True


@dataclass(frozen=True, slots=True)
class UnlistedEntities:
    """That a leaderboard may leave out entities of its budget and window.

    ``at_most`` is the most that one which it does not list can have used, None where nothing is
    known of them. ``is_truncated``: only the largest spenders are listed, and the list was full.
    """

    of: BudgetWindow
    at_most: Decimal | None
    is_truncated: bool


@dataclass(frozen=True, slots=True)
class UnreadableKey:
    """A key of the source that names no counter or leaderboard; ``key`` is printable ASCII."""

    key: str
    reason: str


BOARD_SIZE = 500
"""How many entities a leaderboard lists at most."""


def rank(usages: Iterable[tuple[Entity, Decimal]]) -> list[tuple[Entity, Decimal]]:
    """Return the largest usages: most usage first, equal ones by their names' code points."""
    by_name = sorted(usages, key=lambda each: each[0] or "")
    # A stable sort, also in reverse; to sort by the negated usage would round it.
    return sorted(by_name, key=lambda each: each[1], reverse=True)[:BOARD_SIZE]


Usages = Mapping[Entity, Decimal]
"""Usage by entity, of one budget and window."""
RecoveryPoint = Mapping[BudgetWindow, Usages]
"""The best known usages of every still-current window of one tenant."""


def max_merge(*records: Usages) -> dict[Entity, Decimal]:
    """Take, entity by entity, the highest usage: order and repetition change nothing."""
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
    """A counter of the recovery point that the store no longer holds, or holds lower.

    ``after`` is None where it is missing: from the store or, of a full leaderboard, from among
    those that have used as much as it had. Purges of single keys change no identity, so this is
    the only trace that they leave.
    """

    of: BudgetWindow
    entity: Entity
    before: Decimal
    after: Decimal | None


def find_drops(
    point: RecoveryPoint,
    observed: RecoveryPoint,
    unknown: Iterable[tuple[BudgetWindow, Entity]],
    unlisted: Iterable[UnlistedEntities],
) -> tuple[Drop, ...]:
    """List what the point holds and the store does not, except what is not known of.

    An ``unknown`` counter, one that is unreadable, is reported as such; it is not known to be lower
    or lost. Neither is one that is not observed where ``unlisted`` tells that not all are, unless
    it had more than any such one has.
    """
    unjudged = frozenset(unknown)
    incomplete = {each.of: each for each in unlisted}
    return tuple(
        Drop(of, entity, before, after)
        for of, usages in point.items()
        for entity, before in usages.items()
        if (of, entity) not in unjudged
        if _is_drop(before, after := observed.get(of, {}).get(entity), incomplete.get(of))
    )


def _is_drop(before: Decimal, after: Decimal | None, unlisted: UnlistedEntities | None) -> bool:
    if after is not None:
        return after < before
    if unlisted is None:
        return True
    return unlisted.at_most is not None and unlisted.at_most < before


# The default context would round to 28 digits. A usage has at most 38, and each further digit is
# room for ten times as many of them.
_EXACT_SUMS = Context(prec=80, traps=[Inexact])


def hash_usages(usages: Usages) -> bytes:
    """Digest usages independently of their order; equal contents, and only they, hash alike."""
    digest = hashlib.sha256()
    # The aggregate (None) sorts and digests as "", which no real name can be.
    for name, usage in sorted((entity or "", usage) for entity, usage in usages.items()):
        encoded = name.encode()
        digest.update(f"{len(encoded)}:".encode() + encoded + f"={format_usage(usage)};".encode())
    return digest.digest()


def exact_sum(usages: Iterable[Decimal]) -> Decimal:
    """Add usages up exactly, in plain form: no exponent that a person has to read."""
    total = Decimal(0)
    for usage in usages:
        total = _EXACT_SUMS.add(total, usage)
    return total


def exact_difference(usage: Decimal, less: Decimal) -> Decimal:
    """Subtract a usage from another exactly."""
    return _EXACT_SUMS.subtract(usage, less)


def budget_usage(usages: Usages) -> Decimal:
    """Return what a budget has used in a window: its aggregate, or else the sum of its entities.

    Where the gateway counts both, the sum of all would count every request twice.
    """
    aggregate = usages.get(None)
    return exact_sum(usages.values()) if aggregate is None else aggregate
