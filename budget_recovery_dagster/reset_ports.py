"""What deliberate resets need from the outside world; as in ``ports``, with promises."""

from typing import Protocol

from budget_recovery_dagster.domain.resets import Reset


class Resets(Protocol):
    """The resets that were recorded: none is ever changed or removed."""

    def record(self, reset: Reset) -> Reset:
        """Keep a reset for as long as the database lives, and return it as it is kept.

        Texts for people are kept in a form that the database holds. Once this returns, no reading
        of a recovery point that begins uses what the reset makes ineligible.
        """
        ...

    def of_tenant(self, tenant: str) -> tuple[Reset, ...]:
        """Return the resets of a tenant, in the order of their recording."""
        ...

    def recent(self, count: int) -> tuple[Reset, ...]:
        """Return the resets of any tenant that were recorded last, the newest first."""
        ...
