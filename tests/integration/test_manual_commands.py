"""``snapshots``, ``preview``, ``restore`` and ``resolve`` in a terminal, on real servers."""

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner

from budget_recovery_dagster.cli.console import confirmed
from budget_recovery_dagster.cli.main import main
from budget_recovery_dagster.domain import CAPTURE_LEASE, RESTORE_LEASE, RecoveryState
from tests.integration.commands import PROGRAM, WIDTH, answer, page, run_at_terminal
from tests.integration.commands import invoke as run
from tests.integration.recovery_harness import Harness, all_stored
from tests.integration.recovery_runs import usages

LIFETIME = "lifetime"
RESOLVE = ("resolve", "--reason", "x", "--yes")


@pytest.fixture
def lost(harness: Harness) -> Harness:
    """Return a store that was captured and lost, with the real clock."""
    harness.bucket.spend("acme", "users", LIFETIME, {"alice": "30.5", "bob": "20"})
    harness.bucket.spend("acme", "cards", LIFETIME, {None: "4"})
    harness.bucket.spend("team a / 東京", "users", LIFETIME, {"user:bob@example.com": "1"})
    harness.bucket.rank("acme", "users", LIFETIME, {"alice": "30.5", "bob": "20"})
    harness.bucket.rank("team a / 東京", "users", LIFETIME, {"user:bob@example.com": "1"})
    harness.capture()
    harness.lose()
    harness.find_loss()
    return harness


def lower(document: dict[str, Any]) -> list[tuple[str, str]]:
    """Return what the snapshots hold beyond the store, by budget, largest first."""
    remainder = document["remainder"]
    assert (remainder["unreadable"], remainder["windows_unknown"], remainder["unread"]) == (
        0,
        0,
        [],
    )
    assert remainder["windows"] == len(remainder["largest"])
    return [(each["budget"], each["usage"]) for each in remainder["largest"]]


def state(harness: Harness) -> RecoveryState:
    return harness.plane.incidents.recovery().state


def test_snapshots_lists_the_choices(lost: Harness) -> None:
    head, row = page("snapshots")
    assert head.split() == ["captured", "at", "(UTC)", "tenants", "windows", "counters", "remarks"]
    at, tenants, windows, counters = row.split()
    assert (tenants, windows, counters) == ("2", "3", "4")
    (listed,) = answer("snapshots")["snapshots"]
    assert listed["captured_at"] == at
    document = answer("snapshots", "--tenant", "acme")
    assert document["budgets"] == ["cards", "users"]
    assert document["snapshots"][0]["counters"] == 3
    # --snapshot accepts this value.
    assert answer("preview", "--snapshot", at)["choice"]["snapshot"] == at


def test_preview_shows_everything_and_writes_nothing(lost: Harness) -> None:
    before = all_stored(lost.bucket)
    lines = page("preview")
    assert lines[0].startswith("PREVIEW at ")
    assert "Choice  every tenant, highest usage in all snapshots" in lines
    assert "Result  4 counters in 3 windows would be raised." in lines
    assert "    raises 2 of 2 counters: 0 -> 50.5 (+50.5)" in lines
    assert "    [++++++++++++++++++++++++] nothing -> 30.5" in lines
    assert lines[-1] == "To apply: budget-recovery restore <same options> --reason <why>"
    document = answer("preview", "--tenant", "acme", "--budget", "users")
    assert document["raised"] == 2
    assert document["state"] == "recovering"
    (tenant,) = document["tenants"]
    assert [(each["entity"], each["result"], each["action"]) for each in tenant["entries"]] == [
        ("alice", "30.5", "raise"),
        ("bob", "20", "raise"),
    ]
    assert all_stored(lost.bucket) == before


def test_a_restore_of_one_budget_and_then_of_all_closes_the_incident(lost: Harness) -> None:
    budget = ("--tenant", "acme", "--budget", "cards")
    answer("preview", *budget)
    document = answer("restore", *budget, "--reason", "cards first", "--yes")
    assert (document["raised"], document["differences"]) == (1, [])
    assert document["incident"]["is_closed"] is False
    assert lower(document) == [("users", "50.5"), ("users", "1")]
    assert state(lost) is RecoveryState.RECOVERING
    lines = page("restore", "--reason", "all of it", "--yes")
    assert lines[0] == "DONE 3 counters raised, 2 leaderboards written."
    assert any("is closed; the store is HEALTHY." in line for line in lines)
    assert state(lost) is RecoveryState.HEALTHY
    assert usages(lost.bucket, "acme", "users", LIFETIME) == {"alice": "30.5", "bob": "20"}


def test_at_a_terminal_restore_shows_a_preview_and_asks(lost: Harness) -> None:
    before = all_stored(lost.bucket)
    ended = run_at_terminal("n", "restore", "--reason", "why not")
    assert ended.returncode == 2, ended.stderr
    assert ended.stdout.startswith("PREVIEW at ")
    assert "Result  4 counters in 3 windows would be raised." in ended.stdout
    assert "To apply" not in ended.stdout
    assert ended.stdout.endswith("\n\nRestore this? [y/N]: Nothing is restored.\n")
    assert all_stored(lost.bucket) == before


def on_a_full_disk(*command: str, unbuffered: bool = False) -> subprocess.CompletedProcess[str]:
    """Run a command whose output cannot be written; only a buffer's is still there at its end."""
    environment = {name: os.environ[name] for name in os.environ if name != "PYTHONUNBUFFERED"}
    if unbuffered:
        environment["PYTHONUNBUFFERED"] = "1"
    with Path("/dev/full").open("w") as full:
        return subprocess.run(
            [*PROGRAM, *command],
            check=False,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
            env=environment,
        )


@pytest.mark.parametrize(
    "command",
    [
        ["preview"],
        ["snapshots", "--json"],
        ["record-reset", "--tenant", "acme", "--budget", "users", "--reason", "paid", "--json"],
    ],
)
def test_output_that_cannot_be_written_is_reported(lost: Harness, command: list[str]) -> None:
    ended = on_a_full_disk(*command)
    assert ended.returncode == 1
    assert ended.stderr.endswith(
        "Error: The output cannot be written: No space left on device.\n"
        "Try: check the output, and whether the command did its work before you repeat it.\n"
    )
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("unbuffered", [False, True])
@pytest.mark.parametrize(
    ("command", "what", "code"), [("status", "status", 3), ("doctor", "report", 2)]
)
def test_a_result_that_cannot_be_written_has_its_own_exit_code(
    lost: Harness, command: str, what: str, code: int, *, unbuffered: bool
) -> None:
    ended = on_a_full_disk(command, unbuffered=unbuffered)
    assert (ended.returncode, ended.stderr) == (
        code,
        f"Error: The {what} cannot be written: No space left on device.\nTry: check the output.\n",
    )


@pytest.mark.parametrize("unbuffered", [False, True])
@pytest.mark.parametrize(
    ("command", "what", "code"), [("status", "status", 3), ("doctor", "report", 2)]
)
def test_a_refusal_that_cannot_be_written_keeps_its_exit_code(
    command: str, what: str, code: int, monkeypatch: pytest.MonkeyPatch, *, unbuffered: bool
) -> None:
    monkeypatch.setenv("BUDGET_RECOVERY_POSTGRES_URL", "postgresql://\udcff")
    ended = on_a_full_disk(command, "--json", unbuffered=unbuffered)
    assert ended.returncode == code
    assert ended.stderr == (
        "Error: BUDGET_RECOVERY_POSTGRES_URL is not valid UTF-8.\n"
        "Try: set BUDGET_RECOVERY_POSTGRES_URL to a valid URL.\n"
        f"Error: The {what} cannot be written: No space left on device.\nTry: check the output.\n"
    )


def test_nothing_is_restored_without_a_terminal_and_without_yes(lost: Harness) -> None:
    before = all_stored(lost.bucket)
    result = run("restore", "--reason", "why not")
    assert result.exit_code == 2
    assert "there is no terminal to ask for confirmation" in result.stderr
    result = run("resolve", "--reason", "why not")
    assert result.exit_code == 2
    assert "pass --yes with --record-resets or --keep-snapshots" in result.stderr
    for choice in ((), ("--record-resets", "--keep-snapshots")):
        assert run("resolve", "--reason", "why not", "--yes", *choice).exit_code == 2
    assert state(lost) is RecoveryState.RECOVERING
    assert all_stored(lost.bucket) == before
    result = run("restore", "--reason", "why not", "--json")
    assert result.exit_code == 2
    assert "--json needs --yes" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        (
            ("preview", "--tenant", "acmee"),
            "No snapshot of tenant 'acmee' is retained",
            "choose the tenant from: *, ",
        ),
        (
            ("preview", "--tenant", "acme", "--budget", "x"),
            "No snapshot of budget 'x' of tenant 'acme' is retained",
            "choose the budget from: cards, users.",
        ),
        (("preview", "--budget", "x"), "but the tenant is *", "give the tenant"),
        (("preview", "--snapshot", "noon"), "neither latest nor a timestamp", "latest, 20"),
        (("snapshots", "--tenant", "x"), "No snapshot of tenant 'x' is retained", "acme"),
        (("restore", "--yes", "--reason", " "), "The reason is empty.", "give a reason"),
        (("resolve", "--yes", "--reason", ""), "The reason is empty.", "give a reason"),
        (("hold", "--reason", " "), "The reason is empty.", "give a reason"),
        (
            ("record-reset", "--tenant", "acme", "--budget", "users", "--reason", " "),
            "The reason is empty.",
            "give a reason",
        ),
    ],
)
def test_invalid_arguments_are_refused_with_the_choices(
    lost: Harness, arguments: tuple[str, ...], message: str, hint: str
) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert hint in result.stderr
    error = answer(*arguments, code=2)["error"]
    assert error["code"] == "choice"
    assert message in error["message"]
    assert hint in error["hint"]


def test_a_restore_is_refused_with_its_holder_while_another_runs(lost: Harness) -> None:
    # With the real clock, which the commands use.
    with lost.plane.leases.hold(RESTORE_LEASE, "bob@night"):
        for command in (("restore", "--yes"), ("resolve", "--yes", "--keep-snapshots")):
            result = run(*command, "--reason", "now")
            assert result.exit_code == 2
            assert "Another restore is running: bob@night, since 20" in result.stderr


def test_resolve_accepts_the_store(lost: Harness) -> None:
    document = answer("resolve", "--reason", "on the next loss", "--yes", "--keep-snapshots")
    assert document["outcome"] == "accepted"
    assert lower(document) == [("users", "50.5"), ("cards", "4"), ("users", "1")]
    assert document["remainder"]["counters"] == 4
    assert document["acceptance"] == "keep_snapshots"
    assert (document["resets"], document["undo_until"]) == (0, None)
    assert state(lost) is RecoveryState.HEALTHY
    result = run("resolve", "--reason", "again", "--yes", "--keep-snapshots")
    assert result.exit_code == 1
    assert "The store is HEALTHY, and no incident is open." in result.stderr
    # Refused before the question.
    asked = run_at_terminal("--record-resets", "resolve", "--reason", "again")
    assert asked.returncode == 1
    assert "no incident is open" in asked.stderr
    assert "record-resets" not in asked.stdout
    lost.lose()
    lost.find_loss()
    assert answer("preview")["raised"] == 4


def test_an_accepted_state_is_remembered_after_the_next_loss(lost: Harness) -> None:
    lost.bucket.spend("acme", "users", LIFETIME, {"alice": "2"})
    document = answer("resolve", "--reason", "on purpose", "--yes", "--record-resets")
    # 28.5 for alice and 20 for bob
    assert lower(document) == [("users", "48.5"), ("cards", "4"), ("users", "1")]
    assert (document["acceptance"], document["resets"]) == ("record_resets", 3)
    # A full capture follows at once.
    capture = document["capture"]
    assert (capture["outcome"], capture["stored"], capture["absent"]) == ("stored", 1, 1)
    assert document["capture_error"] is None
    lost.lose()
    lost.find_loss()
    assert answer("preview")["raised"] == 1
    lost.recover()
    assert usages(lost.bucket, "acme", "users", LIFETIME) == {"alice": "2"}
    assert usages(lost.bucket, "acme", "cards", LIFETIME) == {}
    # It can be undone.
    undone = run("restore", "--reason", "a mistake", "--yes", "--despite-resets").stdout
    assert "DONE 4 counters raised" in undone
    assert "Capture the current hour now" in undone
    assert usages(lost.bucket, "acme", "users", LIFETIME) == {"alice": "30.5", "bob": "20"}


@pytest.mark.parametrize(
    # Without resets, both tenants are stored with what they lack.
    ("typed", "resets", "stored"),
    [("--record-resets", 3, 0), ("--keep-snapshots", 0, 2)],
)
def test_resolve_shows_at_a_terminal_what_each_choice_means_and_asks(
    lost: Harness, typed: str, resets: int, stored: int
) -> None:
    ended = run_at_terminal(typed, "resolve", "--reason", "emptied")
    assert ended.returncode == 0, ended.stderr
    text, _, report = " ".join(ended.stdout.split()).partition("Accept the store with")
    assert (
        "4 counters lower than in the snapshots or missing. The largest: acme, users life" in text
    )
    assert "--record-resets: the usage of 4 counters was removed on purpose." in text
    assert "--keep-snapshots: the next loss raises 4 counters to the usage in the snap" in text
    assert "is closed; the store is HEALTHY." in report
    if resets:
        assert "`budget-recovery restore --despite-resets --tenant <tenant>" in report
    else:
        assert "`budget-recovery status` shows ATTENTION until" in report
    assert f"Captures resumed: {stored} tenants stored, 0 failed." in report
    with psycopg.connect(os.environ["BUDGET_RECOVERY_POSTGRES_URL"]) as connection:
        [(found,)] = connection.execute(
            "select count(distinct batch) + count(*) filter (where batch is null)"
            " from budget_recovery.budget_reset"
        ).fetchall()
    assert found == resets


def test_resolve_with_a_choice_asks_for_confirmation_at_a_terminal(lost: Harness) -> None:
    ended = run_at_terminal("n", "resolve", "--reason", "emptied", "--record-resets")
    assert ended.returncode == 2, ended.stderr
    assert "--keep-snapshots" not in ended.stdout
    assert ended.stdout.endswith("Accept the store as it is? [y/N]: The incident stays open.\n")
    assert state(lost) is RecoveryState.RECOVERING


def test_an_accepted_store_stays_accepted_if_its_first_capture_fails(lost: Harness) -> None:
    with lost.plane.leases.hold(CAPTURE_LEASE, "run 1234 on host-a (pid 7)"):
        document = answer("resolve", "--reason", "x", "--yes", "--record-resets")
    assert state(lost) is RecoveryState.HEALTHY
    assert document["outcome"] == "accepted"
    assert document["capture"] is None
    assert document["capture_error"]["code"] == "lease_held"


def test_hold_and_release_report_the_hold(lost: Harness) -> None:
    held = answer("hold", "--reason", "wait for the disk")
    assert held["is_held"] is True
    assert held["held"]["reason"] == "wait for the disk"
    released = answer("release")
    assert (released["is_held"], released["incident_id"]) == (False, held["incident_id"])
    assert released["released_at"] is not None
    answer("resolve", "--reason", "all is well", "--yes", "--keep-snapshots")
    for command in (("hold", "--reason", "again"), ("release",)):
        error = answer(*command, code=1)["error"]
        assert error["code"] == "incident_moved"
        assert error["message"] == "The store is HEALTHY: no restore is under way."


def test_a_first_hold_with_a_long_reason_is_reported_as_new(lost: Harness) -> None:
    # The stored reason is shorter.
    first, second = (" ".join(page("hold", "--reason", "r" * 3000)) for _ in range(2))
    assert re.fullmatch(
        "Incident [0-9a-f]{8} is on hold. To continue: budget-recovery release", first
    )
    assert " has been on hold since 20" in second
    assert second.endswith("The new reason is not stored. To continue: budget-recovery release")


def test_control_characters_in_the_reason_of_a_hold_are_escaped(lost: Harness) -> None:
    run("hold", "--reason", "\x1b[2Jgone")
    again = run("hold", "--reason", "mine")
    assert "\x1b" not in again.output
    assert r"\x1b[2Jgone" in again.output


@pytest.mark.parametrize(
    "arguments",
    [
        ("restore", "--yes"),
        ("restore", "--reason", "x"),
        ("resolve", "--reason", "x"),
        ("resolve", "--reason", "x", "--yes"),
        ("record-reset", "--tenant", "a", "--budget", "b", "--reason", "x", "--at", "noon"),
        ("preview", "--nonsense"),
    ],
)
def test_invalid_options_are_reported_as_json_too(arguments: tuple[str, ...]) -> None:
    error = answer(*arguments, code=2)["error"]
    assert error["code"] == "usage"
    assert error["message"]


@pytest.mark.parametrize("name", ["a\0", "a\udcff"])
def test_invalid_names_are_refused_like_unknown_ones(lost: Harness, name: str) -> None:
    for command in (
        ("preview", "--tenant", name),
        ("record-reset", "--tenant", name, "--budget", "users", "--reason", "x"),
        ("record-reset", "--tenant", "acme", "--budget", name, "--reason", "x"),
    ):
        assert (
            "acme" in answer(*command, code=2)["error"]["hint"] or "users" in run(*command).stderr
        )
    entity = ("record-reset", "--tenant", "acme", "--budget", "users", "--reason", "x")
    error = answer(*entity, "--entity", name, code=2)["error"]
    assert "No such reset can be recorded" in error["message"]


def test_an_interrupted_confirmation_means_no() -> None:
    with CliRunner().isolation(input=""):
        assert not confirmed("Restore this?")
    with CliRunner().isolation(input="y\n"):
        assert confirmed("Restore this?")


def test_a_terminal_without_a_width_shows_the_output(lost: Harness) -> None:
    for command in (["status"], ["snapshots"], ["preview"]):
        shown = CliRunner().invoke(main, command, env={"COLUMNS": "0"})
        assert len(shown.stdout.splitlines()) > 1
        assert max(map(len, shown.stdout.splitlines())) <= WIDTH


def test_control_characters_in_names_are_escaped(harness: Harness) -> None:
    harness.bucket.spend("acme", "users", LIFETIME, {"\x1b[31mred\nnew": "3"})
    harness.capture()
    harness.lose()
    harness.find_loss()
    output = run("preview").output
    assert "\x1b" not in output
    assert r"'\x1b[31mred\nnew'" in output


def test_control_characters_in_choices_are_escaped(harness: Harness) -> None:
    harness.bucket.spend("\x1b[2Jacme", "users", LIFETIME, {"alice": "3"})
    harness.capture()
    refused = run("preview", "--tenant", "x")
    assert "\x1b" not in refused.stderr
    assert r"\x1b[2Jacme" in refused.stderr


def test_commands_without_settings_and_without_a_running_dev_are_refused_with_a_hint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    for name in ("NATS_URL", "POSTGRES_URL"):
        monkeypatch.delenv(f"BUDGET_RECOVERY_{name}", raising=False)
    for command in (["preview"], ["snapshots"], [*RESOLVE, "--keep-snapshots"]):
        result = run(*command, "--data-dir", str(tmp_path))
        assert result.exit_code == 2
        assert f"No budget-recovery dev runs on {tmp_path}." in result.stderr
