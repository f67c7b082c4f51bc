"""Reads a tenant's counters from leaderboards, which list the largest of each budget and window.

A full leaderboard may omit entities, and the entities on an unreadable one are unknown. A reading
reports both, so that an unlisted entity is not reported as missing.
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

# How much of a name a reason quotes, so that the error after it stays visible.
_SHOWN_NAME = 80


class _UnreadableBoardError(ValueError):
    """A leaderboard is unreadable as a whole; the message is short printable ASCII."""


@dataclass(slots=True)
class Board:
    """The readable content of a leaderboard.

    ``usages`` follow the order of the entries; an entity with several entries has its highest one.
    ``length`` counts all entries, readable or not.
    """

    tenant: str
    of: BudgetWindow
    key: str
    length: int = 0
    usages: dict[Entity, Decimal] = field(default_factory=dict)
    omitted: list[OmittedCounter] = field(default_factory=list)

    @property
    def counters(self) -> list[CounterReading]:
        """The listed usages that are readable."""
        return [
            CounterReading(self.of, entity, usage, shape=None, expiry_seconds=None)
            for entity, usage in self.usages.items()
        ]

    @property
    def unlisted(self) -> UnlistedEntities | None:
        """What is known about entities without a usage here; None: there are no such entities."""
        is_truncated = self.length >= BOARD_SIZE
        if not all(omission.is_entity_known for omission in self.omitted):
            return UnlistedEntities(self.of, None, is_truncated)
        if is_truncated:
            # Valid even if some usages are unreadable: an unlisted entity has at most the lowest
            # listed usage, which is not above the lowest readable one.
            lowest = min(self.usages.values(), default=None)
            return UnlistedEntities(self.of, lowest, is_truncated)
        return None


def read_boards(tenant: str, found: KeysRead) -> TenantReading:
    """Decode all leaderboards under a tenant's prefix; the reading names what is unreadable."""
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
    """Decode one leaderboard; its ``omitted`` name what is unreadable."""
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
        require_counter_key(CounterKey(board.tenant, board.of, entity), board_key=board.key)
    except UnusableNameError as error:
        # An invalid name may be a damaged valid one, so the entity is unknown.
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
    """Return a leaderboard's entries, not yet decoded.

    Raises:
        _UnreadableBoardError: there is no list of entries.
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
    """Return an entry's entity and fields.

    Raises:
        UnusableNameError: the entry has no valid entity.
    """
    if not isinstance(entry, dict):
        raise UnusableNameError("not an object")
    if "entity" not in entry:
        raise UnusableNameError("no field entity")
    entity = entry["entity"]
    if entity is None:
        return None, entry
    if not is_json_text(entity):
        raise UnusableNameError("entity is neither a string nor null")
    return require_encodable(entity), entry


def _shown(entity: Entity) -> str:
    if entity is None:
        return "the aggregate"
    return ascii(entity if len(entity) <= _SHOWN_NAME else f"{entity[:_SHOWN_NAME]}...")
