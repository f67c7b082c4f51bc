"""Builds the adapters from the settings: the only place where services meet servers."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from budget_recovery_dagster.adapters.nats.connection import Timeouts
from budget_recovery_dagster.adapters.nats.store import open_usage_store
from budget_recovery_dagster.adapters.parquet import ParquetTables
from budget_recovery_dagster.adapters.postgres.database import Database
from budget_recovery_dagster.adapters.postgres.falls import PostgresFalls
from budget_recovery_dagster.adapters.postgres.incidents import PostgresIncidents
from budget_recovery_dagster.adapters.postgres.leases import PostgresLeases
from budget_recovery_dagster.adapters.postgres.plans import (
    PostgresBudgets,
    PostgresPreviews,
    PostgresRestoreAudits,
)
from budget_recovery_dagster.adapters.postgres.recovery_point import PostgresRecoveryPoints
from budget_recovery_dagster.adapters.postgres.reports import PostgresCaptureReports
from budget_recovery_dagster.adapters.postgres.resets import PostgresResets
from budget_recovery_dagster.adapters.postgres.schema import Migration, OnWait, migrate
from budget_recovery_dagster.adapters.postgres.snapshots import PostgresSnapshots
from budget_recovery_dagster.adapters.postgres.store import PostgresStoreRegistry
from budget_recovery_dagster.ports import ControlPlane, OpenStore, UsageTables
from budget_recovery_dagster.settings import Settings

# A sensor's tick has ten seconds for everything, however large the store is.
_SECONDS_IN_A_TICK = 2


def migrate_schema(settings: Settings, *, on_wait: OnWait) -> Migration:
    """Create or upgrade the schema of the control-plane database; it is safe to repeat.

    ``on_wait`` receives sentences while it waits for another process.

    Raises:
        SettingsError: BUDGET_RECOVERY_POSTGRES_URL is not set.
        DatabaseError: the database cannot be reached, or the schema cannot be migrated.
    """
    return migrate(settings.require_postgres_url(), on_wait=on_wait)


@contextmanager
def opened_control_plane(settings: Settings) -> Iterator[ControlPlane]:
    """Open the control-plane database.

    Raises:
        SettingsError: BUDGET_RECOVERY_POSTGRES_URL is not set.
        DatabaseError: the database cannot be reached, or its schema is not current.
    """
    with Database(settings.require_postgres_url()) as database:
        yield control_plane_on(database, settings.bucket)


def control_plane_on(database: Database, bucket: str) -> ControlPlane:
    """Return the control plane of the store in ``bucket`` on an opened database."""
    return ControlPlane(
        clock=database,
        registry=PostgresStoreRegistry(database, bucket),
        leases=PostgresLeases(database),
        snapshots=PostgresSnapshots(database),
        reports=PostgresCaptureReports(database),
        points=PostgresRecoveryPoints(database),
        falls=PostgresFalls(database),
        incidents=PostgresIncidents(database),
        audits=PostgresRestoreAudits(database),
        resets=PostgresResets(database),
        budgets=PostgresBudgets(database),
        previews=PostgresPreviews(database),
    )


def store_opener(settings: Settings, *, in_a_tick: bool = False) -> OpenStore:
    """Return what opens the usage store; ``in_a_tick``: within the short time of a sensor's tick.

    Raises:
        SettingsError: BUDGET_RECOVERY_NATS_URL is not set.
    """
    url = settings.require_nats_url()
    timeouts = Timeouts(
        answer=settings.answer_timeout_seconds, reading=settings.read_timeout_seconds
    )
    if in_a_tick:
        answer = min(timeouts.answer, _SECONDS_IN_A_TICK)
        timeouts = replace(timeouts, connect=_SECONDS_IN_A_TICK, answer=answer)
    return lambda: open_usage_store(
        url,
        settings.bucket,
        credentials=settings.nats_creds,
        certificate_authority=settings.nats_ca,
        timeouts=timeouts,
    )


def usage_tables(settings: Settings) -> UsageTables:
    """Return the directory of tables that the settings name."""
    return ParquetTables(settings.tables_place)
