"""``budget-recovery dev``: everything that it runs in its data directory."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from budget_recovery_dagster.adapters.postgres.database import Database
from budget_recovery_dagster.adapters.postgres.plans import PostgresBudgets
from budget_recovery_dagster.adapters.postgres.schema import OnWait, migrate
from budget_recovery_dagster.embedded import (
    NatsServer,
    OwnedProcess,
    PostgresServer,
    Program,
)
from budget_recovery_dagster.errors import SettingsError
from budget_recovery_dagster.sandbox import gateway
from budget_recovery_dagster.sandbox.dagster_services import (
    DagsterServices,
    DagsterUi,
    close_abandoned_runs,
)
from budget_recovery_dagster.settings import PREFIX, Settings

CONTROL_DATABASE = "budget_recovery"
DAGSTER_DATABASE = "dagster"
_DAGSTER_URL = f"{PREFIX}DAGSTER_POSTGRES_URL"
_POSTGRES_URL = f"{PREFIX}POSTGRES_URL"
# With a bare postgresql:// SQLAlchemy uses another driver, and Dagster's storage fails.
_DAGSTER_SCHEME = "postgresql+psycopg2://"
_GATEWAY_SECONDS = 60
Step = Callable[[str], AbstractContextManager[None]]
"""Shows the name of a step while its context lasts."""


@dataclass(frozen=True, slots=True)
class Stack:
    """The running parts; None for a server that a setting names.

    Only an embedded NATS server gets a simulated ``gateway``: one process that serves and one that
    aggregates.
    """

    postgres: PostgresServer | None
    nats: NatsServer | None
    gateway: tuple[OwnedProcess, ...]
    dagster: DagsterServices

    def ended(self) -> OwnedProcess | None:
        """Return a child that has ended, if there is one."""
        servers = [server.process for server in (self.postgres, self.nats) if server is not None]
        children = [*servers, *self.gateway, *self.dagster.processes]
        return next((child for child in children if child.has_ended()), None)


@contextmanager
def running_stack(
    settings: Settings, data_dir: Path, ui: DagsterUi, step: Step, on_wait: OnWait
) -> Iterator[Stack]:
    """Run every part that no setting names, on the data in ``data_dir``, except the daemon.

    ``on_wait`` receives sentences while the schema waits for another process.

    If the address of the pages is in use, nothing is started.

    Raises:
        SettingsError: the URL for Dagster's tables does not name the right driver.
        CannotStartError, ChildEndedError: a part cannot start; the others are stopped.
        DatabaseError: the schema could not be migrated.
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
        with step("database schema"):
            migrate(environment[_POSTGRES_URL], on_wait=on_wait)
        nats = None
        processes: tuple[OwnedProcess, ...] = ()
        if settings.nats_url is None:
            with step("NATS"):
                nats = exits.enter_context(NatsServer(data_dir / "nats"))
            environment[f"{PREFIX}NATS_URL"] = nats.url
            with step("simulated gateway"):
                if settings.postgres_url is None:
                    # The limits in a database that a setting names are not ours.
                    define_budgets(environment[_POSTGRES_URL], gateway.BUDGETS)
                processes = _start_gateway(exits, data_dir, environment)
        dagster = DagsterServices(data_dir / "dagster", ui, environment)
        exits.callback(dagster.stop)
        with step("Dagster"):
            dagster.start_pages()
            close_abandoned_runs(ui)
        yield Stack(postgres, nats, processes, dagster)


def _require_dagster_driver(environment: Mapping[str, str]) -> None:
    given = environment.get(_DAGSTER_URL)
    if given and not given.startswith(_DAGSTER_SCHEME):
        # The message does not contain the URL, which may hold a password.
        raise SettingsError(
            f"{_DAGSTER_URL} does not begin with {_DAGSTER_SCHEME}, the only driver that works with"
            " Dagster's storage.",
            f"set it to a URL such as {_DAGSTER_SCHEME}user@host/dagster.",
        )


def _start_postgres(
    exits: ExitStack,
    step: Step,
    settings: Settings,
    data_dir: Path,
    environment: dict[str, str],
) -> PostgresServer | None:
    """Provide both databases, and put their URLs into the environment.

    Dagster's tables go into a given database only if a setting names one for them.
    """
    server = None
    given = settings.postgres_url
    if given is not None:
        environment[_POSTGRES_URL] = given.get_secret_value()
    if given is None or not environment.get(_DAGSTER_URL):
        with step("PostgreSQL"):
            server = exits.enter_context(PostgresServer(data_dir / "postgres"))
            server.create_missing_databases(CONTROL_DATABASE, DAGSTER_DATABASE)
        if given is None:
            environment[_POSTGRES_URL] = server.url(CONTROL_DATABASE)
        if not environment.get(_DAGSTER_URL):
            _, _, rest = server.url(DAGSTER_DATABASE).partition("://")
            environment[_DAGSTER_URL] = f"{_DAGSTER_SCHEME}{rest}"
    return server


def define_budgets(postgres_url: str, budgets: gateway.Budgets) -> None:
    """Store the definitions of the simulated tenants' budgets in the control-plane database."""
    with Database(postgres_url) as database:
        PostgresBudgets(database).define(budgets.definitions)


def _start_gateway(
    exits: ExitStack, data_dir: Path, environment: Mapping[str, str]
) -> tuple[OwnedProcess, ...]:
    """Start the gateway; its ledger records whether its history is already counted."""
    parts = (
        ("gateway", gateway.GATE_READY, ("serve", data_dir / "gateway.ledger", "--with-history")),
        ("aggregator", gateway.AGGREGATOR_READY, ("aggregate",)),
    )
    processes = []
    for name, _, arguments in parts:
        process = OwnedProcess(
            Program(
                f"simulated {name}",
                [sys.executable, "-m", gateway.__name__, *arguments],
                log=data_dir / f"{name}.log",
                environment={**environment, "PYTHONUNBUFFERED": "1"},
            )
        )
        exits.callback(process.stop)
        processes.append(process)
    for process, (_, ready, _) in zip(processes, parts, strict=True):
        process.wait_until_ready(partial(process.has_logged, ready), seconds=_GATEWAY_SECONDS)
    return tuple(processes)
