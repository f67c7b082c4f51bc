"""The page and the JSON of ``budget-recovery status``, on a real database."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner, Result
from pydantic import SecretStr

from budget_recovery_dagster.adapters.postgres import Database
from budget_recovery_dagster.cli.main import main
from budget_recovery_dagster.domain import (
    CAPTURE_LEASE,
    RESTORE_LEASE,
    Baseline,
    CaptureFailure,
    Check,
    Closing,
    FailureReason,
    Hour,
    Loss,
    Outcome,
    Restored,
    StoreIdentity,
    Verdict,
    take_snapshot,
)
from budget_recovery_dagster.errors import ClockSkewError
from budget_recovery_dagster.ports import ControlPlane
from budget_recovery_dagster.sandbox import RunningDev, announced, held_data_dir
from budget_recovery_dagster.settings import Settings
from budget_recovery_dagster.wiring import control_plane_on, opened_control_plane
from tests import services
from tests.contract.control_planes import reading
from tests.free_ports import unused_port
from tests.nats_servers import Bucket

POSTGRES_URL = "BUDGET_RECOVERY_POSTGRES_URL"
BUCKET = "budget-usage"
# More than a double represents exactly.
LARGE = 2**53 + 1
NEXT = "Next         "


@pytest.fixture
def opened(database_url: str) -> Iterator[ControlPlane]:
    """Open a database whose store was checked five minutes ago."""
    with opened_control_plane(Settings(postgres_url=SecretStr(database_url))) as database:
        database.registry.claim()
        check(database, minutes=5)
        yield database


def identity(database: ControlPlane) -> StoreIdentity:
    return StoreIdentity(database.clock.now() - timedelta(days=1), LARGE)


def check(
    database: ControlPlane,
    *,
    minutes: float,
    verdict: Verdict = Verdict.SAME,
    reason: str = "As it was.",
) -> None:
    at = database.clock.now() - timedelta(minutes=minutes)
    database.registry.record_check(Check(at, "sensor", verdict, reason, identity(database)))


def lose(database: ControlPlane) -> None:
    now = database.clock.now()
    loss = Loss(now, "sensor", Verdict.LOST, "It was recreated.", identity(database), None)
    judged = database.registry.claim().baseline
    database.incidents.open(loss, target=Baseline(identity(database), 1), judged=judged)


def fail(database: ControlPlane) -> None:
    open_one = database.incidents.recovery().incident
    assert open_one is not None
    with database.leases.hold(RESTORE_LEASE, "test") as lease:
        claimed = database.incidents.claim_attempt(
            judged=open_one, run_id="run", holder="test", lease=lease
        )
        database.incidents.end_attempt("The disk is full.", judged=claimed, lease=lease)
        database.incidents.give_up(
            FailureReason.NOT_WRITTEN, "The disk is full.", judged=claimed, lease=lease
        )


def close(database: ControlPlane) -> None:
    open_one = database.incidents.recovery().incident
    assert open_one is not None
    closing = Closing(
        Outcome.RESTORED, "All is back.", Restored(1, 2, 3, 4), Baseline(identity(database), 1)
    )
    with database.leases.hold(RESTORE_LEASE, "test") as lease:
        database.incidents.close(closing, judged=open_one, lease=lease)


def status(url: str | None, *arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(
        main, ["status", *arguments], env={POSTGRES_URL: url, "COLUMNS": "80", **environment}
    )


def as_json(url: str | None, *arguments: str, **environment: str) -> dict[str, Any]:
    ended = status(url, "--json", *arguments, **environment)
    content: dict[str, Any] = json.loads(ended.stdout)
    assert content["exit_code"] == ended.exit_code
    return content


def require_tidy(page: str) -> None:
    assert all(len(line) <= 80 and line == line.rstrip() for line in page.splitlines()), page


def test_each_state_has_its_page_and_exit_code(opened: ControlPlane, database_url: str) -> None:
    healthy = status(database_url)
    assert healthy.exit_code == 0
    assert healthy.stdout.startswith("HEALTHY at ")
    assert f"\n{NEXT}Nothing to do. The next check " in healthy.stdout

    lose(opened)
    recovering = status(database_url)
    assert recovering.exit_code == 1
    assert recovering.stdout.startswith("RECOVERING at ")
    assert "It was recreated." in recovering.stdout
    assert "Attempts 0 of 3" in recovering.stdout
    assert "Not covered: all usage, because no intact snapshot existed" in recovering.stdout

    fail(opened)
    failed = status(database_url)
    assert failed.exit_code == 2
    assert failed.stdout.startswith("FAILED at ")
    assert "all attempts failed" in failed.stdout
    assert f"\n{NEXT}The disk is full. Fix the cause, " in failed.stdout
    for ended in (healthy, recovering, failed):
        require_tidy(ended.stdout)
        assert ended.stderr == ""


def capture(database: ControlPlane, usage: str) -> None:
    now = database.clock.now()
    read = reading("acme", {("team", "lifetime"): {"alice": usage}})
    known = database.points.current_usages("acme", now)
    with database.leases.hold(CAPTURE_LEASE, "test") as lease:
        database.snapshots.commit(
            take_snapshot(read, now, identity(database), known),
            hour=Hour.containing(now),
            run_id="run",
            lease=lease,
            judged=database.registry.claim().baseline,
        )


# The verification of any content but the newest fails.
_FAILING = """
create or replace function budget_recovery.is_stored_intact(content_id bigint) returns boolean
language plpgsql as $$
begin
    if is_stored_intact.content_id < (select max(c.content_id)
       from budget_recovery.budget_content c) then
        raise exception 'cannot read the block';
    end if;
    return true;
end $$
"""


def test_the_state_is_shown_although_records_cannot_be_verified(
    opened: ControlPlane, database_url: str
) -> None:
    capture(opened, "5")
    # A lower usage does not cover the earlier record.
    capture(opened, "4")
    lose(opened)
    fail(opened)
    with psycopg.connect(database_url) as connection:
        connection.execute(_FAILING)
    ended = status(database_url)
    assert ended.exit_code == 2
    assert ended.stdout.startswith("FAILED at ")
    not_verified = "Not verified: 'acme'. Error from the control-plane database: cannot read the"
    assert not_verified in " ".join(ended.stdout.split())
    points = as_json(database_url)["points"]
    assert (points["damaged_records_by_tenant"], points["unverified_tenants"]) == ({}, ["acme"])
    environment = {POSTGRES_URL: database_url, "COLUMNS": "80"}
    listed = CliRunner().invoke(main, ["snapshots"], env=environment)
    assert listed.exit_code == 0
    assert not_verified in " ".join(listed.stdout.split())
    document = CliRunner().invoke(main, ["snapshots", "--json"], env=environment)
    assert json.loads(document.stdout)["unverified_tenants"] == ["acme"]


def test_the_last_closed_incident_shows_what_was_restored(
    opened: ControlPlane, database_url: str
) -> None:
    lose(opened)
    close(opened)
    ended = status(database_url)
    assert ended.exit_code == 0
    assert ": restored\n" in ended.stdout
    text = " ".join(ended.stdout.split())
    assert "All is back. 4 leaderboards rebuilt" in text
    require_tidy(ended.stdout)


def test_a_hold_is_shown_until_its_incident_is_closed(
    opened: ControlPlane, database_url: str
) -> None:
    lose(opened)
    open_one = opened.incidents.recovery().incident
    assert open_one is not None
    opened.incidents.hold("looking", "ann", judged=open_one)
    held = status(database_url)
    assert held.exit_code == 2
    assert held.stdout.startswith("HELD at ")
    assert re.search(r"On hold since [0-9:]{8} UTC, by ann: looking", held.stdout)
    close(opened)
    over = status(database_url).stdout
    assert re.search(r"On hold from [0-9:]{8} UTC to [0-9:]{8} UTC, by ann: looking", over)


def test_three_unknown_checks_exit_with_3(opened: ControlPlane, database_url: str) -> None:
    for minutes in (3, 2, 1):
        check(opened, minutes=minutes, verdict=Verdict.UNKNOWN, reason="No answer came.")
    ended = status(database_url)
    assert ended.exit_code == 3
    assert ended.stdout.startswith("UNKNOWN at ")
    assert "The newest 3 checks are unknown: No answer came." in ended.stdout
    require_tidy(ended.stdout)


def test_the_check_interval_comes_from_the_settings(
    opened: ControlPlane, database_url: str
) -> None:
    assert status(database_url, BUDGET_RECOVERY_CHECK_INTERVAL_SECONDS="90").exit_code == 3
    assert status(database_url, BUDGET_RECOVERY_CHECK_INTERVAL_SECONDS="110").exit_code == 0


def test_json_has_the_same_keys_in_every_situation(opened: ControlPlane, database_url: str) -> None:
    down = f"postgresql://me:s3cret@127.0.0.1:{unused_port()}/database"
    contents = [as_json(database_url), as_json(down)]
    lose(opened)
    contents.append(as_json(database_url))
    fail(opened)
    contents.append(as_json(database_url))
    assert [each["condition"] for each in contents] == [
        "healthy",
        "unknown",
        "recovering",
        "failed",
    ]
    assert {frozenset(each) for each in contents} == {frozenset(contents[0])}
    healthy, _, recovering, failed = contents
    newest = healthy["checks"]["newest_good"]
    assert newest["identity"]["last_sequence"] == str(LARGE)
    now = datetime.now(UTC)
    for timestamp in (healthy["at"], newest["checked_at"]):
        assert timestamp.endswith("Z")
        assert timedelta(0) <= now - datetime.fromisoformat(timestamp) < timedelta(minutes=10)
    [loss] = recovering["incident"]["losses"]
    assert (loss["before"]["last_sequence"], loss["after"]) == (str(LARGE), None)
    assert failed["incident"]["given_up"]["detail"] == "The disk is full."
    assert failed["incident"]["newest_attempt"]["outcome"] == "The disk is full."
    assert failed["incident"]["waiting"] is None


def test_status_changes_nothing(database_url: str, database: psycopg.Connection) -> None:
    ended = status(database_url)
    assert ended.exit_code == 3
    assert ended.stderr.startswith("Error: ")
    [(rows,)] = database.execute("select count(*) from budget_recovery.store").fetchall()
    assert rows == 0


def test_control_characters_in_names_are_escaped(opened: ControlPlane, database_url: str) -> None:
    name = "\x1b[2J\n東京"
    hour = Hour.containing(opened.clock.now())
    opened.snapshots.record_failures(
        [CaptureFailure(name, hour, "No answer came.", "wait.")], run_id="run"
    )
    ended = status(database_url)
    text = ended.stdout
    assert (ended.exit_code, text.split()[0]) == (4, "ATTENTION")
    assert "\x1b" not in text
    assert "Failing: \\x1b[2J\\n東京, without any snapshot" in text
    assert as_json(database_url)["points"]["failing_tenants"] == {name: None}


def no_answer(url: str | None, *arguments: str, **environment: str) -> str:
    ended = status(url, *arguments, **environment)
    assert (ended.exit_code, ended.stdout) == (3, "")
    assert "s3cret" not in ended.stderr
    sentence, hint = ended.stderr.splitlines()
    assert hint.startswith("Try: ")
    return sentence


def test_an_unusable_database_exits_with_3_and_one_sentence(
    empty_database_url: str, tmp_path: Path
) -> None:
    down = f"postgresql://me:s3cret@127.0.0.1:{unused_port()}/database"
    assert no_answer(down).startswith("Error: ")
    assert "schema" in no_answer(empty_database_url)
    assert "BUDGET_RECOVERY_RETENTION_DAYS is 'x'" in no_answer(
        down, BUDGET_RECOVERY_RETENTION_DAYS="x"
    )
    assert no_answer(None, "--data-dir", str(tmp_path)) == (
        f"Error: No budget-recovery dev runs on {tmp_path}."
    )
    error = as_json(down)["error"]
    assert error["code"] == "database_unreachable"
    assert error["message"] in no_answer(down)


def test_an_unknown_option_exits_with_3() -> None:
    assert status(None, "--jsn").exit_code == 3


def test_status_uses_the_database_of_the_running_dev_without_a_setting(
    opened: ControlPlane, database_url: str, tmp_path: Path
) -> None:
    own = RunningDev("http://127.0.0.1:1", BUCKET, 600, nats_url=None, postgres_url=database_url)
    given = RunningDev("http://127.0.0.1:1", BUCKET, 600, nats_url=None, postgres_url=None)
    arguments = ("--data-dir", str(tmp_path / "data"))
    with held_data_dir(tmp_path / "data") as data_dir:
        with announced(data_dir, own):
            assert status(None, *arguments).exit_code == 0
        with announced(data_dir, replace(own, check_interval_seconds=90)):
            assert status(None, *arguments).exit_code == 3
        with announced(data_dir, given):
            assert no_answer(None, *arguments) == (
                f"Error: The running dev uses the database that its {POSTGRES_URL} names."
            )


def capture_with_clock(url: str, ahead: timedelta, run_id: str) -> None:
    """Capture with a database whose clock is ahead of that of the store."""
    settings = services.present_settings()
    with Database(url, clock=lambda _: datetime.now(UTC) + ahead) as skewed:
        plane = control_plane_on(skewed, settings.bucket)
        services.capture(plane, Hour.containing(plane.clock.now()), run_id=run_id)


def check_now(url: str) -> None:
    with opened_control_plane(services.present_settings()) as plane:
        services.check(plane)
    with psycopg.connect(url) as connection:
        ((state,),) = connection.execute("select state from budget_recovery.store").fetchall()
        assert state == "healthy"


def codes(document: dict[str, Any]) -> list[str]:
    return [each["code"] for each in document["attention"]]


def test_clocks_that_differ_are_shown_with_what_they_prevent(
    configured: Bucket, database_url: str
) -> None:
    configured.spend("acme", "total", "lifetime", {None: "10"})
    check_now(database_url)
    for number in range(2):
        with pytest.raises(ClockSkewError):
            capture_with_clock(database_url, timedelta(seconds=-70), f"run {number}")

    document = as_json(database_url)
    assert (document["exit_code"], document["condition"]) == (4, "attention")
    assert codes(document) == ["clock_skew", "captures_failing"]
    skew, failing = document["attention"]
    assert skew["message"].startswith("The store's clock is 70 s ahead of the database's.")
    assert "no snapshot is taken" in skew["message"]
    assert failing["message"].startswith(
        "Each of the last 2 captures failed. The newest: The clocks differ by 70 s:"
    )
    assert document["captures"]["newest_run"]["error"]["code"] == "clock_skew"

    # Snapshots are stored, but a restore would refuse the clock.
    capture_with_clock(database_url, timedelta(seconds=-30), "run 3")
    document = as_json(database_url)
    assert (document["exit_code"], codes(document)) == (4, ["clock_skew"])
    assert "no restore could run" in document["attention"][0]["message"]
    assert document["captures"]["clock_skew_seconds"] == pytest.approx(30, abs=1)
    page = status(database_url)
    require_tidy(page.stdout)
    assert page.stdout.startswith("ATTENTION at ")

    capture_with_clock(database_url, timedelta(0), "run 4")
    assert as_json(database_url)["exit_code"] == 0


def test_a_store_without_a_snapshot_for_hours_needs_attention(
    configured: Bucket, database: psycopg.Connection, database_url: str
) -> None:
    check_now(database_url)
    assert status(database_url).exit_code == 0
    database.execute(
        "update budget_recovery.store_check set checked_at = checked_at - interval '33 hours'"
    )
    check_now(database_url)
    document = as_json(database_url)
    assert (document["exit_code"], codes(document)) == (4, ["no_snapshot"])
    (attention,) = document["attention"]
    assert "The store was first checked 33.0 h ago" in attention["message"]
    assert attention["message"].endswith("No capture has run.")
    assert "hourly_snapshot_schedule" in attention["next_step"]

    configured.spend("acme", "total", "lifetime", {None: "10"})
    capture_with_clock(database_url, timedelta(0), "run")
    assert as_json(database_url)["exit_code"] == 0


def test_failing_tenants_need_attention_until_they_are_captured_or_have_left(
    configured: Bucket, database: psycopg.Connection, database_url: str
) -> None:
    for tenant in ("acme", "globex", "left", "mended"):
        configured.spend(tenant, "total", "lifetime", {None: "10"})
    check_now(database_url)
    database.execute(
        "create function refuse() returns trigger language plpgsql as $$ begin"
        " if new.tenant = 'left' then raise exception 'no space for it'; end if;"
        " if new.tenant <> 'acme' then raise exception 'not permitted'; end if;"
        " return new; end $$"
    )
    database.execute(
        "create trigger refuse before insert on budget_recovery.capture"
        " for each row execute function refuse()"
    )
    capture_with_clock(database_url, timedelta(0), "run 1")

    document = as_json(database_url)
    assert (document["exit_code"], codes(document)) == (4, ["tenants_failing"])
    assert [each["tenants"] for each in document["captures"]["failures"]] == [
        ["globex", "mended"],
        ["left"],
    ]
    (attention,) = document["attention"]
    assert "Captures of 'globex', 'left', 'mended' fail. 2 tenants: " in attention["message"]
    assert "not permitted" in attention["message"]
    assert " 1 tenant: " in attention["message"]

    database.execute("drop trigger refuse on budget_recovery.capture")
    configured.purge("usage.left.")
    capture_with_clock(database_url, timedelta(0), "run 2")
    document = as_json(database_url)
    assert document["exit_code"] == 0
    newest = document["captures"]["newest_run"]
    assert (newest["stored"], newest["absent"], newest["failed"]) == (3, 1, 0)


def test_a_capture_that_was_killed_needs_attention_once_its_hour_is_over(
    configured: Bucket, database: psycopg.Connection, database_url: str
) -> None:
    configured.spend("acme", "total", "lifetime", {None: "10"})
    check_now(database_url)
    capture_with_clock(database_url, timedelta(0), "run")
    # As a process that was killed leaves it.
    database.execute(
        "update budget_recovery.capture_run set hour = hour - interval '1 hour', ended_at = null,"
        " outcome = null, stored = null, absent = null, failed = null"
    )
    document = as_json(database_url)
    assert (document["exit_code"], codes(document)) == (4, ["captures_failing"])
    assert "its process hangs or died" in document["attention"][0]["message"]
    assert document["captures"]["newest_run"]["ended_at"] is None
