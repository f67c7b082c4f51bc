"""While ``budget-recovery dev`` runs: counters, refusals of others, ``status`` and ``wipe``."""

import asyncio
import json
import os
import pty
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import nats
import pytest
from nats.js.api import KeyValueConfig, StreamConfig

from budget_recovery_dagster.adapters.nats import decode_key
from budget_recovery_dagster.domain import Period
from budget_recovery_dagster.sandbox import find_running_dev
from budget_recovery_dagster.sandbox.gateway import BUDGETS
from tests.free_ports import unused_port
from tests.integration.commands import PROGRAM
from tests.integration.dev_command import START_SECONDS, UNSET, Dev, refusal, started
from tests.waiting import wait_until

OTHERS = ("KV_another", "another")


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
            [*PROGRAM, "wipe", "--data-dir", self.data_dir, *arguments],
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
    """Start the command after a first start that was interrupted before the history was written."""
    with tempfile.TemporaryDirectory(prefix="of running ", dir=server_dir) as directory:
        path = Path(directory)
        path.chmod(0o755)
        for data in (path / "data", path / "data" / "nats"):
            data.mkdir(mode=0o755)
        # An older version left this mark, although its bucket and ledger may have been wiped since.
        for file in ("dev.lock", "history-is-seeded"):
            (path / "data" / file).touch()
        with started(path / "data", path / "output.txt") as dev:
            asyncio.run(_make_others(find_running_dev(path / "data").nats_url or ""))
            yield Place(dev, path / "data")


def test_the_counters_of_the_gateway_only_rise_and_have_a_history(place: Place) -> None:
    dev = place.dev
    before = dev.counters()
    assert {decode_key(key).tenant for key in before} == {"acme", "globex", "team a / 東京"}
    assert dev.defined_budgets() == len(BUDGETS.definitions)
    counters = {decode_key(key): usage for key, usage in before.items()}
    # A minute of traffic costs only a few dollars.
    ever = [key for key in counters if key.of.window.period is Period.LIFETIME]
    assert sum(counters[key] for key in ever) > 20
    after: dict[str, Decimal] = {}

    def have_changed() -> bool:
        after.update(dev.counters())
        return after != before

    wait_until(have_changed)
    assert all(after[key] >= usage > 0 for key, usage in before.items())


def test_each_refusal_is_one_sentence_and_does_not_disturb_the_running_dev(place: Place) -> None:
    dev, directory = place.dev, place.data_dir.parent
    (directory / "file").write_text("")
    assert f"already runs on {directory}/data (pid {dev.process.pid})" in refusal(
        unused_port(), directory / "data"
    )
    assert f"port {dev.ui.port}: Address already in use" in refusal(
        dev.ui.port, directory / "other data"
    )
    assert list((directory / "other data").iterdir()) == [directory / "other data" / "dev.lock"]
    assert f"{directory} holds other files" in refusal(unused_port(), directory)
    assert f"{directory}/file/data cannot be used: Not a directory" in refusal(
        unused_port(), directory / "file" / "data"
    )
    assert dev.ui.is_up()


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
        [*PROGRAM, "status", "--json", "--data-dir", place.data_dir],
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
