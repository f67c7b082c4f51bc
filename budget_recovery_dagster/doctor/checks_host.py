"""Checks of this host: settings, Python, installed packages, the directory of tables."""

import importlib.metadata
import platform
import sys
import tempfile
from collections.abc import Iterator

from packaging.requirements import Requirement

from budget_recovery_dagster.adapters.parquet import file_errors
from budget_recovery_dagster.doctor.model import Check, Installation, Result, fail, joined, ok
from budget_recovery_dagster.settings import PREFIX

_DISTRIBUTION = "budget-recovery"
_OLDEST_PYTHON = (3, 11)
_FIRST_UNSUPPORTED_PYTHON = (3, 14)
_SHOWN_PACKAGES = ("dagster", "dagster-postgres", "psycopg", "nats-py", "SQLAlchemy")


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


HOST_CHECKS = (
    Check("settings", settings),
    Check("python", python),
    Check("packages", packages),
    Check("tables_directory", tables_directory),
)
