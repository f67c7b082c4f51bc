"""The daemon restores a wiped store automatically, as an operator sees it in a terminal."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.acceptance.recovering_dev import RecoveringDev, recovering_dev

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
def recovering(server_dir: Path) -> Iterator[RecoveringDev]:
    with tempfile.TemporaryDirectory(prefix="of recovery ", dir=server_dir) as directory:
        path = Path(directory)
        path.chmod(0o755)
        with recovering_dev(path) as dev:
            yield dev


def test_a_wiped_store_is_restored_automatically(recovering: RecoveringDev) -> None:
    dev = recovering.dev
    recovering.wait_for_a_good_check()
    before = dev.counters()

    assert recovering.command("wipe", "--yes").returncode == 0
    recovering.wait_for_restores(1)

    found = recovering.status()
    incident = found["last_closed_incident"]
    assert (found["condition"], found["exit_code"]) == ("healthy", 0)
    assert incident["ended"]["outcome"] == "restored"
    assert (incident["attempts"], len(incident["losses"])) == (1, 1)
    # The snapshot was taken under traffic before these were read; it contains nearly all of them.
    restored = incident["ended"]["restored"]
    assert restored["counters"] > len(before) / 2
    assert recovering.command("status").returncode == 0

    seen = dev.ui.query(BLOCKED_AND_RESTORED)
    (materialization,) = seen["assetOrError"]["assetMaterializations"]
    metadata = {
        entry["label"]: entry.get("intValue") for entry in materialization["metadataEntries"]
    }
    assert metadata["counters_raised"] == restored["counters"]
    (run,) = seen["runsOrError"]["results"]
    tags = {tag["key"]: tag["value"] for tag in run["tags"]}
    assert run["status"] == "SUCCESS"
    assert tags["budget_recovery/incident"] == incident["id"]
    assert tags["budget_recovery/outcome"] == "restored"
    assert tags["dagster/run_key"] == f"{incident['id']}/launch-1"

    # A second loss on the same day has its own incident and run.
    assert recovering.command("wipe", "--yes").returncode == 0
    recovering.wait_for_restores(2)
    assert recovering.status()["last_closed_incident"]["id"] != incident["id"]
    assert len(dev.ui.query(BLOCKED_AND_RESTORED)["runsOrError"]["results"]) == 2
