"""The tenants of the sandbox with their budgets, and random requests of theirs."""

import random
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from decimal import Decimal

from budget_recovery_dagster.domain.counters import BudgetDefinition, Enforcement, SplitBy
from budget_recovery_dagster.domain.windows import Period
from budget_recovery_dagster.sandbox.gateway.requests import Budgets, Request

SHOP = "team a / 東京"
"""The tenant with customers of its own, each with a budget."""

USERS: Mapping[str, tuple[str, ...]] = {
    "acme": ("user:alice@example.com", "user:bob@example.com", "service:nightly-report"),
    "globex": ("user:hanna@example.org", "user:søren@example.org"),
    SHOP: ("user:yuki@example.jp", "user:ren@example.jp", "user:mei@example.jp"),
}

# Dollars per token.
PRICES: Mapping[str, Decimal] = {
    "openai-main/gpt-4o": Decimal("0.00001"),
    "openai-main/gpt-4o-mini": Decimal("0.0000006"),
    "bedrock/anthropic.claude:0": Decimal("0.000015"),
}

VIRTUAL_ACCOUNTS = ("va:backend", "va:data science", "va:support & sales")
AGENTS = ("agent:triage", "agent:code-review", "agent:research", "agent:translate/日本語")
COST_CENTRES = ("4711", "R&D", "G&A 50%")
CUSTOMERS = tuple(f"customer:{number:04d}@shop.example" for number in range(1, 641))

_METADATA_KEYS = {"cost centres": "cost_centre", "customers": "end_user"}

_PAST_REQUESTS = 3000
_PAST_DAYS = 120


def _definitions_of(tenant: str) -> Iterator[BudgetDefinition]:
    enforce, audit = Enforcement.ENFORCE, Enforcement.AUDIT
    ever = Period.LIFETIME
    # Each tenant spends about $1.30 per minute. The limits that every request counts into are out
    # of reach, so that traffic continues forever. One of acme's agents and one of the shop's
    # customers have exhausted their budgets in the history, and the next are about to.
    budgets = [
        ("company", Period.MONTH, "1000000", SplitBy.NOTHING, enforce),
        ("company", Period.QUARTER, "2500000", SplitBy.NOTHING, enforce),
        ("per user", Period.DAY, "25000", SplitBy.USER, enforce),
        ("per user", Period.WEEK, "100000", SplitBy.USER, enforce),
        ("per-model", Period.MONTH, "5", SplitBy.MODEL, audit),
        ("per-model", ever, "10", SplitBy.MODEL, audit),
        ("virtual accounts", Period.QUARTER, "1000000", SplitBy.VIRTUAL_ACCOUNT, enforce),
        ("agents", ever, "2.41" if tenant == "acme" else "1000000", SplitBy.AGENT, enforce),
        ("cost centres", Period.DAY, "2", SplitBy.METADATA, audit),
    ]
    if tenant == SHOP:
        budgets.append(("customers", ever, "0.25", SplitBy.METADATA, enforce))
    for name, period, limit, split_by, enforcement in budgets:
        yield BudgetDefinition(
            tenant, name, period, Decimal(limit), split_by, enforcement, _METADATA_KEYS.get(name)
        )


BUDGETS = Budgets(each for tenant in USERS for each in _definitions_of(tenant))
"""All budgets of the sandbox."""


class Traffic:
    """Random requests of the sandbox's tenants; the same seed gives the same sequence."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)  # noqa: S311 - traffic, not secrets

    def request(self, tenant: str | None = None) -> Request:
        """Return a request of this tenant, or of any."""
        chance = self._random
        tenant = tenant or chance.choice(list(USERS))
        model = chance.choice(list(PRICES))
        metadata = {"cost_centre": chance.choice(COST_CENTRES)}
        # Half of the shop's requests are for a customer; some customers buy much more than others.
        if tenant == SHOP and chance.random() < 0.5:
            metadata["end_user"] = CUSTOMERS[int(len(CUSTOMERS) * chance.random() ** 2)]
        return Request(
            tenant=tenant,
            user=chance.choice(USERS[tenant]),
            model=model,
            # Few enough digits that Python's decimal context never rounds them.
            cost=chance.randint(50, 4000) * PRICES[model],
            virtual_account=chance.choice(VIRTUAL_ACCOUNTS),
            agent=chance.choice([None, None, None, *AGENTS]),
            metadata=metadata,
        )

    def history(self, now: datetime) -> Iterator[tuple[datetime, Request]]:
        """Return the requests of the past months in no order, with more of them recently."""
        for _ in range(_PAST_REQUESTS):
            age = timedelta(days=_PAST_DAYS * self._random.random() ** 3)
            yield now - age, self.request()
        # Every customer has bought something once.
        for customer in CUSTOMERS:
            bought = self.request(SHOP)
            yield (
                now - timedelta(days=_PAST_DAYS),
                replace(bought, metadata={**bought.metadata, "end_user": customer}),
            )
