"""A running ``budget-recovery dev``: its commands, recovery, and the asset pages in a browser.

The tests share one dev, and those of a wiped store depend on the wipes before.
"""

import asyncio
import json
import os
import re
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal
from pathlib import Path
from urllib.parse import quote

import nats
import psycopg
import pytest
from nats.js.api import KeyValueConfig, StreamConfig
from playwright.sync_api import Page, expect

from budget_recovery_dagster.adapters.nats import decode_key
from budget_recovery_dagster.domain import Hour, Period
from budget_recovery_dagster.sandbox import find_running_dev
from budget_recovery_dagster.sandbox.gateway import BUDGETS
from tests.acceptance.browser import opened_page
from tests.acceptance.recovering_dev import RecoveringDev, recovering_dev
from tests.free_ports import unused_port
from tests.integration.commands import answering
from tests.integration.dev_command import STOP_SECONDS, Dev, refusal
from tests.processes import descendants, is_running
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

BUCKET = "KV_budget-usage"
OTHERS = ("KV_another", "another")
TENANTS = {"acme", "globex", "team a / 東京"}

SNAPSHOTS = "budget_usage_snapshots"
TABLES = "tenant_usage_tables"

# Dagster's daemon starts new backfills twice a minute. It runs the hours of snapshots one by one,
# and those of tables in one run.
BACKFILL_SECONDS = 300
OWN_RUN, FIRST_OF_RUN = "dagster/partition", "dagster/asset_partition_range_start"

RUNS_OF_HOUR = """
query RunsOfHour($tag: String!, $hour: String!) {
  runsOrError(filter: {tags: [{key: $tag, value: $hour}]}) {
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
# The copies of captures were committed before all others.
COPY_BACK = """
insert into budget_recovery.{table} overriding system value
select (jsonb_populate_record(t, jsonb_build_object(
    'captured_at', captured_at - %s,
    'commit_number', -(to_jsonb(t) ->> 'commit_number')::bigint
))).*
from budget_recovery.{table} t
where captured_at = (select max(captured_at) from budget_recovery.capture)
"""


async def _make_others(url: str) -> None:
    client = await nats.connect(url)
    js = client.jetstream()
    bucket = await js.create_key_value(KeyValueConfig("another"))
    await bucket.put("usage.acme.users.lifetime.alice", b"5")
    await js.add_stream(StreamConfig(name="another", subjects=["another"]))
    await js.publish("another", b"")
    await client.close()


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


def streams(of: RecoveringDev) -> dict[str, tuple[datetime, int]]:
    """When each stream was created, and its newest sequence."""
    return asyncio.run(_streams(find_running_dev(of.data_dir).nats_url or ""))


@pytest.fixture(scope="module")
def recovering(server_dir: Path) -> Iterator[RecoveringDev]:
    """Start the command after a first start that was interrupted before the history was written."""
    with tempfile.TemporaryDirectory(prefix="of running ", dir=server_dir) as directory:
        place = Path(directory)
        place.chmod(0o755)
        for data in (place / "data", place / "data" / "nats"):
            data.mkdir(mode=0o755)
        # An older version left this mark, although its bucket and ledger may have been wiped since.
        for file in ("dev.lock", "history-is-seeded"):
            (place / "data" / file).touch()
        with recovering_dev(place) as recovering:
            asyncio.run(_make_others(find_running_dev(place / "data").nats_url or ""))
            yield recovering


# The tests without a page come first: the driver of the browser leaves an event loop running.


def test_the_counters_of_the_gateway_only_rise_and_have_a_history(
    recovering: RecoveringDev,
) -> None:
    dev = recovering.dev
    before = dev.counters()
    assert {decode_key(key).tenant for key in before} == TENANTS
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


def test_each_refusal_is_one_sentence_and_does_not_disturb_the_running_dev(
    recovering: RecoveringDev,
) -> None:
    dev, directory = recovering.dev, recovering.data_dir.parent
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


def test_status_needs_no_setting_while_dev_runs(recovering: RecoveringDev) -> None:
    recovering.wait_for_a_good_check()
    ended = recovering.command("status", "--json")
    content = json.loads(ended.stdout)
    assert content["error"] is None
    assert content["exit_code"] == ended.returncode
    assert content["points"]["newest_by_tenant"].keys() == TENANTS


def test_wipe_requires_yes_without_a_terminal(recovering: RecoveringDev) -> None:
    created = streams(recovering)[BUCKET][0]
    ended = recovering.command("wipe", input="y\n")
    assert ended.returncode == 2
    assert "there is no terminal to ask for confirmation" in ended.stderr
    assert streams(recovering)[BUCKET][0] == created


def wipe_at_a_terminal(recovering: RecoveringDev, answer: str) -> int:
    """Answer the question of ``wipe``, and return its exit code; 0 if the bucket was wiped."""
    created = streams(recovering)[BUCKET][0]
    with answering(answer) as terminal:
        ended = recovering.command("wipe", stdin=terminal)
    assert "Wipe it? [y/N]: " in ended.stdout
    assert ("Nothing is wiped." in ended.stdout) is (ended.returncode != 0)
    assert (streams(recovering)[BUCKET][0] == created) is (ended.returncode != 0)
    return ended.returncode


@pytest.mark.parametrize("answer", ["n", ""])
def test_at_a_terminal_wipe_wipes_nothing_without_a_yes(
    recovering: RecoveringDev, answer: str
) -> None:
    assert wipe_at_a_terminal(recovering, answer) == 1


@dataclass(frozen=True)
class Wiped:
    """A dev whose store was wiped, with counters and streams as they were."""

    recovering: RecoveringDev
    output: str
    counters: dict[str, Decimal]
    before: dict[str, tuple[datetime, int]]
    after: dict[str, tuple[datetime, int]]


@pytest.fixture(scope="module")
def wiped(recovering: RecoveringDev) -> Wiped:
    recovering.wait_for_a_good_check()
    counters, before = recovering.dev.counters(), streams(recovering)
    ended = recovering.command("wipe", "--yes")
    assert ended.returncode == 0, ended.stderr
    return Wiped(recovering, ended.stdout, counters, before, streams(recovering))


def test_the_bucket_is_lost_and_nothing_else(wiped: Wiped) -> None:
    before, after = wiped.before, wiped.after
    assert after.keys() == before.keys() == {*OTHERS, BUCKET, "COSTS_budget-usage"}
    assert {name for name in before if after[name][0] != before[name][0]} == {BUCKET}
    assert all(after[name] == before[name] for name in OTHERS)

    # The gateway counts into the new one; the loss may already be detected.
    wait_until(lambda: streams(wiped.recovering)[BUCKET][1] > 0)
    assert wiped.recovering.dev.ui.is_up()


def test_wipe_shows_the_contents_and_how_to_watch(wiped: Wiped) -> None:
    data_dir = wiped.recovering.data_dir
    lines = wiped.output.splitlines()
    assert lines[0] == "Bucket budget-usage of the simulated gateway:"
    assert " counters of " in lines[1]
    assert lines[2].endswith(" blocked keys")
    assert "Wiped: stream KV_budget-usage is deleted." in lines
    assert any(line.startswith("The gateway created an empty one after ") for line in lines)
    assert lines[-2] == f"  budget-recovery status --data-dir '{data_dir}'"
    assert lines[-1] == f"  {wiped.recovering.dev.ui.url}"
    assert wiped.output.isascii()
    assert all(len(line) <= 80 or str(data_dir) in line for line in lines)


def test_a_wiped_store_is_restored_automatically(wiped: Wiped) -> None:
    recovering = wiped.recovering
    recovering.wait_for_restores(1)

    found = recovering.status()
    incident = found["last_closed_incident"]
    assert (found["condition"], found["exit_code"]) == ("healthy", 0)
    assert incident["ended"]["outcome"] == "restored"
    assert (incident["attempts"], len(incident["losses"])) == (1, 1)
    # The snapshot was taken under traffic before these were read; it contains nearly all of them.
    restored = incident["ended"]["restored"]
    assert restored["counters"] > len(wiped.counters) / 2
    assert recovering.command("status").returncode == 0

    seen = recovering.dev.ui.query(BLOCKED_AND_RESTORED)
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


def test_a_second_loss_on_the_same_day_has_its_own_incident_and_run(wiped: Wiped) -> None:
    recovering = wiped.recovering
    incident = recovering.status()["last_closed_incident"]

    assert wipe_at_a_terminal(recovering, "y") == 0
    recovering.wait_for_restores(2)

    assert recovering.status()["last_closed_incident"]["id"] != incident["id"]
    assert len(recovering.dev.ui.query(BLOCKED_AND_RESTORED)["runsOrError"]["results"]) == 2


@dataclass(frozen=True)
class Running:
    """A running dev with captures in the current hour and in one of the three before."""

    dev: Dev
    current: Hour
    directory_of_tables: Path

    def ago(self, hours: int) -> Hour:
        return Hour(self.current.start - timedelta(hours=hours))

    @property
    def retained(self) -> Hour:
        return self.ago(2)

    @property
    def never_captured(self) -> Hour:
        return self.ago(3)

    def wait_for_runs(self, asset: str, tag: str, *hours: Hour) -> None:
        """Wait until each hour has had a run of the asset with this tag, and all have ended."""

        def is_over(hour: Hour) -> bool:
            answer = self.dev.ui.query(RUNS_OF_HOUR, tag=tag, hour=hour.key)
            runs = answer["runsOrError"]["results"]
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


# Requires the page first, so that nothing is started for it without a browser.
@pytest.fixture(scope="module")
def running(page: Page, recovering: RecoveringDev) -> Running:
    with psycopg.connect(recovering.postgres_url) as connection:
        rows = connection.execute("select max(captured_at) from budget_recovery.capture")
        [(newest,)] = rows.fetchall()
        assert isinstance(newest, datetime)
        for table in ("capture", "budget_record"):
            connection.execute(COPY_BACK.format(table=table).encode(), (timedelta(hours=2),))
    return Running(recovering.dev, Hour.containing(newest), recovering.data_dir / "tables")


def choose(page: Page, hour: Hour) -> None:
    """Click an hour in the list of the partitions page."""
    page.get_by_title(hour.key, exact=True).first.click()
    expect(page).to_have_url(re.compile(f"partition={quote(hour.key)}"))


def launch_backfill(page: Page, running: Running, asset: str) -> None:
    """Use the dialog on the asset's page to materialize a range of hours."""
    page.goto(f"{running.dev.ui.url}/assets/{asset}?view=partitions")
    page.get_by_role("button", name="Materialize").first.click()
    hours = page.get_by_placeholder("No matching partitions")
    hours.fill(f"[{running.never_captured.key}...{running.retained.key}]")
    hours.press("Enter")
    page.get_by_role("button", name="Launch backfill").click()
    expect(page.get_by_text("Created backfill")).to_be_visible()


@pytest.fixture(scope="module")
def backfilled(running: Running, page: Page) -> Running:
    """Backfill an hour that was never captured, and a captured one after it."""
    for asset in (SNAPSHOTS, TABLES):
        launch_backfill(page, running, asset)
    # An open page keeps polling the server.
    page.goto("about:blank")
    running.wait_for_runs(SNAPSHOTS, OWN_RUN, running.never_captured, running.retained)
    running.wait_for_runs(TABLES, FIRST_OF_RUN, running.never_captured)
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


def test_a_backfill_verifies_a_captured_hour_and_fails_for_another(
    backfilled: Running, page: Page
) -> None:
    running = backfilled
    page.goto(f"{running.dev.ui.url}/assets/{SNAPSHOTS}?view=partitions")
    # At a full hour, a capture may have found a wipe: then its hour has failed, too.
    expect(page.get_by_text(re.compile(r"^Failed \([12]\)$"))).to_be_visible()
    choose(page, running.retained)
    expect(page.get_by_text("verified", exact=True)).to_be_visible()
    captured_at = page.get_by_text(re.compile(f"^{running.retained.start:%Y-%m-%dT%H}:"))
    expect(captured_at).to_have_count(3)
    require_refusal(
        page,
        running,
        f"No snapshot is stored for the hour {running.never_captured}: none was taken",
    )


def test_a_backfill_writes_the_tables_of_a_retained_hour(backfilled: Running, page: Page) -> None:
    running = backfilled
    assert len(running.tables(running.current)) == 3
    assert running.tables(running.never_captured) == {}
    assert running.tables(running.retained).keys() == running.tables(running.current).keys()
    page.goto(f"{running.dev.ui.url}/assets/{TABLES}?view=partitions")
    choose(page, running.retained)
    expect(page.get_by_text("how_to_read", exact=True)).to_be_visible()
    require_refusal(
        page, running, f"No table of the hour {running.never_captured} can be written: no snapshot"
    )


# The last test: it ends the dev of all others.
def test_a_child_that_dies_ends_dev_and_is_named(recovering: RecoveringDev) -> None:
    dev = recovering.dev
    owned = descendants(dev.process.pid)
    os.kill(dev.nats_pid, signal.SIGKILL)
    assert dev.process.wait(STOP_SECONDS) == 1
    output = dev.output.read_text()
    assert "Error: NATS ended by SIGKILL" in output
    assert f"Try: see its log {recovering.data_dir}/nats.log." in output
    assert not any(map(is_running, owned))
