"""Which control-plane database, and which store, a command works on."""

from pathlib import Path

from pydantic import SecretStr

from budget_recovery_dagster.errors import SettingsError
from budget_recovery_dagster.sandbox.running_dev import find_running_dev
from budget_recovery_dagster.settings import PREFIX, Settings, load_settings


def settings_with_database(data_dir: Path | None) -> Settings:
    """Return the settings, with database and check interval of the running dev where none is set.

    Raises:
        SettingsError: a setting is wrong, or names no database where one is needed.
        NoRunningDevError: none is set, and no dev runs there.
    """
    settings = load_settings()
    if settings.postgres_url is not None:
        return settings
    running = find_running_dev(data_dir or settings.data_place)
    if running.postgres_url is None:
        raise SettingsError(
            f"The running dev uses the database that its {PREFIX}POSTGRES_URL names.",
            f"set {PREFIX}POSTGRES_URL here, too.",
        )
    return settings.model_copy(
        update={
            "postgres_url": SecretStr(running.postgres_url),
            "check_interval_seconds": running.check_interval_seconds,
        }
    )


def settings_with_servers(data_dir: Path | None) -> Settings:
    """Return the settings, with both servers of the running dev where none is set.

    Raises:
        SettingsError: a setting is wrong, or names no server where one is needed.
        NoRunningDevError: none is set, and no dev runs there.
    """
    settings = settings_with_database(data_dir)
    if settings.nats_url is not None:
        return settings
    running = find_running_dev(data_dir or settings.data_place)
    if running.nats_url is None:
        raise SettingsError(
            f"The running dev uses the store that its {PREFIX}NATS_URL names.",
            f"set {PREFIX}NATS_URL here, too.",
        )
    told = {"nats_url": SecretStr(running.nats_url), "bucket": running.bucket}
    return settings.model_copy(update=told)
