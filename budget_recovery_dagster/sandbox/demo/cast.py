"""Who the story is about: the sandbox's tenants, with limits that only the story makes felt.

So no budget but the one that the story is about is used up while it is told, and what is blocked
at one moment can be compared with what is blocked at another.
"""

from collections.abc import Iterator
from dataclasses import replace
from decimal import Decimal

from budget_recovery_dagster.adapters.nats.codec import CounterKey
from budget_recovery_dagster.domain.budgets import BudgetDefinition
from budget_recovery_dagster.domain.counters import BudgetWindow, Entity
from budget_recovery_dagster.domain.windows import LIFETIME_TOKEN, Window
from budget_recovery_dagster.sandbox.gateway import scene
from budget_recovery_dagster.sandbox.gateway.budgets import Budgets
from budget_recovery_dagster.sandbox.gateway.requests import Request
from budget_recovery_dagster.sandbox.gateway.traffic import Traffic

TENANT, BUDGET = "acme", "agents"
AGENT = "agent:research"
NEWCOMER = "agent:new-hire"
"""An agent of the same budget that first spends after the wipe, so that no snapshot knows it."""

LIMIT = Decimal(10)
"""What each agent may spend, in dollars. From the history the four have spent about 2 each."""

HISTORY_SEED = 1
_TRAFFIC_SEED = 2
_OUT_OF_REACH = Decimal(1_000_000)
# The history takes some past it. The story's traffic leaves customers alone, so that they stay.
_CUSTOMERS_LIMIT = Decimal("0.10")


def _limit(definition: BudgetDefinition) -> Decimal:
    if (definition.tenant, definition.budget) == (TENANT, BUDGET):
        return LIMIT
    return _CUSTOMERS_LIMIT if definition.budget == "customers" else _OUT_OF_REACH


BUDGETS = Budgets(replace(each, limit=_limit(each)) for each in scene.BUDGETS.definitions)
"""The budgets of all tenants."""


def request_of(agent: str, cost: str) -> Request:
    """Return a request of one of the tenant's agents, with its cost in dollars."""
    return Request(
        TENANT,
        scene.USERS[TENANT][0],
        next(iter(scene.PRICES)),
        Decimal(cost),
        virtual_account=scene.VIRTUAL_ACCOUNTS[0],
        agent=agent,
        metadata={"cost_centre": scene.COST_CENTRES[0]},
    )


REQUEST = request_of(AGENT, "0.50")
"""The request that is refused, let through, and refused again."""

PROBE = replace(REQUEST, cost=Decimal(0))
"""The same request at no cost, by which one finds out whether it is refused."""


def counter_of(entity: Entity) -> CounterKey:
    """Return the counter of an entity in the budget that the story is about."""
    return CounterKey(TENANT, BudgetWindow(BUDGET, Window.parse(LIFETIME_TOKEN)), entity)


def is_of_the_budget(counter: CounterKey) -> bool:
    """Whether a counter is one of the budget that the story is about."""
    return (counter.tenant, counter.of) == (TENANT, counter_of(AGENT).of)


def traffic() -> Iterator[Request]:
    """Make up requests of all tenants, without end, always the same ones."""
    made_up = Traffic(seed=_TRAFFIC_SEED)
    while True:
        request = made_up.request()
        metadata = {name: each for name, each in request.metadata.items() if name != "end_user"}
        yield replace(request, metadata=metadata)
