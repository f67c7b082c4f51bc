"""A wiped store is put right by the daemon alone, as a person watches it in a terminal."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.dev_command import START_SECONDS, UNSET, Dev, started
from tests.waiting import wait_until

COMMAND = [sys.executable, "-c", "from budget_recovery_dagster.cli.main import main; main()"]
_CHECK_SECONDS = 30
# A check, two looks, a launch, and a run on a busy machine.
_RECOVERY_SECONDS = 120

BLOCKED_AND_RESTORED = """
query Restored {
  assetOrError(assetKey: {path: ["restored_usage"]}) {
    ... on Asset {
      assetMaterializations(limit: 5) {
        metadataEntries { label ... on IntMetadataEntry { intValue } }
      }
    }
  }
  runsOrError(filter: {pipelineName: "restore_job"}) {
    ... on Runs { results { id status tags { key value } } }
  }
}
"""


@pytest.fixture(scope="module")
def place(server_dir: Path) -> Iterator[tuple[Path, Dev]]:
    with tempfile.TemporaryDirectory(prefix="of recovery ", dir=server_dir) as directory:
        path = Path(directory)
        path.chmod(0o755)
        with started(
            path / "data",
            path / "output.txt",
            BUDGET_RECOVERY_CHECK_INTERVAL_SECONDS=str(_CHECK_SECONDS),
        ) as dev:
            yield path / "data", dev


def command(place: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, arguments[0], "--data-dir", place, *arguments[1:]],
        check=False,
        capture_output=True,
        text=True,
        timeout=START_SECONDS,
        env=UNSET,
    )


def status(place: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(command(place, "status", "--json").stdout)
    return found


def test_a_wiped_store_is_restored_within_a_check_and_seconds(place: tuple[Path, Dev]) -> None:
    data_dir, dev = place
    wait_until(lambda: status(data_dir)["checks"]["newest_good"], seconds=START_SECONDS)
    before = dev.counters()

    assert command(data_dir, "wipe", "--yes").returncode == 0
    wait_until(
        lambda: status(data_dir)["last_closed_incident"] is not None, seconds=_RECOVERY_SECONDS
    )

    found = status(data_dir)
    incident = found["last_closed_incident"]
    assert (found["condition"], found["exit_code"]) == ("healthy", 0)
    assert incident["ended"]["outcome"] == "restored"
    assert (incident["attempts"], len(incident["losses"])) == (1, 1)
    # The snapshot was taken before these were read, under traffic; it holds nearly all of them.
    restored = incident["ended"]["restored"]
    assert restored["counters"] > len(before) / 2
    assert command(data_dir, "status").returncode == 0

    seen = dev.ui.query(BLOCKED_AND_RESTORED)
    (materialization,) = seen["assetOrError"]["assetMaterializations"]
    told = {entry["label"]: entry.get("intValue") for entry in materialization["metadataEntries"]}
    assert told["counters_raised"] == restored["counters"]
    (run,) = seen["runsOrError"]["results"]
    tags = {tag["key"]: tag["value"] for tag in run["tags"]}
    assert run["status"] == "SUCCESS"
    assert tags["budget_recovery/incident"] == incident["id"]
    assert tags["budget_recovery/outcome"] == "restored"
    assert tags["dagster/run_key"] == f"{incident['id']}/launch-1"

    # A second loss on the same day is an incident and a run of its own.
    assert command(data_dir, "wipe", "--yes").returncode == 0
    wait_until(
        lambda: status(data_dir)["last_closed_incident"]["id"] != incident["id"],
        seconds=_RECOVERY_SECONDS,
    )
    assert len(dev.ui.query(BLOCKED_AND_RESTORED)["runsOrError"]["results"]) == 2
