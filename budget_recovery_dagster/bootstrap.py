"""Which adapters stand behind the ports: the one place where services meet servers."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Self

from budget_recovery_dagster.adapters.nats_store import NatsUsageStore, open_usage_store
from budget_recovery_dagster.adapters.postgres_database import Database
from budget_recovery_dagster.adapters.postgres_leases import PostgresLeases
from budget_recovery_dagster.adapters.postgres_registry import PostgresStoreRegistry
from budget_recovery_dagster.adapters.postgres_snapshots import PostgresSnapshots
from budget_recovery_dagster.ports import CaptureReports, Clock, Leases, Snapshots, StoreRegistry
from budget_recovery_dagster.services.capture import CaptureService
from budget_recovery_dagster.settings import Settings


@dataclass(frozen=True, slots=True)
class OpenedDatabase:
    """The ports on an opened control-plane database."""

    settings: Settings
    clock: Clock
    registry: StoreRegistry
    snapshots: Snapshots
    reports: CaptureReports
    leases: Leases

    @classmethod
    def of(cls, database: Database, settings: Settings) -> Self:
        """Put the ports on a database."""
        snapshots = PostgresSnapshots(database)
        return cls(
            settings=settings,
            clock=database,
            registry=PostgresStoreRegistry(database),
            snapshots=snapshots,
            reports=snapshots,
            leases=PostgresLeases(database),
        )

    def capture_service(self) -> CaptureService:
        """Return the capture of this database's store; the store is opened when it is used.

        Raises:
            SettingsError: BUDGET_RECOVERY_NATS_URL is not set.
        """
        url = self.settings.require_nats_url()
        return CaptureService(
            open_store=lambda: _open_store(url, self.settings),
            snapshots=self.snapshots,
            reports=self.reports,
            registry=self.registry,
            leases=self.leases,
            clock=self.clock,
            bucket=self.settings.bucket,
            retention=self.settings.retention,
        )


@contextmanager
def opened_database(settings: Settings) -> Iterator[OpenedDatabase]:
    """Open the control-plane database.

    Raises:
        SettingsError: BUDGET_RECOVERY_POSTGRES_URL is not set.
        DatabaseError: the database cannot be reached, or its schema is not current.
    """
    with Database(settings.require_postgres_url()) as database:
        yield OpenedDatabase.of(database, settings)


def _open_store(url: str, settings: Settings) -> AbstractContextManager[NatsUsageStore]:
    return open_usage_store(
        url,
        settings.bucket,
        credentials=settings.nats_creds,
        certificate_authority=settings.nats_ca,
    )
