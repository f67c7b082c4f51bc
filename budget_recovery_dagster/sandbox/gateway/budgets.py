"""The budgets of all tenants: which of them a request counts into, and what stands behind a key."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from datetime import UTC, date, datetime, time
from functools import lru_cache

from budget_recovery_dagster.adapters.nats.codec import CounterKey
from budget_recovery_dagster.domain.budgets import BudgetDefinition
from budget_recovery_dagster.domain.counters import BudgetWindow
from budget_recovery_dagster.domain.windows import Period, Window
from budget_recovery_dagster.sandbox.gateway.requests import Request


class Budgets:
    """Definitions by tenant."""

    def __init__(self, definitions: Iterable[BudgetDefinition]) -> None:
        self.definitions = tuple(definitions)
        self._of: defaultdict[str, list[BudgetDefinition]] = defaultdict(list)
        self._behind: dict[tuple[str, str, Period], BudgetDefinition] = {}
        for each in self.definitions:
            self._of[each.tenant].append(each)
            self._behind[each.tenant, each.budget, each.period] = each

    def raised_by(
        self, request: Request, moment: datetime
    ) -> Iterator[tuple[BudgetDefinition, CounterKey]]:
        """Name the counters that a request of ``moment`` (aware) raises by its cost.

        They are those of the windows that the moment falls into, whatever the time is by now.
        """
        day = moment.astimezone(UTC).date()
        for definition in self._of.get(request.tenant, ()):
            try:
                entity = request.entity(definition)
            except LookupError:
                continue
            window = _window(definition.period, day)
            yield (
                definition,
                CounterKey(request.tenant, BudgetWindow(definition.budget, window), entity),
            )

    def behind(self, counter: CounterKey) -> BudgetDefinition | None:
        """Return the definition that a counter belongs to; None where there is none."""
        return self._behind.get((counter.tenant, counter.of.budget, counter.of.window.period))


@lru_cache(maxsize=1024)
def _window(period: Period, day: date) -> Window:
    return Window.containing(period, datetime.combine(day, time(), UTC))
