"""Checks of this host: settings, Python, packages, the directory of tables, Dagster's storage.

Dagster's own code would create its tables on connecting, so it is not used.
"""

import importlib.metadata
import platform
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml  # type: ignore[import-untyped]  # it ships none
from packaging.requirements import Requirement

from budget_recovery_dagster.adapters.parquet import file_errors
from budget_recovery_dagster.doctor.model import (
    Check,
    CheckFailed,
    Installation,
    Result,
    fail,
    joined,
    ok,
    skipped,
    warn,
)
from budget_recovery_dagster.settings import PREFIX

if TYPE_CHECKING:
    from sqlalchemy.engine import URL

_DISTRIBUTION = "budget-recovery"
_OLDEST_PYTHON = (3, 11)
_FIRST_UNSUPPORTED_PYTHON = (3, 14)
_SHOWN_PACKAGES = ("dagster", "dagster-postgres", "psycopg", "nats-py", "SQLAlchemy")
_HOME = "DAGSTER_HOME"
_FILE = "dagster.yaml"
_DRIVER = "psycopg2"
_CONNECT_SECONDS = 5
# Older configurations have three sections in place of `storage`.
_SINGLE_SECTIONS = ("event_log_storage", "run_storage", "schedule_storage")
_POOLS = frozenset({"usage_store", "usage_tables"})
# A capture, tables, recovery points and a manual job can be at work, each with a slot.
_SLOTS_NEEDED = 5
_DEFAULT_SLOTS = 10
_URL_PARTS = ("scheme", "username", "password", "hostname", "port", "db_name")
_USE_POSTGRES = (
    "for production, copy this project's dagster.yaml to DAGSTER_HOME and set"
    " BUDGET_RECOVERY_DAGSTER_POSTGRES_URL."
)
_NAME_DRIVER = "write the URL as postgresql+psycopg2://user:password@host/database."


def settings(installation: Installation) -> Result:
    """Check that every setting is valid; name each that is not."""
    errors = installation.invalid.values()
    if not errors:
        return ok("all settings are valid")
    return fail(
        "invalid_settings",
        " ".join(error.message for error in errors),
        joined(error.hint for error in errors),
        settings=[f"{PREFIX}{field.upper()}" for field in installation.invalid],
    )


def python(_: Installation) -> Result:
    """Check the version of Python."""
    version = platform.python_version()
    if not _OLDEST_PYTHON <= sys.version_info[:2] < _FIRST_UNSUPPORTED_PYTHON:
        return fail(
            "unsupported_version",
            f"Python {version} is not supported.",
            "use Python 3.11, 3.12 or 3.13.",
            version=version,
        )
    return ok(version, version=version)


def packages(_: Installation) -> Result:
    """Check that the installed packages are those that budget-recovery requires."""
    mismatches = list(_mismatches(_DISTRIBUTION))
    if mismatches:
        return fail(
            "package_mismatch",
            f"Installed packages do not match the requirements: {'; '.join(mismatches)}.",
            "reinstall budget-recovery in a virtual environment of its own.",
            mismatches=mismatches,
        )
    versions = {name: importlib.metadata.version(name) for name in _SHOWN_PACKAGES}
    return ok(", ".join(map(" ".join, versions.items())), versions=versions)


def tables_directory(installation: Installation) -> Result:
    """Check that files can be created in the directory of tables, and leave none."""
    if "tables_dir" in installation.invalid:
        raise installation.invalid["tables_dir"]
    if "data_dir" in installation.invalid and installation.settings.tables_dir is None:
        raise installation.invalid["data_dir"]
    directory = installation.settings.tables_place
    # The first run that writes a table creates the missing directories.
    nearest = next(each for each in (directory, *directory.parents) if each.exists())
    with file_errors(directory), tempfile.TemporaryFile(dir=nearest):
        return ok(str(directory), directory=str(directory))


def _mismatches(distribution: str) -> Iterator[str]:
    """Compare what is installed with what a distribution requires without extras."""
    for text in importlib.metadata.requires(distribution) or ():
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            installed = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            yield f"{requirement.name} is missing"
            continue
        if not requirement.specifier.contains(installed, prereleases=True):
            yield f"{requirement.name} is {installed}, not {requirement.specifier}"


def dagster_storage(installation: Installation) -> Result:
    """Check where Dagster stores runs and events, and connect to it. No password is shown."""
    environment = installation.dagster_environment
    if environment is None:
        return skipped("managed_by_dev", "The running `budget-recovery dev` manages its storage.")
    home = environment.get(_HOME)
    if not home:
        return warn(
            "dagster_home_not_set",
            f"{_HOME} is not set. `dagster dev` would keep no data; webserver and daemon would not"
            " start.",
            f"set {_HOME} to the directory of dagster.yaml, here and for Dagster's processes.",
        )
    directory = Path(home)
    if not directory.is_absolute() or not directory.is_dir():
        raise CheckFailed(
            "dagster_home_invalid",
            f"{_HOME} is {home}, which is not the absolute path of a directory.",
            f"set {_HOME} to the directory of dagster.yaml.",
            directory=home,
        )
    kind, settings = _storage_section(_read(directory / _FILE))
    if kind == "sqlite":
        return warn(
            "sqlite_storage",
            f"Dagster stores runs in SQLite in {directory}, on this host only.",
            _USE_POSTGRES,
            storage=kind,
        )
    if kind != "postgres":
        return warn(
            "untested_storage",
            f"Dagster stores runs in the storage {kind!r}, which is not tested with this project.",
            _USE_POSTGRES,
            storage=kind,
        )
    where = _connect(_url(settings, environment, directory / _FILE))
    return ok(f"PostgreSQL, {where}", storage=kind, url=where)


def dagster_slots(installation: Installation) -> Result:
    """Check that Dagster has run slots for a restore, and limits the pools of this project."""
    environment = installation.dagster_environment or {}
    home = environment.get(_HOME)
    if not home:
        return skipped("dagster_home_not_set", f"{_HOME} is not set.")
    file = Path(home) / _FILE
    config = _read(file)
    slots = _run_slots(config)
    if 0 <= slots < _SLOTS_NEEDED:
        return warn(
            "few_run_slots",
            f"Dagster starts at most {slots} runs at once. With a capture, tables, recovery points"
            " and a manual job at work, a restore would wait.",
            f"set concurrency: runs: max_concurrent_runs to {_SLOTS_NEEDED} or more in {file}.",
            run_slots=slots,
        )
    unlimited = sorted(_POOLS - _limited_pools(config, environment, file))
    if unlimited:
        return warn(
            "pools_not_limited",
            f"Dagster does not limit the pools {', '.join(unlimited)}. So captures are not kept in"
            " order, and runs of tables take run slots while they wait for each other.",
            "; ".join(f"run: dagster instance concurrency set {pool} 1" for pool in unlimited)
            + f"; or set concurrency: pools: default_limit to 1 in {file}.",
            pools=unlimited,
        )
    return ok(f"{slots if slots >= 0 else 'any number of'} runs at once", run_slots=slots)


def _run_slots(config: Mapping[str, Any]) -> int:
    """Return how many runs Dagster starts at once; -1: any number."""
    places = (
        ("concurrency", "runs"),
        ("run_queue",),
        ("run_coordinator", "config"),
    )
    for place in places:
        slots = _section(config, *place).get("max_concurrent_runs")
        if isinstance(slots, int):
            return slots
    return _DEFAULT_SLOTS


def _limited_pools(
    config: Mapping[str, Any], environment: Mapping[str, str], file: Path
) -> frozenset[str]:
    """Return those of this project's pools in which Dagster starts one run at a time."""
    default = _section(config, "concurrency", "pools").get("default_limit")
    by_default = _POOLS if default == 1 else frozenset[str]()
    kind, settings = _storage_section(config)
    if kind != "postgres":
        return by_default
    import sqlalchemy  # noqa: PLC0415
    from sqlalchemy.exc import ProgrammingError  # noqa: PLC0415
    from sqlalchemy.pool import NullPool  # noqa: PLC0415

    # A limit that is set for a pool overrides the default.
    limits = 'select concurrency_key, "limit" from concurrency_limits'
    engine = sqlalchemy.create_engine(_url(settings, environment, file), poolclass=NullPool)
    try:
        with engine.connect() as connection:
            rows = connection.execute(sqlalchemy.text(limits))
            explicit = {row.concurrency_key: row.limit for row in rows}
            return frozenset(pool for pool in _POOLS if explicit.get(pool, default) == 1)
    except ProgrammingError:
        # Dagster has not created its tables yet.
        return by_default


def _section(config: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
    found: Any = config
    for name in names:
        found = found.get(name) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else {}


def _read(file: Path) -> Mapping[str, Any]:
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        # The parser's message quotes the file, which may hold a password.
        reason = getattr(error, "strerror", None) or "it is not valid YAML"
        raise CheckFailed(
            "dagster_yaml_unreadable",
            f"{file} cannot be read: {reason}.",
            "correct the file.",
            file=str(file),
        ) from None
    return content if isinstance(content, dict) else {}


def _storage_section(config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Return the kind of the configured storage, and its settings."""
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


def _url(settings: Mapping[str, Any], environment: Mapping[str, str], file: Path) -> "URL":
    # Only here and where it connects: other commands start without SQLAlchemy.
    from sqlalchemy.engine import URL, make_url  # noqa: PLC0415
    from sqlalchemy.exc import ArgumentError  # noqa: PLC0415

    try:
        url = _value(settings.get("postgres_url"), environment, file)
        if url:
            return make_url(url)
        given = settings["postgres_db"]
        parts = {name: _value(given.get(name), environment, file) for name in _URL_PARTS}
        return URL.create(
            parts["scheme"] or "postgresql",
            parts["username"] or None,
            parts["password"] or None,
            parts["hostname"] or None,
            int(parts["port"] or 5432),
            parts["db_name"] or None,
            query={name: str(value) for name, value in (given.get("params") or {}).items()},
        )
    except (ArgumentError, KeyError, AttributeError, TypeError, ValueError):
        raise CheckFailed(
            "storage_url_invalid",
            f"{file} has no readable URL for Dagster's storage.",
            _NAME_DRIVER,
            file=str(file),
        ) from None


def _value(given: Any, environment: Mapping[str, str], file: Path) -> str:
    """Read a value of Dagster's settings, which may name an environment variable."""
    if not isinstance(given, dict):
        return "" if given is None else str(given)
    name = str(given.get("env"))
    if not environment.get(name):
        raise CheckFailed(
            "storage_variable_not_set",
            f"{name}, which {file} uses for Dagster's storage, is not set.",
            f"set {name} to a URL such as postgresql+psycopg2://user@host/dagster.",
            variable=name,
        )
    return environment[name]


def _connect(url: "URL") -> str:
    """Connect once; return the URL without password and parameters."""
    import sqlalchemy  # noqa: PLC0415
    from sqlalchemy.exc import NoSuchModuleError, SQLAlchemyError  # noqa: PLC0415
    from sqlalchemy.pool import NullPool  # noqa: PLC0415

    where = url.set(password=None, query={}).render_as_string()
    try:
        driver = url.get_driver_name()
    except NoSuchModuleError:
        driver = url.drivername
    if url.get_backend_name() != "postgresql" or driver != _DRIVER:
        raise CheckFailed(
            "storage_driver_unsupported",
            f"The URL of Dagster's storage begins with {url.drivername}://, which selects the"
            f" driver {driver}. Dagster's event storage fails with it.",
            _NAME_DRIVER,
            url=where,
            driver=driver,
        )
    try:
        engine = sqlalchemy.create_engine(
            url, poolclass=NullPool, connect_args={"connect_timeout": _CONNECT_SECONDS}
        )
        with engine.connect():
            return where
    except ModuleNotFoundError as error:
        raise CheckFailed(
            "storage_driver_missing",
            f"The driver of Dagster's storage is not installed: {error.name}.",
            "pip install psycopg2-binary into Dagster's environment.",
            url=where,
        ) from error
    except SQLAlchemyError as error:
        reason = " ".join(str(getattr(error, "orig", None) or error).split()).rstrip(".")
        raise CheckFailed(
            "storage_unreachable",
            f"Dagster's storage cannot be reached: {reason}.",
            "check that this PostgreSQL runs and that the URL of Dagster's storage is correct.",
            url=where,
        ) from error


INSTALLATION_CHECKS = (
    Check("settings", settings),
    Check("python", python),
    Check("packages", packages),
    Check("tables_directory", tables_directory),
    Check("dagster_storage", dagster_storage),
    Check("dagster_slots", dagster_slots, needs=("dagster_storage",)),
)
