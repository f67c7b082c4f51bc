"""Which windows a restore writes at calendar boundaries, with the test's clock."""

import signal
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal

import pytest

from budget_recovery_dagster.domain import Incident, IsOpen, Outcome, Window
from tests.boards import board_key
from tests.integration.interrupted_store import Interruptions, interrupted
from tests.integration.recovery_harness import Harness, outcome_of
from tests.integration.recovery_runs import usages
from tests.integration.restore_worker import Worker
from tests.waiting import wait_until

LEFT = "skipped, the window has closed"
TOKYO = timezone(timedelta(hours=9))


def utc(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def spend(harness: Harness, tokens: list[str], updated_at: str = "2026-11-29T14:00:00Z") -> None:
    for number, token in enumerate(tokens, start=50):
        value = f'{{"usage":"{number}","updated_at":"{updated_at}"}}'
        harness.bucket.put(f"usage.acme.total.{token}.=", value.encode())
        harness.bucket.rank("acme", "total", token, {None: str(number)})


def lose_and_recover(harness: Harness, point_at: datetime, restored_at: datetime) -> Incident:
    harness.capture(point_at)
    harness.lose()
    harness.find_loss(restored_at)
    return harness.recover()


def assert_only_restored(
    harness: Harness, incident: Incident, restored: list[str], skipped: list[str]
) -> None:
    """Require that these windows are restored and the others skipped, and that this is reported."""
    entries = harness.entries(incident)
    assert {token for _, _, token in entries} == {*restored, *skipped}
    for number, token in enumerate(restored + skipped, start=50):
        entry = entries["acme", "total", token]
        board = harness.bucket.stored(board_key("acme", "total", token))
        if token in restored:
            assert usages(harness.bucket, "acme", "total", token) == {None: str(number)}
            assert (entry.raised, entry.skipped, entry.notes) == (1, 0, ())
            assert board is not None
        else:
            assert usages(harness.bucket, "acme", "total", token) == {}
            assert (entry.raised, entry.skipped, entry.notes) == (0, 1, (LEFT,))
            assert board is None
    reported = {line for line in harness.messages if LEFT in line}
    assert reported == {f"Tenant 'acme', total {token}: {LEFT}" for token in skipped}


@pytest.mark.parametrize(
    ("point_at", "restored_at", "restored", "skipped"),
    [
        pytest.param(
            # A Sunday: its week closes with the month.
            "2026-05-31T23:59",
            "2026-06-01T00:05",
            ["2026-Q2", "lifetime"],
            ["2026-05-31", "2026-W22", "2026-05"],
            id="end of May",
        ),
        pytest.param(
            "2026-05-30T23:59",
            "2026-05-31T23:59",
            ["2026-W22", "2026-05", "2026-Q2", "lifetime"],
            ["2026-05-30"],
            id="31st day of a month",
        ),
        pytest.param(
            "2026-11-29T23:30",
            "2026-11-30T00:10",
            ["2026-11", "2026-Q4", "lifetime"],
            ["2026-11-29", "2026-W48"],
            id="Sunday to Monday",
        ),
        pytest.param(
            "2026-11-28T23:30",
            "2026-11-29T00:10",
            ["2026-W48", "2026-11", "2026-Q4", "lifetime"],
            ["2026-11-28"],
            id="Saturday to Sunday",
        ),
        pytest.param(
            "2026-03-31T23:30",
            "2026-04-01T00:10",
            ["2026-W14", "lifetime"],
            ["2026-03-31", "2026-03", "2026-Q1"],
            id="end of a quarter",
        ),
        pytest.param(
            # 2026 has 53 weeks, and the last one ends on 3 January.
            "2026-12-31T23:50",
            "2027-01-01T00:10",
            ["2026-W53", "lifetime"],
            ["2026-12-31", "2026-12", "2026-Q4"],
            id="end of a year",
        ),
        pytest.param(
            "2027-01-03T23:50",
            "2027-01-04T00:10",
            ["2027-01", "2027-Q1", "lifetime"],
            ["2027-01-03", "2026-W53"],
            id="end of week 53",
        ),
        pytest.param(
            "2026-02-28T23:30",
            "2026-03-01T00:10",
            ["2026-W09", "2026-Q1", "lifetime"],
            ["2026-02-28", "2026-02"],
            id="28 February",
        ),
        pytest.param(
            "2028-02-28T23:30",
            "2028-02-29T00:10",
            ["2028-W09", "2028-02", "2028-Q1", "lifetime"],
            ["2028-02-28"],
            id="28 February of a leap year",
        ),
        pytest.param(
            "2028-02-29T23:30",
            "2028-03-01T00:10",
            ["2028-W09", "2028-Q1", "lifetime"],
            ["2028-02-29", "2028-02"],
            id="29 February",
        ),
    ],
)
def test_closed_windows_are_skipped_and_the_others_restored(
    harness: Harness, point_at: str, restored_at: str, restored: list[str], skipped: list[str]
) -> None:
    spend(harness, restored + skipped)
    incident = lose_and_recover(harness, utc(point_at), utc(restored_at))
    assert outcome_of(incident) is Outcome.RESTORED
    assert_only_restored(harness, incident, restored, skipped)


@pytest.fixture
def _in_tokyo(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Set the time zone of the worker's host nine hours ahead of UTC."""
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "Asia/Tokyo")
        time.tzset()
        yield
    time.tzset()


@pytest.mark.usefixtures("_in_tokyo")
@pytest.mark.parametrize(
    ("point_at", "restored_at", "restored", "skipped"),
    [
        # After midnight in Tokyo, but not in UTC.
        (
            "2026-06-01T00:30+09:00",
            "2026-06-01T08:30+09:00",
            ["2026-05-31", "2026-W22", "2026-05", "2026-Q2", "lifetime"],
            [],
        ),
        (
            "2026-06-01T08:59+09:00",
            "2026-06-01T09:05+09:00",
            ["2026-Q2", "lifetime"],
            ["2026-05-31", "2026-W22", "2026-05"],
        ),
    ],
)
def test_windows_follow_utc_in_every_time_zone(
    harness: Harness, point_at: str, restored_at: str, restored: list[str], skipped: list[str]
) -> None:
    assert time.tzname == ("JST", "JST")
    assert datetime.fromisoformat(point_at).utcoffset() == TOKYO.utcoffset(None)
    spend(harness, restored + skipped, updated_at="2026-06-01T00:10:00+09:00")
    incident = lose_and_recover(
        harness, datetime.fromisoformat(point_at), datetime.fromisoformat(restored_at)
    )
    assert_only_restored(harness, incident, restored, skipped)


def test_a_restore_with_only_closed_windows_writes_nothing_and_ends_healthy(
    harness: Harness,
) -> None:
    spend(harness, ["2026-05-31", "2026-W22"])
    incident = lose_and_recover(harness, utc("2026-05-31T23:59"), utc("2026-06-01T00:05"))
    assert outcome_of(incident) is Outcome.NOTHING_CURRENT
    assert harness.bucket.messages() == 1  # our marker
    harness.capture(utc("2026-06-01T01:00"))


def test_a_window_that_closes_between_plan_and_write_is_not_written(harness: Harness) -> None:
    spend(harness, ["2026-Q2", "2026-05"])
    harness.capture(utc("2026-05-31T23:00"))
    harness.lose()
    harness.find_loss(utc("2026-05-31T23:50"))
    planned: list[bool] = []

    def close(is_open: IsOpen) -> None:
        may = Window.parse("2026-05")
        planned.append(is_open(may))
        wait_until(lambda: not is_open(may))

    # The restore begins three seconds before the end of the month.
    harness.clock.time = utc("2026-05-31T23:59:57")
    incident = harness.recover(interrupted(Interruptions(before_raising=close)))

    assert planned == [True]
    assert harness.bucket.stored("usage.acme.total.2026-05.=") is None
    assert harness.bucket.stored(board_key("acme", "total", "2026-05")) is None
    assert usages(harness.bucket, "acme", "total", "2026-Q2") == {None: "50"}
    entries = harness.entries(incident)
    month = entries["acme", "total", "2026-05"]
    assert (month.raised, month.skipped, month.notes) == (
        0,
        1,
        ("1 counter skipped: the window has closed",),
    )
    assert entries["acme", "total", "2026-Q2"].raised == 1


def test_a_window_that_closes_after_its_counters_were_raised_keeps_them(harness: Harness) -> None:
    spend(harness, ["2026-Q2", "2026-05"])
    harness.capture(utc("2026-05-31T23:00"))
    harness.lose()
    harness.find_loss(utc("2026-05-31T23:50"))
    asked: list[IsOpen] = []

    def close() -> None:
        wait_until(lambda: not asked[0](Window.parse("2026-05")))

    harness.clock.time = utc("2026-05-31T23:59:57")
    incident = harness.recover(
        interrupted(Interruptions(before_raising=asked.append, after_raising=close))
    )

    assert usages(harness.bucket, "acme", "total", "2026-05") == {None: "51"}
    # No later step of the restore writes into the closed month.
    assert harness.bucket.stored(board_key("acme", "total", "2026-05")) is None
    month = harness.entries(incident)["acme", "total", "2026-05"]
    assert (month.raised, month.after) == (1, Decimal(51))


@pytest.mark.slow
def test_a_worker_that_is_stopped_across_the_end_of_a_window_creates_none_of_its_counters(
    harness: Harness,
) -> None:
    spend(harness, ["2026-05", "2026-Q2"])
    harness.capture(utc("2026-05-31T23:00"))
    harness.lose()
    harness.find_loss(utc("2026-05-31T23:50"))
    # The clock of the database stands still ten seconds before the end of the month.
    at = utc("2026-05-31T23:59:50")
    with Worker.started("stopped", 1, signal.SIGSTOP, at=at) as worker:
        wait_until(lambda: worker.is_stopped, seconds=60)
        over = time.monotonic() + 10
        wait_until(lambda: time.monotonic() > over)
        assert usages(harness.bucket, "acme", "total", "2026-Q2") == {}
        worker.resume()
        assert worker.report()["ended"] == "Recovered"
    assert usages(harness.bucket, "acme", "total", "2026-Q2") == {None: "51"}
    assert harness.bucket.stored("usage.acme.total.2026-05.=") is None


@pytest.mark.parametrize("by", [timedelta(hours=-1), timedelta(days=-40)])
def test_a_clock_that_is_set_back_during_a_restore_opens_no_closed_window(
    harness: Harness, by: timedelta
) -> None:
    for tenant in ("acme", "globex"):
        for token in ("2026-05", "lifetime"):
            harness.bucket.spend(tenant, "total", token, {None: "5"})
    harness.capture(utc("2026-05-31T23:00"))
    harness.lose()
    harness.find_loss(utc("2026-05-31T23:50"))

    def set_back(_: IsOpen) -> None:
        harness.clock.time += by

    # The first tenant is restored after the end of the month; then the clock is set back.
    harness.clock.time = utc("2026-06-01T00:00:01")
    harness.recover(interrupted(Interruptions(before_raising=set_back)))

    for tenant in ("acme", "globex"):
        assert usages(harness.bucket, tenant, "total", "lifetime") == {None: "5"}
        assert harness.bucket.stored(f"usage.{tenant}.total.2026-05.=") is None


def test_a_clock_that_is_set_forward_during_a_restore_closes_the_window_for_the_next_tenant(
    harness: Harness,
) -> None:
    for tenant in ("acme", "globex"):
        for token in ("2026-05", "lifetime"):
            harness.bucket.spend(tenant, "total", token, {None: "5"})
    harness.capture(utc("2026-05-31T23:00"))
    harness.lose()
    harness.find_loss(utc("2026-05-31T23:50"))

    def set_forward() -> None:
        harness.clock.time = max(harness.clock.time, utc("2026-06-01T00:00"))

    # By less than the duration of a lease: otherwise the restore loses it, and is tried again.
    harness.clock.time = utc("2026-05-31T23:59:45")
    harness.recover(interrupted(Interruptions(after_raising=set_forward)))

    assert usages(harness.bucket, "acme", "total", "2026-05") == {None: "5"}
    assert usages(harness.bucket, "globex", "total", "lifetime") == {None: "5"}
    assert harness.bucket.stored("usage.globex.total.2026-05.=") is None
