"""An operator previews and applies the restore of a FAILED store, using only the pages."""

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Locator, Page, expect

from budget_recovery_dagster.embedded import NatsServer, PostgresServer
from budget_recovery_dagster.sandbox import snapshot_run
from tests.acceptance.browser import opened_page
from tests.acceptance.given_up_store import GivenUp, given_up
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

RESTORED = "restored_usage"
SNAPSHOTS = "budget_usage_snapshots"
RUN_SECONDS = 120
REASON = "the disk has room again"

DEFAULTS = (
    "accept_unconverged: false",
    "budget: ''",
    "despite_resets: false",
    "mode: preview",
    "reason: ''",
    "snapshot: latest",
    "tenant: '*'",
)


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with opened_page() as page:
        yield page


# Requires the page first, so that nothing is started without a browser.
@pytest.fixture(scope="module")
def failed_dev(
    page: Page, server_dir: Path, nats_server: NatsServer, postgres_server: PostgresServer
) -> Iterator[GivenUp]:
    with tempfile.TemporaryDirectory(dir=server_dir) as directory:
        place = Path(directory)
        place.chmod(0o755)
        with given_up(place, nats_server, postgres_server) as failed_dev:
            yield failed_dev


def job(failed_dev: GivenUp, name: str) -> str:
    return f"{failed_dev.dev.ui.url}/locations/budget_recovery/jobs/{name}"


def asset(failed_dev: GivenUp, name: str, view: str) -> str:
    return f"{failed_dev.dev.ui.url}/assets/{name}?view={view}"


def open_launchpad(page: Page, failed_dev: GivenUp) -> None:
    """Open the Launchpad of the job as a new user."""
    # The Launchpad remembers the last config.
    page.goto(f"{failed_dev.dev.ui.url}/server_info")
    page.evaluate("localStorage.clear()")
    page.goto(job(failed_dev, "manual_restore_job"))
    expect(page.get_by_text("Start it from the Launchpad with mode preview")).to_be_visible()
    page.get_by_role("tab", name="Launchpad").click()


def line(page: Page, text: str) -> Locator:
    """Return a line of the Launchpad's editor."""
    return page.locator(".CodeMirror-line", has_text=text)


def write(page: Page, setting: str, old: str, new: str) -> None:
    """Replace the value of a setting."""
    line(page, f"{setting}: {old}").click()
    page.keyboard.press("End")
    for _ in old:
        page.keyboard.press("Backspace")
    page.keyboard.type(new)
    expect(line(page, f"{setting}: {new}")).to_be_visible()


def launch(page: Page, failed_dev: GivenUp, outcome: str) -> str:
    """Launch the run, wait until it is over, and return the URL of its page."""
    page.get_by_role("button", name="Launch Run").click()
    return require_outcome(page, failed_dev, outcome)


def require_outcome(page: Page, failed_dev: GivenUp, outcome: str) -> str:
    """Wait until the run on the page is over and shows this outcome; return the page's URL."""
    expect(page).to_have_url(re.compile("/runs/[0-9a-f-]{36}"))
    url = page.url
    run_id = url.rpartition("/")[2][:36]
    # The page of a running run draws its chart all the time, which takes more than the run does.
    page.goto("about:blank")
    ui = failed_dev.dev.ui
    wait_until(lambda: snapshot_run(ui, run_id).is_over, seconds=RUN_SECONDS, every=0.2)
    page.goto(url)
    expect(page.get_by_text(outcome, exact=True).first).to_be_visible()
    return url


def row(page: Page, *cells: str) -> Locator:
    """Return the row of a metadata table that starts with these cells."""
    pattern = r"\s*".join(map(re.escape, cells))
    return page.locator("table table tr").filter(has_text=re.compile(f"^{pattern}"))


def test_the_page_of_a_run_with_an_unknown_tenant_shows_the_choices(
    failed_dev: GivenUp, page: Page
) -> None:
    open_launchpad(page, failed_dev)
    write(page, "tenant", "'*'", "acmee")
    launch(page, failed_dev, "Failure")
    refusal = "No snapshot of tenant 'acmee' is retained. Try: choose the tenant from"
    expect(page.get_by_text(f"{refusal}: *, acme, globex.").first).to_be_visible()


def test_a_failed_store_is_restored_and_the_next_snapshot_is_taken(
    failed_dev: GivenUp, page: Page
) -> None:
    assert failed_dev.state == "failed"
    # Only the snapshot before the loss; the first run of the command was paused.
    assert failed_dev.captures == 1

    open_launchpad(page, failed_dev)
    for default in DEFAULTS:
        expect(line(page, default)).to_be_visible()
    line(page, "mode: preview").click()
    expect(page.get_by_text("show in the Events of the asset restored_usage")).to_be_visible()
    preview = launch(page, failed_dev, "Success")

    page.goto(asset(failed_dev, RESTORED, "events"))
    expect(page.get_by_text("4 counters in 2 windows would be raised")).to_be_visible()
    expect(page.get_by_text(re.compile("^FAILED, incident .* is open"))).to_be_visible()
    expect(page.locator("pre")).to_contain_text(
        "acme, total lifetime, 'alice'\n  [########++++++++++++++++] 10 -> 30, would be blocked\n"
    )
    window = row(page, "acme", "total lifetime", "0 -> 80", "80", "25", "0 -> 1", "3 of 3")
    expect(window).to_be_visible()
    assert failed_dev.usage_of_alice == "10"

    page.goto(preview)
    page.get_by_text("Open in Launchpad").click()
    write(page, "reason", "''", REASON)
    write(page, "mode", "preview", "apply")
    launch(page, failed_dev, "Success")

    page.goto(asset(failed_dev, RESTORED, "overview"))
    expect(page.get_by_text("4 counters raised, ")).to_be_visible()
    expect(page.get_by_text(REASON, exact=True)).to_be_visible()
    expect(page.get_by_text("is closed; the store is HEALTHY.")).to_be_visible()
    expect(page.get_by_text(re.compile("^No difference from the preview of "))).to_be_visible()
    expect(row(page, "acme", "total", "lifetime", "3", "3", "0", "80")).to_be_visible()
    assert failed_dev.usage_of_alice == "30"
    assert failed_dev.state == "healthy"

    page.goto(job(failed_dev, "hourly_snapshot_job"))
    page.get_by_role("button", name="Materialize all").click()
    page.get_by_role("button", name="Latest", exact=True).click()
    page.get_by_role("button", name="Launch 1 run").click()
    page.get_by_role("button", name="View", exact=True).or_(
        page.get_by_role("link", name="View", exact=True)
    ).click()
    require_outcome(page, failed_dev, "Success")
    page.goto(asset(failed_dev, SNAPSHOTS, "overview"))
    expect(page.get_by_text("tenants_stored", exact=True)).to_be_visible()
    assert failed_dev.captures > 1
    assert failed_dev.state == "healthy"
