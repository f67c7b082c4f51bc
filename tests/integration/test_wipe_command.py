"""The command ``budget-recovery wipe``, while ``budget-recovery dev`` runs."""

import asyncio
import json
import os
import pty
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import nats
import pytest
from click.testing import CliRunner, Result
from nats.js.api import KeyValueConfig, StreamConfig

from budget_recovery_dagster.cli.main import main
from budget_recovery_dagster.sandbox import (
    DEV_FILE,
    RunningDev,
    announced,
    find_running_dev,
    held_data_dir,
)
from tests.integration.dev_command import PASSWORD, START_SECONDS, UNSET, Dev, started
from tests.waiting import wait_until

COMMAND = [sys.executable, "-c", "from budget_recovery_dagster.cli.main import main; main()"]
OTHERS = ("KV_another", "another")
NATS_URL = "BUDGET_RECOVERY_NATS_URL"
NOWHERE = RunningDev(
    ui_url="http://127.0.0.1:1",
    bucket="budget-usage",
    check_interval_seconds=600,
    nats_url="nats://127.0.0.1:1",
    postgres_url=None,
)


@dataclass(frozen=True)
class Place:
    dev: Dev
    data_dir: Path

    def streams(self) -> dict[str, tuple[datetime, int]]:
        """When each stream was created, and its newest sequence."""
        url = find_running_dev(self.data_dir).nats_url or ""
        return asyncio.run(_streams(url))

    def wipe(self, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*COMMAND, "wipe", "--data-dir", self.data_dir, *arguments],
            check=False,
            capture_output=True,
            text=True,
            timeout=START_SECONDS,
            env=UNSET,
            **options,
        )


async def _streams(url: str) -> dict[str, tuple[datetime, int]]:
    client = await nats.connect(url)
    try:
        infos = await client.jetstream().streams_info()
    finally:
        await client.close()
    found = {}
    for info in infos:
        assert info.created is not None
        found[info.config.name or ""] = (info.created, info.state.last_seq)
    return found


async def _make_others(url: str) -> None:
    client = await nats.connect(url)
    js = client.jetstream()
    bucket = await js.create_key_value(KeyValueConfig("another"))
    await bucket.put("usage.acme.users.lifetime.alice", b"5")
    await js.add_stream(StreamConfig(name="another", subjects=["another"]))
    await js.publish("another", b"")
    await client.close()


@pytest.fixture(scope="module")
def place(server_dir: Path) -> Iterator[Place]:
    with tempfile.TemporaryDirectory(prefix="of wipe ", dir=server_dir) as directory:
        path = Path(directory)
        path.chmod(0o755)
        with started(path / "data", path / "output.txt") as dev:
            asyncio.run(_make_others(find_running_dev(path / "data").nats_url or ""))
            yield Place(dev, path / "data")


def test_the_bucket_is_lost_and_nothing_else(place: Place) -> None:
    before = place.streams()

    ended = place.wipe("--yes")

    assert ended.returncode == 0, ended.stderr
    after = place.streams()
    assert after.keys() == before.keys() == {*OTHERS, "KV_budget-usage", "COSTS_budget-usage"}
    assert {name for name in before if after[name][0] != before[name][0]} == {"KV_budget-usage"}
    assert all(after[name] == before[name] for name in OTHERS)

    # The gateway counts into the new one; the loss may already be detected.
    wait_until(lambda: place.streams()["KV_budget-usage"][1] > 0)
    assert place.dev.ui.is_up()


def test_wipe_shows_the_contents_and_how_to_watch(place: Place) -> None:
    wait_until(lambda: place.streams()["KV_budget-usage"][1] > 0)
    output = place.wipe("--yes").stdout
    lines = output.splitlines()
    assert lines[0] == "Bucket budget-usage of the simulated gateway:"
    assert " counters of " in lines[1]
    assert lines[2].endswith(" blocked keys")
    assert "Wiped: stream KV_budget-usage is deleted." in lines
    assert any(line.startswith("The gateway created an empty one after ") for line in lines)
    assert lines[-2] == f"  budget-recovery status --data-dir '{place.data_dir}'"
    assert lines[-1] == f"  {place.dev.ui.url}"
    assert output.isascii()
    assert all(len(line) <= 80 or str(place.data_dir) in line for line in lines)


def test_wipe_requires_yes_without_a_terminal(place: Place) -> None:
    created = place.streams()["KV_budget-usage"][0]
    ended = place.wipe(input="y\n")
    assert ended.returncode == 2
    assert "there is no terminal to ask for confirmation" in ended.stderr
    assert place.streams()["KV_budget-usage"][0] == created


@pytest.mark.parametrize(("answer", "code"), [("n", 1), ("", 1), ("y", 0)])
def test_at_a_terminal_wipe_asks_for_confirmation(place: Place, answer: str, code: int) -> None:
    created = place.streams()["KV_budget-usage"][0]
    ours, theirs = pty.openpty()
    try:
        os.write(ours, f"{answer}\n".encode())
        ended = place.wipe(stdin=theirs)
    finally:
        os.close(ours)
        os.close(theirs)
    assert ended.returncode == code
    assert "Wipe it? [y/N]: " in ended.stdout
    assert ("Nothing is wiped." in ended.stdout) is (code != 0)
    assert (place.streams()["KV_budget-usage"][0] == created) is (code != 0)


def test_status_needs_no_setting_while_dev_runs(place: Place) -> None:
    ended = subprocess.run(
        [*COMMAND, "status", "--json", "--data-dir", place.data_dir],
        check=False,
        capture_output=True,
        text=True,
        timeout=START_SECONDS,
        env=UNSET,
    )
    content = json.loads(ended.stdout)
    assert content["error"] is None
    assert content["exit_code"] == ended.returncode
    assert content["points"]["newest_by_tenant"].keys() == {"acme", "globex", "team a / 東京"}


def refused(data_dir: Path, **environment: str) -> str:
    ended: Result = CliRunner().invoke(
        main,
        ["wipe", "--yes", "--data-dir", str(data_dir)],
        env={NATS_URL: None, **environment},
    )
    assert ended.exit_code == 2
    assert PASSWORD not in ended.output
    sentence, hint = ended.output.splitlines()
    assert hint.startswith("Try: ")
    return sentence


def test_a_store_named_by_a_setting_is_never_wiped(tmp_path: Path) -> None:
    with held_data_dir(tmp_path / "data") as data_dir, announced(data_dir, NOWHERE):
        assert refused(data_dir, **{NATS_URL: f"nats://me:{PASSWORD}@127.0.0.1:1"}) == (
            f"Error: {NATS_URL} is set, and the store that it names is never wiped."
        )


def test_a_store_given_to_the_running_dev_is_never_wiped(tmp_path: Path) -> None:
    given = replace(NOWHERE, nats_url=None)
    with held_data_dir(tmp_path / "data") as data_dir, announced(data_dir, given):
        assert refused(data_dir) == (
            f"Error: The running dev uses the store of its {NATS_URL}, which is never wiped."
        )


def test_nothing_is_wiped_without_a_running_dev(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    nobody = f"Error: No budget-recovery dev runs on {data_dir}."
    assert refused(data_dir) == nobody
    assert not data_dir.exists()
    with held_data_dir(data_dir), announced(data_dir, NOWHERE):
        left_behind = (data_dir / DEV_FILE).read_bytes()
    assert not (data_dir / DEV_FILE).exists()
    # The state after a kill.
    (data_dir / DEV_FILE).write_bytes(left_behind)
    assert refused(data_dir) == nobody
    with held_data_dir(data_dir):
        assert refused(data_dir) == (
            f"Error: The budget-recovery dev on {data_dir} is starting or stopping."
        )


def test_the_servers_of_a_dev_are_published_to_its_owner_only(tmp_path: Path) -> None:
    with held_data_dir(tmp_path / "data") as data_dir, announced(data_dir, NOWHERE):
        assert stat.S_IMODE((data_dir / DEV_FILE).stat().st_mode) == 0o600
        assert find_running_dev(data_dir) == NOWHERE
        (data_dir / DEV_FILE).write_text('{"another": "version"}')
        assert "does not describe a running dev" in refused(data_dir)


def test_a_store_that_does_not_answer_is_one_error_message(tmp_path: Path) -> None:
    with held_data_dir(tmp_path / "data") as data_dir, announced(data_dir, NOWHERE):
        ended = CliRunner().invoke(
            main, ["wipe", "--yes", "--data-dir", str(data_dir)], env={NATS_URL: None}
        )
    assert ended.exit_code == 1
    assert ended.output.startswith("Error: Bucket budget-usage at nats://127.0.0.1:1 could not be")
