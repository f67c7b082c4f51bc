"""All that ``budget-recovery dev`` runs, started in order and stopped in the opposite one."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psycopg
from psycopg import sql

from budget_recovery_dagster.adapters.postgres.database import Database, migrate
from budget_recovery_dagster.adapters.postgres.previews import PostgresBudgets
from budget_recovery_dagster.errors import SettingsError
from budget_recovery_dagster.sandbox.child_process import OwnedProcess, Program
from budget_recovery_dagster.sandbox.dagster_services import DagsterServices
from budget_recovery_dagster.sandbox.dagster_ui import DagsterUi
from budget_recovery_dagster.sandbox.first_snapshot import close_abandoned_runs
from budget_recovery_dagster.sandbox.gateway import aggregate, serve
from budget_recovery_dagster.sandbox.gateway.scene import BUDGETS
from budget_recovery_dagster.sandbox.nats_server import NatsServer
from budget_recovery_dagster.sandbox.postgres_server import PostgresServer
from budget_recovery_dagster.settings import PREFIX, Settings

CONTROL_DATABASE = "budget_recovery"
DAGSTER_DATABASE = "dagster"

_DAGSTER_URL = f"{PREFIX}DAGSTER_POSTGRES_URL"
_POSTGRES_URL = f"{PREFIX}POSTGRES_URL"

# SQLAlchemy takes another driver for a bare postgresql://, with which Dagster's storage fails.
_DAGSTER_SCHEME = "postgresql+psycopg2://"

_GATEWAY_SECONDS = 60

Step = Callable[[str], AbstractContextManager[None]]
"""Tells a person what is being started, for as long as its context lasts."""


@dataclass(frozen=True, slots=True)
class Stack:
    """What runs, and where; a server that was given by its URL is None.

    Only on a NATS server of its own there is a simulated ``gateway``: one process that serves, and
    one that aggregates.
    """

    postgres: PostgresServer | None
    nats: NatsServer | None
    gateway: tuple[OwnedProcess, ...]
    dagster: DagsterServices

    def ended(self) -> OwnedProcess | None:
        """Return a child that has ended, if one has."""
        servers = [server.process for server in (self.postgres, self.nats) if server is not None]
        children = [*servers, *self.gateway, *self.dagster.processes]
        return next((child for child in children if child.exit_code is not None), None)


@contextmanager
def running_stack(settings: Settings, data_dir: Path, ui: DagsterUi, step: Step) -> Iterator[Stack]:
    """Run everything for which no URL is given, on the data in ``data_dir``, without the daemon.

    Nothing is started where the pages' address is taken.

    Raises:
        SettingsError: the URL that is given for Dagster's tables does not name its driver.
        SandboxError: something could not be started; what had been is stopped.
        DatabaseError: the schema could not be brought up to date.
    """
    _require_dagster_driver(os.environ)
    ui.require_free()
    with ExitStack() as exits:
        environment = {
            **os.environ,
            f"{PREFIX}BUCKET": settings.bucket,
            f"{PREFIX}TABLES_DIR": str(settings.tables_dir or data_dir / "tables"),
        }
        postgres = _start_postgres(exits, step, settings, data_dir, environment)
        nats = None
        gateway: tuple[OwnedProcess, ...] = ()
        if settings.nats_url is None:
            nats = NatsServer(data_dir / "nats")
            exits.callback(nats.stop)
            with step("NATS"):
                nats.start()
            environment[f"{PREFIX}NATS_URL"] = nats.url
            with step("simulated gateway"):
                if settings.postgres_url is None:
                    # In a database that was given, limits are somebody else's to set.
                    with Database(environment[_POSTGRES_URL]) as database:
                        PostgresBudgets(database).define(BUDGETS.definitions)
                gateway = _start_gateway(exits, data_dir, environment)
        dagster = DagsterServices(data_dir / "dagster", ui, environment)
        exits.callback(dagster.stop)
        with step("Dagster"):
            dagster.start_pages()
            close_abandoned_runs(ui)
        yield Stack(postgres, nats, gateway, dagster)


def _require_dagster_driver(environment: Mapping[str, str]) -> None:
    given = environment.get(_DAGSTER_URL)
    if given and not given.startswith(_DAGSTER_SCHEME):
        # The URL itself is not shown: it may hold a password.
        raise SettingsError(
            f"{_DAGSTER_URL} does not begin with {_DAGSTER_SCHEME}, the one driver that Dagster's"
            " storage works with.",
            f"set it to a URL such as {_DAGSTER_SCHEME}user@host/dagster.",
        )


def _start_postgres(
    exits: ExitStack,
    step: Step,
    settings: Settings,
    data_dir: Path,
    environment: dict[str, str],
) -> PostgresServer | None:
    """Provide both databases, and say in the environment where they are.

    Dagster's tables go into a database that was given only if it was given for them.
    """
    server = None
    given = settings.postgres_url
    if given is not None:
        environment[_POSTGRES_URL] = given.get_secret_value()
    if given is None or not environment.get(_DAGSTER_URL):
        server = PostgresServer(data_dir / "postgres")
        exits.callback(server.stop)
        with step("PostgreSQL"):
            server.start()
            create_missing_databases(server, CONTROL_DATABASE, DAGSTER_DATABASE)
        if given is None:
            environment[_POSTGRES_URL] = server.url(CONTROL_DATABASE)
        if not environment.get(_DAGSTER_URL):
            _, _, rest = server.url(DAGSTER_DATABASE).partition("://")
            environment[_DAGSTER_URL] = f"{_DAGSTER_SCHEME}{rest}"
    with step("database schema"):
        migrate(environment[_POSTGRES_URL])
    return server


def create_missing_databases(server: PostgresServer, *names: str) -> None:
    """Provide databases of these names on a running server."""
    with psycopg.connect(server.url(), autocommit=True) as connection:
        rows = connection.execute("select datname from pg_database").fetchall()
        for name in set(names) - {row[0] for row in rows}:
            connection.execute(sql.SQL("create database {}").format(sql.Identifier(name)))


def _start_gateway(
    exits: ExitStack, data_dir: Path, environment: Mapping[str, str]
) -> tuple[OwnedProcess, ...]:
    """Start the gateway; its ledger knows whether the history is still to be written."""
    serving = _start_python(
        exits,
        "simulated gateway",
        [serve.__name__, data_dir / "gateway.ledger", serve.HISTORY],
        data_dir / "gateway.log",
        environment,
    )
    aggregating = _start_python(
        exits,
        "simulated aggregator",
        [aggregate.__name__],
        data_dir / "aggregator.log",
        environment,
    )
    for process, ready in ((serving, serve.READY), (aggregating, aggregate.READY)):
        process.wait_until_ready(partial(process.has_said, ready), seconds=_GATEWAY_SECONDS)
    return serving, aggregating


def _start_python(
    exits: ExitStack,
    name: str,
    module: Sequence[str | Path],
    log: Path,
    environment: Mapping[str, str],
) -> OwnedProcess:
    """Start a module of ours, given with its arguments."""
    process = OwnedProcess(
        Program(
            name,
            [sys.executable, "-m", *module],
            log=log,
            environment={**environment, "PYTHONUNBUFFERED": "1"},
        )
    )
    exits.callback(process.stop)
    return process
