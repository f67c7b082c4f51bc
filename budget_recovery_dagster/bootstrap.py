"""Which adapters stand behind the ports: the one place where services meet servers."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Self

from budget_recovery_dagster.adapters.nats_store import NatsUsageStore, open_usage_store
from budget_recovery_dagster.adapters.parquet_tables import ParquetTables
from budget_recovery_dagster.adapters.postgres_database import Database
from budget_recovery_dagster.adapters.postgres_leases import PostgresLeases
from budget_recovery_dagster.adapters.postgres_point_windows import PostgresRecoveryPoints
from budget_recovery_dagster.adapters.postgres_registry import PostgresStoreRegistry
from budget_recovery_dagster.adapters.postgres_retained import PostgresRetainedSnapshots
from budget_recovery_dagster.adapters.postgres_snapshots import PostgresSnapshots
from budget_recovery_dagster.ports import CaptureReports, Clock, Leases, Snapshots, StoreRegistry
from budget_recovery_dagster.services.capture import CaptureService
from budget_recovery_dagster.services.recovery_points import RecoveryPointsService
from budget_recovery_dagster.services.usage_tables import UsageTablesService
from budget_recovery_dagster.settings import Settings
from budget_recovery_dagster.table_ports import RecoveryPoints, RetainedSnapshots


@dataclass(frozen=True, slots=True)
class OpenedDatabase:
    """The ports on an opened control-plane database."""

    settings: Settings
    clock: Clock
    registry: StoreRegistry
    snapshots: Snapshots
    reports: CaptureReports
    leases: Leases
    retained: RetainedSnapshots
    points: RecoveryPoints

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
            retained=PostgresRetainedSnapshots(database),
            points=PostgresRecoveryPoints(database),
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
            source=self.settings.capture_source,
            retention=self.settings.retention,
        )

    def usage_tables_service(self) -> UsageTablesService:
        """Return the building of tables in the place that the settings name."""
        return UsageTablesService(
            snapshots=self.snapshots,
            retained=self.retained,
            registry=self.registry,
            tables=ParquetTables(self.settings.tables_place),
            clock=self.clock,
            bucket=self.settings.bucket,
        )

    def recovery_points_service(self) -> RecoveryPointsService:
        """Return the look at what a restore would bring back."""
        return RecoveryPointsService(points=self.points, clock=self.clock)


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
