"""The command ``budget-recovery dev``: started, refused, stopped, killed."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest

from budget_recovery_dagster.embedded import Account
from budget_recovery_dagster.sandbox import (
    DEV_FILE,
    DagsterUiError,
    NoRunningDevError,
    find_running_dev,
    snapshot_run,
)
from tests.free_ports import unused_port
from tests.integration.dev_command import (
    COMMAND,
    NOBODY,
    PASSWORD,
    START_SECONDS,
    STOP_SECONDS,
    refusal,
    require_one_snapshot_an_hour,
    started,
    wait_for_an_hour_with,
)
from tests.postgres_servers import expire_leases
from tests.private_files import require_private
from tests.processes import descendants, is_running
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

HOLDER = "select holder from budget_recovery.lease where name = 'capture'"


def is_capturing(database: psycopg.Connection) -> bool:
    return any(holder is not None for (holder,) in database.execute(HOLDER))


@pytest.fixture
def given_database(database: psycopg.Connection) -> psycopg.Connection:
    """Return a database with a limit of its own."""
    database.execute(
        "insert into budget_recovery.budget values"
        " ('acme', 'company', 'month', 7, 'nothing', null, 'enforce')"
    )
    return database


@pytest.fixture
def place(server_dir: Path) -> Iterator[Path]:
    """A directory with a space in its path that the account of the database can reach."""
    with tempfile.TemporaryDirectory(prefix="of dev ", dir=server_dir) as directory:
        path = Path(directory)
        path.chmod(0o755)
        yield path


@dataclass(frozen=True)
class FirstStart:
    """A first start that Ctrl-C ended: what was observed, and the data that it left."""

    since: datetime
    data_dir: Path
    output: str
    taken: dict[str, str]
    ui_was_found: bool
    exit_code: int
    left: tuple[int, ...]

    def copy(self, place: Path) -> Path:
        """Copy the data, with their owners, and return where they are."""
        copied = place / "data"
        subprocess.run(["cp", "--archive", self.data_dir, copied], check=True)  # noqa: S607
        return copied


@pytest.fixture(scope="module")
def first_start(server_dir: Path) -> Iterator[FirstStart]:
    """Start the command once with new data; tests of later starts copy the data."""
    with tempfile.TemporaryDirectory(prefix="of first ", dir=server_dir) as directory:
        path = Path(directory)
        path.chmod(0o755)
        data_dir = path / "new" / "data dir"
        since = datetime.now(UTC)
        with started(data_dir, path / "first.txt") as dev:
            output = dev.output.read_text()
            require_one_snapshot_an_hour(dev, since)
            taken = dev.snapshots()
            owned = descendants(dev.process.pid)
            ui_was_found = find_running_dev(data_dir).ui_url == dev.ui.url
            exit_code = dev.stop(signal.SIGINT)
            left = tuple(filter(is_running, owned))
        yield FirstStart(since, data_dir, output, taken, ui_was_found, exit_code, left)


def test_dev_shows_its_addresses_takes_a_snapshot_and_leaves_no_process(
    first_start: FirstStart,
) -> None:
    output, data_dir = first_start.output, first_start.data_dir
    for name in (
        "Dagster UI ",
        "Snapshots ",
        "PostgreSQL  psql -h ",
        "NATS ",
        "Data ",
        "Logs ",
    ):
        assert f"\n{name}" in output
    assert all(len(line) <= 80 or str(data_dir) in line for line in output.splitlines())
    assert first_start.ui_was_found
    assert first_start.exit_code == 0
    assert first_start.left == ()
    assert not (data_dir / DEV_FILE).exists()


def test_only_the_account_of_dev_can_read_what_it_wrote(first_start: FirstStart) -> None:
    assert require_private(first_start.data_dir) > 1000
    written = {path.name for path in first_start.data_dir.iterdir()}
    assert {"dagster", "nats", "gateway.ledger", "daemon.log", "nats.log"} <= written


def test_a_later_start_keeps_the_snapshots_and_a_kill_leaves_no_process(
    place: Path, first_start: FirstStart
) -> None:
    data_dir = first_start.copy(place)
    # As earlier versions left them.
    (data_dir / "tables").mkdir(exist_ok=True)
    for name, mode in (("tables", 0o755), ("dagster", 0o755), ("daemon.log", 0o644)):
        (data_dir / name).chmod(mode)
    with started(data_dir, place / "output.txt") as dev:
        require_private(data_dir)
        assert first_start.taken.items() <= dev.snapshots().items()
        require_one_snapshot_an_hour(dev, first_start.since)
        with pytest.raises(DagsterUiError, match="knows no run"):
            snapshot_run(dev.ui, str(uuid4()))
        owned = descendants(dev.process.pid)
        dev.process.kill()
    assert len(owned) > 10
    # Its file remains and is ignored.
    assert (place / "data" / DEV_FILE).exists()
    with pytest.raises(NoRunningDevError, match="No budget-recovery dev runs on"):
        find_running_dev(place / "data")
    wait_until(lambda: not any(map(is_running, owned)), seconds=STOP_SECONDS)


@pytest.mark.disaster
def test_a_dev_that_was_killed_during_a_run_repeats_the_snapshot_and_keeps_given_limits(
    place: Path, given_database: psycopg.Connection, database_url: str
) -> None:
    data = place / "data"
    limits = given_database.execute("table budget_recovery.budget").fetchall()
    wait_for_an_hour_with(timedelta(seconds=90))
    since = datetime.now(UTC)
    with started(
        data, place / "first.txt", until="\nLogs ", BUDGET_RECOVERY_POSTGRES_URL=database_url
    ) as dev:
        waiting = dev.first_run("QUEUED")
        dev.process.kill()
    with started(
        data, place / "second.txt", until="\nLogs ", BUDGET_RECOVERY_POSTGRES_URL=database_url
    ) as dev:
        nats_pid = dev.nats_pid
        # The run can neither end before it is read nor continue before it is killed.
        os.kill(nats_pid, signal.SIGSTOP)
        try:
            assert dev.first_run("STARTED") == waiting
            wait_until(lambda: is_capturing(given_database), seconds=60)
            others = set(descendants(dev.process.pid)) - {nats_pid}
            dev.process.kill()
            wait_until(lambda: not any(map(is_running, others)), seconds=60)
        finally:
            os.kill(nats_pid, signal.SIGCONT)
    # The dead run's lease prevents another snapshot for half a minute.
    expire_leases(given_database)
    with started(data, place / "third.txt", BUDGET_RECOVERY_POSTGRES_URL=database_url) as dev:
        assert {run["id"]: run["status"] for run in dev.runs()}[waiting] == "CANCELED"
        require_one_snapshot_an_hour(dev, since)
        assert dev.stop(signal.SIGTERM) == 0
    # None of the starts changed the limits that were there.
    assert given_database.execute("table budget_recovery.budget").fetchall() == limits


def test_a_url_for_dagsters_tables_names_the_driver(place: Path) -> None:
    setting = "BUDGET_RECOVERY_DAGSTER_POSTGRES_URL"
    url = {setting: f"postgresql://me:{PASSWORD}@host/dagster"}
    assert refusal(unused_port(), place / "data", **url) == (
        f"Error: {setting} does not begin with postgresql+psycopg2://, the only driver that"
        " works with Dagster's storage."
    )
    assert [path.name for path in (place / "data").iterdir()] == ["dev.lock"]


@pytest.mark.skipif(os.geteuid() != 0, reason="the other tests run as a normal user already")
def test_a_normal_user_can_run_it(place: Path) -> None:
    if not Account.of(NOBODY).may_run(sys.executable, "-c", "import budget_recovery_dagster"):
        pytest.skip("this checkout or its Python cannot be reached by a normal user")
    os.chown(place, NOBODY, NOBODY)
    since = datetime.now(UTC)
    with started(place / "data", place / "output.txt", user=NOBODY) as dev:
        require_one_snapshot_an_hour(dev, since)
        assert (place / "data" / "postgres").stat().st_uid == NOBODY
        assert dev.stop(signal.SIGINT) == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root drops to another account")
def test_root_is_refused_a_directory_that_the_database_cannot_reach(place: Path) -> None:
    private = place / "private"
    private.mkdir(mode=0o700)
    ended = subprocess.run(
        [*COMMAND, "--port", str(unused_port()), "--data-dir", private / "data"],
        check=False,
        capture_output=True,
        text=True,
        timeout=START_SECONDS,
    )
    assert ended.returncode == 2
    assert "which cannot reach" in ended.stderr
    assert private.stat().st_mode & 0o777 == 0o700
