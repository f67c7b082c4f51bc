"""The scene of a history: a gateway that counts, and accidents of all kinds.

A seed decides everything. The model follows what is true.
"""

from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from random import Random
from typing import NoReturn

from budget_recovery_dagster.adapters.nats import CounterKey, encode_key
from budget_recovery_dagster.domain import BudgetWindow, Entity, Period, Window
from tests.boards import board, board_key
from tests.histories.model import Database, Model, usage_of
from tests.histories.worlds import Faults, World

START = datetime(2030, 11, 28, 18, 3, tzinfo=UTC)
"""A Thursday: days, a week and a month end soon. No key of a real server expires before."""

ZERO = Decimal(0)
TENANTS = ("acme", "*", "eu/globex.com")
ENTITIES: tuple[Entity, ...] = ("alice@example.com", ">", "bo")
PERIODS = {
    "team": (Period.DAY, Period.LIFETIME),
    "spend": (Period.MONTH,),
    "weekly*": (Period.WEEK, Period.DAY),
}
SECOND, MINUTE, HOUR = timedelta(seconds=1), timedelta(minutes=1), timedelta(hours=1)
_STRAY_KEYS = (
    "usage.{}",
    "usage.{}.team",
    "usage.{}.team.2030-13.bo",
    "usage.{}.team.lifetime.=zz",
    "leaderboard.{}",
    "leaderboard.{}.=FF.lifetime",
)
_UNREADABLE = (b"{", b'{"usage":"-1"}', b'{"usage":"NaN"}', b'"text"', b'{"spent":1}')


class BrokenError(AssertionError):
    """A promise was broken; the message has the seed and all steps."""


class Scene:
    """A world with a gateway; ``seen`` counts what happened in it.

    ``raced`` are the last values that the gateway wrote since it was cleared. ``is_limited``: the
    bucket deletes old keys when it is full.
    """

    def __init__(self, world: World, seed: int) -> None:
        self.world = world
        self.seed = seed
        self.chance = Random(seed)  # noqa: S311 - a reproducible course of events
        self.model = Model()
        self.seen: Counter[str] = Counter()
        self.steps: list[str] = []
        self.tenants = TENANTS[: self.chance.choice([1, 2, 3])]
        self.has_ttl = self.chance.random() < 0.7
        # Whether lifetime counters are protected from a maximum age.
        self.protects = self.seed % 2 == 0
        self.shapes = {each: self.chance.choice(["text", "number", "bare"]) for each in TENANTS}
        self.raced: dict[str, bytes] = {}
        self.is_limited = False
        # Whether the address leads to a store that no person has accepted.
        self.is_foreign = False
        self.is_neighbour_known = False
        self._database_copy: Database | None = None
        self._has_store_copy = False

    def note(self, step: str) -> None:
        """Add a step to the report of a failure."""
        self.steps.append(f"{self.world.clock.now():%m-%d %H:%M:%S} {step}")

    def fail(self, what: str, cause: Exception | None = None) -> NoReturn:
        """Report what was broken, with the seed and all steps.

        Raises:
            BrokenError: always.
        """
        steps = "\n".join(self.steps)
        raise BrokenError(
            f"Seed {self.seed} ({type(self.world).__name__}): {what}\nThe steps were:\n{steps}"
        ) from cause

    def advance(self, span: timedelta) -> None:
        """Let time pass."""
        self.world.clock.advance(span)
        if self.world.exists:
            self.world.expire()

    # The gateway

    def spend(self, requests: int = 3) -> None:
        """Let the gateway add up the costs of some requests."""
        for _ in range(requests):
            tenant = self.chance.choice(self.tenants)
            budget = self.chance.choice(list(PERIODS))
            entity = self.chance.choice(ENTITIES)
            cost = Decimal(self.chance.randrange(1, 900)) / 100
            if self.chance.random() < 0.1:
                cost += Decimal("0.000001")
            for period in PERIODS[budget]:
                # The gateway's clock is right, whatever the database's says.
                of = BudgetWindow(budget, Window.containing(period, self.world.store_time))
                for each in (entity, None):
                    self._count(CounterKey(tenant, of, each), cost)
                if budget == "team":
                    self._rank(tenant, of)

    def _count(self, key: CounterKey, cost: Decimal) -> None:
        truth = self.model.truth
        truth[key] = truth.get(key, ZERO) + cost
        if not self.world.exists:
            return
        stored = self.world.get(encode_key(key))
        live = ZERO if stored is None else usage_of(stored)
        if live is not None:
            self.write_counter(key, live + cost)

    def write_counter(self, key: CounterKey, usage: Decimal) -> None:
        shape = self.shapes[key.tenant]
        text = f'"{usage:f}"' if shape == "text" else f"{usage:f}"
        value = text if shape == "bare" else f'{{"usage":{text},"by":"gateway","updated_at":"now"}}'
        self._put(encode_key(key), value.encode(), self._ttl(key.of.window))

    def _ttl(self, window: Window) -> str | None:
        if window.end is None:
            return "never" if self.protects else None
        if not self.has_ttl:
            return None
        left = window.end + timedelta(days=1) - self.world.store_time
        return f"{int(left.total_seconds())}s"

    def _rank(self, tenant: str, of: BudgetWindow) -> None:
        if not self.world.exists:
            return
        ranked = {}
        for entity in ENTITIES:
            stored = self.world.get(encode_key(CounterKey(tenant, of, entity)))
            usage = None if stored is None else usage_of(stored)
            if usage is not None:
                ranked[entity] = f"{usage:f}"
        if ranked:
            self._put(board_key(tenant, of.budget, of.window.token), board(ranked))

    def _put(self, key: str, value: bytes, ttl: str | None = None) -> None:
        self.world.put(key, value, ttl)
        self.raced[key] = value

    # Accidents

    def accident(self) -> None:
        """Let something happen to the store, the database, a clock or the network."""
        kinds: dict[Callable[[], None], int] = {
            self.recreate: 5,
            self.delete_bucket: 2,
            self.purge_everything: 3,
            self.purge_a_tenant: 3,
            self.lose_messages: 4,
            self.copy_store: 5,
            self.set_store_back: 4,
            self.change_address: 4,
            self.copy_database: 4,
            self.set_database_back: 4,
            self.spoil_marker: 4,
            self.spoil_counter: 3,
            self.put_stray_key: 3,
            self.limit_bucket: 3,
            self.disturb: 6,
        }
        self.chance.choices(list(kinds), list(kinds.values()))[0]()

    def recreate(self) -> None:
        self.note("the bucket is deleted and recreated")
        if self.world.exists:
            self.world.destroy()
        self.world.create()
        if self.chance.random() < 0.6:
            self.spend(self.chance.choice([1, 3, 15]))

    def delete_bucket(self) -> None:
        self.note("the bucket is deleted")
        if self.world.exists:
            self.world.destroy()

    def purge_everything(self) -> None:
        self.note("the stream is purged")
        if self.world.exists:
            self.world.purge()

    def purge_a_tenant(self) -> None:
        tenant = self.chance.choice(self._tokens())
        self.note(f"the counters of {tenant} are purged")
        if self.world.exists:
            self.world.purge(f"usage.{tenant}.")

    def lose_messages(self) -> None:
        keys = [key for key in sorted(self.world.keys()) if key.startswith("usage.")]
        lost = self.chance.sample(keys, min(len(keys), self.chance.randrange(1, 6)))
        self.note(f"{len(lost)} messages are lost")
        self.world.drop(lost)

    def copy_store(self) -> None:
        if self.world.is_at_other:
            return
        self.note("the store is copied")
        self.world.copy_store()
        self._has_store_copy = True

    def set_store_back(self) -> None:
        if not self._has_store_copy or self.world.is_at_other:
            return
        self.note("the store is set back to its copy")
        self.world.set_store_back()
        if self.chance.random() < 0.3:
            self.note("... and overtakes what it was")
            self.spend(30)

    def change_address(self) -> None:
        other = not self.world.is_at_other
        self.note("the address leads to another store" if other else "the own store is back")
        self.is_foreign = other and self._accepts_a_store() and not self.is_neighbour_known
        self.world.show(other=other)
        if other and self.chance.random() < 0.6:
            self.spend(2)

    def copy_database(self) -> None:
        self.note("the database is copied")
        self.world.copy_database()
        self._database_copy = self.model.database.copy()

    def set_database_back(self) -> None:
        if self._database_copy is None:
            return
        self.note("the database is set back to its copy")
        self.world.set_database_back()
        self.model.database = self._database_copy.copy()
        self.is_foreign &= self._accepts_a_store()
        self.seen["database set back"] += 1

    def _accepts_a_store(self) -> bool:
        return self.world.plane.registry.claim().baseline is not None

    def spoil_marker(self) -> None:
        how = self.chance.choice(["deleted", "purged", "overwritten", "expired"])
        self.note(f"the marker is {how}")
        key = self.world.marker_key
        if not self.world.exists:
            return
        if how == "deleted":
            self.world.remove(key)
        elif how == "overwritten":
            self.world.put(key, b"somebody was here")
        else:
            self.world.drop([key])

    def spoil_counter(self) -> None:
        keys = [key for key in sorted(self.world.keys()) if key.startswith("usage.")]
        if keys:
            key = self.chance.choice(keys)
            self.note(f"{key} becomes unreadable")
            self.world.put(key, self.chance.choice(_UNREADABLE))

    def put_stray_key(self) -> None:
        """Put a key that names no counter, or no leaderboard."""
        tenant = self.chance.choice([*self._tokens(), "=FF", "*x"])
        key = self.chance.choice(_STRAY_KEYS).format(tenant)
        self.note(f"{key} is written")
        if self.world.exists:
            self.world.put(key, b'{"usage":"1"}')

    def _tokens(self) -> list[str]:
        """Return the tenants as keys name them."""
        of = BudgetWindow("team", Window.parse("lifetime"))
        return [encode_key(CounterKey(each, of, None)).split(".")[1] for each in self.tenants]

    def limit_bucket(self) -> None:
        if not self.world.exists:
            return
        room = self.chance.choice([0, 1, 3, 12])
        self.note(f"the bucket has room for {room} more messages, and then deletes old ones")
        self.world.limit(room)
        self.is_limited = True
        self.seen["bucket limited"] += 1

    def disturb(self) -> None:
        faults = self.world.faults
        what = self.chance.choice(
            [
                *("is_unreachable", "is_unled", "refuses_markers", "deletes_markers"),
                *("refuses_counters", "denies_counters", "silent_tenant", "clock_ahead"),
            ]
        )
        self.note(f"fault: {what}")
        self.seen[f"fault {what}"] += 1
        if what == "clock_ahead":
            self.set_clock_ahead(self.chance.choice([7 * SECOND, 2 * HOUR]))
        elif what == "silent_tenant":
            faults.silent_tenant = self.chance.choice(self.tenants)
        else:
            setattr(faults, what, True)

    def set_clock_ahead(self, ahead: timedelta) -> None:
        right = self.world.store_time
        self.world.faults.clock_ahead = ahead
        self.world.clock.set(right + ahead)

    def calm(self) -> None:
        """End all faults of servers, clocks and limits."""
        self.note("servers and clocks are well again")
        self.set_clock_ahead(timedelta(0))
        self.world.faults = Faults()
        self.world.lift_limits()
        self.is_limited = False
