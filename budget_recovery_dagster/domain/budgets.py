"""Budget definitions: the limits of usage, by entity and period, and their enforcement.

They are optional: counters are captured and restored without them. With them, a preview shows what
is blocked, or would be.
"""

from dataclasses import dataclass
from decimal import Decimal
from enum import StrEnum

from budget_recovery_dagster.domain.counters import MAX_INTEGER_DIGITS, check_name
from budget_recovery_dagster.domain.windows import Period


class SplitBy(StrEnum):
    """The kind of entity that a budget counts separately; each entity has the whole limit."""

    NOTHING = "nothing"
    USER = "user"
    MODEL = "model"
    VIRTUAL_ACCOUNT = "virtual_account"
    AGENT = "agent"
    METADATA = "metadata"


class Enforcement(StrEnum):
    """What the gateway does at the limit: refuse requests, or only log."""

    ENFORCE = "enforce"
    AUDIT = "audit"


@dataclass(frozen=True, slots=True)
class BudgetDefinition:
    """One period of one budget; a budget with several periods has a definition for each.

    ``limit`` is in the gateway's currency, for each entity and window. ``metadata_key`` names the
    field of a request's metadata by which the budget is split, and is None for every other split.
    """

    tenant: str
    budget: str
    period: Period
    limit: Decimal
    split_by: SplitBy
    enforcement: Enforcement
    metadata_key: str | None = None

    def __post_init__(self) -> None:
        check_name(self.tenant)
        check_name(self.budget)
        if self.limit.is_nan() or not 0 <= self.limit < 10**MAX_INTEGER_DIGITS:
            raise ValueError(f"budget {self.budget!r} has the limit {self.limit}")
        if (self.metadata_key is not None) != (self.split_by is SplitBy.METADATA):
            raise ValueError(
                f"budget {self.budget!r} is split by {self.split_by} with the metadata key "
                f"{self.metadata_key!r}: a split by metadata needs a key, and only that one"
            )

    def is_exhausted_at(self, usage: Decimal) -> bool:
        """Whether an entity that has used this much may spend no more."""
        return usage >= self.limit
