"""Stored contents: the usages that records share. Verifies, reads and adds them."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any

from budget_recovery_dagster.adapters.postgres.database import Connection
from budget_recovery_dagster.domain.counters import Usages, hash_usages

# A content that is missing is damage like any other.
_CONTENTS = """
select wanted.content_id, c.content_hash, c.entities, c.usages
from unnest(%s::bigint[]) with ordinality as wanted (content_id, position)
left join budget_recovery.budget_content c using (content_id)
order by wanted.position
"""
# The server's time limit is per statement, and reading everything may well take longer.
_AT_ONCE = 500


def as_captured(
    content_hash: bytes | None, entities: list[Any] | None, usages: list[Any] | None
) -> Usages | None:
    """Return the usages of a stored content; None if it is damaged.

    The aggregate's empty name becomes None. ``content_is_intact`` is the same rule in SQL.
    """
    # The verified content may have any form: lists of another length, shape or type are damage,
    # too.
    if content_hash is None or entities is None or usages is None:
        return None
    if not all(isinstance(entity, str) for entity in entities):
        return None
    if not all(isinstance(usage, Decimal) and usage.is_finite() for usage in usages):
        return None
    content = {entity or None: usage for entity, usage in zip(entities, usages, strict=False)}
    is_whole = len(content) == len(entities) == len(usages)
    return content if is_whole and hash_usages(content) == content_hash else None


def stream_verified(
    connection: Connection, content_ids: Sequence[int]
) -> Iterator[tuple[int, Usages | None]]:
    """Yield contents with their ids, in the order of the ids; None if one is damaged.

    They are read one by one, because all of them may not fit into memory. Nothing else can use the
    connection until the last one is read.
    """
    for first in range(0, len(content_ids), _AT_ONCE):
        with connection.cursor() as cursor:
            wanted = list(content_ids[first : first + _AT_ONCE])
            for content_id, *content in cursor.stream(_CONTENTS, (wanted,)):
                yield content_id, as_captured(*content)


# A damaged content is never shared: the next record with its usages gets a new one.
_INTACT = """
select content_hash, content_id
from budget_recovery.budget_content
where content_hash = any(%s)
  and budget_recovery.content_is_intact(content_hash, entities, usages)
"""
_ADD = """
copy budget_recovery.budget_content (content_hash, entities, usages) from stdin
"""


def share_contents(connection: Connection, contents: Mapping[bytes, Usages]) -> dict[bytes, int]:
    """Return the ids of intact contents by hash, and add those that are not stored intact.

    The caller holds the lock on the store's row: without it, two captures could add the same
    content, and a prune could remove one that was found here.
    """
    known = _find_intact(connection, contents.keys())
    new = [content_hash for content_hash in contents if content_hash not in known]
    if not new:
        return known
    with connection.cursor() as cursor, cursor.copy(_ADD) as copy:
        for content_hash in new:
            copy.write_row((content_hash, *_columns(contents[content_hash])))
    return known | _find_intact(connection, new)


def _find_intact(connection: Connection, hashes: Collection[bytes]) -> dict[bytes, int]:
    return dict(connection.execute(_INTACT, (list(hashes),)).fetchall())


def _columns(usages: Usages) -> tuple[list[str], list[Decimal]]:
    entries = sorted((entity or "", usage) for entity, usage in usages.items())
    return [entity for entity, _ in entries], [usage for _, usage in entries]
