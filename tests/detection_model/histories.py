"""Random histories: what may happen to stores, databases and addresses, in any order."""

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from random import Random

from tests.detection_model.truth import Database, Renewal, Store
from tests.detection_model.world import FULL, MINUTE, SECOND, ModelStore, Outcome, World

HOUR = timedelta(hours=1)
OURS = 0
_PAUSES = (SECOND, 3 * SECOND, 10 * MINUTE, 10 * MINUTE, 10 * MINUTE, HOUR, 5 * HOUR, 26 * HOUR)


@dataclass
class History:
    """One random history; ``play`` returns the outcomes of its checks and captures."""

    seed: str
    steps: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = Random(self.seed)  # noqa: S311 - reproducible, not secret
        self.world = World(self.random)
        self.world.max_age = self.random.choice((None, None, None, 2 * HOUR))
        self.world.sites = [self.world.create(OURS, self.world.now - 10 * HOUR)]
        self.flushed: Store | None = None
        self.backups: list[tuple[int, Store]] = []
        self.dumps: list[Database] = []
        self.strangers = 0

    def play(self) -> list[Outcome]:
        """Let between 8 and 30 things happen, with a check after most of them."""
        outcomes: list[Outcome] = []
        names, weights = list(_STEPS), list(_STEPS.values())
        if self.random.random() < 0.8:
            self._do(outcomes, History.check)
            self._do(outcomes, History.capture)
        for _ in range(self.random.randint(8, 30)):
            if self.random.random() < 0.05:
                self._play_sequence(outcomes)
                continue
            (step,) = self.random.choices(names, weights)
            self._do(outcomes, step)
            self.world.advance(self.random.choice(_PAUSES))
            if self.random.random() < 0.45:
                self._do(outcomes, History.check)
        return outcomes

    def _play_sequence(self, outcomes: list[Outcome]) -> None:
        """Let the steps of a rare risk follow each other, with short pauses."""
        for step in self.random.choice(_SEQUENCES):
            self._do(outcomes, step)
            self.world.advance(self.random.choice(_PAUSES[:5]))

    def _do(self, outcomes: list[Outcome], step: "Step") -> None:
        self.steps.append(step.__name__)
        outcome = step(self)
        if outcome is not None:
            outcomes.append(outcome)
            self.steps.append(f"  {outcome.decision}, right: {sorted(outcome.right)}")

    # What the product does

    def check(self) -> Outcome:
        return self.world.check()

    def capture(self) -> Outcome:
        return self.world.capture()

    def reset(self) -> Outcome | None:
        return self.world.reset(is_reachable=True)

    def reset_without_nats(self) -> Outcome | None:
        return self.world.reset(is_reachable=False)

    # Traffic, and losses of the store

    def traffic(self) -> None:
        for store in filter(None, self.world.sites):
            if self.random.random() < 0.7:
                writes = self.random.choice((1, 2, 5, 40))
                store.spend(int(self.world.now.timestamp()), writes)

    def wipe(self) -> None:
        """The gateway's bucket is deleted, and created again."""
        world = self.world
        gateway = world.store.gateway if world.store else OURS
        world.replace(world.create(gateway, world.now))

    def disappear(self) -> None:
        self.world.replace(None)

    def purge(self) -> None:
        if (store := self.world.store) is not None:
            self.world.jump()
            store.purge()

    def restart_empty(self) -> None:
        """A single server lost its disk; the cluster kept the creation time."""
        if (store := self.world.store) is not None:
            self.world.jump()
            store.restart_empty()
            store.spend(1)

    def flush(self) -> None:
        if self.world.store is not None:
            self.flushed = self.world.store.copy()

    def lose_power(self) -> None:
        """What was not flushed is gone, and its sequences are used again."""
        store, flushed = self.world.store, self.flushed
        if store and flushed and flushed.creation == store.creation:
            self.world.jump()
            store.put_back(flushed)
            self.world.expire()

    def back_up(self) -> None:
        if self.world.store is not None:
            self.backups.append((self.world.at, self.world.store.copy()))

    def restore_files(self) -> None:
        """A copy of the files keeps the creation time."""
        if (backup := self._backup()) is not None:
            self.world.replace(backup)
            self.world.expire()

    def restore_stream(self) -> None:
        """A stream restored from a backup is made anew; its servers disagree on when."""
        if (backup := self._backup()) is not None:
            self._create_again(backup)
            backup.offsets = self.random.choice(_OFFSETS)
            self.world.replace(backup)
            self.world.expire()

    def restore_after_copying(self) -> None:
        """A backup that is restored at once, before anything is written."""
        self.back_up()
        self.restore_stream()

    def _create_again(self, store: Store) -> None:
        store.creation = next(self.world._numbers)
        store.created_at = self.world.now

    def _backup(self) -> Store | None:
        if not self.backups:
            return None
        site, backup = self.random.choice(self.backups[-3:])
        return backup.copy() if site == self.world.at else None

    # Several stores

    def clone(self) -> None:
        """A copy of the store starts at another address."""
        if self.world.store is not None and len(self.world.sites) < 5:
            self.world.sites.append(self.world.store.copy())

    def another_gateway(self) -> None:
        """Another gateway's store, older or younger than ours, with or without a marker."""
        if len(self.world.sites) >= 5:
            return
        self.strangers += 1
        age = self.random.choice((0 * HOUR, 30 * SECOND, 2 * HOUR, 20 * HOUR))
        store = self.world.create(self.strangers, self.world.now - age)
        store.spend(1, self.random.choice((1, 60)))
        accepted = self.world.acting.accepted
        if accepted is not None and self.random.random() < 0.1:
            shift = self.random.choice((-5, -4, 4, 5, 6)) * SECOND
            store.created_at = accepted.shown_creation + shift
        if self.random.random() < 0.4:
            _mark(self.world, store, f"stranger {self.strangers}")
        self.world.sites.append(store)
        self.world.move_to(len(self.world.sites) - 1)

    def switch(self) -> None:
        self.world.move_to(self.random.randrange(len(self.world.sites)))

    def switch_back(self) -> None:
        if self.world.acting.accepted is not None:
            self.world.move_to(self.world.acting.accepted.site)

    def alternate(self) -> Outcome:
        """Two servers answer in turn during one check."""
        world = self.world
        others = [
            site
            for site, store in enumerate(world.sites)
            if site != world.at and store and world.store and store.gateway != world.store.gateway
        ]
        world.alternate = self.random.choice(others) if others else None
        outcome = world.check()
        world.alternate = None
        return outcome

    def neighbour_marks(self) -> None:
        """Another installation uses the same store."""
        if self.world.store is not None:
            self.strangers += 1
            _mark(self.world, self.world.store, f"neighbour {self.strangers % 3}")

    # The marker, and who answers

    def remove_marker(self) -> None:
        if self.world.store is not None:
            self.world.store.drop_marker(self.world.acting.deployment, is_expired=False)

    def refuse_markers(self) -> None:
        if self.world.store is not None:
            self.world.store.fake.marker_failure = FULL

    def accept_markers(self) -> None:
        if self.world.store is not None:
            self.world.store.fake.marker_failure = None

    def start_cleanup(self) -> None:
        """A program of the gateway deletes our marker as soon as it is written."""
        self._set_cleanup(is_running=True)

    def stop_cleanup(self) -> None:
        self._set_cleanup(is_running=False)

    def _set_cleanup(self, *, is_running: bool) -> None:
        store = self.world.store
        if store is not None and isinstance(store.fake, ModelStore):
            store.fake.deletes_markers = is_running

    def lose_acknowledgement(self) -> Outcome | None:
        store = self.world.store
        if store is None or not isinstance(store.fake, ModelStore) or not self.world.may_write:
            return None
        store.fake.loses_acknowledgement = True
        outcome = self.world.check()
        store.fake.loses_acknowledgement = False
        return outcome

    def step_down(self) -> None:
        if self.world.store is not None:
            self.world.store.leader += 1

    def ask_old_leader(self) -> Outcome:
        """A leader without a majority shows what it knows."""
        if self.world.store is None:
            return self.ask_in_vain()
        self.world.is_led = False
        backup = self.flushed if self.random.random() < 0.5 else None
        self.world.stale = backup.copy() if backup is not None else None
        outcome = self.world.check() if self.random.random() < 0.7 else self.world.capture()
        self.world.is_led, self.world.stale = True, None
        return outcome

    def ask_in_vain(self) -> Outcome:
        self.world.is_away = True
        outcome = self.world.check()
        self.world.is_away = False
        return outcome

    # The database

    def dump(self) -> None:
        self.dumps.append(self.world.acting.copy())

    def restore_dump(self) -> None:
        found = [each for each in self.dumps if each.deployment == self.world.acting.deployment]
        if found:
            self.world.put_back(self.random.choice(found[-2:]))

    def clone_database(self) -> None:
        """A second installation starts with a copy of the database."""
        if len(self.world.installation.databases) == 1:
            self.world.installation.databases.append(self.world.acting.copy())

    def act_with_clone(self) -> None:
        self.world.acting = self.random.choice(self.world.installation.databases)

    def install_again(self) -> None:
        self.world.install()


def _mark(world: World, store: Store, deployment: str) -> None:
    """Let another installation write its marker."""
    store.fake.put(f"__guard.{deployment.replace(' ', '=20')}", b"{}")
    store.marked(deployment, Renewal(next(world._numbers), frozenset(), world.now))


_MILLISECOND = timedelta(milliseconds=1)
_OFFSETS = (
    (0 * SECOND, 60 * _MILLISECOND, -45 * _MILLISECOND),
    (0 * SECOND, 60 * _MILLISECOND, -45 * _MILLISECOND),
    (0 * SECOND, 4999 * _MILLISECOND, 2 * SECOND),
    (0 * SECOND, 5 * SECOND, 4 * SECOND),
)

Step = Callable[[History], Outcome | None]
_SEQUENCES: tuple[tuple[Step, ...], ...] = (
    (History.check, History.back_up, History.traffic, History.restore_files, History.traffic),
    (History.install_again, History.capture, History.another_gateway, History.check),
    (History.check, History.wipe, History.neighbour_marks, History.check),
    (History.check, History.dump, History.reset_without_nats, History.restore_dump),
    (History.check, History.dump, History.capture, History.restore_dump, History.check),
    (History.dump, History.back_up, History.reset, History.restore_files, History.restore_dump),
    (History.clone_database, History.check, History.act_with_clone, History.check),
    (History.restore_stream, History.check, History.step_down, History.check, History.step_down),
    (History.another_gateway, History.check, History.switch, History.traffic, History.check),
    (
        History.wipe,
        History.start_cleanup,
        History.check,
        History.wipe,
        History.traffic,
        History.check,
    ),
)
_STEPS: dict[Step, float] = {
    History.check: 12,
    History.capture: 8,
    History.reset: 2,
    History.reset_without_nats: 2,
    History.traffic: 14,
    History.wipe: 2,
    History.disappear: 1,
    History.purge: 1.5,
    History.restart_empty: 1,
    History.flush: 3,
    History.lose_power: 3,
    History.back_up: 4,
    History.restore_files: 4,
    History.restore_stream: 2,
    History.restore_after_copying: 0.7,
    History.clone: 2,
    History.another_gateway: 2.5,
    History.switch: 2.5,
    History.switch_back: 2.5,
    History.alternate: 1.5,
    History.neighbour_marks: 0.7,
    History.remove_marker: 1.5,
    History.refuse_markers: 1.5,
    History.accept_markers: 1.5,
    History.start_cleanup: 1.5,
    History.stop_cleanup: 1.5,
    History.lose_acknowledgement: 1.5,
    History.step_down: 3,
    History.ask_old_leader: 1.5,
    History.ask_in_vain: 1,
    History.dump: 4,
    History.restore_dump: 3,
    History.clone_database: 0.6,
    History.act_with_clone: 1.5,
    History.install_again: 0.3,
}
