"""A crash of a check at any point neither looks like a loss nor hides one."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace

import dagster as dg
import psycopg
import pytest

from budget_recovery_dagster.domain import (
    RESTORE_LEASE,
    Baseline,
    Closing,
    Outcome,
    Restored,
    Verdict,
)
from budget_recovery_dagster.embedded import NatsServer
from budget_recovery_dagster.errors import BudgetRecoveryError
from budget_recovery_dagster.ports import ControlPlane, OpenStore
from budget_recovery_dagster.services import Checked
from budget_recovery_dagster.wiring import opened_control_plane, store_opener
from tests import services
from tests.integration.check_borders import (
    Borders,
    CrashError,
    HurriedClock,
    bordered,
    bordered_store,
    crash,
    each_border,
    fail,
)
from tests.integration.detection_records import assert_intact, losses, store_row
from tests.integration.recovery_runs import check, incidents, skipped, state, verdict
from tests.nats_servers import Bucket, DisturbedNetwork
from tests.postgres_servers import expire_leases

# The minimum numbers of borders of a check with this finding.
FIRST = 30
RENEWAL = 26
FINDING = 24
WATCHING = 20


@dataclass(frozen=True)
class Scene:
    """A store with its database, and checks whose two observations follow without a pause."""

    bucket: Bucket
    database: psycopg.Connection
    plane: ControlPlane
    open_store: OpenStore

    def check(self) -> Checked:
        return services.check(self.plane, open_store=self.open_store)

    def check_across(self, borders: Borders) -> None:
        """Run a check with a fault at a border; it may fail."""
        with suppress(CrashError, BudgetRecoveryError):
            services.check(
                bordered(self.plane, borders),
                open_store=bordered_store(self.open_store, borders),
                by="a disturbed check",
            )

    def forget(self) -> None:
        """Make the next check the first one."""
        self.database.execute("delete from budget_recovery.store")

    def rebuild(self) -> None:
        self.bucket.destroy()
        self.bucket.create()

    def purge(self) -> None:
        """Remove all keys, including our marker."""
        self.bucket.purge("")

    def assert_intact(self, borders: Borders) -> None:
        """Require that no incident exists, and that the accepted store contains our marker."""
        assert self.check().check.verdict.is_good, borders.crossed
        assert incidents(self.database) == []
        row = store_row(self.database)
        stored = self.bucket.stored(f"__guard.{row['deployment_id']}")
        assert stored is not None
        assert (stored.revision, row["intended_nonce"]) == (row["marker_revision"], None)

    def end_incident(self) -> None:
        """Close the open incident like a restore, and let a check accept the store."""
        incident = self.plane.incidents.recovery().incident
        assert incident is not None
        with self.open_store() as store, self.plane.leases.hold(RESTORE_LEASE, "r") as held:
            identity = store.observe("nobody").identity
            closing = Closing(Outcome.NOTHING_LOST, "", Restored(), Baseline(identity, version=1))
            self.plane.incidents.close(closing, judged=incident, lease=held)
        assert self.check().check.verdict.is_good


@pytest.fixture
def scene(configured: Bucket, database: psycopg.Connection) -> Iterator[Scene]:
    configured.spend("acme", "total", "lifetime", {None: "80"})
    settings = services.present_settings()
    with opened_control_plane(settings) as plane, store_opener(settings)() as store:
        hurried = replace(plane, clock=HurriedClock(plane.clock))
        # All checks share one client.
        yield Scene(configured, database, hurried, lambda: nullcontext(store))


def test_a_crash_of_the_first_check_does_not_look_like_a_loss(scene: Scene) -> None:
    for borders in each_border(crash, at_least=FIRST):
        scene.forget()
        scene.check_across(borders)
        scene.assert_intact(borders)


@pytest.mark.parametrize("inject", [crash, fail])
def test_a_crash_or_failure_of_a_renewal_does_not_look_like_a_loss(
    scene: Scene, inject: Callable[[bool], None]
) -> None:
    assert scene.check().check.verdict is Verdict.FIRST_SEEN
    for borders in each_border(inject, at_least=RENEWAL):
        scene.check_across(borders)
        # Crash a second time at the same border.
        scene.check_across(replace(borders, crossed=[], is_dead=False))
        scene.assert_intact(borders)


@pytest.mark.parametrize("lose", [Scene.rebuild, Scene.purge])
def test_a_loss_after_a_crash_is_detected(scene: Scene, lose: Callable[[Scene], None]) -> None:
    assert scene.check().check.verdict is Verdict.FIRST_SEEN
    for borders in each_border(crash, at_least=RENEWAL):
        scene.check_across(borders)
        lose(scene)
        assert scene.check().check.verdict.is_alarm, borders.crossed
        assert state(scene.database) == "recovering"
        scene.end_incident()


def test_a_crash_while_a_loss_is_detected_leads_to_exactly_one_incident(scene: Scene) -> None:
    assert scene.check().check.verdict is Verdict.FIRST_SEEN
    for number, borders in enumerate(each_border(crash, at_least=FINDING), start=1):
        scene.rebuild()
        scene.check_across(borders)
        scene.check()
        assert state(scene.database) == "recovering", borders.crossed
        assert len(incidents(scene.database)) == number, borders.crossed
        assert len(losses(scene.database)) == number, borders.crossed
        scene.end_incident()


def test_a_crash_while_a_lost_store_returns_is_not_a_further_loss(scene: Scene) -> None:
    assert scene.check().check.verdict is Verdict.FIRST_SEEN
    for number, borders in enumerate(each_border(crash, at_least=WATCHING), start=1):
        scene.bucket.destroy()
        assert scene.check().check.identity is None
        scene.bucket.create()
        scene.check_across(borders)
        assert not scene.check().check.verdict.is_alarm, borders.crossed
        assert len(losses(scene.database)) == number, borders.crossed
        scene.end_incident()


def one_completes(scene: Scene) -> None:
    assert scene.check().check.verdict.is_good


def two_complete(scene: Scene) -> None:
    one_completes(scene)
    one_completes(scene)


def one_dies_before_it_writes(scene: Scene) -> None:
    borders = Borders("before write_marker of open_store", crash)
    scene.check_across(borders)
    assert borders.is_reached


@pytest.mark.parametrize("meanwhile", [one_completes, two_complete, one_dies_before_it_writes])
def test_a_check_that_stalls_at_any_border_does_not_disturb_others(
    scene: Scene, meanwhile: Callable[[Scene], None]
) -> None:
    assert scene.check().check.verdict is Verdict.FIRST_SEEN

    def stall(_: bool) -> None:  # noqa: FBT001 - as Borders calls it
        expire_leases(scene.database)
        meanwhile(scene)

    for borders in each_border(stall, at_least=RENEWAL):
        scene.check_across(borders)
        scene.assert_intact(borders)


def test_a_check_that_stalls_during_a_loss_reports_no_second_loss(
    scene: Scene,
) -> None:
    assert scene.check().check.verdict is Verdict.FIRST_SEEN
    found: list[Verdict] = []

    def stall(_: bool) -> None:  # noqa: FBT001 - as Borders calls it
        expire_leases(scene.database)
        scene.rebuild()
        found.append(scene.check().check.verdict)

    for borders in each_border(stall, at_least=RENEWAL):
        scene.check_across(borders)
        if not borders.is_reached:
            continue
        deployment_id = store_row(scene.database)["deployment_id"]
        assert scene.bucket.stored(f"__guard.{deployment_id}") is None, borders.crossed
        assert not scene.check().check.verdict.is_alarm
        assert len(losses(scene.database)) == len(found), borders.crossed
        scene.end_incident()
    assert set(found) == {Verdict.LOST}
    assert len(incidents(scene.database)) == len(found)


def test_a_marker_whose_acknowledgement_was_lost_is_recognized(
    configured: Bucket,
    nats_server: NatsServer,
    instance: dg.DagsterInstance,
    database: psycopg.Connection,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    configured.spend("acme", "total", "lifetime", {None: "80"})
    assert verdict(check(instance)) == "first_seen"
    before = store_row(database)
    with DisturbedNetwork(nats_server.url) as network, monkeypatch.context() as elsewhere:
        elsewhere.setenv("BUDGET_RECOVERY_NATS_URL", network.url)
        network.rewrite = lambda answer: b"" if b'"seq":3' in answer else answer
        assert "No response to $KV." in skipped(check(instance))
    row = store_row(database)
    assert row["intended_nonce"] is not None
    assert row["intended_number"] == row["given_number"] == before["given_number"] + 1
    changed = {name for name in row if row[name] != before[name]}
    assert changed == {
        "baseline_version",
        "given_number",
        "given_nonce",
        "intended_nonce",
        "intended_number",
        "intended_landmark",
    }
    stored = configured.stored(f"__guard.{row['deployment_id']}")
    assert stored is not None
    assert stored.revision == 3
    assert row["intended_nonce"] in stored.data.decode()
    assert_intact(instance, database)
