"""``budget-recovery dev`` as a person runs it: started, refused, stopped, killed."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

import nats
import pytest

from budget_recovery_dagster.adapters.nats_codec import decode_key, decode_value
from budget_recovery_dagster.sandbox.accounts import Account
from budget_recovery_dagster.sandbox.child_process import poll
from budget_recovery_dagster.sandbox.dagster_ui import DagsterUi

COMMAND = [sys.executable, "-c", "from budget_recovery_dagster.cli.main import main; main()", "dev"]
NOBODY = 65534
START_SECONDS = 120
STOP_SECONDS = 60

RUNS = """
query Runs {
  runsOrError(filter: {pipelineName: "hourly_snapshot_job"}) {
    ... on Runs { results { id status assetMaterializations { partition } } }
  }
}
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def descendants(pid: int) -> set[int]:
    """The children of a process, their children, and so on."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if state != "Z":
            children.setdefault(int(parent), []).append(int(stat.parent.name))
    found: set[int] = set()
    waiting = [pid]
    while waiting:
        below = children.get(waiting.pop(), [])
        found.update(below)
        waiting.extend(below)
    return found


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def none_runs(pids: set[int]) -> bool | None:
    return None if any(map(is_running, pids)) else True


@dataclass
class Dev:
    """A running command, with what it has written so far in ``output``."""

    process: subprocess.Popen[bytes]
    output: Path
    ui: DagsterUi

    def said(self, text: str) -> bool | None:
        if self.process.poll() is not None:
            raise AssertionError(f"ended with {self.process.returncode}: {self.output.read_text()}")
        return True if text in self.output.read_text() else None

    def wait_until_it_says(self, text: str) -> None:
        assert poll(lambda: self.said(text), seconds=START_SECONDS), self.output.read_text()

    def stop(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        return self.process.wait(STOP_SECONDS)

    def snapshots(self) -> dict[str, str]:
        """The runs that have stored a snapshot, and of which hour."""
        runs = self.ui.query(RUNS)["runsOrError"]["results"]
        return {
            run["id"]: run["assetMaterializations"][0]["partition"]
            for run in runs
            if run["assetMaterializations"] and run["status"] == "SUCCESS"
        }

    def counters(self) -> dict[str, Decimal]:
        """The gateway's counters, by key."""
        line = next(line for line in self.output.read_text().splitlines() if "nats://" in line)
        return asyncio.run(read_counters(line.split()[1].strip(",")))


async def read_counters(url: str) -> dict[str, Decimal]:
    client = await nats.connect(url)
    bucket = await client.jetstream().key_value("budget-usage")
    entries = [(key, await bucket.get(key)) for key in await bucket.keys()]
    await client.close()
    return {key: decode_value(entry.value or b"")[0] for key, entry in entries}


@contextmanager
def started(data_dir: Path, output: Path, *, user: int | None = None) -> Iterator[Dev]:
    """Start the command and wait until all it has to say is said; in the end nothing is left."""
    ui = DagsterUi("127.0.0.1", free_port())
    with (
        output.open("wb") as out,
        subprocess.Popen(
            [*COMMAND, "--port", str(ui.port), "--data-dir", data_dir],
            stdout=out,
            stderr=subprocess.STDOUT,
            user=user,
            group=user,
            extra_groups=None if user is None else [],
        ) as process,
    ):
        try:
            dev = Dev(process, output, ui)
            dev.wait_until_it_says("Ctrl-C stops everything")
            yield dev
        finally:
            if process.poll() is None:
                process.terminate()


def refusal(port: int, data_dir: Path) -> str:
    ended = subprocess.run(
        [*COMMAND, "--port", str(port), "--data-dir", data_dir],
        check=False,
        capture_output=True,
        text=True,
        timeout=START_SECONDS,
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    sentence, hint = ended.stderr.splitlines()
    assert sentence.startswith("Error: ")
    assert hint.startswith("Try: ")
    return sentence


@pytest.fixture
def place(server_dir: Path) -> Iterator[Path]:
    """A directory that the database's account can reach, its path with a space."""
    with tempfile.TemporaryDirectory(prefix="of dev ", dir=server_dir) as directory:
        path = Path(directory)
        path.chmod(0o755)
        yield path


def test_it_shows_a_snapshot_and_keeps_it_over_a_restart(place: Path) -> None:
    data_dir = place / "new" / "data dir"
    with started(data_dir, place / "first.txt") as dev:
        said = (place / "first.txt").read_text()
        for name in (
            "Dagster UI ",
            "Snapshots ",
            "PostgreSQL  psql -h ",
            "NATS ",
            "Data ",
            "Logs ",
        ):
            assert f"\n{name}" in said
        assert all(len(line) <= 80 or str(data_dir) in line for line in said.splitlines())
        taken = dev.snapshots()
        assert len(taken) == 1
        owned = descendants(dev.process.pid)
        assert dev.stop(signal.SIGINT) == 0
        assert poll(lambda: none_runs(owned), seconds=1)
    with started(data_dir, place / "second.txt") as dev:
        kept = dev.snapshots()
        assert taken.items() <= kept.items()
        assert len(set(kept.values())) == len(kept), "an hour was captured twice"
        assert dev.stop(signal.SIGTERM) == 0


def test_the_gateways_counters_only_rise(place: Path) -> None:
    with started(place / "data", place / "output.txt") as dev:
        before = dev.counters()
        assert {decode_key(key).tenant for key in before} == {"acme", "globex", "team a / 東京"}
        after = poll(lambda: now if (now := dev.counters()) != before else None, seconds=10)
        assert after is not None
        assert all(after[key] >= usage > 0 for key, usage in before.items())


def test_each_refusal_is_one_sentence_and_leaves_the_running_one_alone(place: Path) -> None:
    (place / "file").write_text("")
    with started(place / "data", place / "output.txt") as dev:
        assert f"already runs on {place}/data (pid {dev.process.pid})" in refusal(
            free_port(), place / "data"
        )
        assert f"port {dev.ui.port}: Address already in use" in refusal(
            dev.ui.port, place / "other data"
        )
        assert list((place / "other data").iterdir()) == [place / "other data" / "dev.lock"]
        assert f"{place}/file/data cannot be used: Not a directory" in refusal(
            free_port(), place / "file" / "data"
        )
        assert dev.ui.is_up()


def test_killed_it_leaves_no_servers_and_starts_again(place: Path) -> None:
    with started(place / "data", place / "first.txt") as dev:
        taken = dev.snapshots()
        owned = descendants(dev.process.pid)
        dev.process.kill()
    assert len(owned) > 10
    with started(place / "data", place / "second.txt") as dev:
        assert none_runs(owned)
        assert taken.items() <= dev.snapshots().items()


def test_a_dying_child_ends_it_by_name(place: Path) -> None:
    with started(place / "data", place / "output.txt") as dev:
        server = next(
            pid
            for pid in descendants(dev.process.pid)
            if b"nats-server" in Path(f"/proc/{pid}/cmdline").read_bytes()
        )
        owned = descendants(dev.process.pid)
        os.kill(server, signal.SIGKILL)
        assert dev.process.wait(STOP_SECONDS) == 1
    said = (place / "output.txt").read_text()
    assert "Error: NATS ended by SIGKILL" in said
    assert f"Try: see its log {place}/data/nats.log." in said
    assert none_runs(owned)


@pytest.mark.skipif(os.geteuid() != 0, reason="the other tests run as a normal user already")
def test_a_normal_user_can_run_it(place: Path) -> None:
    if not Account.of(NOBODY).may_run(sys.executable, "-c", "import budget_recovery_dagster"):
        pytest.skip("this checkout or its Python cannot be reached by a normal user")
    os.chown(place, NOBODY, NOBODY)
    with started(place / "data", place / "output.txt", user=NOBODY) as dev:
        assert len(dev.snapshots()) == 1
        assert (place / "data" / "postgres").stat().st_uid == NOBODY
        assert dev.stop(signal.SIGINT) == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root drops to another account")
def test_root_is_told_of_a_directory_that_the_database_cannot_reach(place: Path) -> None:
    private = place / "private"
    private.mkdir(mode=0o700)
    ended = subprocess.run(
        [*COMMAND, "--port", str(free_port()), "--data-dir", private / "data"],
        check=False,
        capture_output=True,
        text=True,
        timeout=START_SECONDS,
    )
    assert ended.returncode == 2
    assert "as which PostgreSQL runs, cannot reach" in ended.stderr
    assert private.stat().st_mode & 0o777 == 0o700
