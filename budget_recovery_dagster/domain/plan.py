"""Restore plans: the choice, which counters rise, the room they need, previews and audits."""

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from enum import StrEnum

from budget_recovery_dagster.domain.counters import (
    BudgetWindow,
    Entity,
    KnownExpiry,
    TenantUsages,
    Usages,
    ValueShape,
    budget_usage,
    exact_difference,
    order_of,
)
from budget_recovery_dagster.domain.store import StoreIdentity
from budget_recovery_dagster.domain.windows import Window, require_aware
from budget_recovery_dagster.errors import ChoiceError


class Action(StrEnum):
    """What a restore does with one entry."""

    RAISE = "raise"
    KEEP = "keep"
    SKIP_CLOSED = "skip_closed"
    SKIP_UNREADABLE = "skip_unreadable"


@dataclass(frozen=True, slots=True)
class PlannedEntry:
    """One entity in one window of one budget.

    ``live`` is None if the store has no such counter, or if it is unreadable. In a closed window it
    is not used.
    """

    of: BudgetWindow
    entity: Entity
    recorded: Decimal
    live: Decimal | None
    action: Action

    @property
    def rise(self) -> Decimal:
        """By how much a restore raises the counter."""
        return rise_of(self.action, self.recorded, self.live)

    @property
    def result(self) -> Decimal | None:
        """The usage of the counter after the restore, without other writes meanwhile."""
        return self.recorded if self.action is Action.RAISE else self.live


def rise_of(action: Action, recorded: Decimal, live: Decimal | None) -> Decimal:
    """Return by how much a restore raises a counter."""
    if action is not Action.RAISE:
        return Decimal(0)
    return exact_difference(recorded, live or Decimal(0))


@dataclass(frozen=True, slots=True)
class RecoveryPlan:
    """What a restore does to one tenant; entries by budget, window and entity."""

    tenant: str
    entries: tuple[PlannedEntry, ...]

    def that(self, action: Action) -> Iterator[PlannedEntry]:
        """Return the entries with this action."""
        return (entry for entry in self.entries if entry.action is action)

    def by_window(self) -> defaultdict[BudgetWindow, list[PlannedEntry]]:
        """Group the entries by budget and window; other windows are empty."""
        planned: defaultdict[BudgetWindow, list[PlannedEntry]] = defaultdict(list)
        for entry in self.entries:
            planned[entry.of].append(entry)
        return planned


@dataclass(frozen=True, slots=True)
class PlannedAmounts:
    """The usage of one budget and window, as by ``budget_usage``: now, recorded, and restored.

    A counter that the store lacks counts as 0, an unreadable one is left out. ``rise`` is by how
    much the raised counters rise. That is all by which the usage of the budget rises, or, if the
    aggregate is not among them, by how much its entities rise. ``is_least``: the usages are lower
    bounds, because of unreadable counters.
    """

    live: Decimal
    recorded: Decimal
    result: Decimal
    rise: Decimal
    is_least: bool


def planned_amounts(planned: Iterable[PlannedEntry]) -> PlannedAmounts:
    """Return the usages of the entries of one budget and window."""
    entries = tuple(planned)
    readable = [entry for entry in entries if entry.action is not Action.SKIP_UNREADABLE]
    has_aggregate = any(entry.entity is None for entry in readable)
    return PlannedAmounts(
        live=budget_usage({entry.entity: entry.live or Decimal(0) for entry in readable}),
        recorded=budget_usage({entry.entity: entry.recorded for entry in entries}),
        result=budget_usage({entry.entity: entry.result or Decimal(0) for entry in readable}),
        rise=budget_usage(
            {entry.entity: entry.rise for entry in readable if entry.action is Action.RAISE}
        ),
        is_least=len(readable) < len(entries) and not has_aggregate,
    )


def plan_restore(
    tenant: str,
    recorded: TenantUsages,
    live: TenantUsages,
    unreadable: Collection[tuple[BudgetWindow, Entity]],
    now: datetime,
) -> RecoveryPlan:
    """Decide what a restore at ``now`` (aware) does with each recorded entry.

    ``live`` are the readable counters of the store, ``unreadable`` its unreadable ones.
    """
    require_aware(now)
    unjudged = frozenset(unreadable)
    entries: list[PlannedEntry] = []
    for of in sorted(recorded, key=order_of):
        for entity in sorted(recorded[of], key=lambda entity: entity or ""):
            usage, known = recorded[of][entity], live.get(of, {}).get(entity)
            if not of.window.is_current(now):
                action = Action.SKIP_CLOSED
            elif (of, entity) in unjudged:
                action = Action.SKIP_UNREADABLE
            else:
                action = Action.RAISE if known is None or known < usage else Action.KEEP
            entries.append(PlannedEntry(of, entity, usage, known, action))
    return RecoveryPlan(tenant, tuple(entries))


@dataclass(frozen=True, slots=True)
class RaiseOrder:
    """A counter to raise to ``usage``.

    A missing key is created in this ``shape`` and with this ``expiry``. For a lifetime it counts
    from this write.
    """

    of: BudgetWindow
    entity: Entity
    usage: Decimal
    shape: ValueShape
    expiry: KnownExpiry


class Written(StrEnum):
    """The result of an order."""

    RAISED = "raised"
    KEPT = "kept"
    CLOSED = "window_closed"
    UNREADABLE = "unreadable"
    EXPIRED = "expired"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class RaiseResult:
    """The result of one order.

    ``before`` is the live usage at the write, None if it was missing or unreadable; ``reason`` is
    why it is unreadable, or why the store refuses the value.

    ``revision`` is the sequence of a raised or kept key. ``expires_at`` is when a raised key
    expires by its TTL, ``ages_out_at`` when the bucket's maximum age drops it; None: never.
    """

    order: RaiseOrder
    written: Written
    before: Decimal | None
    reason: str = ""
    revision: int = 0
    expires_at: datetime | None = None
    ages_out_at: datetime | None = None


IsOpen = Callable[[Window], bool]
"""Returns whether usage still counts into a window, at the time of the call.

Called before each write; an exception from it stops the writing. It must not block.
"""


@dataclass(frozen=True, slots=True)
class BoardOrder:
    """A leaderboard to update with these usages.

    A missing leaderboard is created only if ``may_create``; it then expires like a counter (see
    RaiseOrder).
    """

    of: BudgetWindow
    usages: Usages
    expiry: KnownExpiry
    may_create: bool


@dataclass(frozen=True, slots=True)
class BoardResult:
    """Whether a leaderboard was written; ``reason`` is why a wrong one was not.

    ``is_missing``: there is none, and none was to be created.
    """

    of: BudgetWindow
    is_written: bool
    reason: str = ""
    is_missing: bool = False


@dataclass(frozen=True, slots=True)
class Room:
    """Space in the store: messages, and bytes as the store counts them."""

    messages: int = 0
    bytes: int = 0

    def __add__(self, other: "Room") -> "Room":
        return Room(self.messages + other.messages, self.bytes + other.bytes)


MARKER_ROOM = Room(messages=1, bytes=512)
"""More than our marker takes."""
# The gateway writes during a restore, too.
_MARGIN_TENTHS = 15


@dataclass(frozen=True, slots=True)
class Shortage:
    """A limit that leaves too little room: the setting of NATS, its value, and what is used.

    ``needed`` is without the margin of one half.
    """

    setting: str
    limit: int
    used: int
    needed: int

    @property
    def needed_with_margin(self) -> int:
        """The room that must be free: 1.5 times what is needed."""
        return -(-self.needed * _MARGIN_TENTHS // 10)

    @property
    def enough(self) -> int:
        """The lowest limit that leaves enough room."""
        return self.used + self.needed_with_margin

    def __str__(self) -> str:
        free = max(self.limit - self.used, 0)
        return (
            f"{self.setting}={self.limit} leaves {free:,}, and {self.needed_with_margin:,} are "
            f"needed (1.5 x {self.needed:,})"
        )


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """The limits of the store, and what it holds now.

    ``evicts``: a full store deletes its oldest keys, of any writer, instead of refusing a write.
    A limit of None does not exist. ``max_age`` is the time after its last write at which
    the store drops a key, unless its TTL is `never`. ``supports_ttl``: keys may have their own TTL.
    """

    used: Room
    max_messages: int | None = None
    max_bytes: int | None = None
    evicts: bool = False
    max_age: timedelta | None = None
    supports_ttl: bool = True

    @property
    def may_evict(self) -> bool:
        """Whether a write can delete other keys."""
        return self.evicts and (self.max_messages is not None or self.max_bytes is not None)

    def shortages(self, needed: Room) -> tuple[Shortage, ...]:
        """Return the limits at which a restore that needs this room may delete other keys."""
        if not self.evicts:
            return ()
        limits = (
            ("max_bytes", self.max_bytes, self.used.bytes, needed.bytes),
            ("max_msgs", self.max_messages, self.used.messages, needed.messages),
        )
        found = (
            Shortage(setting, limit, used, need)
            for setting, limit, used, need in limits
            if limit is not None and need
        )
        return tuple(each for each in found if each.enough > each.limit)

    def drops_early(self, window: Window, now: datetime) -> bool:
        """Whether the maximum age drops a key that is written now before its window ends."""
        if self.max_age is None:
            return False
        return window.end is None or window.end - now > self.max_age

    def has_room_for(self, written: Room) -> bool:
        """Whether one write deletes no other key."""
        return not self.evicts or (
            _fits(self.max_bytes, self.used.bytes, written.bytes)
            and _fits(self.max_messages, self.used.messages, written.messages)
        )


def _fits(limit: int | None, used: int, added: int) -> bool:
    return limit is None or added <= 0 or used + added <= limit


class Change(StrEnum):
    """How an entry differs from its preview."""

    RECORDED = "recorded_changed"
    CLOSED = "window_closed"
    UNREADABLE = "became_unreadable"
    READABLE = "became_readable"
    NEW = "not_previewed"
    GONE = "no_longer_recorded"
    LIVE = "live_changed"


@dataclass(frozen=True, slots=True)
class Difference:
    """One entry that differs from its preview; ``previewed`` and ``found`` are the usages.

    They are those of the live counter (None: missing) or of the snapshots. If no usage changed,
    they are the planned results then and now.
    """

    tenant: str
    of: BudgetWindow
    entity: Entity
    change: Change
    previewed: Decimal | None
    found: Decimal | None


def differences(
    tenant: str, previewed: Iterable[PlannedEntry], planned: Iterable[PlannedEntry]
) -> tuple[Difference, ...]:
    """Compare the plan of a tenant with its preview, entry by entry."""
    before = {(entry.of, entry.entity): entry for entry in previewed}
    found: list[Difference] = []
    for entry in planned:
        earlier = before.pop((entry.of, entry.entity), None)
        if earlier is None:
            found.append(Difference(tenant, entry.of, entry.entity, Change.NEW, None, entry.result))
            continue
        found.extend(
            Difference(tenant, entry.of, entry.entity, change, was, now)
            for change, was, now in _changes(earlier, entry)
        )
    found.extend(
        Difference(tenant, entry.of, entry.entity, Change.GONE, entry.result, None)
        for entry in before.values()
    )
    return tuple(found)


def _changes(
    before: PlannedEntry, now: PlannedEntry
) -> Iterator[tuple[Change, Decimal | None, Decimal | None]]:
    if before.recorded != now.recorded:
        yield Change.RECORDED, before.recorded, now.recorded
    was_closed, is_closed = (each.action is Action.SKIP_CLOSED for each in (before, now))
    if is_closed:
        if not was_closed:
            yield Change.CLOSED, before.result, now.live
        # The live counter of a closed window has no meaning.
        return
    was_unread, is_unread = (each.action is Action.SKIP_UNREADABLE for each in (before, now))
    if was_unread != is_unread:
        change = Change.UNREADABLE if is_unread else Change.READABLE
        yield change, before.result, now.result
    elif before.live != now.live:
        yield Change.LIVE, before.live, now.live


EVERY_TENANT = "*"
"""The text that chooses all tenants."""
OF_THAT_NAME = "A tenant called * is =2A."
"""How to choose that tenant; see ``named_tenant``."""
# How the gateway's keys write these characters. A name that begins with one of them, or with this
# form of it, is chosen unambiguously by its form.
_ESCAPES = {"=2A": "*", "=3D": "="}
LATEST = "latest"
"""The text that chooses the recovery point: the highest usage in all retained snapshots."""
_NAMED = 12
# A timestamp or a prefix of one: a day, an hour, a minute, a second. The hour may have the form of
# a partition key. ASCII digits only.
_TIMESTAMP = re.compile(
    r"([0-9]{4}-[0-9]{2}-[0-9]{2})"
    r"(?:[T -]([0-9]{2})(?::([0-9]{2})(?::([0-9]{2})(?:\.([0-9]{1,6}))?)?)?)?"
    r" ?(?:Z|UTC)?"
)


@dataclass(frozen=True, slots=True)
class RestoreChoice:
    """Which counters to restore, and from which snapshot.

    ``tenant`` None: every tenant. ``budget`` None: every budget; a budget needs its tenant.
    ``snapshot`` None: the recovery point, else exactly the snapshot with that timestamp.
    ``despite_resets``: include usage that was reset on purpose.
    """

    tenant: str | None = None
    budget: str | None = None
    snapshot: datetime | None = None
    despite_resets: bool = False

    def __post_init__(self) -> None:
        if self.budget is not None and self.tenant is None:
            raise ValueError("a budget needs its tenant")

    def __str__(self) -> str:
        whose = "every tenant" if self.tenant is None else f"tenant {self.tenant!r}"
        what = whose if self.budget is None else f"budget {self.budget!r} of {whose}"
        source = "highest usage in all snapshots"
        if self.snapshot is not None:
            source = f"from the snapshot of {timestamp(self.snapshot)}"
        despite = ", including reset usage" if self.despite_resets else ""
        return f"{what}, {source}{despite}"


def timestamp(at: datetime) -> str:
    """Write the timestamp of a snapshot in the form that chooses it."""
    return f"{at.astimezone(UTC):%Y-%m-%dT%H:%M:%S.%f}Z"


def named_tenant(text: str) -> str | None:
    """Return the tenant that a text names, whether or not it exists; None for all.

    ``*`` is for all tenants. A tenant called ``*`` is named ``=2A``, as in the gateway's keys, and
    one called ``=2A`` is named ``=3D2A``: only at the beginning, and only these two.
    """
    if text == EVERY_TENANT:
        return None
    for escape, character in _ESCAPES.items():
        if text.startswith(escape):
            return f"{character}{text.removeprefix(escape)}"
    return text


def tenant_text(tenant: str) -> str:
    """Return the text that names a tenant, the inverse of ``named_tenant``."""
    for escape, character in _ESCAPES.items():
        if named_tenant(tenant) != tenant and tenant.startswith(character):
            return f"{escape}{tenant.removeprefix(character)}"
    return tenant


def choose_tenant(text: str, known: Iterable[str]) -> str | None:
    """Return the chosen tenant, named as by ``named_tenant``; None for all.

    Raises:
        ChoiceError: there is no such tenant in the snapshots.
    """
    tenant, names = named_tenant(text), sorted(known)
    if tenant is None or tenant in names:
        return tenant
    raise ChoiceError(
        f"No snapshot of tenant {tenant!r} is retained.",
        _one_of("tenant", [EVERY_TENANT, *map(tenant_text, names)]),
    )


def choose_budget(text: str, tenant: str | None, known: Sequence[str]) -> str | None:
    """Return the chosen budget; None for all, which an empty text chooses.

    Raises:
        ChoiceError: there is no such budget in the tenant's snapshots, or no tenant is given.
    """
    if not text:
        return None
    if tenant is None:
        raise ChoiceError(
            f"Budget {text!r} needs a tenant, but the tenant is {EVERY_TENANT}.",
            "give the tenant of the budget, or leave the budget out.",
        )
    if text in known:
        return text
    raise ChoiceError(
        f"No snapshot of budget {text!r} of tenant {tenant!r} is retained.",
        _one_of("budget", sorted(known)),
    )


def is_latest(text: str) -> bool:
    """Whether the text chooses the recovery point instead of one snapshot."""
    return text.strip().lower() == LATEST


def choose_snapshot(text: str, retained: Sequence[datetime]) -> datetime | None:
    """Return the timestamp of the chosen snapshot; None for the recovery point.

    ``text`` is ``latest``, or a timestamp in UTC, or a unique prefix of one.

    Raises:
        ChoiceError: it is not a timestamp, or no snapshot or several snapshots match.
    """
    if is_latest(text):
        return None
    written = text.strip()
    newest_first = sorted(retained, reverse=True)
    match = _TIMESTAMP.fullmatch(written)
    if match is None:
        raise ChoiceError(
            f"The snapshot {text!r} is neither {LATEST} nor a timestamp in UTC.",
            _one_of("snapshot", [LATEST, *map(timestamp, newest_first)]),
        )
    found = [at for at in newest_first if timestamp(at).startswith(_beginning(match))]
    if not found:
        raise ChoiceError(
            f"No retained snapshot matches {text!r}.",
            _one_of("snapshot", [LATEST, *map(timestamp, newest_first)]),
        )
    if len(found) > 1:
        raise ChoiceError(
            f"The snapshot {text!r} is ambiguous: {len(found)} snapshots match.",
            _one_of("snapshot", [*map(timestamp, found)]),
        )
    return found[0]


def _beginning(match: re.Match[str]) -> str:
    """Write the given part of a timestamp in the form of ``timestamp``."""
    day, hour, minute, second, fraction = match.groups()
    written = f"{day}T"
    if hour is not None:
        written = f"{written}{hour}:"
    if minute is not None:
        written = f"{written}{minute}:"
    if second is not None:
        written = f"{written}{second}."
    return written if fraction is None else f"{written}{fraction}"


def _one_of(what: str, choices: Sequence[str]) -> str:
    if not choices:
        return f"there is no {what} to choose: nothing is retained."
    more = f", and {len(choices) - _NAMED} more" if len(choices) > _NAMED else ""
    return f"choose the {what} from: {', '.join(choices[:_NAMED])}{more}."


PREVIEWS_KEPT_FOR = timedelta(days=1)
"""How long a preview is stored, for comparison with a restore."""

OUTDATED_KEPT_FOR = timedelta(hours=1)
"""How long a preview with a newer one for the same options is stored: as long as a restore."""


@dataclass(frozen=True, slots=True)
class KeptPreview:
    """A stored preview, with its time, author, choice, and the identity of the store."""

    preview_id: str
    at: datetime
    by: str
    choice: RestoreChoice
    identity: StoreIdentity


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """What one restore plans for, or did to, one budget and window of a tenant.

    ``point_at`` is the newest source snapshot. ``entries`` counts the counters, ``planned`` those
    to raise, and ``raised`` those that were raised. ``before`` and ``after`` are its usage, as by
    ``budget_usage``, that was read before and after; ``after`` is the planned one until the restore
    ends.
    ``notes`` name the counters that were skipped, and why. ``wrote_board``: its leaderboard was
    updated or created.
    """

    tenant: str
    of: BudgetWindow
    point_at: datetime
    entries: int
    planned: int
    raised: int
    kept: int
    skipped: int
    before: Decimal
    after: Decimal
    notes: tuple[str, ...]
    wrote_board: bool = False


@dataclass(frozen=True, slots=True)
class AuditTrail:
    """The entries of one restore, with who restores, why, in which run, and when.

    Each tenant, budget and window has at most one entry.
    """

    at: datetime
    run_id: str
    who: str
    why: str
    incident_id: str | None
    entries: tuple[AuditEntry, ...]


@dataclass(frozen=True, slots=True)
class ManualRestore:
    """A manual restore, by a command or a run, as its audits show it.

    ``at`` is when it began. ``unfinished`` are the tenants whose end is not recorded, by name: the
    restore is running, or its worker died.
    """

    run_id: str
    at: datetime
    who: str
    why: str
    incident_id: str | None
    unfinished: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class MergedAudits:
    """What all restores of an incident, or one restore, did, merged by budget and window.

    ``windows`` counts them, and ``largest`` has those that rose most.
    """

    windows: int
    largest: tuple[AuditEntry, ...]
