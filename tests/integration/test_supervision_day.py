"""A day of ticks of sensors on a flapping store leaks nothing."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import dagster as dg
import psycopg
import pytest
from dagster import DagsterRunStatus

from budget_recovery_dagster.domain import Suspicion, Verdict
from budget_recovery_dagster.sensors import TICK_SECONDS, Deadline, supervise_restore
from budget_recovery_dagster.services.restore import Recovered
from tests import services
from tests.free_ports import unused_port
from tests.integration.detection_records import losses
from tests.integration.launched_runs import our_runs
from tests.integration.recovery_harness import Harness
from tests.integration.recovery_runs import incidents, usages
from tests.integration.unknown_ticks import no_leaks

NATS_URL = "BUDGET_RECOVERY_NATS_URL"
EVALUATIONS = 300
APART = timedelta(minutes=5)
FLAP = 30
WARM = 90
# Far less than a leaked client for each evaluation.
MOST_GROWTH = 24 * 2**20


@dataclass
class Day:
    """Ticks, and the runs that they request, most of which die."""

    harness: Harness
    instance: dg.DagsterInstance
    monkeypatch: pytest.MonkeyPatch
    there: str
    nowhere: str
    suspicion: Suspicion | None = None
    verdicts: set[Verdict] = field(default_factory=set)
    keys: list[str] = field(default_factory=list)
    most_runs_at_once: int = 0

    def evaluate(self, number: int) -> None:
        event = self._events().get(number % FLAP)
        if event is not None:
            event()
        self.verdicts.add(self.harness.check().check.verdict)
        supervised = supervise_restore(
            our_runs(self.instance, self.harness.plane),
            self.harness.plane,
            Deadline(TICK_SECONDS),
            self.suspicion,
        )
        self.suspicion = supervised.suspicion
        if supervised.request is not None:
            assert supervised.request.run_key is not None
            self.keys.append(supervised.request.run_key)
            # Every other run stays started forever: its host is gone.
            is_silent = len(self.keys) % 2
            self.instance.create_run_for_job(
                services.definitions().resolve_job_def("restore_job"),
                status=DagsterRunStatus.STARTED if is_silent else DagsterRunStatus.FAILURE,
                tags=dict(supervised.request.tags),
            )
        at_once = self.instance.get_runs(dg.RunsFilter(statuses=[DagsterRunStatus.STARTED]))
        self.most_runs_at_once = max(self.most_runs_at_once, len(at_once))
        self.harness.clock.time += APART

    def _events(self) -> Mapping[int, Callable[[], object]]:
        """Return the events of a round, by the number of the evaluation."""
        return {
            1: self.harness.bucket.destroy,
            4: self._make_anew,
            8: lambda: self.monkeypatch.setenv(NATS_URL, self.nowhere),
            11: lambda: self.monkeypatch.setenv(NATS_URL, self.there),
            15: self.harness.lose,
            25: self._restore,
        }

    def _make_anew(self) -> None:
        self.harness.bucket.create()
        # Stores that are made within five seconds of each other differ only by their sequence.
        self.harness.bucket.put("ratelimit.acme", b"1")

    def _restore(self) -> None:
        assert isinstance(self.harness.run(), Recovered)


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def connections(database: psycopg.Connection) -> int:
    [(count,)] = database.execute(
        "select count(*) from pg_stat_activity where datname = current_database()"
    ).fetchall()
    return int(count)


def test_a_day_of_ticks_on_a_flapping_store_leaks_nothing(
    harness: Harness,
    database: psycopg.Connection,
    instance: dg.DagsterInstance,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As openobserve/openobserve#13594: each evaluation leaked a watcher.
    harness.bucket.spend("acme", "total", "lifetime", {None: "80"})
    harness.capture()
    harness.check()
    nowhere = f"nats://127.0.0.1:{unused_port()}"
    day = Day(harness, instance, monkeypatch, os.environ[NATS_URL], nowhere)
    for number in range(WARM):
        day.evaluate(number)
    connected, resident = connections(database), resident_bytes()
    with no_leaks():
        for number in range(WARM, EVALUATIONS):
            day.evaluate(number)
    assert connections(database) <= connected
    assert harness.bucket.consumers() == 0
    assert resident_bytes() - resident < MOST_GROWTH

    assert {Verdict.UNKNOWN, Verdict.LOST, Verdict.SAME} <= day.verdicts
    rounds = EVALUATIONS // FLAP
    found = incidents(database)
    assert [incident["outcome"] for incident in found] == ["restored"] * rounds
    assert len(losses(database)) == 2 * rounds
    # A tick launches at most one run, and a silent run is declared dead before the next launch.
    assert all(incident["launches"] <= FLAP for incident in found)
    assert len(set(day.keys)) == len(day.keys) == sum(each["launches"] for each in found)
    assert day.most_runs_at_once == 1
    assert usages(harness.bucket, "acme", "total", "lifetime") == {None: "80"}
