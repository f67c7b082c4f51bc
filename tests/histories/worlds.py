"""Two worlds for histories: the fakes, and a NATS server with a PostgreSQL server.

A history changes a world as the gateway, as an operator or as an accident would, and opens its
store as the services do. Time is that of one clock, which only a history moves.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, NamedTuple, cast

from budget_recovery_dagster.adapters.nats import marker_key
from budget_recovery_dagster.domain import (
    CaptureSource,
    IntendedMarker,
    IsOpen,
    Marker,
    Observation,
    RaiseOrder,
    RaiseResult,
)
from budget_recovery_dagster.errors import (
    StorePermissionError,
    StoreReadError,
    StoreUnreachableError,
    StoreWriteError,
)
from budget_recovery_dagster.ports import ControlPlane, UsageStore
from tests.fakes.control_plane import ManualClock
from tests.integration.restore_worker import Overriding

FOREIGN_MARKER = "__guard.00000000-0000-4000-8000-000000000000"


class WorkerDiedError(BaseException):
    """The process of a worker ends here; no code of the project may catch this."""


class Raw(NamedTuple):
    """A live key as stored; ``is_protected``: its time to live is `never`."""

    revision: int
    data: bytes
    is_protected: bool


@dataclass
class Faults:
    """What disturbs a world until it is calmed.

    A refused counter may have been written, a denied one never is. A program may delete markers as
    soon as they are written. No read of ``silent_tenant`` is answered.
    ``clock_ahead`` is how far the database's clock is ahead of the store's.
    """

    is_unreachable: bool = False
    is_unled: bool = False
    is_timeless: bool = False
    refuses_markers: bool = False
    deletes_markers: bool = False
    refuses_counters: bool = False
    denies_counters: bool = False
    silent_tenant: str | None = None
    clock_ahead: timedelta = timedelta(0)


class World(ABC):
    """A gateway's store and a control plane; ``hook`` is called at named points of each use."""

    def __init__(self) -> None:
        self.faults = Faults()
        self.hook: Callable[[str], None] | None = None
        self.is_at_other = False
        self.supports_ttl = True

    @property
    @abstractmethod
    def plane(self) -> ControlPlane:
        """The control plane, which is another object after it was set back."""

    @property
    @abstractmethod
    def clock(self) -> ManualClock:
        """The clock of the control plane."""

    @property
    def store_time(self) -> datetime:
        """The time of the store's leader."""
        return self.clock.now() - self.faults.clock_ahead

    @property
    def deployment_id(self) -> str:
        return self.plane.registry.claim().deployment_id

    @property
    def marker_key(self) -> str:
        return marker_key(self.deployment_id)

    @contextmanager
    def opened(self) -> Iterator[UsageStore]:
        """Open the store at the address as the services do."""
        self.touch("connect")
        if self.faults.is_unreachable:
            raise StoreUnreachableError("Nobody answers.", "start it.")
        with self._connected() as store:
            yield cast(UsageStore, _WatchedStore(store, self))

    def seen(self) -> Observation:
        """Observe the store without disturbance."""
        with self._connected() as store:
            return self.judged_by_clock(store.observe(self.deployment_id))

    def require_answer(self, tenant: str) -> None:
        """Fail as a read does that is not answered in time."""
        if tenant == self.faults.silent_tenant:
            raise StoreReadError("No answer within 30 s.", "wait.")

    def touch(self, point: str) -> None:
        """Let the history act at a point of a service's work."""
        if self.hook is not None:
            self.hook(point)

    @abstractmethod
    def judged_by_clock(self, seen: Observation) -> Observation:
        """Return an observation with the times of the world's clock."""

    @abstractmethod
    def _connected(self) -> AbstractContextManager[UsageStore]: ...

    # The store, as the gateway and accidents change it

    @property
    @abstractmethod
    def exists(self) -> bool:
        """Whether the bucket exists."""

    @abstractmethod
    def keys(self) -> dict[str, Raw]:
        """Return all live keys."""

    @abstractmethod
    def get(self, key: str) -> bytes | None: ...

    @abstractmethod
    def put(self, key: str, value: bytes, ttl: str | None = None) -> None: ...

    @abstractmethod
    def remove(self, key: str) -> None:
        """Delete a key as the gateway does, with a delete mark."""

    @abstractmethod
    def purge(self, prefix: str = "") -> None:
        """Purge keys without a trace."""

    @abstractmethod
    def drop(self, keys: Sequence[str]) -> None:
        """Lose single messages without a trace."""

    @abstractmethod
    def create(self) -> None: ...

    @abstractmethod
    def destroy(self) -> None: ...

    @abstractmethod
    def limit(self, room: int) -> None:
        """Let the bucket delete its oldest keys after so many more."""

    @abstractmethod
    def lift_limits(self) -> None:
        """End the limits of both stores."""

    @abstractmethod
    def copy_store(self) -> None: ...

    @abstractmethod
    def set_store_back(self) -> None:
        """Replace the store by its last copy."""

    @abstractmethod
    def show(self, *, other: bool) -> None:
        """Let the address lead to another gateway's store, or to the own one again."""

    @abstractmethod
    def expire(self) -> None:
        """Drop the keys whose time to live is over, where the store follows the test's clock."""

    # The database

    @abstractmethod
    def copy_database(self) -> None: ...

    @abstractmethod
    def set_database_back(self) -> None: ...

    @abstractmethod
    def landmarks(self) -> frozenset[str]:
        """Return the ids of all landmarks of the database."""


class _Watched(Overriding):
    def __init__(self, part: Any, world: World) -> None:
        super().__init__(part)
        self._world = world


class _WatchedTenant(_Watched):
    def raise_counters(
        self, orders: Sequence[RaiseOrder], *, is_open: IsOpen
    ) -> tuple[RaiseResult, ...]:
        self._world.touch("raise")
        if self._world.faults.refuses_counters:
            raise StoreWriteError("The store refuses writes.", "make room.")
        if self._world.faults.denies_counters:
            raise StorePermissionError("Counters may not be written.", "grant it.")
        middle = len(orders) // 2
        first = self._part.raise_counters(orders[:middle], is_open=is_open)
        self._world.touch("half")
        second = self._part.raise_counters(orders[middle:], is_open=is_open)
        self._world.touch("raised")
        return (*first, *second)


class _WatchedReader(_Watched):
    def read(self, tenant: str) -> Any:
        self._world.touch("read")
        self._world.require_answer(tenant)
        return self._part.read(tenant)


class _WatchedStore(_Watched):
    def now(self) -> datetime | None:
        return None if self._world.faults.is_timeless else self._world.store_time

    def observe(self, deployment_id: str) -> Observation:
        self._world.touch("observe")
        seen = self._world.judged_by_clock(self._part.observe(deployment_id))
        return replace(seen, is_led=not self._world.faults.is_unled)

    def write_marker(self, deployment_id: str, marker: IntendedMarker, *, after: int) -> Marker:
        self._world.touch("marker")
        if self._world.faults.refuses_markers:
            raise StorePermissionError("The marker may not be written.", "grant it.")
        written: Marker = self._part.write_marker(deployment_id, marker, after=after)
        if self._world.faults.deletes_markers:
            self._world.remove(self._world.marker_key)
        self._world.touch("marked")
        return written

    def reader(self, source: CaptureSource) -> Any:
        return _WatchedReader(self._part.reader(source), self._world)

    def open_tenant(self, tenant: str) -> Any:
        self._world.touch("open")
        self._world.require_answer(tenant)
        return _WatchedTenant(self._part.open_tenant(tenant), self._world)
