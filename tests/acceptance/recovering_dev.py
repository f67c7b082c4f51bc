"""A running ``budget-recovery dev`` whose store is lost and restored, as an operator sees it."""

import json
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
from psycopg.rows import dict_row

from budget_recovery_dagster.sandbox import find_running_dev
from tests.integration.commands import PROGRAM
from tests.integration.dev_command import START_SECONDS, UNSET, Dev, started
from tests.postgres_servers import expire_leases, skip_pause
from tests.waiting import wait_until

CHECK_SECONDS = 30
# A check, two observations, a launch, and a run on a busy machine.
RECOVERY_SECONDS = 120

_RESTORES = """
query Restores {
  runsOrError(filter: {pipelineName: "restore_job"}) {
    ... on Runs { results { id status tags { key value } } }
  }
}
"""
_TERMINATE = """
mutation Terminate($run: String!) { terminateRun(runId: $run) { __typename } }
"""
_WORKER = "select holder from budget_recovery.lease where name = 'restore'"
_ATTEMPTS = """
select number, outcome, run_id from budget_recovery.restore_attempt order by started_at
"""
_CLOSED = "select count(*) from budget_recovery.incident where closed_at is not null"
_INCIDENT = "select * from budget_recovery.incident order by opened_at desc limit 1"


@dataclass(frozen=True)
class RestoreRun:
    """A run of restore_job as the web pages show it."""

    run_id: str
    status: str
    tags: dict[str, str]


@dataclass(frozen=True)
class RecoveringDev:
    """The running command, its data, and the state of the restore in its database."""

    data_dir: Path
    dev: Dev

    def command(self, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a command as in a terminal."""
        return subprocess.run(
            [*PROGRAM, arguments[0], "--data-dir", self.data_dir, *arguments[1:]],
            check=False,
            capture_output=True,
            text=True,
            timeout=START_SECONDS,
            env=UNSET,
            **options,
        )

    def status(self) -> dict[str, Any]:
        """Return the JSON of ``budget-recovery status``."""
        found: dict[str, Any] = json.loads(self.command("status", "--json").stdout)
        return found

    @property
    def postgres_url(self) -> str:
        url = find_running_dev(self.data_dir).postgres_url
        assert url is not None
        return url

    def restores(self) -> list[RestoreRun]:
        """Return the runs of restore_job, newest first."""
        return [
            RestoreRun(run["id"], run["status"], {tag["key"]: tag["value"] for tag in run["tags"]})
            for run in self.dev.ui.query(_RESTORES)["runsOrError"]["results"]
        ]

    def terminate(self, run_id: str) -> None:
        """Terminate a run, like the button on its page."""
        answer = self.dev.ui.query(_TERMINATE, run=run_id)["terminateRun"]
        assert answer["__typename"] == "TerminateRunSuccess"

    def worker_pid(self) -> int:
        """Return the pid of the holder of the restore lease."""
        ((holder,),) = self._rows(_WORKER)
        found = re.fullmatch(r"run \w+ on .* \(pid (\d+)\)", holder)
        assert found is not None
        return int(found[1])

    def attempts(self) -> list[tuple[int, str | None, str]]:
        """Return number, outcome and run of all attempts, oldest first."""
        return self._rows(_ATTEMPTS)

    def incident(self) -> dict[str, Any]:
        """Return the newest incident."""
        with psycopg.connect(self.postgres_url, row_factory=dict_row) as database:
            (row,) = database.execute(_INCIDENT).fetchall()
        return row

    def let_leases_run_out(self) -> None:
        """Expire the lease of a dead worker, and its pause, without waiting for minutes."""
        skip_pause(self.postgres_url)
        with psycopg.connect(self.postgres_url) as database:
            expire_leases(database)

    def wait_for_a_good_check(self) -> None:
        wait_until(lambda: self.status()["checks"]["newest_good"], seconds=START_SECONDS, every=1)

    def wait_for_restores(self, count: int) -> None:
        """Wait until this many incidents are closed and the runs of their restores have ended.

        This polls the database, because polling the command would slow down the restore.
        """
        wait_until(lambda: self._rows(_CLOSED) == [(count,)], seconds=RECOVERY_SECONDS, every=0.2)
        wait_until(
            lambda: [run.status for run in self.restores()] == ["SUCCESS"] * count, every=0.2
        )

    def _rows(self, query: str) -> list[Any]:
        with psycopg.connect(self.postgres_url) as database:
            return database.execute(query.encode()).fetchall()


@contextmanager
def recovering_dev(place: Path) -> Iterator[RecoveringDev]:
    """Start the command on the data that an earlier one left."""
    with started(
        place / "data",
        place / "output.txt",
        BUDGET_RECOVERY_CHECK_INTERVAL_SECONDS=str(CHECK_SECONDS),
    ) as dev:
        yield RecoveringDev(place / "data", dev)
