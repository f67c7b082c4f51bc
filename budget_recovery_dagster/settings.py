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
        raise ValueError("unknown home directory") from error
    if not expanded.is_absolute():
        # Dagster runs do not share the working directory of the shell that sets this.
        raise ValueError("a relative path")
    return expanded


def _encodable(url: SecretStr) -> SecretStr:
    # Bytes of the environment that are not UTF-8 become surrogates, which no server accepts.
    try:
        url.get_secret_value().encode()
    except UnicodeEncodeError:
        # The original error quotes the URL, which may contain a password.
        raise ValueError("not valid UTF-8") from None
    return url


Directory = Annotated[Path, AfterValidator(_absolute)]
_DIRECTORY = Field(description="an absolute path")
# Secret, because a URL may contain a password; messages do not quote it.
Url = Annotated[SecretStr, AfterValidator(_encodable)]
SERVER_URLS = ("nats_url", "postgres_url")
"""The fields that name the servers."""


class Settings(BaseSettings):
    """All settings, created by ``load_settings``."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        env_ignore_empty=True,
        extra="ignore",
        frozen=True,
        # A traceback must not quote a password.
        hide_input_in_errors=True,
    )

    nats_url: Url | None = None
    nats_creds: Path | None = None
    nats_ca: Path | None = None
    # The characters that NATS allows; in a subject, `*` or `>` would match other buckets.
    bucket: Annotated[
        str,
        Field(pattern=r"^[A-Za-z0-9_-]+$", max_length=200, description="letters, digits, - and _"),
    ] = "budget-usage"
    postgres_url: Url | None = None
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
    answer_timeout_seconds: Annotated[
        int, Field(ge=1, le=300, description="a whole number of seconds from 1 to 300")
    ] = 5
    read_timeout_seconds: Annotated[
        int, Field(ge=10, le=3600, description="a whole number of seconds from 10 to 3600")
    ] = 300
    tables_dir: Annotated[Directory | None, _DIRECTORY] = None
    data_dir: Annotated[Directory | None, _DIRECTORY] = None

    @property
    def data_place(self) -> Path:
        """The directory of all local data: DATA_DIR, or the platform's default directory."""
        return self.data_dir or _default_data_dir()

    @property
    def tables_place(self) -> Path:
        """The directory of the tenants' tables: TABLES_DIR, or ``tables`` in the data directory."""
        return self.tables_dir or self.data_place / "tables"

    @property
    def retention(self) -> RetentionPolicy:
        """How long snapshots are retained."""
        return RetentionPolicy(self.retention_days)

    @property
    def check_interval(self) -> timedelta:
        """How often the store's identity is checked against the baseline."""
        return timedelta(seconds=self.check_interval_seconds)

    @property
    def convergence_timeout(self) -> timedelta:
        """How long one run of a restore waits for the cluster to converge before it ends."""
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
        SettingsError: a value is invalid; the message names the setting and contains no secret.
    """
    try:
        return Settings()
    except ValidationError as error:
        raise next(iter(_errors_by_field(error).values())) from error


def read_settings() -> tuple[Settings, Mapping[str, SettingsError]]:
    """Return the valid settings, and the error of each invalid one by field name.

    In the returned settings an invalid one has its default, which must not be used in its place.
    """
    try:
        return Settings(), {}
    except ValidationError as error:
        invalid = _errors_by_field(error)
    # Arguments override the environment.
    defaults = {field: Settings.model_fields[field].default for field in invalid}
    return Settings(**defaults), invalid


def _errors_by_field(error: ValidationError) -> dict[str, SettingsError]:
    by_field: dict[str, SettingsError] = {}
    for detail in error.errors(include_url=False):
        field = str(detail["loc"][0])
        name = PREFIX + field.upper()
        if field in SERVER_URLS:
            reason = detail["ctx"]["error"]
            by_field[field] = SettingsError(f"{name} is {reason}.", f"set {name} to a valid URL.")
            continue
        expected = Settings.model_fields[field].description or f"valid: {detail['msg']}"
        by_field[field] = SettingsError(
            f"{name} is {detail['input']!r}, which is not {expected}.",
            f"set {name} to a valid value, or unset it to use the default.",
        )
    return by_field


def _default_data_dir() -> Path:
    if os.geteuid() == 0:
        # Not root's home directory, which the account that runs PostgreSQL cannot read.
        return Path("/var/lib/budget-recovery")
    # The XDG specification requires ignoring a relative path.
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
        f"set it, for example to {example}, or run `budget-recovery dev`, which sets it.",
    )
