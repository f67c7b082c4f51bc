"""``budget-recovery dev`` as a child of a test."""

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psycopg

from budget_recovery_dagster.adapters.nats import encode_key
from budget_recovery_dagster.domain import Hour
from budget_recovery_dagster.embedded import poll
from budget_recovery_dagster.sandbox import DagsterUi
from budget_recovery_dagster.sandbox.gateway import Place
from budget_recovery_dagster.settings import PREFIX
from tests.free_ports import unused_port
from tests.integration.commands import PROGRAM
from tests.integration.gateway_harness import contents
from tests.processes import descendants
from tests.waiting import wait_until

COMMAND = [*PROGRAM, "dev"]
NOBODY = 65534
START_SECONDS = 120
STOP_SECONDS = 60
PASSWORD = "s3cret"

# These tests use their own servers and directories, not those of the shell's settings.
UNSET = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}

RUNS = """
query Runs {
  runsOrError(filter: {pipelineName: "hourly_snapshot_job"}) {
    ... on Runs { results { id status assetMaterializations { partition } } }
  }
}
"""


@dataclass
class Dev:
    """A running command; ``output`` is the file that receives its output."""

    process: subprocess.Popen[bytes]
    output: Path
    ui: DagsterUi

    @property
    def nats_pid(self) -> int:
        return next(
            pid
            for pid in descendants(self.process.pid)
            if b"nats-server" in Path(f"/proc/{pid}/cmdline").read_bytes()
        )

    def has_output(self, text: str) -> bool | None:
        if self.process.poll() is not None:
            raise AssertionError(f"ended with {self.process.returncode}: {self.output.read_text()}")
        return True if text in self.output.read_text() else None

    def wait_for_output(self, text: str) -> None:
        assert poll(lambda: self.has_output(text), seconds=START_SECONDS), self.output.read_text()

    def stop(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        return self.process.wait(STOP_SECONDS)

    def runs(self) -> list[dict[str, Any]]:
        runs: list[dict[str, Any]] = self.ui.query(RUNS)["runsOrError"]["results"]
        return runs

    def snapshots(self) -> dict[str, str]:
        """Return the runs that stored a snapshot, with their hours."""
        return {
            run["id"]: run["assetMaterializations"][0]["partition"]
            for run in self.runs()
            if run["assetMaterializations"] and run["status"] == "SUCCESS"
        }

    def first_run(self, status: str) -> str:
        """Wait for a run with this status."""
        found: list[str] = []

        def is_there() -> bool:
            found.extend(run["id"] for run in self.runs() if run["status"] == status)
            return bool(found)

        wait_until(is_there, seconds=START_SECONDS, every=0.1)
        return found[0]

    def counters(self) -> dict[str, Decimal]:
        """Return the gateway's counters, by key."""
        line = next(line for line in self.output.read_text().splitlines() if "nats://" in line)
        # The driver's listing of keys may end too early during writes.
        found = contents(Place(line.split()[1].strip(","), "budget-usage"))
        return {encode_key(counter): usage for counter, usage in found.usages.items()}

    @property
    def control_database(self) -> str:
        """The URL of the control-plane database."""
        line = next(line for line in self.output.read_text().splitlines() if "psql -h" in line)
        _, _, _, host, _, user, database = shlex.split(line)
        return f"postgresql://{user}@/{database}?host={quote(host)}"

    def defined_budgets(self) -> int:
        """Return the number of budget definitions in the database."""
        with psycopg.connect(self.control_database) as connection:
            [(count,)] = connection.execute("select count(*) from budget_recovery.budget")
        return int(count)


@contextmanager
def started(
    data_dir: Path,
    output: Path,
    *,
    user: int | None = None,
    until: str = "Ctrl-C stops everything",
    **environment: str,
) -> Iterator[Dev]:
    """Start the command, wait for this output, and stop the command at the end."""
    ui = DagsterUi("127.0.0.1", unused_port())
    with (
        output.open("wb") as out,
        subprocess.Popen(
            [*COMMAND, "--port", str(ui.port), "--data-dir", data_dir],
            stdout=out,
            stderr=subprocess.STDOUT,
            umask=0,  # everything is private nevertheless
            env={**UNSET, **environment},
            user=user,
            group=user,
            extra_groups=None if user is None else [],
        ) as process,
    ):
        try:
            dev = Dev(process, output, ui)
            dev.wait_for_output(until)
            yield dev
        finally:
            if process.poll() is None:
                process.terminate()


def require_one_snapshot_an_hour(dev: Dev, since: datetime) -> None:
    """Require one snapshot for each hour of the test, which may span two hours."""
    hours = [*dev.snapshots().values()]
    assert hours, dev.output.read_text()
    assert set(hours) <= {Hour.containing(at).key for at in (since, datetime.now(UTC))}
    assert len(set(hours)) == len(hours), "an hour was captured twice"


def wait_for_an_hour_with(time_left: timedelta) -> None:
    now = datetime.now(UTC)
    if (rest := Hour.containing(now).end - now) < time_left:
        time.sleep(rest.total_seconds())


def refusal(port: int, data_dir: Path, **environment: str) -> str:
    ended = subprocess.run(
        [*COMMAND, "--port", str(port), "--data-dir", data_dir],
        check=False,
        capture_output=True,
        text=True,
        timeout=START_SECONDS,
        env={**UNSET, **environment},
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    assert PASSWORD not in ended.stderr
    sentence, hint = ended.stderr.splitlines()
    assert sentence.startswith("Error: ")
    assert hint.startswith("Try: ")
    return sentence
