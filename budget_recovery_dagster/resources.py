"""Dagster resources, and how our errors become Dagster failures."""

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import dagster as dg

from budget_recovery_dagster.bootstrap import OpenedDatabase, opened_database
from budget_recovery_dagster.errors import BudgetRecoveryError
from budget_recovery_dagster.services.restore.choice import Order
from budget_recovery_dagster.settings import load_settings


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


class ControlPlaneResource(dg.ConfigurableResource):  # type: ignore[type-arg]  # no config of its own
    """The control-plane database, as the BUDGET_RECOVERY_ settings name it.

    The settings are read when it is opened, not when Dagster loads: the definitions load without
    any server, and a run without settings fails by name.
    """

    @contextmanager
    def opened(self) -> Iterator[OpenedDatabase]:
        """Open the database for one run, check or tick.

        Raises:
            SettingsError: a setting is missing or wrong.
            DatabaseError: the database cannot be reached, or its schema is not current.
        """
        with opened_database(load_settings()) as database:
            yield database


def holder_of(run_id: str) -> str:
    """Name this process and its run, for whoever finds a lease taken."""
    return f"run {run_id[:8]} on {socket.gethostname()} (pid {os.getpid()})"


def order_by(context: dg.OpExecutionContext, reason: str, *, accept_unconverged: bool) -> Order:
    """Return the order of a run; whoever waits for it reads the run's log."""
    run_id = context.run.run_id
    return Order(
        by=holder_of(run_id),
        reason=reason,
        run_id=run_id,
        tell=context.log.info,
        accept_unconverged=accept_unconverged,
    )
