"""What restores need from the outside world; as in ``ports``, with promises."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from enum import StrEnum
from typing import Protocol

from budget_recovery_dagster.domain.convergence import ClusterView
from budget_recovery_dagster.domain.counters import (
    BudgetWindow,
    Entity,
    OmittedCounter,
    UnreadableKey,
    ValueShape,
)
from budget_recovery_dagster.domain.detection import Sighting
from budget_recovery_dagster.domain.identity import Marker
from budget_recovery_dagster.domain.recovery_point import Usages
from budget_recovery_dagster.domain.resets import Reset
from budget_recovery_dagster.domain.snapshots import TenantReading
from budget_recovery_dagster.domain.windows import Window


@dataclass(frozen=True, slots=True)
class RaiseOrder:
    """A counter to be raised to ``usage``.

    Where the store has no such key, one is made in this ``shape`` and with this expiry: seconds
    after the window's end or, for a lifetime, after the writing; None means never.
    """

    of: BudgetWindow
    entity: Entity
    usage: Decimal
    shape: ValueShape
    expiry_seconds: int | None


class Written(StrEnum):
    """What became of an order."""

    RAISED = "raised"
    KEPT = "kept, it is as high already"
    CLOSED = "left: the window has closed"
    UNREADABLE = "left: the live value is unreadable"
    EXPIRED = "left: the key would have expired by now"
    REFUSED = "left: the store refuses the value"


@dataclass(frozen=True, slots=True)
class RaiseResult:
    """What became of one order.

    ``before`` is the live usage at the writing, None where there was none or none that could be
    read; ``reason`` says why an unreadable one is, or why the store refuses the value.
    """

    order: RaiseOrder
    written: Written
    before: Decimal | None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class BoardOrder:
    """A leaderboard to be brought in line with these usages.

    Where the store has none, one is made that expires like a counter (see RaiseOrder).
    """

    of: BudgetWindow
    usages: Usages
    expiry_seconds: int | None


@dataclass(frozen=True, slots=True)
class BoardResult:
    """Whether a leaderboard was written; ``reason`` says why one was left that is not in line."""

    of: BudgetWindow
    is_written: bool
    reason: str = ""


IsOpen = Callable[[Window], bool]
"""Tells whether usage still counts into a window, at the moment of the asking.

Asked before each write; what it raises breaks the writing off. It must not wait for anything.
"""


class LiveTenant(Protocol):
    """A tenant's counters in the store, read once and ready to be raised.

    Every write is conditional on what was read before it, and on the window being open then. Where
    somebody else has written meanwhile, the key is read again from the leader, and the higher usage
    stands. So a usage can only go up. An order that is lost on the way is done again.
    """

    @property
    def reading(self) -> TenantReading:
        """The counters as they were read."""
        ...

    def raise_counters(
        self, orders: Sequence[RaiseOrder], *, is_open: IsOpen
    ) -> tuple[RaiseResult, ...]:
        """Raise counters, and give the results in the order of the orders.

        A key that exists keeps its other fields and the time at which it expires. A value that the
        store would never take, such as one too large, is left, and fails nothing.

        Raises:
            StoreWriteError: the first write that the store refuses for anything but its value, such
                as that it is full. All others were tried before, until 100 were refused in a row;
                what was written stays.
            StoreError: the writing could not be brought to its end; what was written stays.
        """
        ...

    def rebuild_boards(
        self, orders: Sequence[BoardOrder], *, is_open: IsOpen
    ) -> tuple[BoardResult, ...]:
        """Bring leaderboards in line, and give the results in the order of the orders.

        An entity gets the higher of what the leaderboard and the usages say; the 500 largest stay.
        A leaderboard that is right already is not written, one that cannot be read is left alone.
        One that the store refuses, for whatever reason, is left with that reason, and the others
        are tried as by ``raise_counters``; so no StoreWriteError is raised.

        Raises:
            StoreError: the writing could not be brought to its end; what was written stays.
        """
        ...


class RecoverableStore(Protocol):
    """The gateway's store, as far as detection and restores need it."""

    def look(self, deployment_id: str) -> Sighting:
        """Read identity and marker from the stream's leader.

        Raises:
            StoreMissingError: the cluster says that the bucket does not exist.
            StorePermissionError: the marker may not be read.
        """
        ...

    def write_marker(self, deployment_id: str, nonce: str, *, after: int) -> Marker:
        """Write our marker over what stands under its key at sequence ``after``; 0: nothing.

        Raises:
            MarkerConflictError: something else stands there; nothing is overwritten.
            StorePermissionError: the marker may not be written.
            StoreWriteError: the store refuses the write.
        """
        ...

    def cluster_view(self, seen_at: datetime) -> ClusterView:
        """Ask the stream's leader for the servers that hold it; ``seen_at`` is the time of now."""
        ...

    def now(self) -> datetime | None:
        """Return the time of the stream's leader; None where its server does not tell."""
        ...

    def open_tenant(self, tenant: str) -> LiveTenant:
        """Read a tenant's counters to be raised.

        Raises:
            StoreReadError: the reading could not be brought to its end in time.
        """
        ...


OpenStore = Callable[[], AbstractContextManager[RecoverableStore]]


@dataclass(frozen=True, slots=True)
class WindowPoint:
    """What a restore would bring back of one budget and window.

    ``newest_at`` is the time of the newest sound record of it. ``shape`` and ``expiry_seconds`` are
    those of the newest record that knows them; ``shape`` None: none does. ``corrupt`` are the times
    of records that hold something else than was captured; nothing is taken from them.

    ``sources`` has every entity of the usages, with the newest snapshot that holds it at that
    height. Whether it ``is_truncated`` or ``is_partial``, and what it has ``omitted``, is told of
    the newest sound record; where there is none, nothing is. Of very many omitted counters the
    first are named, and ``omitted_count`` tells how many there are. ``resets`` are those that keep
    usages of older records out, in the order of their recording.
    """

    of: BudgetWindow
    usages: Usages
    newest_at: datetime
    shape: ValueShape | None
    expiry_seconds: int | None
    corrupt: tuple[datetime, ...] = ()
    sources: Mapping[Entity, datetime] = field(default_factory=dict)
    is_truncated: bool = False
    is_partial: bool = False
    omitted: tuple[OmittedCounter, ...] = ()
    omitted_count: int = 0
    resets: tuple[Reset, ...] = ()


@dataclass(frozen=True, slots=True)
class TenantPoint:
    """The recovery point of a tenant for a restore; windows by budget and token.

    Beside the current windows it has those that were current at the tenant's newest snapshot and
    have closed since, so that a restore can say that it leaves them.

    Where it is of one named snapshot, ``newest_at`` is the time of that one, and the windows are
    all that it has. ``unreadable`` are the keys that the newest, or the named, snapshot could not
    read: of very many the first, and ``unreadable_count`` tells how many.
    """

    tenant: str
    newest_at: datetime
    windows: tuple[WindowPoint, ...]
    unreadable: tuple[UnreadableKey, ...] = ()
    unreadable_count: int = 0


class RestorePoints(Protocol):
    """The recovery points of all tenants, verified as they are read.

    What deliberate resets make ineligible is left out of them.
    """

    def tenants(self) -> frozenset[str]:
        """Return the tenants that have a retained record of any budget."""
        ...

    def point_of(self, tenant: str, now: datetime) -> TenantPoint | None:
        """Read a tenant's recovery point; None where nothing of the tenant is retained."""
        ...

    def snapshot_of(self, tenant: str, captured_at: datetime) -> TenantPoint | None:
        """Read the records of one snapshot of a tenant, and no others; None: there is none.

        How keys are made anew is of the newest record that tells it, as in a recovery point.

        Raises:
            DatabaseError: it has a record of what is no window.
        """
        ...

    def despite_resets(self) -> "RestorePoints":
        """Return the same points as if no reset had been recorded."""
        ...
