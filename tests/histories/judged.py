"""Judges every work of a service in a scene, and interferes with it.

What the store held before and after the work is compared (see ``model.Work``).
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from functools import cache
from typing import TypeVar

from budget_recovery_dagster.domain import BudgetWindow, Recovery, RecoveryState
from budget_recovery_dagster.errors import BudgetRecoveryError, StoreUnreachableError
from tests.histories.model import Work
from tests.histories.scene import Scene
from tests.histories.worlds import FOREIGN_MARKER, Raw, WorkerDiedError, World

Result = TypeVar("Result")

_AUTOMATIC = ("capture", "check", "restore")
_RESTORES = ("restore", "manual restore")


class JudgedScene(Scene):
    """A scene in which services work.

    ``raised_windows`` are those that the work of the open incident has begun to raise.
    ``despite_resets``: a person orders a restore of what was reset. ``is_over``: nothing interferes
    any more.
    """

    def __init__(self, world: World, seed: int) -> None:
        super().__init__(world, seed)
        self.raised_windows: frozenset[tuple[str, BudgetWindow]] = frozenset()
        self.despite_resets = False
        self.is_over = False
        self._before: Mapping[str, Raw] = {}
        self._held: str | None = None
        self.is_disturbed = False

    def recovery(self) -> Recovery:
        """Return the state of the store and the open incident."""
        return self.world.plane.incidents.recovery()

    def work(
        self, name: str, work: Callable[[], Result], *, is_calm: bool = False
    ) -> Result | None:
        """Let a service work, and judge what it did; None: it ended with an error, or died."""
        self._recognize_residual_risks()
        self._before, self.raced = self.world.keys(), {}
        began, incident = self.world.clock.now(), self.recovery().incident
        self._held = None if incident is None else incident.on_hold
        self.is_disturbed = False
        result, how = None, ""
        with self._disturbed(name, is_calm=is_calm):
            try:
                result = work()
                how = type(result).__name__
            except WorkerDiedError:
                how = "died"
                self.seen["worker died"] += 1
            except BudgetRecoveryError as error:
                how = f"{type(error).__name__}: {error}"
                self.seen[f"error {type(error).__name__}"] += 1
        self.note(f"{name}: {how}")
        self._judge(name, began)
        if name.startswith(_RESTORES) and self.recovery().incident is not None:
            self._expect_boards()
        self._require_consistent()
        return result

    def _judge(self, name: str, began: datetime) -> None:
        world = self.world
        work = Work(
            before=self._before,
            after=world.keys(),
            began=began,
            marker=world.marker_key,
            raced=self.raced,
            bounds=cache(lambda: self.model.bounds(despite_resets=self.despite_resets)),
            raised_before=self.raised_windows,
            is_limited=self.is_limited,
            is_disturbed=self.is_disturbed,
            protects=self.protects and world.supports_ttl,
        )
        if self._held is not None and name in _AUTOMATIC and work.changed_by_us():
            self.fail(f"{name} wrote {work.changed_by_us()}, and it is on hold: {self._held}")
        if raised := work.raised():
            self.raised_windows |= {(each.tenant, each.of) for each in raised}
            self.seen["work that raised counters"] += 1
            self.seen["counters raised"] += len(raised)
            if self.is_foreign and name in _AUTOMATIC and FOREIGN_MARKER in self._before:
                self.fail(f"{name} raised counters of another store, and no person decided that")
            if not name.startswith(_RESTORES):
                self.fail(f"{name} raised counters")
        for fault in work.faults():
            self.fail(fault)

    def _expect_boards(self) -> None:
        """Expect leaderboards of all windows that an unfinished restore may have begun."""
        windows = {(each.tenant, each.of) for each in self.model.due(self.world.clock.now())}
        self.raised_windows |= windows

    def _require_consistent(self) -> None:
        recovery = self.world.plane.incidents.recovery()
        is_healthy = recovery.state is RecoveryState.HEALTHY
        if is_healthy != (recovery.incident is None):
            self.fail(f"{recovery.state} and {recovery.incident}")

    @contextmanager
    def _disturbed(self, name: str, *, is_calm: bool) -> Iterator[None]:
        """Let something happen at a point of the work, sometimes."""
        is_restore = name == "restore"
        kinds = {
            "nothing": 25 if is_restore else 50,
            "spend": 45 if is_restore else 25,
            "die": 10,
            "fail": 6,
            "lose": 5 if is_restore else 0,
        }
        if is_calm:
            kinds = {"nothing": 50, "spend": 50}
        kind = self.chance.choices(list(kinds), list(kinds.values()))[0]
        countdown = self.chance.randrange(1, 30)
        points = 0

        def hook(point: str) -> None:
            nonlocal points
            points += 1
            if points == countdown:
                self._interfere(kind, point)

        self.world.hook = None if self.is_over else hook
        try:
            yield
        finally:
            self.world.hook = None

    def _interfere(self, kind: str, point: str) -> None:
        if kind == "nothing":
            return
        self.steps.append(f"    at {point}: {kind}")
        if kind == "spend":
            self.spend(6)
            self.seen["traffic during work"] += 1
        elif kind == "die":
            raise WorkerDiedError
        elif kind == "fail":
            raise StoreUnreachableError("The connection broke.", "wait.")
        else:
            began = self.world.clock.now()
            self._judge("restore", began)
            self.chance.choice([self.purge_everything, self.recreate, self.lose_messages])()
            self._before, self.raced = self.world.keys(), {}
            self.seen["loss during work"] += 1
            self.is_disturbed = True

    # Residual risks

    def is_behind(self) -> bool:
        incident = self.world.plane.incidents.recovery().incident
        return incident is not None and incident.is_database_behind

    def _recognize_residual_risks(self) -> None:
        """Recognize an older database that the store cannot reveal.

        The reset was recorded without NATS, and the marker was not renewed since; or the store went
        back, too. Everywhere else the marker names the reset, or something after it.
        """
        if not self.model.forgotten - self.model.revivable or self.is_behind():
            return
        marker = self.world.seen().marker if self.world.exists else None
        if marker is None or marker.landmark is None or marker.landmark in self.world.landmarks():
            self.may_revive("a residual risk")

    def may_revive(self, why: str) -> None:
        new = self.model.forgotten - self.model.revivable
        if new:
            self.model.revivable |= new
            self.note(f"forgotten resets may be revived: {why}")
            self.seen[f"reset revivable: {why}"] += len(new)
