"""Which adapters stand behind the ports: the one place where services meet servers."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Self

from budget_recovery_dagster.adapters.nats.connection import Timeouts
from budget_recovery_dagster.adapters.nats.store import NatsUsageStore, open_usage_store
from budget_recovery_dagster.adapters.parquet import ParquetTables
from budget_recovery_dagster.adapters.postgres.audits import PostgresRestoreAudits
from budget_recovery_dagster.adapters.postgres.database import Database
from budget_recovery_dagster.adapters.postgres.incidents import PostgresIncidents
from budget_recovery_dagster.adapters.postgres.leases import PostgresLeases
from budget_recovery_dagster.adapters.postgres.previews import PostgresBudgets, PostgresPreviews
from budget_recovery_dagster.adapters.postgres.records import PostgresRetainedSnapshots
from budget_recovery_dagster.adapters.postgres.recovery_point import (
    PostgresRecoveryPoints,
    PostgresRestorePoints,
)
from budget_recovery_dagster.adapters.postgres.resets import PostgresResets
from budget_recovery_dagster.adapters.postgres.snapshots import (
    PostgresSnapshotList,
    PostgresSnapshots,
)
from budget_recovery_dagster.adapters.postgres.store import (
    PostgresBaselines,
    PostgresStoreChecks,
    PostgresStoreRegistry,
)
from budget_recovery_dagster.ports import (
    Baselines,
    BudgetDefinitions,
    CaptureReports,
    Clock,
    Incidents,
    Leases,
    Previews,
    RecoveryPoints,
    Resets,
    RestoreAudits,
    RestorePoints,
    RetainedSnapshots,
    SnapshotList,
    Snapshots,
    StoreChecks,
    StoreRegistry,
)
from budget_recovery_dagster.services.capture import CaptureService
from budget_recovery_dagster.services.holds import HoldService
from budget_recovery_dagster.services.preview import PreviewService
from budget_recovery_dagster.services.recovery_points import RecoveryPointsService
from budget_recovery_dagster.services.resets import ResetService
from budget_recovery_dagster.services.restore.automatic import RecoveryService
from budget_recovery_dagster.services.restore.choice import Choosing
from budget_recovery_dagster.services.restore.manual import (
    HandTools,
    ManualRestoreService,
    ResolveService,
)
from budget_recovery_dagster.services.status import StatusService
from budget_recovery_dagster.services.store_watch import DetectionService
from budget_recovery_dagster.services.tables import UsageTablesService
from budget_recovery_dagster.settings import Settings

# A tick has ten seconds for everything.
_IN_A_TICK = Timeouts(connect=2, answer=2)


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
    baselines: Baselines
    checks: StoreChecks
    incidents: Incidents
    restore_points: RestorePoints
    audits: RestoreAudits
    resets: Resets
    snapshot_list: SnapshotList
    definitions: BudgetDefinitions
    previews: Previews

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
            baselines=PostgresBaselines(database),
            checks=PostgresStoreChecks(database),
            incidents=PostgresIncidents(database),
            restore_points=PostgresRestorePoints(database),
            audits=PostgresRestoreAudits(database),
            resets=PostgresResets(database),
            snapshot_list=PostgresSnapshotList(database),
            definitions=PostgresBudgets(database),
            previews=PostgresPreviews(database),
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
            incidents=self.incidents,
            checks=self.checks,
            registry=self.registry,
            leases=self.leases,
            clock=self.clock,
            bucket=self.settings.bucket,
            source=self.settings.capture_source,
            retention=self.settings.retention,
        )

    def detection_service(self) -> DetectionService:
        """Return the check of this database's store, with a client of its own.

        Raises:
            SettingsError: BUDGET_RECOVERY_NATS_URL is not set.
        """
        url = self.settings.require_nats_url()
        return DetectionService(
            open_store=lambda: _open_store(url, self.settings, _IN_A_TICK),
            registry=self.registry,
            baselines=self.baselines,
            snapshots=self.snapshots,
            checks=self.checks,
            incidents=self.incidents,
            leases=self.leases,
            clock=self.clock,
            bucket=self.settings.bucket,
        )

    def recovery_service(self) -> RecoveryService:
        """Return the recovery of this database's store.

        Raises:
            SettingsError: BUDGET_RECOVERY_NATS_URL is not set.
        """
        url = self.settings.require_nats_url()
        return RecoveryService(
            open_store=lambda: _open_store(url, self.settings),
            registry=self.registry,
            incidents=self.incidents,
            points=self.restore_points,
            audits=self.audits,
            checks=self.checks,
            leases=self.leases,
            clock=self.clock,
            bucket=self.settings.bucket,
            convergence_timeout=self.settings.convergence_timeout,
        )

    def preview_service(self) -> PreviewService:
        """Return what tells what a restore would do.

        Raises:
            SettingsError: BUDGET_RECOVERY_NATS_URL is not set.
        """
        url = self.settings.require_nats_url()
        return PreviewService(
            open_store=lambda: _open_store(url, self.settings),
            registry=self.registry,
            snapshots=self.snapshots,
            incidents=self.incidents,
            choosing=self._choosing(),
            definitions=self.definitions,
            previews=self.previews,
            clock=self.clock,
            bucket=self.settings.bucket,
        )

    def manual_restore_service(self) -> ManualRestoreService:
        """Return what restores by hand.

        Raises:
            SettingsError: BUDGET_RECOVERY_NATS_URL is not set.
        """
        return ManualRestoreService(self._hand_tools(), self._choosing(), self.previews)

    def resolve_service(self) -> ResolveService:
        """Return what ends an incident by hand.

        Raises:
            SettingsError: BUDGET_RECOVERY_NATS_URL is not set.
        """
        return ResolveService(self._hand_tools())

    def _choosing(self) -> Choosing:
        return Choosing(self.restore_points, self.snapshot_list)

    def _hand_tools(self) -> HandTools:
        url = self.settings.require_nats_url()
        return HandTools(
            open_store=lambda: _open_store(url, self.settings),
            registry=self.registry,
            incidents=self.incidents,
            snapshots=self.snapshots,
            points=self.restore_points,
            audits=self.audits,
            checks=self.checks,
            leases=self.leases,
            clock=self.clock,
            bucket=self.settings.bucket,
            convergence_timeout=self.settings.convergence_timeout,
        )

    def hold_service(self) -> HoldService:
        """Return what holds and releases the restore of the open incident."""
        return HoldService(incidents=self.incidents)

    def reset_service(self) -> ResetService:
        """Return what records deliberate resets; it needs this database only."""
        return ResetService(
            resets=self.resets,
            points=self.restore_points,
            snapshot_list=self.snapshot_list,
            incidents=self.incidents,
            clock=self.clock,
        )

    def status_service(self) -> StatusService:
        """Return the look at how the store stands, which needs this database only."""
        return StatusService(
            incidents=self.incidents,
            checks=self.checks,
            points=self.points,
            leases=self.leases,
            clock=self.clock,
            check_interval=self.settings.check_interval,
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


def _open_store(
    url: str, settings: Settings, timeouts: Timeouts | None = None
) -> AbstractContextManager[NatsUsageStore]:
    return open_usage_store(
        url,
        settings.bucket,
        credentials=settings.nats_creds,
        certificate_authority=settings.nats_ca,
        timeouts=timeouts,
    )
