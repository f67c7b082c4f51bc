"""Which adapters stand behind the ports of an examination, which needs nothing to be there."""

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from budget_recovery_dagster.adapters.dagster_storage import find_dagster_storage
from budget_recovery_dagster.adapters.installation import HostInstallation
from budget_recovery_dagster.adapters.nats_examination import open_examination as examine_store
from budget_recovery_dagster.adapters.postgres_examination import (
    open_examination as examine_database,
)
from budget_recovery_dagster.errors import SettingsError
from budget_recovery_dagster.services.doctor import DoctorService
from budget_recovery_dagster.settings import Settings


def doctor_service(
    settings: Settings,
    wrong: Mapping[str, SettingsError],
    dagster_environment: Mapping[str, str] | None,
) -> DoctorService:
    """Return the examination of all that these settings name, but for the ``wrong`` fields.

    What cannot be opened is what it finds. ``dagster_environment`` is that of Dagster's processes;
    None: they are those of a running dev.
    """
    return DoctorService(
        installation=HostInstallation(
            find_tables_place=lambda: _tables_place(settings, wrong),
            find_dagster_storage=lambda: (
                None if dagster_environment is None else find_dagster_storage(dagster_environment)
            ),
        ),
        open_database=lambda: examine_database(settings.require_postgres_url()),
        open_store=lambda: examine_store(
            settings.require_nats_url(),
            credentials=settings.nats_creds,
            certificate_authority=settings.nats_ca,
        ),
        wrong_settings=tuple(wrong.values()),
        bucket=None if "bucket" in wrong else settings.bucket,
        now=lambda: datetime.now(UTC),
    )


def _tables_place(settings: Settings, wrong: Mapping[str, SettingsError]) -> Path:
    if "tables_dir" in wrong:
        raise wrong["tables_dir"]
    if "data_dir" in wrong and settings.tables_dir is None:
        raise wrong["data_dir"]
    return settings.tables_place
