"""``discard-future``: snapshots that a wrong clock dated in the future are listed and discarded."""

import json
from datetime import timedelta

import psycopg
import pytest
from click.testing import CliRunner, Result

from budget_recovery_dagster.cli.main import main
from budget_recovery_dagster.cli.options import current_user
from budget_recovery_dagster.domain import CAPTURE_LEASE, RecoveryState
from budget_recovery_dagster.errors import ClockSkewError
from budget_recovery_dagster.services.future_snapshots import (
    discard_future,
    list_future,
)
from budget_recovery_dagster.wiring import store_opener
from tests.free_ports import unused_port
from tests.integration.recovery_harness import Harness
from tests.services import present_settings

LIFETIME = "lifetime"
AHEAD = timedelta(days=40)
SOON = timedelta(seconds=1)


@pytest.fixture
def ahead(harness: Harness) -> Harness:
    """Return two tenants with a good snapshot, and one by a clock that was 40 days ahead."""
    harness.bucket.spend("acme", "total", LIFETIME, {"alice": "30"})
    harness.bucket.spend("globex", "total", LIFETIME, {None: "5"})
    now = harness.clock.time
    harness.capture()
    harness.bucket.spend("acme", "total", LIFETIME, {"alice": "31"})
    harness.capture(now + AHEAD)
    harness.clock.time = now
    return harness


def run(*arguments: str, reason: str = "wrong clock", typed: str | None = None) -> Result:
    return CliRunner().invoke(main, ["discard-future", "--reason", reason, *arguments], input=typed)


def count(database: psycopg.Connection, table: str) -> int:
    [(rows,)] = database.execute(
        f"select count(*) from budget_recovery.{table}".encode()
    ).fetchall()
    return int(rows)


def test_snapshots_dated_in_the_future_are_discarded_and_recorded(
    ahead: Harness, database: psycopg.Connection
) -> None:
    (future,) = ahead.plane.snapshots.in_future(ahead.clock.time)
    assert (future.tenants, future.records, future.entries) == (2, 2, 2)
    result = run("--yes")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == "Dated in the future:"
    assert lines[2].split()[1:4] == ["2", "2", "2"]
    assert str(future.captured_at.date()) in lines[2]
    # Alice's 31 was only there.
    assert lines[3:] == [
        "Lower or missing in the recovery points without them: 1 counter",
        "  acme, total lifetime: 1 counter, 1 of usage",
        "No restore brings this usage back once they are discarded.",
        "Discarded 1 snapshot (2 tenants). The table discarded_capture lists them.",
        "Lower or missing in the recovery points: 1 counter.",
    ]
    assert [each.tenants for each in ahead.plane.snapshots.listed(None)] == [2]
    assert [count(database, table) for table in ("capture", "budget_record")] == [2, 2]
    # The content of globex is shared.
    assert count(database, "budget_content") == 2
    recorded = database.execute(
        "select tenant, captured_at, record_count, entry_count, discarded_by, reason"
        " from budget_recovery.discarded_capture order by tenant"
    ).fetchall()
    assert recorded == [
        (tenant, future.captured_at, 1, 1, current_user(), "wrong clock")
        for tenant in ("acme", "globex")
    ]
    again = run("--yes")
    assert again.exit_code == 2
    assert "No snapshot is dated in the future" in again.stderr


def test_the_discarded_snapshots_are_written_as_json(ahead: Harness) -> None:
    result = run("--yes", "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert [each["tenants"] for each in document["discarded"]] == [2]
    place = {"tenant": "acme", "budget": "total", "window": "lifetime"}
    assert document["lost"] == {
        "windows": 1,
        "counters": 1,
        "largest": [{**place, "counters": 1, "usage": "1"}],
    }
    assert document["falls_ended"] == 0
    refused = run("--json")
    assert refused.exit_code == 2
    assert json.loads(refused.stdout)["error"]["code"] == "usage"


def test_a_capture_before_keeps_the_usage_of_the_store(ahead: Harness) -> None:
    ahead.capture(ahead.clock.time + SOON)
    result = run("--yes")
    assert result.stdout.splitlines()[3:] == [
        "The other snapshots hold all their usage of open windows.",
        "Discarded 1 snapshot (2 tenants). The table discarded_capture lists them.",
    ]


def test_the_list_of_what_only_they_hold_is_cut_with_a_count(ahead: Harness) -> None:
    now = ahead.clock.time
    for number in range(1, 43):
        ahead.bucket.spend("acme", f"budget {number}", LIFETIME, {None: str(number)})
    ahead.capture(now + 2 * AHEAD)
    ahead.clock.time = now
    lines = run("--yes").stdout.splitlines()
    first = lines.index("  acme, budget 42 lifetime: 1 counter, 42 of usage")
    assert lines[first - 1].endswith("without them: 43 counters")
    assert lines[first + 39] == "  acme, budget 3 lifetime: 1 counter, 3 of usage"
    assert lines[first + 40] == "  3 more windows"
    assert lines[-1] == "Lower or missing in the recovery points: 43 counters."


def test_a_fall_that_only_they_show_ends_as_discarded(
    ahead: Harness, database: psycopg.Connection
) -> None:
    ahead.bucket.spend("acme", "total", LIFETIME, {"alice": "30"})
    ahead.capture(ahead.clock.time + SOON)
    assert "acme, total lifetime: 1 counter, 1 of usage" in status()
    result = run("--yes")
    assert result.stdout.splitlines()[-1] == (
        "Ended as discarded: 1 fall whose missing usage only they held."
    )
    assert "Missing" not in status()
    ahead.capture(ahead.clock.time + SOON)
    outcomes = database.execute("select outcome from budget_recovery.usage_fall").fetchall()
    assert outcomes == [("discarded",)]


def status() -> str:
    return CliRunner().invoke(main, ["status"]).stdout


def test_only_what_was_shown_is_discarded(ahead: Harness) -> None:
    """A snapshot that is stored while the command waits for the answer stays."""
    now = ahead.clock.time
    (shown,) = list_future(ahead.plane, None).found
    ahead.capture(now + 2 * AHEAD)
    ahead.clock.time = now
    discarded = discard_future(
        ahead.plane, [shown], None, by="ann", reason="clock", holder="a command"
    )
    assert discarded.found == (shown,)
    (kept,) = ahead.plane.snapshots.in_future(now)
    assert kept.captured_at > shown.captured_at
    result = run("--yes")
    assert "Discarded 1 snapshot (2 tenants)." in result.stdout


def test_several_snapshots_are_counted_as_listed(ahead: Harness) -> None:
    now = ahead.clock.time
    ahead.capture(now + 2 * AHEAD)
    ahead.clock.time = now
    result = run("--yes")
    assert result.exit_code == 0, result.output
    assert "Discarded 2 snapshots (up to 2 tenants)." in result.stdout


def test_nothing_is_discarded_without_a_confirmation(ahead: Harness) -> None:
    result = run(typed="y\n")
    assert result.exit_code == 2
    # The preview is shown, and there is no terminal to ask.
    assert "Dated in the future:" in result.stdout
    assert "Nothing was discarded: there is no terminal" in result.stderr
    assert len(ahead.plane.snapshots.listed(None)) == 2


def test_a_clock_that_is_behind_discards_no_good_snapshot(
    ahead: Harness, database: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The database's clock is an hour behind this host's, so that all snapshots seem to be ahead.
    database.execute("create schema behind")
    database.execute(
        "create function behind.clock_timestamp() returns timestamptz language sql"
        " return pg_catalog.clock_timestamp() - interval '1 hour'"
    )
    [(name,)] = database.execute("select current_database()").fetchall()
    database.execute(
        f'alter database "{name}" set search_path = behind, pg_catalog, public'.encode()
    )
    result = run("--yes")
    assert result.exit_code == 2
    assert "The clocks differ by" in result.stderr
    assert "this host's" in result.stderr
    assert "Nothing was discarded." in result.stderr
    assert len(ahead.plane.snapshots.listed(None)) == 2


def test_clocks_of_one_machine_that_are_behind_discard_no_good_snapshot(ahead: Harness) -> None:
    # PostgreSQL and this host share a clock that was set back, so only that of NATS differs.
    ahead.clock.time -= timedelta(hours=1)
    open_store = store_opener(present_settings())
    with pytest.raises(ClockSkewError, match="the usage store's"):
        list_future(ahead.plane, open_store)


def test_snapshots_are_discarded_with_a_warning_while_nats_is_away(
    ahead: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BUDGET_RECOVERY_NATS_URL", f"nats://127.0.0.1:{unused_port()}")
    result = run("--yes")
    assert result.exit_code == 0, result.output
    assert "the clock of NATS was not compared" in result.stderr
    assert len(ahead.plane.snapshots.listed(None)) == 1


@pytest.mark.parametrize("state", [RecoveryState.RECOVERING, RecoveryState.FAILED])
def test_nothing_is_discarded_while_captures_are_paused(
    ahead: Harness, database: psycopg.Connection, state: RecoveryState
) -> None:
    database.execute("update budget_recovery.store set state = %s", (state.value,))
    result = run("--yes")
    assert result.exit_code == 2
    assert f"The store is {state.name}, so no snapshot is discarded." in result.stderr
    assert len(ahead.plane.snapshots.listed(None)) == 2


def test_nothing_is_discarded_while_a_capture_runs(ahead: Harness) -> None:
    with ahead.plane.leases.hold(CAPTURE_LEASE, "a capture"):
        result = run("--yes")
    assert result.exit_code == 2
    assert "Another capture is running" in result.stderr
    assert len(ahead.plane.snapshots.listed(None)) == 2


def test_an_empty_reason_is_refused(ahead: Harness) -> None:
    assert run("--yes", reason=" ").exit_code == 2
    assert len(ahead.plane.snapshots.listed(None)) == 2


def test_the_status_names_the_snapshot_and_the_command(ahead: Harness) -> None:
    status = CliRunner().invoke(main, ["status"])
    assert "A snapshot has a time in the future" in status.stdout
    assert "budget-recovery discard-future" in " ".join(status.stdout.split())
    assert run("--yes").exit_code == 0
    assert "future" not in CliRunner().invoke(main, ["status"]).stdout
