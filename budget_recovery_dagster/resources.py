"""Dagster resources: what runs and ticks use to reach the store and the database.

They read the settings when they are opened, not when Dagster loads: the definitions load without
any server, and a run without settings fails by name.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Self

import dagster as dg

from budget_recovery_dagster.adapters.nats_store import NatsUsageStore, open_usage_store
from budget_recovery_dagster.adapters.postgres_database import Database
from budget_recovery_dagster.adapters.postgres_leases import PostgresLeases
from budget_recovery_dagster.adapters.postgres_registry import PostgresStoreRegistry
from budget_recovery_dagster.adapters.postgres_snapshots import PostgresSnapshots
from budget_recovery_dagster.ports import Clock, Leases, Snapshots, StoreRegistry
from budget_recovery_dagster.services.capture import CaptureService
from budget_recovery_dagster.settings import Settings, load_settings


@dataclass(frozen=True, slots=True)
class ControlPlane:
    """The opened control-plane database."""

    settings: Settings
    clock: Clock
    registry: StoreRegistry
    snapshots: Snapshots
    leases: Leases

    @classmethod
    def on(cls, database: Database, settings: Settings) -> Self:
        """Return the ports of an opened database."""
        return cls(
            settings=settings,
            clock=database,
            registry=PostgresStoreRegistry(database),
            snapshots=PostgresSnapshots(database),
            leases=PostgresLeases(database),
        )

    def capture_service(self) -> CaptureService:
        """Return the capture of this database's store; the store is opened when it is used."""
        return CaptureService(
            open_store=lambda: _open_store(self.settings),
            snapshots=self.snapshots,
            registry=self.registry,
            leases=self.leases,
            clock=self.clock,
            bucket=self.settings.bucket,
            retention=self.settings.retention,
        )


class ControlPlaneResource(dg.ConfigurableResource):  # type: ignore[type-arg]  # no config of its own
    """The control-plane database, as the BUDGET_RECOVERY_ settings name it."""

    @contextmanager
    def opened(self) -> Iterator[ControlPlane]:
        """Open the database for one run, check or tick.

        Raises:
            SettingsError: a setting is missing or wrong.
            DatabaseError: the database cannot be reached, or its schema is not current.
        """
        settings = load_settings()
        settings.require_nats_url()
        with Database(settings.require_postgres_url()) as database:
            yield ControlPlane.on(database, settings)


def holder_of(run_id: str) -> str:
    """Name this process and its run, for whoever finds a lease taken."""
    return f"run {run_id[:8]} on {socket.gethostname()} (pid {os.getpid()})"


def _open_store(settings: Settings) -> AbstractContextManager[NatsUsageStore]:
    return open_usage_store(
        settings.require_nats_url(),
        settings.bucket,
        credentials=settings.nats_creds,
        certificate_authority=settings.nats_ca,
    )
