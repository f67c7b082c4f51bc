"""Counters: what one entity has spent in one window of one budget.

Usage is an exact decimal, never negative. A counter is a value of the gateway's store, read and
compared here; it is not one of the store's own built-in counter types.
"""

import re
from dataclasses import dataclass
from decimal import MAX_EMAX, MAX_PREC, MIN_EMIN, Context, Decimal
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

    TEXT = "object with text"
    NUMBER = "object with number"
    BARE = "bare number"


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
