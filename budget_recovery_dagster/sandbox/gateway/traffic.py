"""Requests at random, the same sequence for the same seed."""

import random
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta

from budget_recovery_dagster.sandbox.gateway.requests import Request
from budget_recovery_dagster.sandbox.gateway.scene import (
    AGENTS,
    COST_CENTRES,
    CUSTOMERS,
    PRICES,
    SHOP,
    USERS,
    VIRTUAL_ACCOUNTS,
)

_PAST_REQUESTS = 3000
_PAST_DAYS = 120


class Traffic:
    """Makes up requests of the sandbox's tenants."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)  # noqa: S311 - traffic, not secrets

    def request(self, tenant: str | None = None) -> Request:
        """Make up one request, of this tenant or of any."""
        chance = self._random
        tenant = tenant or chance.choice(list(USERS))
        model = chance.choice(list(PRICES))
        metadata = {"cost_centre": chance.choice(COST_CENTRES)}
        # Half of the shop's requests are for a customer, some of whom buy much more than others.
        if tenant == SHOP and chance.random() < 0.5:
            metadata["end_user"] = CUSTOMERS[int(len(CUSTOMERS) * chance.random() ** 2)]
        return Request(
            tenant=tenant,
            user=chance.choice(USERS[tenant]),
            model=model,
            # A few digits each: no context of Python's rounds that.
            cost=chance.randint(50, 4000) * PRICES[model],
            virtual_account=chance.choice(VIRTUAL_ACCOUNTS),
            agent=chance.choice([None, None, None, *AGENTS]),
            metadata=metadata,
        )

    def history(self, now: datetime) -> Iterator[tuple[datetime, Request]]:
        """Make up the requests of the past months, in no order, more of them lately."""
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
