"""Reading a tenant's counters from leaderboards, which list the largest of a budget and window.

A leaderboard that is full may leave entities out, and of one that cannot be read nobody knows whom
it lists. Both are told with the reading, so that nothing is called missing which is only unlisted.
"""

from dataclasses import dataclass, field
from decimal import Decimal

from budget_recovery_dagster.adapters.nats.codec import (
    CounterKey,
    KeysRead,
    StoredValue,
    decode_board_key,
    decode_json,
    decode_keys,
    is_json_text,
    require_counter_key,
    require_encodable,
    shortened,
    usage_of,
)
from budget_recovery_dagster.domain.counters import (
    BOARD_SIZE,
    BudgetWindow,
    CounterReading,
    Entity,
    OmittedCounter,
    UnlistedEntities,
    UnreadableUsageError,
    UnusableNameError,
)
from budget_recovery_dagster.domain.snapshots import CaptureSource, TenantReading

FULL_BOARD = BOARD_SIZE
"""With so many entries there may be others who are not listed."""
# Of a name in a reason; what is wrong comes after it.
_SHOWN_NAME = 80


class _UnreadableBoardError(ValueError):
    """A leaderboard of which nothing can be read; the message is short printable ASCII."""


@dataclass(slots=True)
class Board:
    """What a leaderboard says, as far as it can be read.

    ``usages`` are in the order of its entries, the higher one of an entity that has several;
    ``length`` is how many entries there are, sound or not.
    """

    tenant: str
    of: BudgetWindow
    key: str
    length: int = 0
    usages: dict[Entity, Decimal] = field(default_factory=dict)
    omitted: list[OmittedCounter] = field(default_factory=list)

    @property
    def counters(self) -> list[CounterReading]:
        """What is listed and readable."""
        return [
            CounterReading(self.of, entity, usage, shape=None, expiry_seconds=None)
            for entity, usage in self.usages.items()
        ]

    @property
    def unlisted(self) -> UnlistedEntities | None:
        """What is known of entities that are not among the usages; None: there are none."""
        is_truncated = self.length >= FULL_BOARD
        if not all(omission.is_entity_known for omission in self.omitted):
            return UnlistedEntities(self.of, None, is_truncated)
        if is_truncated:
            # Also where some usages cannot be read: nobody who is unlisted has more than the
            # lowest of all, which is no more than the lowest of those that can.
            lowest = min(self.usages.values(), default=None)
            return UnlistedEntities(self.of, lowest, is_truncated)
        return None


def read_boards(tenant: str, found: KeysRead) -> TenantReading:
    """Decode all that was found under a tenant's prefix; what cannot be read is named."""
    keys, unreadable = decode_keys(found.values, decode_board_key)
    boards = [read_board(tenant, board.of, key, found.values[key]) for key, board in keys]
    return TenantReading(
        tenant=tenant,
        source=CaptureSource.LEADERBOARDS,
        counters=tuple(counter for board in boards for counter in board.counters),
        omitted=tuple(omission for board in boards for omission in board.omitted),
        unreadable=unreadable,
        is_partial=found.is_partial,
        unlisted=tuple(board.unlisted for board in boards if board.unlisted is not None),
    )


def read_board(tenant: str, of: BudgetWindow, key: str, value: StoredValue) -> Board:
    """Read one leaderboard; what cannot be read of it is named."""
    board = Board(tenant, of, key)
    try:
        entries = _entries(value)
    except _UnreadableBoardError as error:
        board.omitted.append(
            OmittedCounter(board.of, None, board.key, str(error), is_entity_known=False)
        )
        return board
    board.length = len(entries)
    for position, entry in enumerate(entries, start=1):
        _read_entry(board, f"entry {position}", entry)
    return board


def _read_entry(board: Board, place: str, entry: object) -> None:
    try:
        entity, fields = _entity(entry)
        require_counter_key(CounterKey(board.tenant, board.of, entity), beside=board.key)
    except UnusableNameError as error:
        # Even a name that no counter can have may be what is left of one that can.
        reason = f"{place}: {error}"
        board.omitted.append(
            OmittedCounter(board.of, None, board.key, reason, is_entity_known=False)
        )
        return
    try:
        usage, _ = usage_of(fields)
    except UnreadableUsageError as error:
        reason = shortened(f"{place}, {_shown(entity)}: {error}")
        board.omitted.append(OmittedCounter(board.of, entity, board.key, reason))
        return
    board.usages[entity] = max(usage, board.usages.get(entity, usage))


def _entries(value: StoredValue) -> list[object]:
    """Return a leaderboard's entries, whatever they are.

    Raises:
        _UnreadableBoardError: it has none that could be read.
    """
    if value.fault is not None:
        raise _UnreadableBoardError(value.fault)
    try:
        content = decode_json(value.data)
    except UnreadableUsageError as error:
        raise _UnreadableBoardError(str(error)) from error
    if not isinstance(content, dict):
        raise _UnreadableBoardError("the value is not an object")
    if "entries" not in content:
        raise _UnreadableBoardError("the value has no field entries")
    if not isinstance(content["entries"], list):
        raise _UnreadableBoardError("entries is not a list")
    return content["entries"]


def _entity(entry: object) -> tuple[Entity, dict[str, object]]:
    """Return whose entry it is, and its fields.

    Raises:
        UnusableNameError: that cannot be told.
    """
    if not isinstance(entry, dict):
        raise UnusableNameError("not an object")
    if "entity" not in entry:
        raise UnusableNameError("no field entity")
    entity = entry["entity"]
    if entity is None:
        return None, entry
    if not is_json_text(entity):
        raise UnusableNameError("entity is neither text nor null")
    return require_encodable(entity), entry


def _shown(entity: Entity) -> str:
    if entity is None:
        return "the aggregate"
    return ascii(entity if len(entity) <= _SHOWN_NAME else f"{entity[:_SHOWN_NAME]}...")
