"""Builds the adapters from the settings: the only place where services meet servers."""

from collections.abc import Iterator
from contextlib import contextmanager

from budget_recovery_dagster.adapters.nats.connection import Timeouts
from budget_recovery_dagster.adapters.nats.store import open_usage_store
from budget_recovery_dagster.adapters.parquet import ParquetTables
from budget_recovery_dagster.adapters.postgres.control_plane import control_plane_on
from budget_recovery_dagster.adapters.postgres.database import Database
from budget_recovery_dagster.ports import ControlPlane, OpenStore, UsageTables
from budget_recovery_dagster.settings import Settings

# A sensor's tick has ten seconds for everything.
_IN_A_TICK = Timeouts(connect=2, answer=2)


@contextmanager
def opened_control_plane(settings: Settings) -> Iterator[ControlPlane]:
    """Open the control-plane database.

    Raises:
        SettingsError: BUDGET_RECOVERY_POSTGRES_URL is not set.
        DatabaseError: the database cannot be reached, or its schema is not current.
    """
    with Database(settings.require_postgres_url()) as database:
        yield control_plane_on(database, settings.bucket)


def store_opener(settings: Settings, timeouts: Timeouts | None = None) -> OpenStore:
    """Return what opens the usage store.

    Raises:
        SettingsError: BUDGET_RECOVERY_NATS_URL is not set.
    """
    url = settings.require_nats_url()
    return lambda: open_usage_store(
        url,
        settings.bucket,
        credentials=settings.nats_creds,
        certificate_authority=settings.nats_ca,
        timeouts=timeouts,
    )


def store_opener_in_a_tick(settings: Settings) -> OpenStore:
    """Return what opens the usage store within the short time of a sensor's tick.

    Raises:
        SettingsError: BUDGET_RECOVERY_NATS_URL is not set.
    """
    return store_opener(settings, _IN_A_TICK)


def usage_tables(settings: Settings) -> UsageTables:
    """Return the directory of tables that the settings name."""
    return ParquetTables(settings.tables_place)
