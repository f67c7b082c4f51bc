"""What an incident cost, in sentences: restored, counted and not added, and not covered."""

from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal

from budget_recovery_dagster.domain.audits import Bound, IncidentAmounts
from budget_recovery_dagster.domain.counters import BudgetWindow, format_usage
from budget_recovery_dagster.domain.incident import Incident
from budget_recovery_dagster.domain.windows import in_words
from budget_recovery_dagster.services.restore.tenants import counted

# So many amounts are in a sentence.
_AMOUNTS = 3
_IN_WORDS: Mapping[Bound, str] = {
    Bound.EXACT: "",
    Bound.AT_MOST: "at most ",
    Bound.AT_LEAST: "at least ",
    Bound.ESTIMATE: "about ",
}


def bounded(amount: Decimal | None, bound: Bound) -> str:
    """Write an amount with what is known of it."""
    if amount is None or bound is Bound.UNKNOWN:
        return "unknown"
    return f"{_IN_WORDS[bound]}{format_usage(amount)}"


def largest_amounts(amounts: Iterable[tuple[str, BudgetWindow, Decimal]]) -> str:
    """List the largest amounts with their tenants, budgets and windows, and count the others.

    They are never added up: one request counts in many of them.
    """
    # A stable sort: equal amounts stay in their order.
    largest = sorted(amounts, key=lambda each: each[2], reverse=True)
    return _first(
        (f"{tenant}, {of}: {format_usage(amount)}" for tenant, of, amount in largest), len(largest)
    )


def restored_amounts(amounts: IncidentAmounts) -> str:
    """List the largest amounts that were restored."""
    return _first(
        (f"{each.tenant}, {each.of}: {format_usage(each.restored)}" for each in amounts.restored),
        amounts.restored_windows,
    )


def amounts_not_added(amounts: IncidentAmounts) -> str:
    """List the largest amounts that were counted after the loss and are not added."""
    known = _first(
        (
            f"{each.tenant}, {each.of}: {bounded(each.counted, each.bound)}"
            for each in amounts.counted
        ),
        amounts.counted_windows,
    )
    if not amounts.unknown_windows:
        return known or "nothing"
    unknown = f"unknown in {counted(amounts.unknown_windows, 'window')}"
    return f"{known}; {unknown}" if known else unknown


def _first(amounts: Iterable[str], number: int) -> str:
    """Join the first amounts of so many, and count the others."""
    shown = [amount for amount, _ in zip(amounts, range(_AMOUNTS), strict=False)]
    if more := number - len(shown):
        shown.append(f"and {counted(more, 'smaller amount')}")
    return "; ".join(shown)


def cost(incident: Incident, amounts: IncidentAmounts) -> Iterator[str]:
    """Describe by amounts what an incident's restores brought back, and what they did not add.

    Nothing is yielded if no restore raised anything, unless it is known that the store was empty:
    else its counters may simply have survived.
    """
    if amounts.restored_windows:
        yield f"Restored: {restored_amounts(amounts)}."
    elif not incident.began_empty or not (amounts.counted_windows or amounts.unknown_windows):
        return
    yield (
        "Counted after the loss and not added, because the higher value counts:"
        f" {amounts_not_added(amounts)}."
    )


def uncovered(incident: Incident) -> str:
    """Describe the usage that no snapshot holds."""
    span, since = incident.uncovered, incident.newest_point_at
    if span is None or since is None:
        return "No snapshot existed before the loss, so no usage is restored."
    newest = f"{since:%Y-%m-%d %H:%M:%S} UTC"
    found = f"{incident.lost_at:%Y-%m-%d %H:%M:%S} UTC"
    return (
        f"Usage between the newest snapshot ({newest}) and the loss is not restored: at most"
        f" {in_words(span)}, until the loss was found ({found})."
    )
