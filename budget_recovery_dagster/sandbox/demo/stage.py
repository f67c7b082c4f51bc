"""The servers of the story, in a directory of their own that nothing of is left."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from budget_recovery_dagster.adapters.postgres.database import Database, migrate
from budget_recovery_dagster.adapters.postgres.previews import PostgresBudgets
from budget_recovery_dagster.sandbox.accounts import ROOT
from budget_recovery_dagster.sandbox.child_process import OwnedProcess
from budget_recovery_dagster.sandbox.demo.cast import BUDGETS
from budget_recovery_dagster.sandbox.demo.gateway import DemoGateway, running_gateway
from budget_recovery_dagster.sandbox.errors import DemoError, UnusableDataError
from budget_recovery_dagster.sandbox.gateway.lifecycle import Place
from budget_recovery_dagster.sandbox.nats_server import NatsServer
from budget_recovery_dagster.sandbox.postgres_server import PostgresServer
from budget_recovery_dagster.sandbox.stack import CONTROL_DATABASE, Step, create_missing_databases
from budget_recovery_dagster.settings import Settings

_BUCKET = str(Settings.model_fields["bucket"].default)


@dataclass(frozen=True, slots=True)
class Stage:
    """What runs, and where."""

    postgres: PostgresServer
    nats: NatsServer
    gateway: DemoGateway

    @property
    def database_url(self) -> str:
        """The URL of the control-plane database."""
        return self.postgres.url(CONTROL_DATABASE)

    def ended(self) -> OwnedProcess | None:
        """Return a server that has ended, if one has."""
        servers = (self.postgres.process, self.nats.process)
        return next((each for each in servers if each.exit_code is not None), None)


@contextmanager
def data_dir(*, keep: bool) -> Iterator[Path]:
    """Make a new directory among the temporary ones, removed in the end unless it is to be kept.

    Raises:
        UnusableDataError: it cannot be made.
        DemoError: it cannot be removed.
    """
    try:
        directory = Path(tempfile.mkdtemp(prefix="budget-recovery-demo-"))
    except OSError as error:
        raise UnusableDataError(
            f"No temporary directory can be made: {error.strerror}.", "set TMPDIR to another place."
        ) from error
    try:
        if os.geteuid() == ROOT:
            # The account of the database must pass through.
            directory.chmod(0o711)
        yield directory
    finally:
        if not keep:
            _remove(directory)


def _remove(directory: Path) -> None:
    try:
        shutil.rmtree(directory)
    except OSError as error:
        raise DemoError(
            f"The directory {directory} could not be removed: {error.strerror}.", "remove it."
        ) from error


def _start(postgres: PostgresServer) -> None:
    try:
        postgres.start()
    except UnusableDataError as error:
        raise UnusableDataError(
            error.message, "set TMPDIR to a directory that every account can reach, such as /tmp."
        ) from error


@contextmanager
def running_stage(directory: Path, step: Step) -> Iterator[Stage]:
    """Run PostgreSQL, NATS and the gateway on an empty directory.

    Raises:
        SandboxError: something could not be started; what had been is stopped.
    """
    with ExitStack() as exits:
        postgres = PostgresServer(directory / "postgres")
        exits.callback(postgres.stop)
        with step("PostgreSQL"):
            _start(postgres)
            create_missing_databases(postgres, CONTROL_DATABASE)
        url = postgres.url(CONTROL_DATABASE)
        with step("database schema"):
            migrate(url)
        nats = NatsServer(directory / "nats")
        exits.callback(nats.stop)
        with step("NATS"):
            nats.start()
        with step("simulated gateway"):
            with Database(url) as database:
                PostgresBudgets(database).define(BUDGETS.definitions)
            gateway = exits.enter_context(
                running_gateway(Place(nats.url, _BUCKET), directory / "gateway.ledger")
            )
        yield Stage(postgres, nats, gateway)
