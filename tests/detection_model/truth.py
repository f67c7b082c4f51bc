"""What really happened to the stores and the databases, independent of what the product can see.

A store's content is the end of a chain of writes. Content is intact if the accepted end is still in
the chain, whatever creation time, sequence or marker say.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Self

from budget_recovery_dagster.adapters.nats import marker_key
from budget_recovery_dagster.domain import StoreIdentity
from tests.fakes.plane import MemoryControlPlane
from tests.fakes.usage_store import MemoryUsageStore


@dataclass(frozen=True, slots=True)
class Renewal:
    """A marker that was written: its place in the order of all writes, and what its writer knew."""

    number: int
    events: frozenset[int]
    at: datetime


@dataclass(frozen=True, slots=True, eq=False)
class Write:
    """The content of a store after a write; ``markers`` are the present ones, by deployment.

    ``data`` is the newest write of the gateway, None if this is one.
    """

    parent: "Write | None"
    sequence: int
    purges: int
    markers: Mapping[str, Renewal]
    data: "Write | None" = None

    @property
    def usage(self) -> "Write":
        """The newest write of the gateway."""
        return self.data or self

    def is_in(self, other: "Write") -> bool:
        """Whether the other content was reached from this one."""
        found: Write | None = other
        # Some changes take no sequence.
        while found is not None and found is not self and found.sequence >= self.sequence:
            found = found.parent
        return found is self

    def shares_origin_with(self, other: "Write") -> bool:
        """Whether both contents began with the same write."""
        return _origin(self) is _origin(other)


def _origin(write: Write) -> Write:
    while write.parent is not None:
        write = write.parent
    return write


def empty() -> Write:
    """Return the content of a new store."""
    return Write(None, 0, 0, {})


@dataclass(slots=True, eq=False)
class Store:
    """A store of a gateway, and the fake that shows it.

    ``creation`` identifies the creation of the stream, ``gateway`` the owner. The servers report
    creation times that differ by ``offsets``; ``leader`` is the present one's.
    """

    gateway: int
    creation: int
    created_at: datetime
    fake: MemoryUsageStore
    head: Write = field(default_factory=empty)
    offsets: tuple[timedelta, ...] = (timedelta(0),)
    leader: int = 0

    @property
    def shown_creation(self) -> datetime:
        """The creation time that the present leader reports."""
        return self.created_at + self.offsets[self.leader % len(self.offsets)]

    def show(self, now: datetime) -> MemoryUsageStore:
        """Return the fake as it is now."""
        self.fake.clock = now
        self.fake.stream = StoreIdentity(self.shown_creation, self.fake.stream.last_sequence)
        return self.fake

    def copy(self) -> Self:
        """Return a copy of the files."""
        return replace(self, fake=self.fake.copy())

    def put_back(self, older: Self) -> None:
        """Put an older copy of the files in place; limits of the server stay."""
        failure, self.fake = self.fake.marker_failure, older.fake.copy()
        self.fake.marker_failure = failure
        self.head = older.head

    def spend(self, usage: int, writes: int = 1) -> None:
        """Count usage; the last of several writes to one key stays."""
        stream = self.fake.stream
        self.fake.stream = replace(stream, last_sequence=stream.last_sequence + writes - 1)
        self.fake.put_usage("a", "spend", "lifetime", None, str(usage))
        self.head = Write(self.head, self._sequence, self.head.purges, self.head.markers)

    def purge(self) -> None:
        """Remove everything; the sequence stays."""
        self.fake.purge()
        self.head = Write(self.head, self._sequence, self.head.purges + 1, {})

    def restart_empty(self) -> None:
        """Lose all data, but not the creation time."""
        self.fake.recreate(self.created_at)
        self.head = empty()

    def drop_marker(self, deployment: str, *, is_expired: bool, leaves_mark: bool = True) -> None:
        """Let the gateway delete our marker, or its age do so."""
        if deployment not in self.head.markers:
            return
        key = marker_key(deployment)
        if is_expired:
            self.fake.expire(key, leaves_mark=leaves_mark)
        else:
            self.fake.remove(key)
        self.forget_marker(deployment)

    def forget_marker(self, deployment: str) -> None:
        """Note that a marker was deleted."""
        left = {name: each for name, each in self.head.markers.items() if name != deployment}
        self._add(left)

    def marked(self, deployment: str, renewal: Renewal) -> None:
        """Note that a marker was written."""
        self._add({**self.head.markers, deployment: renewal})

    def note_restored(self) -> None:
        """Note writes of a restore."""
        if self._sequence > self.head.sequence:
            self.head = Write(self.head, self._sequence, self.head.purges, self.head.markers)

    def _add(self, markers: Mapping[str, Renewal]) -> None:
        head = self.head
        self.head = Write(head, self._sequence, head.purges, markers, head.usage)

    @property
    def _sequence(self) -> int:
        return self.fake.stream.last_sequence


@dataclass(frozen=True, slots=True)
class Accepted:
    """The store that a database accepted, as it was then, and the ``site`` at which it stood."""

    site: int
    creation: int
    gateway: int
    head: Write
    shown_creation: datetime
    at: datetime
    neighbours: frozenset[str]
    marker: Renewal | None


@dataclass(slots=True, eq=False)
class Database:
    """A control-plane database, and what it really knows.

    ``events`` and ``renewals`` are those that it recorded; ``settled`` those that it lacks, but
    that an earlier decision was about. ``former`` are accepted stores that others replaced.
    ``is_writing``: it does not know whether its newest marker was written.
    """

    plane: MemoryControlPlane
    deployment: str
    accepted: Accepted | None = None
    events: set[int] = field(default_factory=set)
    renewals: set[int] = field(default_factory=set)
    settled: set[int] = field(default_factory=set)
    former: set[int] = field(default_factory=set)
    renewals_lost_at: datetime | None = None
    is_writing: bool = False

    def copy(self) -> Self:
        """Return a copy, such as a dump."""
        return replace(
            self,
            plane=self.plane.copy(),
            events=set(self.events),
            renewals=set(self.renewals),
            settled=set(self.settled),
            former=set(self.former),
        )


@dataclass(slots=True)
class Installation:
    """All that databases with one deployment id ever recorded; numbers are never used twice.

    ``databases`` are those that work at present: more than one if copies do.
    """

    databases: list[Database]
    events: dict[int, str] = field(default_factory=dict)
    renewals: set[int] = field(default_factory=set)
