"""Sums of money that are exact, or fail."""

from decimal import Context, Decimal, Inexact

# A usage has at most 38 digits; Python's own context would round it to 28.
_EXACT = Context(prec=60, traps=[Inexact])


def plus(one: Decimal, other: Decimal) -> Decimal:
    """Add, without rounding.

    Raises:
        decimal.Inexact: the sum has more than 60 digits.
    """
    return _EXACT.add(one, other)


def times(one: Decimal, other: Decimal) -> Decimal:
    """Multiply, without rounding.

    Raises:
        decimal.Inexact: the product has more than 60 digits.
    """
    return _EXACT.multiply(one, other)
