"""Names of things as people read them."""

from collections.abc import Iterable
from itertools import islice

from budget_recovery_dagster.domain.counters import Entity

# So many are named; how many there are is told beside it.
_NAMED = 5


def listed(names: Iterable[str]) -> str:
    """Name the first few of many."""
    first = list(islice(names, _NAMED + 1))
    return ", ".join(first) if len(first) <= _NAMED else f"{', '.join(first[:_NAMED])}, ..."


def shown_entity(entity: Entity) -> str:
    """Name who spends; what cannot be printed is escaped."""
    return "the aggregate" if entity is None else repr(entity)
