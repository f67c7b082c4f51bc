"""What is installed on this host, and what its settings say of it."""

import importlib.metadata
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement

from budget_recovery_dagster.adapters.parquet import told_of
from budget_recovery_dagster.errors import InstallationError
from budget_recovery_dagster.examination_ports import DagsterStorage

_DISTRIBUTION = "budget-recovery"
_OLDEST_PYTHON = (3, 11)
_FIRST_PYTHON_TOO_NEW = (3, 14)
_SHOWN = ("dagster", "dagster-postgres", "psycopg", "nats-py", "SQLAlchemy")


@dataclass(frozen=True, slots=True)
class HostInstallation:
    """The port, on the host that looks.

    ``find_tables_place`` tells where the tables lie, and raises SettingsError where the setting is
    wrong; ``find_dagster_storage`` as ``Installation.dagster_storage``.
    """

    find_tables_place: Callable[[], Path]
    find_dagster_storage: Callable[[], DagsterStorage | None]

    def python(self) -> str:
        """Return the version of Python."""
        if not _OLDEST_PYTHON <= sys.version_info[:2] < _FIRST_PYTHON_TOO_NEW:
            raise InstallationError(
                f"This is Python {platform.python_version()}.", "use Python 3.11, 3.12 or 3.13."
            )
        return platform.python_version()

    def packages(self) -> str:
        """Say in which versions the most important packages are installed."""
        complaints = list(_complaints(_DISTRIBUTION))
        if complaints:
            raise InstallationError(
                f"The installed packages do not fit: {'; '.join(complaints)}.",
                "install budget-recovery anew, into an environment of its own.",
            )
        return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in _SHOWN)

    def tables_place(self) -> Path:
        """Return the directory of the tables, in which files can be made."""
        place = self.find_tables_place()
        # Where it is missing it is made, by the first run that writes a table.
        nearest = next(each for each in (place, *place.parents) if each.exists())
        with told_of(place), tempfile.TemporaryFile(dir=nearest):
            return place

    def dagster_storage(self) -> DagsterStorage | None:
        """Find out where Dagster keeps its runs and events, and connect to it."""
        return self.find_dagster_storage()


def _complaints(distribution: str) -> Iterator[str]:
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
