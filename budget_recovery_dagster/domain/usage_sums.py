"""Adding usages up without rounding."""

from collections.abc import Iterable
from decimal import Context, Decimal, Inexact

from budget_recovery_dagster.domain.recovery_point import Usages

# The default context would round to 28 digits. A usage has at most 38, and each further digit is
# room for ten times as many of them.
_EXACT = Context(prec=80, traps=[Inexact])


def exact_sum(usages: Iterable[Decimal]) -> Decimal:
    """Add usages up exactly, in plain form: no exponent that a person has to read."""
    total = Decimal(0)
    for usage in usages:
        total = _EXACT.add(total, usage)
    return total


def exact_difference(usage: Decimal, less: Decimal) -> Decimal:
    """Subtract a usage from another exactly."""
    return _EXACT.subtract(usage, less)


def budget_usage(usages: Usages) -> Decimal:
    """Return what a budget has used in a window: its aggregate, or else the sum of its entities.

    Where the gateway counts both, the sum of all would count every request twice.
    """
    aggregate = usages.get(None)
    return exact_sum(usages.values()) if aggregate is None else aggregate
