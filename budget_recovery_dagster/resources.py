"""Dagster resources, and how our errors become Dagster failures."""

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import dagster as dg

from budget_recovery_dagster.errors import BudgetRecoveryError
from budget_recovery_dagster.ports import ControlPlane
from budget_recovery_dagster.services.restore.manual import Order
from budget_recovery_dagster.settings import Settings
from budget_recovery_dagster.wiring import opened_control_plane


def failure(
    message: str,
    hint: str,
    metadata: Mapping[str, Any] | None = None,
    *,
    allow_retries: bool = False,
) -> dg.Failure:
    """Return the failure of a step: first what happened, then what to do."""
    return dg.Failure(
        description=f"{message} Try: {hint}",
        metadata={"action": hint, **(metadata or {})},
        allow_retries=allow_retries,
    )


@dataclass(frozen=True, slots=True)
class ControlPlaneResource:
    """The control-plane database that the settings name, and the usage store that belongs to it.

    Definitions load without any server; a run or tick without a URL fails and names the setting.
    """

    settings: Settings

    def opened(self) -> AbstractContextManager[ControlPlane]:
        """Open the database for one run, check or tick.

        Raises:
            SettingsError: BUDGET_RECOVERY_POSTGRES_URL is not set.
            DatabaseError: the database cannot be reached, or its schema is not current.
        """
        return opened_control_plane(self.settings)

    @contextmanager
    def opened_in_step(self) -> Iterator[ControlPlane]:
        """Open the database for a step or check; our errors become its failures, with the hint.

        Raises:
            dagster.Failure: an error of ours, from opening the database or from the step.
        """
        try:
            with self.opened() as plane:
                yield plane
        except BudgetRecoveryError as error:
            raise failure(error.message, error.hint) from error


ControlPlaneParam = dg.ResourceParam[ControlPlaneResource]
"""The parameter type with which Dagster objects request the resource ``control_plane``."""


def control_plane_resource(settings: Settings) -> dg.ResourceDefinition:
    """Return the definition of the resource ``control_plane``."""
    return dg.ResourceDefinition(
        lambda _: ControlPlaneResource(settings),
        description="The control-plane database and the usage store, as the settings name them.",
    )


def holder_of(run_id: str) -> str:
    """Name this process and its run; shown to a process that finds the lease taken."""
    return f"run {run_id[:8]} on {socket.gethostname()} (pid {os.getpid()})"


def order_by(context: dg.OpExecutionContext, reason: str, *, accept_unconverged: bool) -> Order:
    """Return the order of a run; its progress goes to the run's log."""
    run_id = context.run.run_id
    return Order(
        by=holder_of(run_id),
        reason=reason,
        run_id=run_id,
        on_progress=context.log.info,
        accept_unconverged=accept_unconverged,
    )
