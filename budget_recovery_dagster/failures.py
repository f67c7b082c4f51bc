"""How errors reach a person in the Dagster UI."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import dagster as dg

from budget_recovery_dagster.errors import BudgetRecoveryError


def failure(message: str, hint: str, metadata: Mapping[str, Any] | None = None) -> dg.Failure:
    """Make the failure of a step: what happened first, then what to do."""
    return dg.Failure(
        description=f"{message} Try: {hint}",
        metadata={"what_to_do": hint, **(metadata or {})},
        allow_retries=False,
    )


@contextmanager
def shown_as_failures() -> Iterator[None]:
    """Turn our errors into failures of the step, with the hint in the metadata."""
    try:
        yield
    except BudgetRecoveryError as error:
        raise failure(error.message, error.hint) from error
