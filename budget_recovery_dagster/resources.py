"""Dagster resources: what runs, checks and ticks use to reach the servers."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import dagster as dg

from budget_recovery_dagster.bootstrap import OpenedDatabase, opened_database
from budget_recovery_dagster.settings import load_settings


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
