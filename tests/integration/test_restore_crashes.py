"""A restore that dies between any two steps is completed by the next ones."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import psycopg
import pytest

from budget_recovery_dagster.errors import BudgetRecoveryError
from budget_recovery_dagster.ports import OpenStore, UsageStore
from tests import services
from tests.integration.check_borders import (
    Borders,
    CrashError,
    bordered,
    crash,
    each_border,
    fail,
)
from tests.integration.recovery_harness import Harness
from tests.integration.recovery_runs import incidents, state, usages
from tests.integration.restore_borders import bordered_restoring
from tests.integration.timeless_store import opened_store

pytestmark = pytest.mark.slow

LIFETIME = "lifetime"
# The minimum number of borders of a restore of two tenants with a counter and a leaderboard each.
RESTORE = 60


@dataclass(frozen=True)
class Scene:
    """A store that is lost repeatedly, and restores that share one client.

    ``ends`` are the results and errors of the restores since the last loss.
    """

    harness: Harness
    database: psycopg.Connection
    open_store: OpenStore
    ends: list[object] = field(default_factory=list)

    def lose(self) -> None:
        self.ends.clear()
        self.harness.lose()
        self.harness.bucket.spend("acme", "total", LIFETIME, {None: "1"})
        self.harness.find_loss()

    def restore(self, borders: Borders | None = None) -> None:
        """Restore, with a fault at a border if given."""
        plane, open_store = self.harness.plane, self.open_store
        if borders is not None:
            plane = bordered(plane, borders)
            open_store = bordered_restoring(open_store, borders)
        try:
            end: object = services.recover(plane, open_store=open_store, holder="a worker")
        except (CrashError, BudgetRecoveryError) as error:
            end = error
        self.ends.append(end)

    def assert_restored(self, borders: Borders) -> None:
        """Require the same state as after an undisturbed restore."""
        (*_, incident) = incidents(self.database)
        why = (borders.crossed[-5:], self.ends, incident)
        assert state(self.database) == "healthy", why
        assert (incident["outcome"], incident["restored_counters"]) == ("restored", 2)
        assert usages(self.harness.bucket, "acme", "total", LIFETIME) == {None: "80"}
        assert usages(self.harness.bucket, "globex", "total", LIFETIME) == {None: "5"}
        assert 1 <= incident["attempts"] <= 2
        claimed = self.database.execute(
            "select count(*) from budget_recovery.restore_attempt where incident_id = %s",
            (incident["incident_id"],),
        ).fetchall()
        assert claimed == [(incident["attempts"],)]
        assert self.harness.check().check.verdict.is_good


@pytest.fixture
def scene(harness: Harness, database: psycopg.Connection) -> Iterator[Scene]:
    harness.bucket.spend("acme", "total", LIFETIME, {None: "80"})
    harness.bucket.spend("globex", "total", LIFETIME, {None: "5"})
    harness.capture()
    with opened_store() as store:
        found: UsageStore = store
        yield Scene(harness, database, lambda: nullcontext(found))


@pytest.mark.parametrize("inject", [crash, fail])
def test_a_restore_that_dies_or_fails_at_any_border_is_completed_by_the_next(
    scene: Scene, inject: Callable[[bool], Any]
) -> None:
    for borders in each_border(inject, at_least=RESTORE):
        scene.lose()
        scene.restore(borders)
        for _ in range(2):
            scene.restore()
        scene.assert_restored(borders)
