"""The status of a store in each situation, and the next step."""

import io
import json
import os
import re
import subprocess
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from rich.console import Console

from budget_recovery_dagster import presentation
from budget_recovery_dagster.domain import (
    ITSELF,
    Attempt,
    CaptureFailure,
    Check,
    ConfigurationChange,
    Evidence,
    FailureReason,
    GivenUp,
    Held,
    Incident,
    RecordedRun,
    RunOutcome,
    Stopped,
    Uncaptured,
    Verdict,
    Waiting,
)
from budget_recovery_dagster.errors import DatabaseError
from budget_recovery_dagster.presentation import label, status_json
from budget_recovery_dagster.presentation.status import restore_command
from budget_recovery_dagster.presentation.terminal import print_status
from budget_recovery_dagster.services import MOST_CHECKS, Attention, Condition
from tests.unit.known_states import (
    Known,
    ago,
    check,
    closed,
    failed,
    fall,
    gone,
    incident,
    loss,
    recovering,
    run,
    unknown,
)

INSTANT = timedelta(microseconds=1)


def summary(known: Known) -> tuple[Condition, tuple[str, ...], str]:
    status = known.status()
    return (
        status.condition,
        tuple(presentation.doubts(status).values()),
        presentation.next_step(status),
    )


def next_step(known: Known) -> str:
    return presentation.next_step(known.status())


def test_a_recently_checked_store_is_healthy() -> None:
    known = Known(checks=(check(6), check(16)), points={"acme": ago(31)})
    assert summary(known) == (
        Condition.HEALTHY,
        (),
        "Nothing to do. The next check of the store is due at 08:35:02 UTC.",
    )


def test_the_next_step_of_a_healthy_store_shows_an_overdue_or_missing_check() -> None:
    overdue = Known(checks=(check(10),))
    assert next_step(overdue) == "Nothing to do. The next check of the store is due."
    first = Known(points={"acme": ago(1)})
    assert next_step(first) == "Nothing to do. The store has not been checked yet."


@pytest.mark.parametrize("verdict", [Verdict.FIRST_SEEN, Verdict.SAME])
def test_the_status_is_unknown_after_three_missed_checks(verdict: Verdict) -> None:
    at_the_limit = Known(checks=(check(30, verdict),))
    assert summary(at_the_limit)[0] is Condition.HEALTHY
    condition, [doubt], step = summary(Known(checks=(check(30 + 1 / 60, verdict),)))
    assert condition is Condition.UNKNOWN
    assert doubt == (
        "The store was last known to be intact 30 min ago, at 08:01:01 UTC; a check is due"
        " every 10 min."
    )
    assert "store_loss_sensor" in step


def test_the_status_is_unknown_after_three_unknown_checks() -> None:
    two = Known(checks=(unknown(1), unknown(2), check(3)))
    assert summary(two)[0] is Condition.HEALTHY
    assert two.status().unknown_in_a_row == 2
    three = Known(checks=(unknown(1), unknown(2), unknown(3), check(4)))
    assert summary(three) == (
        Condition.UNKNOWN,
        ("The newest 3 checks are unknown: No answer came.",),
        (
            "Fix the cause above, which `budget-recovery doctor` shows in detail. Then wait for the"
            " next check."
        ),
    )


def test_unknown_checks_are_counted_from_the_newest() -> None:
    known = Known(checks=(unknown(1), check(2), unknown(3), unknown(4), unknown(5)))
    assert known.status().unknown_in_a_row == 1
    many = Known(checks=(unknown(1),) * (MOST_CHECKS + 1), older_good=check(2000))
    assert many.status().unknown_in_a_row == MOST_CHECKS
    doubts = summary(many)[1]
    assert len(doubts) == 2
    assert doubts[1].startswith("The store was last known to be intact 33.3 h ago, at 2026-11-28 ")


def test_a_snapshot_replaces_the_first_check_for_one_interval() -> None:
    fresh = Known(points={"acme": ago(10)})
    assert summary(fresh)[0] is Condition.HEALTHY
    stale = Known(points={"acme": ago(10) - INSTANT})
    assert summary(stale)[0] is Condition.UNKNOWN
    with_a_check = Known(points={"acme": ago(1)}, checks=(unknown(2),))
    assert summary(with_a_check)[1] == ("No check has found the store intact yet.",)


def test_the_status_of_an_empty_database_is_unknown() -> None:
    condition, doubts, step = summary(Known())
    assert (condition, doubts) == (Condition.UNKNOWN, ("No check has found the store intact yet.",))
    assert "store_loss_sensor" in step


def test_a_check_in_the_future_makes_the_status_unknown() -> None:
    assert summary(Known(checks=(check(-2),))) == (
        Condition.UNKNOWN,
        ("The newest check has a time in the future: 08:33:02 UTC.",),
        "Synchronize the clocks of PostgreSQL and NATS with NTP.",
    )


def test_a_snapshot_in_the_future_needs_attention_and_hides_nothing_else() -> None:
    known = Known(checks=(check(1),), points={"acme": ago(-2)}, failing_tenants={"b": None})
    assert summary(known)[0] is Condition.ATTENTION
    assert noticed(known)[-1] == (
        Attention.SNAPSHOT_IN_FUTURE,
        "A snapshot has a time in the future: 08:33:02 UTC.",
    )
    assert next(code for code, _ in noticed(known)) is Attention.TENANTS_FAILING
    only = replace(known, failing_tenants={})
    assert next_step(only) == (
        "Synchronize the clocks of PostgreSQL and NATS with NTP. Then discard these snapshots:"
        " `budget-recovery discard-future`."
    )


def test_clocks_may_differ_by_a_minute() -> None:
    assert summary(Known(checks=(check(-1),)))[0] is Condition.HEALTHY


def test_an_older_database_that_was_accepted_is_no_doubt() -> None:
    # As a capture records it that accepts the store: only renewals of the marker were missing.
    accepted = check(1, Verdict.DATABASE_BEHIND, "Accepted.")
    assert summary(Known(checks=(accepted, check(11))))[0] is Condition.HEALTHY


def test_a_loss_without_an_incident_makes_the_status_unknown() -> None:
    gone = check(1, Verdict.LOST, "The store is gone.")
    known = Known(checks=(gone, check(11)))
    assert summary(known)[:2] == (
        Condition.UNKNOWN,
        ("The newest check found a loss: The store is gone.",),
    )


def test_the_end_of_an_incident_counts_as_a_good_check() -> None:
    before: tuple[Check, ...] = (check(5, Verdict.LOST), unknown(6), unknown(7), check(100))
    points = {"acme": ago(60)}
    assert summary(Known(checks=before, incidents=(closed(4),), points=points))[0] is (
        Condition.HEALTHY
    )
    blind = (unknown(5), unknown(6), unknown(7), check(100))
    known = Known(checks=blind, incidents=(closed(4),), points=points)
    assert summary(known)[0] is Condition.HEALTHY
    assert known.status().unknown_in_a_row == 0
    assert summary(Known(checks=blind, incidents=(closed(31),)))[0] is Condition.UNKNOWN


def noticed(known: Known) -> list[tuple[Attention, str]]:
    return [(notice.code, notice.message) for notice in presentation.notices(known.status())]


def test_an_intact_store_with_snapshot_problems_needs_attention() -> None:
    late = Known(checks=(check(1),), points={"a": ago(91), "b": ago(89)})
    assert summary(late)[:2] == (Condition.ATTENTION, ())
    assert noticed(late) == [(Attention.SNAPSHOTS_LATE, "'a' has no recent snapshot.")]
    assert "hourly_snapshot_schedule" in next_step(late)
    failing = Known(checks=(check(1),), failing_tenants=dict.fromkeys("edcba"))
    assert summary(failing)[:2] == (Condition.ATTENTION, ())
    assert noticed(failing) == [
        (
            Attention.TENANTS_FAILING,
            "Captures of 'a', 'b', 'c' and 2 more fail. 5 tenants: Not permitted.",
        )
    ]
    assert next_step(failing) == "Grant it. See the newest run of hourly_snapshot_job in Dagster."


def test_the_reasons_of_failing_tenants_are_grouped_the_most_common_first() -> None:
    reasons = {
        "a": "The user may not read tenant 'a'.",
        "b": "Reading usage.b.> timed out.",
        "c": "Reading usage.c.> timed out.",
        "d": "The disk is full.",
        "e": "No answer.",
    }
    known = Known(checks=(check(1),), failing_tenants=dict.fromkeys("edcba"), reasons=reasons)
    ((_, message),) = noticed(known)
    assert message == (
        "Captures of 'a', 'b', 'c' and 2 more fail. 2 tenants: Reading usage.b.> timed out."
        " 1 tenant: The user may not read tenant 'a'. 1 tenant: The disk is full. 1 more reason."
    )
    document = json.loads(status_json(known.status(), 4))
    assert document["captures"]["failures"][0] == {
        "tenants": ["b", "c"],
        "reason": "Reading usage.b.> timed out.",
        "hint": "grant it.",
    }


@pytest.mark.parametrize(
    ("skew", "differ", "effect"),
    [
        (-70, "70 s behind", "more than 60 s, so no snapshot is taken."),
        (60, "60 s ahead of", "more than 5 s, so no restore could run."),
        (5.001, "5 s ahead of", "more than 5 s, so no restore could run."),
    ],
)
def test_clocks_that_differ_need_attention_although_snapshots_are_stored(
    skew: float, differ: str, effect: str
) -> None:
    fact = f"The store's clock is {differ} the database's."
    message = f"{fact} That is {effect} Measured by the capture of 08:01:02 UTC."
    known = Known(
        checks=(check(1),),
        points={"a": ago(30)},
        # The newest capture could not reach the store, so it has not measured.
        runs=(run(20, skew=None), run(30, skew=skew), run(90, skew=0)),
    )
    assert summary(known)[0] is Condition.ATTENTION
    assert noticed(known) == [(Attention.CLOCK_SKEW, message)]
    assert next_step(known).startswith("Synchronize the clocks of PostgreSQL and NATS with NTP.")
    document = json.loads(status_json(known.status(), 4))
    assert document["captures"]["clock_skew_seconds"] == skew
    assert (
        printed(known).count(
            "Captures     08:11:02 UTC  stored: 3 stored, 1 without usage, 0 failed"
        )
        == 1
    )
    assert fact in printed(known)


@pytest.mark.parametrize("skew", [5, -5, 0, None])
def test_clocks_that_agree_need_no_attention(skew: float | None) -> None:
    known = Known(checks=(check(1),), points={"a": ago(30)}, runs=(run(30, skew=skew),))
    assert summary(known)[0] is Condition.HEALTHY


@pytest.mark.parametrize(
    ("skew", "shown"),
    [
        (0, []),
        (0.3, []),
        (-0.5, []),
        (0.6, ["The store's clock is 1 s ahead of the database's."]),
        (-3, ["The store's clock is 3 s behind the database's."]),
    ],
)
def test_a_difference_of_the_clocks_is_shown_unless_it_rounds_to_zero(
    skew: float, shown: list[str]
) -> None:
    known = Known(checks=(check(1),), points={"a": ago(30)}, runs=(run(30, skew=skew),))
    assert [line for line in printed(known) if "clock" in line] == shown
    document = json.loads(status_json(known.status(), 0))
    assert document["captures"]["clock_skew_seconds"] == skew


@pytest.mark.parametrize("verdict", Verdict)
def test_the_reason_of_a_check_is_separate_from_its_verdict(verdict: Verdict) -> None:
    page = printed(Known(checks=(check(1, verdict, "A reason."),)))
    (line,) = [line for line in page if line.startswith("Checks")]
    words = "" if verdict.is_good else "  A reason."
    assert re.sub(" {2,}", "  ", line) == f"Checks  08:30:02 UTC  {label(verdict)}{words}"


SKEWED = Stopped("clock_skew", "The clocks differ by 70 s.", "synchronize the clocks.")


def failed_run(minutes: float, error: Stopped = SKEWED) -> RecordedRun:
    return run(minutes, RunOutcome.FAILED, skew=None, error=error)


def test_an_intact_store_without_any_snapshot_needs_attention() -> None:
    hours = 33 * 60
    known = Known(checks=(check(1),), first_checked_at=ago(hours))
    text = "No snapshot was ever taken. The store was first checked 33.0 h ago,"
    ((code, message),) = noticed(known)
    assert code is Attention.NO_SNAPSHOT
    assert message.startswith(text)
    assert message.endswith(" No capture has run.")
    assert "hourly_snapshot_schedule" in next_step(known)
    empty = replace(known, runs=(run(30, RunOutcome.NOTHING_TO_STORE),))
    ((_, message),) = noticed(empty)
    assert message.endswith(" The last capture found no counter of a tenant.")
    assert "BUDGET_RECOVERY_BUCKET" in next_step(empty)
    failing = replace(known, runs=(failed_run(30), failed_run(90)))
    assert [code for code, _ in noticed(failing)] == [
        Attention.CAPTURES_FAILING,
        Attention.NO_SNAPSHOT,
    ]
    at_the_limit = Known(checks=(check(1), check(90)))
    assert summary(at_the_limit)[0] is Condition.HEALTHY
    assert summary(Known(checks=(check(1), check(91))))[0] is Condition.ATTENTION


def test_captures_that_all_fail_are_shown_with_their_number_and_the_reason() -> None:
    known = Known(
        checks=(check(1),),
        points={"a": ago(30)},
        runs=(run(10, None), *(failed_run(minutes) for minutes in (40, 100, 160)), run(220)),
    )
    assert known.status().failed_runs == 3
    assert noticed(known) == [
        (
            Attention.CAPTURES_FAILING,
            "Each of the last 3 captures failed. The newest: The clocks differ by 70 s.",
        )
    ]
    assert next_step(known) == "Synchronize the clocks."
    one = replace(known, runs=(failed_run(40), run(100)))
    assert noticed(one)[0][1] == "The last capture failed. The newest: The clocks differ by 70 s."
    document = json.loads(status_json(known.status(), 4))["captures"]
    assert document["failed_in_a_row"] == 3
    assert document["newest_run"]["outcome"] is None
    many = replace(known, runs=(failed_run(40),) * 200)
    assert "Each of the last 100 or more captures failed." in noticed(many)[0][1]


def test_a_capture_whose_process_died_has_failed_once_its_hour_is_over() -> None:
    # It is 08:31:02.
    known = Known(checks=(check(1),), points={"a": ago(80)}, runs=(run(30, None), run(91)))
    assert summary(known)[0] is Condition.HEALTHY
    died = replace(known, runs=(run(32, None), run(91)))
    ((code, message),) = noticed(died)
    assert code is Attention.CAPTURES_FAILING
    assert message == (
        "The last capture failed. The newest, of 07:59:02 UTC, has not ended: its process hangs or"
        " died."
    )


def test_one_message_is_enough_if_the_newest_snapshot_of_all_is_late() -> None:
    known = Known(checks=(check(1),), points={"a": ago(300), "b": ago(360)})
    assert noticed(known) == [
        (Attention.SNAPSHOTS_LATE, "The newest snapshot was taken 5.0 h ago, at 03:31:02 UTC.")
    ]
    closed_windows = Known(checks=(check(1),), snapshots={"a": ago(300)})
    assert noticed(closed_windows) == noticed(known)


def test_snapshots_are_not_late_while_there_is_nothing_to_store() -> None:
    known = Known(
        checks=(check(1),),
        snapshots={"a": ago(300)},
        runs=(run(31, RunOutcome.NOTHING_TO_STORE), run(300)),
    )
    assert summary(known)[0] is Condition.HEALTHY
    long_ago = replace(known, runs=(run(91, RunOutcome.NOTHING_TO_STORE),))
    assert summary(long_ago)[0] is Condition.ATTENTION
    wrong_clock = replace(known, runs=(run(-60, RunOutcome.NOTHING_TO_STORE),))
    assert summary(wrong_clock)[0] is Condition.ATTENTION


def test_a_tenant_whose_counters_are_all_gone_is_not_late() -> None:
    # Its captures have no window any more.
    known = Known(checks=(check(1),), points={"a": ago(5), "b": ago(300)})
    assert [code for code, _ in noticed(known)] == [Attention.SNAPSHOTS_LATE]
    read = replace(known, snapshots={"b": ago(5)}, falls=(fall("b", "team", 3, "41.5"),))
    assert [code for code, _ in noticed(read)] == [Attention.USAGE_MISSING]
    # Also after a fall has ended by a reset, while the old records are retained.
    reset = replace(read, falls=(), was_reset=frozenset({"b"}))
    assert noticed(reset) == []


def test_a_tenant_that_left_is_not_late() -> None:
    known = Known(
        checks=(check(1),), points={"a": ago(30), "left": ago(300)}, absent=frozenset({"left"})
    )
    assert summary(known)[0] is Condition.HEALTHY


def test_failures_from_before_the_end_of_an_incident_need_no_attention() -> None:
    known = Known(
        checks=(check(1),),
        points={"a": ago(30)},
        failing_tenants={"a": ago(30)},
        failed_at=ago(9),
        runs=(failed_run(9), failed_run(69)),
        incidents=(closed(4),),
    )
    assert summary(known)[0] is Condition.HEALTHY
    again = replace(known, failed_at=ago(3), runs=(failed_run(3), *known.runs))
    assert [code for code, _ in noticed(again)] == [
        Attention.CAPTURES_FAILING,
        Attention.TENANTS_FAILING,
    ]
    assert again.status().failed_runs == 1


def test_everything_that_needs_attention_is_shown_with_its_step() -> None:
    known = Known(
        checks=(replace(check(1), evidence=Evidence.MARKER_NOT_WRITTEN),),
        points={"a": ago(91)},
        failing_tenants={"b": None},
        damaged={"a": 1},
        falls=(fall("a", "team", 3, "41.5"),),
        gone=(gone("a", 2),),
        runs=(failed_run(40), run(100, skew=30)),
        failures={failed_run(40).run_id: stray_keys("usage.a")},
    )
    without = (Attention.NO_SNAPSHOT, Attention.SNAPSHOT_IN_FUTURE)
    expected = [each for each in Attention if each not in without]
    assert [code for code, _ in noticed(known)] == expected
    page = " ".join(" ".join(printed(known)).split())
    assert page.startswith("ATTENTION at ")
    for notice in presentation.notices(known.status()):
        assert notice.message in page
        assert notice.next_step in page
    document = json.loads(status_json(known.status(), 4))
    assert (document["condition"], document["state"]) == ("attention", "healthy")
    assert [each["code"] for each in document["attention"]] == expected
    assert document["next_step"] == document["attention"][0]["next_step"]


def test_missing_usage_is_named_by_tenant_number_and_money_with_its_commands() -> None:
    many = [fall(f"t{number}", "team", 1, "0.8") for number in range(7)]
    known = Known(checks=(check(1),), falls=(fall("big co", "all", 2, "39.5"), *many))
    assert summary(known)[0] is Condition.ATTENTION
    assert noticed(known) == [
        (
            Attention.USAGE_MISSING,
            (
                "Missing from the store, or lower than in snapshots: 9 counters of 8 tenants. The"
                " largest: 39.5 of tenant 'big co', all 2026-11."
            ),
        )
    ]
    of_it = "--tenant 'big co' --budget all"
    assert f"`budget-recovery preview {of_it}`" in next_step(known)
    assert f"`budget-recovery restore {of_it} --reason <why>`" in next_step(known)
    lines = [line.strip() for line in printed(known)]
    first = next(number for number, line in enumerate(lines) if line.startswith("Missing"))
    assert lines[first].endswith(
        "big co, all 2026-11: 2 counters, 39.5 of usage, found 60 min ago, at 07:31:02 UTC"
    )
    page = " ".join(lines[first:])
    assert f"budget-recovery restore {of_it} --reason <why>" in page
    assert "t3, team 2026-11: 1 counter, 0.8 of usage" in page
    # Three of the eight windows: t4, t5 and t6.
    assert "3 more windows; --json lists 100" in page
    missing = json.loads(status_json(known.status(), 4))["missing"]
    assert (missing["windows"], missing["counters"]) == (8, 9)
    assert missing["largest"][0]["restore"] == f"budget-recovery restore {of_it} --reason <why>"


@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_no_shell_runs_the_restore_with_a_placeholder_as_its_reason(
    shell: str, tmp_path: Path
) -> None:
    program = tmp_path / "budget-recovery"
    program.write_text("#!/bin/sh\necho ran\n", encoding="utf-8")
    program.chmod(0o755)
    # Even if a file has the name of the placeholder.
    (tmp_path / "why").touch()
    command = restore_command(fall("big co", "all", 2, "39.5"))

    def run_in_shell(line: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [shell, "-c", line],
            check=False,
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={"PATH": f"{tmp_path}:{os.defpath}"},
        )

    refused = run_in_shell(command)
    assert refused.returncode != 0
    assert refused.stdout == ""
    assert run_in_shell(command.replace("<why>", "'ticket 9'")).stdout == "ran\n"


def test_usage_missing_before_an_incident_is_not_shown_beside_its_loss() -> None:
    known = Known(recovering(incident()), falls=(fall("a", "team", 3, "41.5"),))
    page = " ".join(printed(known))
    assert "Missing" not in page
    assert "budget-recovery restore" not in page


def test_counters_that_a_check_found_gone_need_attention_until_a_capture() -> None:
    known = Known(checks=(check(1),), gone=(gone("a", 2), gone("b", 104)))
    assert noticed(known) == [
        (
            Attention.COUNTERS_GONE,
            (
                "Counters missing from the store since the newest snapshots: 106. The largest: 104"
                " of tenant 'b', team lifetime."
            ),
        )
    ]
    assert "hourly_snapshot_job" in next_step(known)


def test_a_doubt_comes_before_what_needs_attention() -> None:
    known = Known(checks=(check(31),), failing_tenants={"b": None})
    condition, doubts, step = summary(known)
    assert condition is Condition.UNKNOWN
    assert len(doubts) == 1
    assert "store_loss_sensor" in step
    page = " ".join(" ".join(printed(known)).split())
    assert f"{doubts[0]} Captures of 'b' fail. 1 tenant: Not permitted. Next {step} " in page


def test_ages_are_not_judged_while_the_time_is_wrong() -> None:
    known = Known(
        checks=(check(-2),),
        points={"a": ago(91)},
        failing_tenants={"b": None},
        falls=(fall("a", "team", 3, "41.5"),),
    )
    assert summary(known)[0] is Condition.UNKNOWN
    assert [code for code, _ in noticed(known)] == [
        Attention.USAGE_MISSING,
        Attention.TENANTS_FAILING,
    ]


def test_nothing_needs_attention_while_a_loss_is_confirmed() -> None:
    lost = check(1, Verdict.LOST)
    known = Known(checks=(lost,), points={"a": ago(91)}, failing_tenants={"b": None})
    assert summary(known)[0] is Condition.UNKNOWN
    assert noticed(known) == []


def test_a_changed_configuration_is_shown_and_needs_no_attention() -> None:
    change = ConfigurationChange("max_age", "unlimited", "60 s", ago(5))
    known = Known(checks=(check(1),), points={"a": ago(1)}, changes=(change,))
    assert summary(known)[0] is Condition.HEALTHY
    page = " ".join(" ".join(printed(known)).split())
    assert "Bucket changed: max_age from unlimited to 60 s, found 5 min ago" in page


def attempt(number: int, *, of: Incident, is_over: bool = False) -> Attempt:
    ended = ago(0.5) if is_over else None
    return Attempt(
        of.incident_id, 1, number, "run", "host", ago(1), ended, "failed" if is_over else None
    )


def test_a_running_attempt_needs_no_action() -> None:
    open_one = incident(attempts=2)
    worker = "run 60a5271d on gate (pid 7)"
    known = Known(recovering(open_one), attempts=(attempt(2, of=open_one),), worker=worker)
    assert summary(known) == (
        Condition.RECOVERING,
        (),
        "Nothing to do: run 60a5271d on gate (pid 7) is restoring.",
    )


def test_an_attempt_for_an_earlier_loss_is_ignored() -> None:
    open_one = incident(attempts=0, losses=(loss(9), loss(0.2)), next_launch_at=ago(0))
    known = Known(recovering(open_one), attempts=(attempt(1, of=open_one),))
    assert next_step(known) == "Nothing to do: the launch of a restore is due now."


def test_the_time_of_the_next_launch_is_shown_between_attempts() -> None:
    open_one = incident(attempts=1, launches=1, next_launch_at=ago(-1))
    known = Known(recovering(open_one), attempts=(attempt(1, of=open_one, is_over=True),))
    assert next_step(known) == (
        "Nothing to do: a restore was launched; it is launched again at 08:32:02 UTC if it does not"
        " start."
    )
    first = Known(recovering(incident(next_launch_at=ago(-1))))
    assert next_step(first) == "Nothing to do: the launch of a restore is due at 08:32:02 UTC."


def test_damaged_records_of_an_intact_store_need_attention() -> None:
    known = Known(checks=(check(1),), points={"a": ago(1)}, damaged={"a": 2, "b": 1})
    assert known.status().condition is Condition.ATTENTION
    assert noticed(known) == [
        (Attention.RECORDS_DAMAGED, "Snapshots of 'a', 'b' have damaged records.")
    ]
    assert "budget-recovery preview" in next_step(known)


def printed(known: Known) -> list[str]:
    output = io.StringIO()
    print_status(Console(file=output, width=100), known.status())
    return [line.strip() for line in output.getvalue().splitlines()]


def test_tenants_that_are_not_verified_in_time_are_named() -> None:
    tenants = tuple("abcde")
    known = Known(
        failed(incident()),
        points=dict.fromkeys(tenants, ago(1)),
        damaged={"a": 2},
        unverified=tenants,
    )
    assert known.status().condition is Condition.FAILED
    shown = printed(known)
    at = shown.index("Damaged: 2 records of 1 tenant (checksum mismatch)")
    assert shown[at + 1] == "Not verified within 5 s: 'a', 'b', 'c' and 2 more"
    assert json.loads(status_json(known.status(), 2))["points"]["unverified_tenants"] == [*tenants]


def test_a_failed_verification_hides_neither_the_state_nor_the_reason() -> None:
    error = DatabaseError("The statement was cancelled.", "find the load.")
    given_up = GivenUp(ago(2), FailureReason.NOT_WRITTEN, "Its disk is full.")
    known = Known(
        failed(incident(given_up=given_up)), points={"b": ago(1), "a": ago(1)}, failure=error
    )
    condition, _, step = summary(known)
    assert condition is Condition.FAILED
    assert step.startswith("Its disk is full.")
    assert known.status().points.damage.unverified == ("a", "b")
    line = next(line for line in printed(known) if "Not verified" in line)
    assert line.endswith("Not verified: 'a', 'b'. The statement was cancelled. Try: find the load.")


def test_what_is_recorded_while_records_are_verified_is_not_in_the_future() -> None:
    slow = Known(checks=(check(1),), points={"a": ago(1)}, takes=timedelta(minutes=2))
    assert slow.status().condition is Condition.HEALTHY
    assert len(slow.checks) == 3


def test_the_tenant_that_is_furthest_behind_is_named() -> None:
    points = {"late": ago(90), "b": ago(1), "a": ago(3)}
    shown = printed(Known(checks=(check(1),), points=points))
    at = shown.index(next(line for line in shown if "3 tenants, newest snapshot" in line))
    assert shown[at].endswith("3 tenants, newest snapshot 60 s ago, at 08:30:02 UTC")
    assert shown[at + 1] == "Furthest behind: late, newest snapshot 90 min ago, at 07:01:02 UTC"


def test_a_restore_that_does_not_start_points_to_the_daemon() -> None:
    known = Known(recovering(incident(9)))
    assert next_step(known) == (
        "The restore was due at 08:22:02 UTC: check in Dagster that the daemon runs and"
        " restore_supervisor_sensor is on."
    )


def test_the_next_launch_is_due_when_the_newest_attempt_has_ended() -> None:
    open_one = incident(9, attempts=1)
    ended = attempt(1, of=open_one, is_over=True)
    known = Known(recovering(open_one), attempts=(ended,))
    assert ended.ended_at == ago(0.5)
    assert next_step(known) == "Nothing to do: the launch of a restore is due now."


def test_a_waiting_restore_shows_the_reason_and_the_next_check() -> None:
    waiting = Waiting(ago(8), "1 of 3 servers is offline.", 4)
    known = Known(recovering(incident(waiting=waiting, next_launch_at=ago(-2))))
    assert summary(known)[:2] == (Condition.RECOVERING, ())
    assert next_step(known) == (
        "The restore waits for the store: 1 of 3 servers is offline. Fix the cause; the restore"
        " checks the store again at 08:33:02 UTC."
    )


@pytest.mark.parametrize(("minutes", "warnings"), [(59, 0), (60, 1)])
def test_a_hold_shows_how_to_release_it_and_causes_a_warning_after_an_hour(
    minutes: float, warnings: int
) -> None:
    held = Held(ago(minutes), "ann@ops", "The disk is being replaced.")
    condition, doubts, step = summary(Known(recovering(incident(90, held=held))))
    assert condition is Condition.HELD
    assert len(doubts) == warnings
    assert step == (
        "On hold: The disk is being replaced. Fix the cause of the hold, then run"
        " `budget-recovery release`. No automatic restore starts until then."
    )


@pytest.mark.parametrize(
    ("verdicts", "offered", "refused"),
    [
        (["lost"], ["release"], ["resolve", "restore`"]),
        (["other_store"], ["correct it", "release", "resolve"], ["restore`"]),
        (["database_behind"], ["preview", "resolve", "restore`"], ["release"]),
        # A later loss changes what a person can do, not why the restore is on hold.
        (["other_store", "lost"], ["closes by itself", "release", "resolve"], ["restore`"]),
        # The accepted store was lost before: the right address does not bring it back.
        (["lost", "other_store"], ["correct it", "release", "resolve"], ["by itself"]),
        (["database_behind", "lost"], ["preview", "resolve", "restore`"], ["release"]),
        (["other_store", "database_behind"], ["preview", "resolve", "restore`"], ["release"]),
    ],
)
def test_a_hold_shows_the_commands_that_end_it_and_no_others(
    verdicts: list[str], offered: list[str], refused: list[str]
) -> None:
    losses = tuple(replace(loss(9), verdict=Verdict(verdict)) for verdict in verdicts)
    by = "ann@ops" if verdicts == ["lost"] else ITSELF
    held = Held(ago(5), by, "ticket 7")
    condition, _, step = summary(Known(recovering(incident(9, losses=losses, held=held))))
    assert condition is Condition.HELD
    assert step.startswith("On hold: ticket 7. ")
    assert [each for each in offered if each not in step] == []
    assert [each for each in refused if each in step] == []


def test_the_final_check_is_due_after_all_attempts() -> None:
    open_one = incident(attempts=3, next_launch_at=ago(1))
    known = Known(recovering(open_one), attempts=(attempt(3, of=open_one, is_over=True),))
    assert next_step(known) == ("Nothing to do: all attempts are used; the final check is due now.")


@pytest.mark.parametrize(
    ("reason", "says"),
    [
        (FailureReason.NO_SNAPSHOTS, "no snapshot is retained"),
        (
            FailureReason.NOT_WRITTEN,
            (
                "Its disk is full. Fix the cause, then run `budget-recovery preview` and "
                "`budget-recovery restore`"
            ),
        ),
    ],
)
def test_a_failed_store_shows_what_the_operator_must_do(reason: FailureReason, says: str) -> None:
    given_up = GivenUp(ago(2), reason, "Its disk is full.")
    condition, doubts, step = summary(Known(failed(incident(given_up=given_up, attempts=3))))
    assert (condition, doubts) == (Condition.FAILED, ())
    assert says in step
    assert "`budget-recovery resolve`" in step


def failed_with(code: str | None, *checks: Check) -> Known:
    given_up = GivenUp(ago(30), FailureReason.NOT_WRITTEN, "No server answered.", code)
    return Known(failed(incident(given_up=given_up, attempts=3)), checks=checks)


def test_a_failed_store_that_answers_again_shows_since_when_and_how_to_finish() -> None:
    known = failed_with("store_unreachable", check(1), check(11), unknown(21), check(29))
    assert next_step(known) == (
        "No server answered. This cause is gone: checks identify the store again since"
        " 08:20:02 UTC. Run `budget-recovery preview`, then finish the restore with"
        " `budget-recovery restore`. Captures are paused until then."
    )


@pytest.mark.parametrize(
    "known",
    [
        failed_with("store_unreachable", unknown(1), check(11)),
        failed_with("store_unreachable", check(30), check(40)),
        failed_with("store_unreachable"),
        failed_with(
            "store_missing", replace(check(1), verdict=Verdict.LOST, evidence=Evidence.GONE)
        ),
        # A check shows nothing about these.
        failed_with("attempt_failed", check(1)),
        failed_with(None, check(1)),
    ],
)
def test_a_cause_that_no_check_shows_as_gone_is_left_to_the_operator(known: Known) -> None:
    assert known.status().cause_gone_since is None
    assert "Fix the cause, then run `budget-recovery preview`" in next_step(known)


def test_the_next_attempt_shows_its_time() -> None:
    known = Known(recovering(incident(9, attempts=1, launches=1, next_attempt_at=ago(-1))))
    assert next_step(known) == "Nothing to do: attempt 2 of 3 is due at 08:32:02 UTC."


def test_the_newest_closed_incident_is_shown() -> None:
    earlier, newest = closed(100), closed(50)
    assert Known(incidents=(newest, earlier)).status().closed == newest
    still_open = Known(recovering(incident()), incidents=(newest, earlier))
    assert still_open.status().closed == newest
    assert Known(recovering(incident())).status().closed is None


def stray_keys(*names: str) -> tuple[CaptureFailure, ...]:
    hour = run(5).hour
    return tuple(
        CaptureFailure(name, hour, "not UTF-8", "find it.", Uncaptured.KEY) for name in names
    )


def test_keys_without_a_tenant_need_attention() -> None:
    newest, earlier = run(5), run(65)
    tenant = CaptureFailure("acme", newest.hour, "Not permitted.", "grant it.")
    known = Known(
        checks=(check(1),),
        snapshots={"acme": ago(5)},
        runs=(run(0, None), newest, earlier),
        failures={newest.run_id: (tenant, *stray_keys("usage.=FF.b", r"usage.\xff"))},
    )
    condition, _, step = summary(known)
    assert condition is Condition.ATTENTION
    assert "tenant_coverage lists them" in step
    (notice,) = presentation.notices(known.status())
    assert notice.code is Attention.UNREADABLE_KEYS
    assert notice.message.startswith(
        "Keys that name no tenant: 2, such as 'usage.=FF.b': not UTF-8."
    )
    # The next capture found none, or a loss came after it.
    assert replace(known, runs=(earlier,)).status().condition is Condition.HEALTHY
    ended = replace(known, incidents=(closed(3),))
    assert Attention.UNREADABLE_KEYS not in ended.status().attentions
