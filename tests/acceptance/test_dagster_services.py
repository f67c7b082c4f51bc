"""Dagster's services: asset pages in a browser, backfills launched from them, recovery."""

import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from urllib.parse import quote

import psycopg
import pytest
from playwright.sync_api import Page, expect

from budget_recovery_dagster.domain import Hour
from tests.acceptance.browser import opened_page
from tests.acceptance.recovering_dev import RecoveringDev, recovering_dev
from tests.integration.dev_command import Dev
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

SNAPSHOTS = "budget_usage_snapshots"
TABLES = "tenant_usage_tables"

# Dagster's daemon starts new backfills twice a minute and runs the hours one by one.
BACKFILL_SECONDS = 300

RUNS_OF_HOUR = """
query RunsOfHour($hour: String!) {
  runsOrError(filter: {tags: [{key: "dagster/partition", value: $hour}]}) {
    ... on Runs { results { status assetSelection { path } } }
  }
}
"""
OVER = {"SUCCESS", "FAILURE", "CANCELED"}

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

# Copy the newest snapshots, as if they had been taken earlier.
COPY_BACK = """
insert into budget_recovery.{table}
select (jsonb_populate_record(t, jsonb_build_object('captured_at', captured_at - %s))).*
from budget_recovery.{table} t
where captured_at = (select max(captured_at) from budget_recovery.capture)
"""


@dataclass(frozen=True)
class Running:
    """A running dev with captures in three of the last five hours."""

    dev: Dev
    current: Hour
    directory_of_tables: Path

    def ago(self, hours: int) -> Hour:
        return Hour(self.current.start - timedelta(hours=hours))

    @property
    def retained(self) -> tuple[Hour, Hour]:
        return self.ago(4), self.ago(2)

    @property
    def never_captured(self) -> Hour:
        return self.ago(3)

    def wait_for_runs(self, asset: str, *hours: Hour) -> None:
        """Wait until each hour has had its own run of the asset, and all have ended."""

        def is_over(hour: Hour) -> bool:
            runs = self.dev.ui.query(RUNS_OF_HOUR, hour=hour.key)["runsOrError"]["results"]
            own = [run["status"] for run in runs if run["assetSelection"] == [{"path": [asset]}]]
            return bool(own) and set(own) <= OVER

        wait_until(lambda: all(map(is_over, hours)), seconds=BACKFILL_SECONDS, every=1)

    def tables(self, hour: Hour) -> dict[str, bytes]:
        """Return the files of an hour, by directory of the tenant."""
        files = self.directory_of_tables.glob(f"*/{hour.start:%Y-%m-%dT%HZ}.parquet")
        return {file.parent.name: file.read_bytes() for file in files}


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with opened_page() as page:
        yield page


@pytest.fixture(scope="module")
def recovering(server_dir: Path) -> Iterator[RecoveringDev]:
    with tempfile.TemporaryDirectory(prefix="of services ", dir=server_dir) as directory:
        place = Path(directory)
        place.chmod(0o755)
        with recovering_dev(place) as recovering:
            yield recovering


# Requires the page first, so that nothing is started for it without a browser.
@pytest.fixture(scope="module")
def running(page: Page, recovering: RecoveringDev) -> Running:
    with psycopg.connect(recovering.postgres_url) as connection:
        rows = connection.execute("select max(captured_at) from budget_recovery.capture")
        [(newest,)] = rows.fetchall()
        assert isinstance(newest, datetime)
        for hours in (2, 4):
            for table in ("capture", "budget_record"):
                copy = COPY_BACK.format(table=table).encode()
                connection.execute(copy, (timedelta(hours=hours),))
    return Running(recovering.dev, Hour.containing(newest), recovering.data_dir / "tables")


# Runs before a page is open: the driver of the browser leaves an event loop running.
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


def choose(page: Page, hour: Hour) -> None:
    """Click an hour in the list of the partitions page."""
    page.get_by_title(hour.key, exact=True).first.click()
    expect(page).to_have_url(re.compile(f"partition={quote(hour.key)}"))


def launch_backfill(page: Page, running: Running, asset: str) -> None:
    """Use the dialog on the asset's page to materialize a range of hours."""
    page.goto(f"{running.dev.ui.url}/assets/{asset}?view=partitions")
    page.get_by_role("button", name="Materialize").first.click()
    hours = page.get_by_placeholder("No matching partitions")
    first, last = running.retained
    hours.fill(f"[{first.key}...{last.key}]")
    hours.press("Enter")
    page.get_by_role("button", name="Launch backfill").click()
    expect(page.get_by_text("Created backfill")).to_be_visible()


@pytest.fixture(scope="module")
def backfilled(running: Running, page: Page) -> Running:
    """Backfill two captured hours, and an hour between them that was never captured."""
    for asset in (SNAPSHOTS, TABLES):
        launch_backfill(page, running, asset)
    # An open page keeps polling the server.
    page.goto("about:blank")
    first, last = running.retained
    for asset in (SNAPSHOTS, TABLES):
        running.wait_for_runs(asset, first, running.never_captured, last)
    return running


def test_the_asset_page_shows_description_metadata_and_job(running: Running, page: Page) -> None:
    page.goto(f"{running.dev.ui.url}/assets/{SNAPSHOTS}")
    expect(page.get_by_text("copied from the gateway's usage store to PostgreSQL")).to_be_visible()
    expect(page.get_by_text("tenants_stored", exact=True)).to_be_visible()
    expect(page.get_by_role("link", name="hourly_snapshot_job")).to_be_visible()


def test_the_partitions_page_shows_missing_and_captured_hours(running: Running, page: Page) -> None:
    page.goto(f"{running.dev.ui.url}/assets/{SNAPSHOTS}?view=partitions")
    expect(page.get_by_text(re.compile(r"^Missing \([0-9]{3}\)$"))).to_be_visible()
    choose(page, running.current)
    expect(page.get_by_text("tenants_stored", exact=True)).to_be_visible()


def require_refusal(page: Page, running: Running, sentence: str) -> None:
    """Require that the hour without a capture has failed, with the reason in the log."""
    choose(page, running.never_captured)
    expect(page.get_by_text("failed, and did not materialize this asset")).to_be_visible()
    page.get_by_text("View logs").click()
    expect(page.get_by_text(sentence).first).to_be_visible()


def test_a_backfill_verifies_captured_hours_and_fails_for_others(
    backfilled: Running, page: Page
) -> None:
    running = backfilled
    page.goto(f"{running.dev.ui.url}/assets/{SNAPSHOTS}?view=partitions")
    expect(page.get_by_text("Failed (1)")).to_be_visible()
    for hour in running.retained:
        choose(page, hour)
        expect(page.get_by_text("verified", exact=True)).to_be_visible()
        captured_at = page.get_by_text(re.compile(f"^{hour.start:%Y-%m-%dT%H}:"))
        expect(captured_at).to_have_count(3)
    require_refusal(
        page,
        running,
        f"No snapshot is stored for the hour {running.never_captured}: none was taken",
    )


def test_a_backfill_writes_the_tables_of_retained_hours(backfilled: Running, page: Page) -> None:
    running = backfilled
    assert len(running.tables(running.current)) == 3
    assert running.tables(running.never_captured) == {}
    for hour in running.retained:
        assert running.tables(hour).keys() == running.tables(running.current).keys()
    page.goto(f"{running.dev.ui.url}/assets/{TABLES}?view=partitions")
    choose(page, running.retained[0])
    expect(page.get_by_text("how_to_read", exact=True)).to_be_visible()
    require_refusal(
        page, running, f"No table of the hour {running.never_captured} can be written: no snapshot"
    )
