"""Who the sandbox is about: tenants, their people, machines and customers, and their budgets."""

from collections.abc import Iterable, Mapping
from decimal import Decimal

from budget_recovery_dagster.domain.budgets import BudgetDefinition, Enforcement, SplitBy
from budget_recovery_dagster.domain.windows import Period
from budget_recovery_dagster.sandbox.gateway.budgets import Budgets

USERS: Mapping[str, tuple[str, ...]] = {
    "acme": ("user:alice@example.com", "user:bob@example.com", "service:nightly-report"),
    "globex": ("user:hanna@example.org", "user:søren@example.org"),
    "team a / 東京": ("user:yuki@example.jp", "user:ren@example.jp", "user:mei@example.jp"),
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

SHOP = "team a / 東京"
"""The tenant that has customers of its own, each with a budget."""

CUSTOMERS = tuple(f"customer:{number:04d}@shop.example" for number in range(1, 641))

_ENFORCE, _AUDIT = Enforcement.ENFORCE, Enforcement.AUDIT


def _of_every_tenant(tenant: str) -> Iterable[BudgetDefinition]:
    def budget(
        name: str,
        split: SplitBy,
        enforcement: Enforcement,
        limits: Mapping[Period, str],
        metadata_key: str | None = None,
    ) -> Iterable[BudgetDefinition]:
        for period, limit in limits.items():
            yield BudgetDefinition(
                tenant, name, period, Decimal(limit), split, enforcement, metadata_key
            )

    # Each tenant spends about $1.30 a minute. The limits that all requests count into are out of
    # reach, so that traffic goes on for ever. Of acme's agents and the shop's customers one each
    # has used up its budget in the history, and the next are about to.
    yield from budget(
        "company",
        SplitBy.NOTHING,
        _ENFORCE,
        {Period.MONTH: "1000000", Period.QUARTER: "2500000"},
    )
    yield from budget(
        "per user", SplitBy.USER, _ENFORCE, {Period.DAY: "25000", Period.WEEK: "100000"}
    )
    yield from budget(
        "per-model", SplitBy.MODEL, _AUDIT, {Period.MONTH: "5", Period.LIFETIME: "10"}
    )
    yield from budget(
        "virtual accounts", SplitBy.VIRTUAL_ACCOUNT, _ENFORCE, {Period.QUARTER: "1000000"}
    )
    yield from budget("agents", SplitBy.AGENT, _ENFORCE, {Period.LIFETIME: AGENT_LIMITS[tenant]})
    yield from budget(
        "cost centres", SplitBy.METADATA, _AUDIT, {Period.DAY: "2"}, metadata_key="cost_centre"
    )
    if tenant == SHOP:
        yield from budget(
            "customers",
            SplitBy.METADATA,
            _ENFORCE,
            {Period.LIFETIME: "0.25"},
            metadata_key="end_user",
        )


AGENT_LIMITS: Mapping[str, str] = {"acme": "2.41", "globex": "1000000", SHOP: "1000000"}

BUDGETS = Budgets(each for tenant in USERS for each in _of_every_tenant(tenant))
"""All budgets of the sandbox."""
