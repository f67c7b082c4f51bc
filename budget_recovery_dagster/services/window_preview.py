"""What a restore would do to one budget and window, told before it is done."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal

from budget_recovery_dagster.domain.budgets import BudgetDefinition, Enforcement
from budget_recovery_dagster.domain.counters import BudgetWindow, Entity, OmittedCounter
from budget_recovery_dagster.domain.plan import Action, PlannedEntry
from budget_recovery_dagster.domain.resets import EVERYONE, Reset
from budget_recovery_dagster.domain.usage_sums import exact_difference, exact_sum
from budget_recovery_dagster.restore_ports import WindowPoint
from budget_recovery_dagster.services.count_words import counted
from budget_recovery_dagster.services.name_words import listed, shown_entity


@dataclass(frozen=True, slots=True)
class EntryPreview:
    """What a restore would do to one counter, and where its figure comes from.

    ``source`` is the newest snapshot that holds ``recorded``. ``blocks`` tells whether the gateway
    would refuse the entity afterwards; None where no limit is known.
    """

    tenant: str
    of: BudgetWindow
    entity: Entity
    live: Decimal | None
    recorded: Decimal
    result: Decimal | None
    action: Action
    source: datetime
    blocks: bool | None

    @property
    def rise(self) -> Decimal:
        """By how much the usage rises."""
        if self.action is not Action.RAISE:
            return Decimal(0)
        return exact_difference(self.recorded, self.live or Decimal(0))


@dataclass(frozen=True, slots=True)
class WindowPreview:
    """The sums over the counters of one budget and window.

    ``live``, ``recorded`` and ``result`` are sums of those counters that are in the snapshots;
    ``raised``, ``kept`` and ``skipped`` count them, ``made_anew`` those of the raised that the
    store does not have, and ``unreadable`` those whose live usage nobody knows, so that ``live``
    and ``result`` are no less than told. ``newest_source`` and ``oldest_source`` are of the
    snapshots that the figures come from, None where nothing is known. ``limit`` is None where none
    is known; then nothing is known of ``blocked_before`` and ``blocked_after`` either, the numbers
    of entities at their limit.
    """

    tenant: str
    of: BudgetWindow
    counters: int
    raised: int
    kept: int
    skipped: int
    made_anew: int
    unreadable: int
    is_closed: bool
    live: Decimal
    recorded: Decimal
    result: Decimal
    newest_source: datetime | None
    oldest_source: datetime | None
    limit: Decimal | None
    is_enforced: bool
    blocked_before: int
    blocked_after: int
    is_truncated: bool
    is_partial: bool
    omitted: tuple[OmittedCounter, ...]
    omitted_count: int
    corrupt: tuple[datetime, ...]
    notes: tuple[str, ...]

    @property
    def rise(self) -> Decimal:
        """By how much the sum rises."""
        return exact_difference(self.result, self.live)

    @property
    def is_unknown(self) -> bool:
        """Whether nobody knows what was used in it: every record is damaged."""
        return bool(self.corrupt) and not self.counters


def preview_window(
    tenant: str,
    point: WindowPoint,
    entries: Sequence[PlannedEntry],
    definition: BudgetDefinition | None,
    unreadable: Mapping[tuple[BudgetWindow, Entity], str],
) -> tuple[WindowPreview, list[EntryPreview]]:
    """Tell what is planned for a window; ``unreadable`` says why live counters are so."""
    told = [_entry(tenant, point, entry, definition) for entry in entries]
    actions = Counter(entry.action for entry in told)
    to_raise, kept = actions[Action.RAISE], actions[Action.KEEP]
    sources = [entry.source for entry in told]
    open_ones = [entry for entry in told if entry.action is not Action.SKIP_CLOSED]
    sums = WindowPreview(
        tenant=tenant,
        of=point.of,
        counters=len(told),
        raised=to_raise,
        kept=kept,
        skipped=len(told) - to_raise - kept,
        made_anew=sum(_is_made_anew(entry) for entry in told),
        unreadable=actions[Action.SKIP_UNREADABLE],
        is_closed=bool(told) and not open_ones,
        live=exact_sum(entry.live for entry in told if entry.live is not None),
        recorded=exact_sum(entry.recorded for entry in told),
        result=exact_sum(entry.result for entry in told if entry.result is not None),
        newest_source=max(sources, default=None),
        oldest_source=min(sources, default=None),
        limit=definition.limit if definition else None,
        is_enforced=definition is not None and definition.enforcement is Enforcement.ENFORCE,
        blocked_before=sum(_is_blocked(definition, entry.live) for entry in open_ones),
        blocked_after=sum(bool(entry.blocks) for entry in told),
        is_truncated=point.is_truncated,
        is_partial=point.is_partial,
        omitted=point.omitted,
        omitted_count=point.omitted_count,
        corrupt=point.corrupt,
        notes=tuple(_notes(point, told, unreadable)),
    )
    return sums, told


def _entry(
    tenant: str, point: WindowPoint, entry: PlannedEntry, definition: BudgetDefinition | None
) -> EntryPreview:
    return EntryPreview(
        tenant=tenant,
        of=entry.of,
        entity=entry.entity,
        live=entry.live,
        recorded=entry.recorded,
        result=entry.result,
        action=entry.action,
        source=point.sources.get(entry.entity, point.newest_at),
        blocks=None
        if definition is None or entry.action in (Action.SKIP_CLOSED, Action.SKIP_UNREADABLE)
        else _is_blocked(definition, entry.result),
    )


def _is_blocked(definition: BudgetDefinition | None, usage: Decimal | None) -> bool:
    if definition is None or usage is None or definition.enforcement is not Enforcement.ENFORCE:
        return False
    return definition.is_exhausted_at(usage)


def _is_made_anew(entry: EntryPreview) -> bool:
    return entry.action is Action.RAISE and entry.live is None


def _notes(
    point: WindowPoint,
    told: Sequence[EntryPreview],
    unreadable: Mapping[tuple[BudgetWindow, Entity], str],
) -> Iterator[str]:
    if any(entry.action is Action.SKIP_CLOSED for entry in told):
        yield "left, its window has closed"
    if blind := [entry for entry in told if entry.action is Action.SKIP_UNREADABLE]:
        yield f"{counted(len(blind), 'live counter')} left as unreadable: " + listed(
            f"{shown_entity(each.entity)} ({unreadable.get((each.of, each.entity), 'no reason')})"
            for each in blind
        )
    if anew := sum(_is_made_anew(entry) for entry in told):
        gone = counted(anew, "counter")
        yield f"{gone} gone from the store: the usage comes back, no other field"
    for reset in point.resets:
        yield _told_of(reset)
    if point.is_truncated:
        yield "the newest snapshot lists only the largest spenders of it"
    if point.is_partial:
        yield "the newest snapshot of it is partial: not all keys arrived"
    if point.omitted_count:
        yield f"{counted(point.omitted_count, 'counter')} unreadable in the newest snapshot: " + (
            listed(_omission(each) for each in point.omitted)
        )
    if point.corrupt:
        times = listed(f"{at:%Y-%m-%d %H:%M:%S} UTC" for at in point.corrupt)
        yield (
            f"nothing is taken from {counted(len(point.corrupt), 'record')} that is not as it was "
            f"captured: {times}"
        )


def _told_of(reset: Reset) -> str:
    whose = "everyone" if reset.entity is EVERYONE else shown_entity(reset.entity)
    return (
        f"nothing of {whose} from before the reset at {reset.at:%Y-%m-%d %H:%M:%S} UTC, recorded "
        f"by {reset.by}: {reset.reason}"
    )


def _omission(omitted: OmittedCounter) -> str:
    name = shown_entity(omitted.entity) if omitted.is_entity_known else omitted.key
    return f"{name} ({omitted.reason})"
