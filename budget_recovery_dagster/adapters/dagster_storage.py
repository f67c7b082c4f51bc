"""Where Dagster keeps its runs and events: read from its own settings, and connected to.

Dagster itself would make its tables on the way, so it is not asked.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import sqlalchemy
import yaml  # type: ignore[import-untyped]  # it ships none
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SQLAlchemyError
from sqlalchemy.pool import NullPool

from budget_recovery_dagster.errors import InstallationError
from budget_recovery_dagster.examination_ports import DagsterStorage

_HOME = "DAGSTER_HOME"
_FILE = "dagster.yaml"
_DRIVER = "psycopg2"
_CONNECT_SECONDS = 5
# Before there was one section for all three.
_SINGLE_SECTIONS = ("event_log_storage", "run_storage", "schedule_storage")

_PARTS = ("scheme", "username", "password", "hostname", "port", "db_name")

_USE_POSTGRES = (
    "for production, put this project's dagster.yaml into DAGSTER_HOME and set"
    " BUDGET_RECOVERY_DAGSTER_POSTGRES_URL."
)
_NAME_DRIVER = "write the URL as postgresql+psycopg2://user:password@host/database."


def find_dagster_storage(environment: Mapping[str, str]) -> DagsterStorage:
    """Find out where a Dagster in this environment keeps its runs and events.

    Raises:
        InstallationError: what is set cannot be used; the message holds no password.
    """
    home = environment.get(_HOME)
    if not home:
        return DagsterStorage(
            "not known",
            f"{_HOME} is not set here: dagster dev would keep nothing, webserver and daemon would"
            " not start.",
            f"set {_HOME} to the directory of dagster.yaml, here as for Dagster's processes.",
        )
    directory = Path(home)
    if not directory.is_absolute() or not directory.is_dir():
        raise InstallationError(
            f"{_HOME} is {home}, which is no directory with an absolute path.",
            f"set {_HOME} to the directory of dagster.yaml.",
        )
    config = _read(directory / _FILE)
    kind, settings = _storage_section(config)
    if kind == "sqlite":
        return DagsterStorage(
            f"SQLite in {directory}",
            f"Dagster keeps its runs in SQLite in {directory}, on this host only.",
            _USE_POSTGRES,
        )
    if kind != "postgres":
        return DagsterStorage(
            kind,
            f"Dagster keeps its runs in the storage {kind!r}, with which this project is not"
            " tested.",
            _USE_POSTGRES,
        )
    return DagsterStorage(_connected(_url(settings, environment, directory / _FILE)))


def _read(file: Path) -> Mapping[str, Any]:
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        # What the parser says quotes the file, which may hold a password.
        reason = getattr(error, "strerror", None) or "it is no YAML"
        raise InstallationError(f"{file} cannot be read: {reason}.", "put it right.") from None
    return content if isinstance(content, dict) else {}


def _storage_section(config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Return what kind of storage is set, and its settings."""
    section = config.get("storage")
    if isinstance(section, dict) and section:
        kind, settings = next(iter(section.items()))
        return str(kind), settings if isinstance(settings, dict) else {}
    for name in _SINGLE_SECTIONS:
        single = config.get(name)
        if isinstance(single, dict):
            module, settings = str(single.get("module", "")), single.get("config")
            kind = "postgres" if module.startswith("dagster_postgres") else module
            return kind, settings if isinstance(settings, dict) else {}
    return "sqlite", {}


def _url(settings: Mapping[str, Any], environment: Mapping[str, str], file: Path) -> URL:
    try:
        given = _value(settings.get("postgres_url"), environment, file)
        if given:
            return make_url(given)
        parts = settings["postgres_db"]
        told = {name: _value(parts.get(name), environment, file) for name in _PARTS}
        return URL.create(
            told.get("scheme") or "postgresql",
            told.get("username") or None,
            told.get("password") or None,
            told.get("hostname") or None,
            int(told.get("port") or 5432),
            told.get("db_name") or None,
            query={name: str(value) for name, value in (parts.get("params") or {}).items()},
        )
    except (ArgumentError, KeyError, AttributeError, TypeError, ValueError):
        raise InstallationError(
            f"{file} names no URL for Dagster's storage that can be read.", _NAME_DRIVER
        ) from None


def _value(given: Any, environment: Mapping[str, str], file: Path) -> str:
    """Read a value of Dagster's settings, which may name a variable of the environment."""
    if not isinstance(given, dict):
        return "" if given is None else str(given)
    name = str(given.get("env"))
    if not environment.get(name):
        raise InstallationError(
            f"{name}, by which {file} names Dagster's storage, is not set.",
            f"set {name} to a URL such as postgresql+psycopg2://user@host/dagster.",
        )
    return environment[name]


def _connected(url: URL) -> str:
    """Connect, and say where that is."""
    try:
        driver = url.get_driver_name()
    except NoSuchModuleError:
        driver = url.drivername
    if url.get_backend_name() != "postgresql" or driver != _DRIVER:
        raise InstallationError(
            f"Dagster's storage is reached by the driver {driver}, on which Dagster's event storage"
            f" fails: its URL begins with {url.drivername}://.",
            _NAME_DRIVER,
        )
    where = f"PostgreSQL, {url.set(password=None, query={}).render_as_string()}"
    try:
        engine = sqlalchemy.create_engine(
            url, poolclass=NullPool, connect_args={"connect_timeout": _CONNECT_SECONDS}
        )
        with engine.connect():
            return where
    except ModuleNotFoundError as error:
        raise InstallationError(
            f"The driver of Dagster's storage is not installed: {error.name}.",
            "pip install psycopg2-binary, into the environment of Dagster.",
        ) from error
    except SQLAlchemyError as error:
        said = " ".join(str(getattr(error, "orig", None) or error).split()).rstrip(".")
        raise InstallationError(
            f"Dagster's storage cannot be reached: {said}.",
            "check that this PostgreSQL runs, and that the URL for Dagster's storage is right.",
        ) from error
