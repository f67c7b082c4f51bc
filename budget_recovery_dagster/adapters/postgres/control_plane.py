"""The control plane of one store in PostgreSQL: every port over one opened database."""

from budget_recovery_dagster.adapters.postgres.audits import PostgresRestoreAudits
from budget_recovery_dagster.adapters.postgres.database import Database
from budget_recovery_dagster.adapters.postgres.incidents import PostgresIncidents
from budget_recovery_dagster.adapters.postgres.leases import PostgresLeases
from budget_recovery_dagster.adapters.postgres.previews import PostgresBudgets, PostgresPreviews
from budget_recovery_dagster.adapters.postgres.records import PostgresRetainedSnapshots
from budget_recovery_dagster.adapters.postgres.recovery_point import PostgresRecoveryPoints
from budget_recovery_dagster.adapters.postgres.resets import PostgresResets
from budget_recovery_dagster.adapters.postgres.snapshots import (
    PostgresSnapshotList,
    PostgresSnapshots,
)
from budget_recovery_dagster.adapters.postgres.store import PostgresStoreRegistry
from budget_recovery_dagster.ports import ControlPlane


def control_plane_on(database: Database, bucket: str) -> ControlPlane:
    """Return the control plane of the store in ``bucket`` on an opened database."""
    snapshots = PostgresSnapshots(database)
    return ControlPlane(
        clock=database,
        registry=PostgresStoreRegistry(database, bucket),
        leases=PostgresLeases(database),
        snapshots=snapshots,
        reports=snapshots,
        snapshot_list=PostgresSnapshotList(database),
        retained=PostgresRetainedSnapshots(database),
        points=PostgresRecoveryPoints(database),
        incidents=PostgresIncidents(database),
        audits=PostgresRestoreAudits(database),
        resets=PostgresResets(database),
        budgets=PostgresBudgets(database),
        previews=PostgresPreviews(database),
    )
