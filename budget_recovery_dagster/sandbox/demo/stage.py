"""The servers and the gateway of the demo, in a directory that is removed at the end.

The tenants are those of the sandbox, with other limits: only the budget of the story gets exhausted
while it runs, so blocks at different times can be compared.
"""

import asyncio
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from decimal import Decimal
from pathlib import Path

from budget_recovery_dagster.adapters.nats.codec import COUNTERS, CounterKey, decode_value
from budget_recovery_dagster.adapters.postgres.schema import migrate
from budget_recovery_dagster.domain.counters import BudgetDefinition, BudgetWindow, Entity
from budget_recovery_dagster.domain.windows import LIFETIME_TOKEN, Window
from budget_recovery_dagster.embedded import (
    ROOT,
    NatsServer,
    OwnedProcess,
    PostgresServer,
    UnusableDataError,
    poll,
    private_files,
)
from budget_recovery_dagster.errors import BudgetRecoveryError
from budget_recovery_dagster.sandbox.dev import CONTROL_DATABASE, Step, define_budgets
from budget_recovery_dagster.sandbox.gateway import (
    Budgets,
    Ledger,
    Place,
    Request,
    RunningGate,
    Traffic,
    begin,
    running_aggregator,
    running_gate,
    store,
    utc_clock,
    wipe,
)
from budget_recovery_dagster.sandbox.gateway.requests import (
    BUDGETS,
    COST_CENTRES,
    PRICES,
    USERS,
    VIRTUAL_ACCOUNTS,
)
from budget_recovery_dagster.sandbox.gateway.watching import read_all
from budget_recovery_dagster.settings import Settings

TENANT, BUDGET = "acme", "agents"
AGENT = "agent:research"
NEWCOMER = "agent:new-hire"
"""An agent of the same budget that first spends after the wipe, so it is in no snapshot."""

LIMIT = Decimal(10)
"""The limit of each agent in dollars. In the history each of the four has spent about 2."""

_HISTORY_SEED = 1
_TRAFFIC_SEED = 2
_OUT_OF_REACH = Decimal(1_000_000)
# The history brings some customers past it. The traffic has no customers, so those stay blocked.
_CUSTOMERS_LIMIT = Decimal("0.10")

_BUCKET = str(Settings.model_fields["bucket"].default)
_REQUESTS_PER_SECOND = 20.0
# Slow enough that a block takes effect between two requests.
_PACE_SECONDS = 0.2
_MOST_REQUESTS = 60
_ANSWER_SECONDS = 20.0
_COUNTED_SECONDS = 20.0
_CHECK_SECONDS = 0.05
# A read that fails, because the store was replaced meanwhile, is repeated.
_READS = 5


class DemoError(BudgetRecoveryError):
    """The demo could not reach its end; its output proves nothing."""


def _limit(definition: BudgetDefinition) -> Decimal:
    if (definition.tenant, definition.budget) == (TENANT, BUDGET):
        return LIMIT
    return _CUSTOMERS_LIMIT if definition.budget == "customers" else _OUT_OF_REACH


_BUDGETS = Budgets(replace(each, limit=_limit(each)) for each in BUDGETS.definitions)


def _request_of(agent: str, cost: str) -> Request:
    return Request(
        TENANT,
        USERS[TENANT][0],
        next(iter(PRICES)),
        Decimal(cost),
        virtual_account=VIRTUAL_ACCOUNTS[0],
        agent=agent,
        metadata={"cost_centre": COST_CENTRES[0]},
    )


REQUEST = _request_of(AGENT, "0.50")
"""The request that is refused, allowed, and refused again."""

# It costs nothing and shows whether REQUEST is refused.
_PROBE = replace(REQUEST, cost=Decimal(0))


def counter_of_entity(entity: Entity) -> CounterKey:
    """Return the counter of an entity in the budget of the story."""
    return CounterKey(TENANT, BudgetWindow(BUDGET, Window.parse(LIFETIME_TOKEN)), entity)


def is_of_the_budget(counter: CounterKey) -> bool:
    """Whether a counter belongs to the budget of the story."""
    return (counter.tenant, counter.of) == (TENANT, counter_of_entity(AGENT).of)


Usages = Mapping[CounterKey, Decimal]


@dataclass(frozen=True, slots=True)
class Figures:
    """Counters and blocks of the store, and the spend in the ledger, all read before ``at``.

    So a window that is current at ``at`` was current during the whole read.
    """

    at: datetime
    counters: Usages
    blocked: frozenset[CounterKey]
    spent: Usages


class DemoGateway:
    """A gateway with traffic of all tenants, which pauses while figures are read."""

    def __init__(self, place: Place, ledger_file: Path, gate: RunningGate) -> None:
        self.place = place
        self._ledger_file = ledger_file
        self._gate = gate
        self._may_spend = threading.Lock()

    def refuses(self, request: Request = REQUEST) -> bool:
        """Send a request, and return whether a budget refuses it.

        Raises:
            DemoError: it is refused for another reason.
        """
        answer = self._gate.answer(request)
        if not answer.is_allowed and not answer.blocked_by:
            raise DemoError(
                "The gateway cannot write its ledger, so it refuses every request.",
                "check whether the disk is full.",
            )
        return not answer.is_allowed

    def spend_until_refused(self) -> int:
        """Repeat the request until it is refused; return how often it was allowed.

        Raises:
            DemoError: it is never refused.
        """
        for number in range(_MOST_REQUESTS):
            if self.refuses():
                return number
            time.sleep(_PACE_SECONDS)
        raise DemoError(
            f"The gateway allowed {_MOST_REQUESTS} requests, far beyond the limit.",
            "run it again; the machine may be too busy for the simulated gateway.",
        )

    def wait_for_answer(self, *, is_refused: bool) -> bool:
        """Wait for this answer to the request, without spending; return False if it is late."""
        return poll(lambda: self.refuses(_PROBE) is is_refused, seconds=_ANSWER_SECONDS)

    def spend(self, agent: str, cost: str) -> None:
        """Let an agent of the story's tenant spend this amount in one request."""
        self.refuses(_request_of(agent, cost))

    def figures(self) -> Figures:
        """Pause the traffic, wait until all costs are counted, and read the store and the ledger.

        Raises:
            DemoError: the store cannot be read, or not all costs are counted in time.
        """
        with self._may_spend:
            return self._read_figures()

    def figures_and_wipe(self) -> tuple[Figures, float]:
        """Read the figures, and wipe the store before any further spend.

        Return the figures, and the seconds until the gateway had created a new store.

        Raises:
            DemoError: it created none in time.
            NotWipedError: the store is not wiped.
        """
        with self._may_spend:
            before = self._read_figures()
            seconds = wipe(self.place)
        if seconds is None:
            raise DemoError(
                "The gateway did not create a new store in time.",
                "run it again; the machine may be too busy for the simulated gateway.",
            )
        return before, seconds

    def _read_figures(self) -> Figures:
        found: dict[str, store.Seen] = {}

        async def read(ledger: Ledger) -> None:
            async with store.opened(self.place, "demo") as opened:
                await _wait_until_counted(opened, ledger)
                found.update(await read_all(opened))

        with Ledger(self._ledger_file) as ledger:
            for _ in range(_READS):
                if (reason := asyncio.run(store.attempt(read(ledger)))) is None:
                    break
            else:
                raise DemoError(
                    f"The gateway's counters could not be read: {reason}.",
                    "run it again; the machine may be too busy.",
                )
            at = utc_clock()
            spent = ledger.true_spend(_BUDGETS, at)
        counters, blocked = {}, set()
        for key, seen in found.items():
            kind, _, suffix = key.partition(".")
            if kind == COUNTERS:
                counters[store.counter_of(suffix)], _ = decode_value(seen.data or b"")
            elif kind == store.BLOCKED:
                blocked.add(store.counter_of(suffix))
        return Figures(at, counters, frozenset(blocked), spent)

    def make_traffic(self, stop: threading.Event) -> None:
        """Send requests of all tenants, always the same sequence, until ``stop`` is set."""
        made_up = Traffic(seed=_TRAFFIC_SEED)
        while not stop.wait(1 / _REQUESTS_PER_SECOND):
            request = made_up.request()
            metadata = {name: each for name, each in request.metadata.items() if name != "end_user"}
            with self._may_spend:
                self._gate.answer(replace(request, metadata=metadata))


async def _wait_until_counted(opened: store.Store, ledger: Ledger) -> None:
    """Wait until every cost is reported, counted and removed from its stream."""
    async with asyncio.timeout(_COUNTED_SECONDS):
        while True:
            info = await opened.js.stream_info(store.cost_stream(opened.bucket))
            if not (info.state.messages or ledger.unreported(1)):
                return
            await asyncio.sleep(_CHECK_SECONDS)


@contextmanager
def _running_gateway(place: Place, ledger_file: Path) -> Iterator[DemoGateway]:
    """Run a gateway with a history of months, and traffic."""
    with Ledger(ledger_file) as ledger:
        asyncio.run(begin(place, ledger, _BUDGETS, utc_clock, Traffic(_HISTORY_SEED).history))
    with running_gate(place, ledger_file, _BUDGETS) as gate, running_aggregator(place, _BUDGETS):
        gateway = DemoGateway(place, ledger_file, gate)
        stop = threading.Event()
        thread = threading.Thread(target=gateway.make_traffic, args=(stop,))
        thread.start()
        try:
            yield gateway
        finally:
            stop.set()
            thread.join()


@dataclass(frozen=True, slots=True)
class Stage:
    """The running servers and the gateway."""

    postgres: PostgresServer
    nats: NatsServer
    gateway: DemoGateway

    @property
    def database_url(self) -> str:
        """The URL of the control-plane database."""
        return self.postgres.url(CONTROL_DATABASE)

    def ended(self) -> OwnedProcess | None:
        """Return a server that has ended, if there is one."""
        servers = (self.postgres.process, self.nats.process)
        return next((each for each in servers if each.has_ended()), None)


@contextmanager
def data_dir(*, keep: bool) -> Iterator[Path]:
    """Create a temporary directory, and remove it at the end unless ``keep`` is set.

    Only this account may read what this process creates meanwhile.

    Raises:
        UnusableDataError: it cannot be created.
        DemoError: it cannot be removed.
    """
    try:
        directory = Path(tempfile.mkdtemp(prefix="budget-recovery-demo-"))
    except OSError as error:
        raise UnusableDataError(
            f"No temporary directory can be created: {error.strerror}.",
            "set TMPDIR to another directory.",
        ) from error
    try:
        if os.geteuid() == ROOT:
            # The account of the database must pass through.
            directory.chmod(0o711)
        with private_files():
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


@contextmanager
def running_stage(directory: Path, step: Step) -> Iterator[Stage]:
    """Run PostgreSQL, NATS and the gateway in an empty directory.

    Raises:
        CannotStartError, ChildEndedError: a server cannot start; the others are stopped.
    """
    with ExitStack() as exits:
        with step("PostgreSQL"):
            try:
                postgres = exits.enter_context(PostgresServer(directory / "postgres"))
            except UnusableDataError as error:
                raise UnusableDataError(
                    error.message,
                    "set TMPDIR to a directory that every account can reach, such as /tmp.",
                ) from error
            postgres.create_missing_databases(CONTROL_DATABASE)
        url = postgres.url(CONTROL_DATABASE)
        with step("database schema"):
            migrate(url)
        with step("NATS"):
            nats = exits.enter_context(NatsServer(directory / "nats"))
        with step("simulated gateway"):
            define_budgets(url, _BUDGETS)
            gateway = exits.enter_context(
                _running_gateway(Place(nats.url, _BUCKET), directory / "gateway.ledger")
            )
        yield Stage(postgres, nats, gateway)
