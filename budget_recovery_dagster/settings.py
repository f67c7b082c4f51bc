"""Settings, read from the environment with the prefix ``BUDGET_RECOVERY_``."""

import os
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from budget_recovery_dagster.domain.snapshots import (
    DEFAULT_RETENTION_DAYS,
    MAX_RETENTION_DAYS,
    CaptureSource,
    RetentionPolicy,
)
from budget_recovery_dagster.errors import SettingsError

PREFIX = "BUDGET_RECOVERY_"


def _absolute(path: Path) -> Path:
    try:
        expanded = path.expanduser()
    except RuntimeError as error:
        raise ValueError("nobody knows that home directory") from error
    if not expanded.is_absolute():
        # Runs have other working directories than whoever sets this.
        raise ValueError("a relative path")
    return expanded


Directory = Annotated[Path, AfterValidator(_absolute)]
_DIRECTORY = Field(description="an absolute path")


class Settings(BaseSettings):
    """All settings; made by ``load_settings``, which names a wrong one."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, env_ignore_empty=True, extra="ignore", frozen=True
    )

    # Secret, like the database's: a URL may carry a password.
    nats_url: SecretStr | None = None
    nats_creds: Path | None = None
    nats_ca: Path | None = None
    # The characters that NATS allows in a bucket's name; `*` or `>` would widen a subject.
    bucket: Annotated[
        str,
        Field(pattern=r"^[A-Za-z0-9_-]+$", max_length=200, description="letters, digits, - and _"),
    ] = "budget-usage"
    postgres_url: SecretStr | None = None
    capture_source: Annotated[CaptureSource, Field(description="'counters' or 'leaderboards'")] = (
        CaptureSource.COUNTERS
    )
    retention_days: Annotated[
        int,
        Field(
            ge=1,
            le=MAX_RETENTION_DAYS,
            description=f"a whole number of days from 1 to {MAX_RETENTION_DAYS}",
        ),
    ] = DEFAULT_RETENTION_DAYS
    check_interval_seconds: Annotated[
        int, Field(ge=30, le=86400, description="a whole number of seconds from 30 to 86400")
    ] = 600
    convergence_timeout_seconds: Annotated[
        int, Field(ge=0, le=3600, description="a whole number of seconds from 0 to 3600")
    ] = 60
    tables_dir: Annotated[Directory | None, _DIRECTORY] = None
    data_dir: Annotated[Directory | None, _DIRECTORY] = None

    @property
    def data_place(self) -> Path:
        """Where data lie unless another place is told: DATA_DIR, or the usual place for them."""
        return self.data_dir or _usual_data_dir()

    @property
    def tables_place(self) -> Path:
        """Where the tables of tenants are written: TABLES_DIR, or beside the other data."""
        return self.tables_dir or self.data_place / "tables"

    @property
    def retention(self) -> RetentionPolicy:
        """How long snapshots are kept."""
        return RetentionPolicy(self.retention_days)

    @property
    def check_interval(self) -> timedelta:
        """How often the store's identity is compared with the accepted one."""
        return timedelta(seconds=self.check_interval_seconds)

    @property
    def convergence_timeout(self) -> timedelta:
        """How long one run of a restore waits for the cluster to settle before it ends."""
        return timedelta(seconds=self.convergence_timeout_seconds)

    def require_nats_url(self) -> str:
        """Return the URL of the NATS servers, with its password.

        Raises:
            SettingsError: it is not set.
        """
        if self.nats_url is None:
            raise _not_set("NATS_URL", "nats://127.0.0.1:4222")
        return self.nats_url.get_secret_value()

    def require_postgres_url(self) -> str:
        """Return the URL of the control-plane database, with its password.

        Raises:
            SettingsError: it is not set.
        """
        if self.postgres_url is None:
            raise _not_set("POSTGRES_URL", "postgresql://user@host/database")
        return self.postgres_url.get_secret_value()


def load_settings() -> Settings:
    """Read the settings from the environment.

    Raises:
        SettingsError: a value is wrong; the message names the setting and never holds a secret.
    """
    try:
        return Settings()
    except ValidationError as error:
        raise next(iter(_complaints(error).values())) from error


def read_settings() -> tuple[Settings, Mapping[str, SettingsError]]:
    """Read the settings as far as they are right, and say of each other one what is wrong.

    By the name of its field; there it has its default, on which nothing may be done in its place.
    """
    try:
        return Settings(), {}
    except ValidationError as error:
        wrong = _complaints(error)
    # What is given here goes before the environment.
    defaults = {field: Settings.model_fields[field].default for field in wrong}
    return Settings(**defaults), wrong


def _complaints(error: ValidationError) -> dict[str, SettingsError]:
    complaints: dict[str, SettingsError] = {}
    for each in error.errors(include_url=False):
        field = str(each["loc"][0])
        name = PREFIX + field.upper()
        complaints[field] = SettingsError(
            f"{name} is {each['input']!r}, which is not {_expected(field, each['msg'])}.",
            f"set {name} to such a value, or unset it to use the default.",
        )
    return complaints


def _usual_data_dir() -> Path:
    if os.geteuid() == 0:
        # Not root's home: PostgreSQL runs as another account and must reach its data.
        return Path("/var/lib/budget-recovery")
    # The specification tells to ignore a relative one.
    state = Path(os.environ.get("XDG_STATE_HOME", ""))
    if state.is_absolute():
        return state / "budget-recovery"
    try:
        return Path.home() / ".local/state/budget-recovery"
    except RuntimeError as error:
        raise _not_set("DATA_DIR", "/var/lib/budget-recovery") from error


def _not_set(name: str, example: str) -> SettingsError:
    return SettingsError(
        f"{PREFIX}{name} is not set.",
        f"set it, for example to {example}, or run `budget-recovery dev`, which brings its own.",
    )


def _expected(field: str, complaint: str) -> str:
    """Say what a setting must be: in its own words or, for want of them, in the library's."""
    return Settings.model_fields[field].description or f"valid: {complaint}"
