"""Wherever a restore dies, between any two of its steps, those after it end it right."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

import psycopg
import pytest

from budget_recovery_dagster.errors import BudgetRecoveryError
from budget_recovery_dagster.ports import RecoverableStore
from budget_recovery_dagster.services.restore import RecoveryService
from tests.integration.check_borders import Borders, CrashError, crash, each_border, fail
from tests.integration.recovery_house import House
from tests.integration.recovery_runs import incidents, state, usages
from tests.integration.restore_borders import bordered_restore
from tests.integration.timeless_store import opened_store

LIFETIME = "lifetime"
# So many borders, at least, has a restore of two tenants with a counter and a leaderboard each.
RESTORE = 60


@dataclass(frozen=True)
class Scene:
    """A store that is lost again and again, and restores of it on one client."""

    house: House
    database: psycopg.Connection
    service: RecoveryService

    def lose(self) -> None:
        self.house.lose()
        self.house.bucket.spend("acme", "total", LIFETIME, {None: "1"})
        self.house.find_loss()

    def restore(self, service: RecoveryService | None = None) -> None:
        with suppress(CrashError, BudgetRecoveryError):
            (service or self.service).recover(
                run_id="a run", holder="a worker", tell=lambda _: None
            )

    def assert_restored(self, borders: Borders) -> None:
        """All is as after a restore in which nothing happened."""
        (*_, incident) = incidents(self.database)
        assert state(self.database) == "HEALTHY", borders.crossed
        assert (incident["outcome"], incident["restored_counters"]) == ("restored", 2)
        assert usages(self.house.bucket, "acme", "total", LIFETIME) == {None: "80"}
        assert usages(self.house.bucket, "globex", "total", LIFETIME) == {None: "5"}
        assert 1 <= incident["attempts"] <= 2
        claimed = self.database.execute(
            "select count(*) from budget_recovery.restore_attempt where incident_id = %s",
            (incident["incident_id"],),
        ).fetchall()
        assert claimed == [(incident["attempts"],)]
        assert self.house.check().check.verdict.is_good


@pytest.fixture
def scene(house: House, database: psycopg.Connection) -> Iterator[Scene]:
    house.bucket.spend("acme", "total", LIFETIME, {None: "80"})
    house.bucket.spend("globex", "total", LIFETIME, {None: "5"})
    house.capture()
    with opened_store() as store:
        found: RecoverableStore = store
        service = replace(house.plane.recovery_service(), open_store=lambda: nullcontext(found))
        yield Scene(house, database, service)


@pytest.mark.parametrize("happen", [crash, fail])
def test_a_restore_that_dies_or_fails_at_any_border_is_ended_by_the_next(
    scene: Scene, happen: Callable[[bool], Any]
) -> None:
    for borders in each_border(happen, at_least=RESTORE):
        scene.lose()
        scene.restore(bordered_restore(scene.service, borders))
        for _ in range(2):
            scene.restore()
        scene.assert_restored(borders)
