"""Reading stored usages back: the contents that records share, each transferred once."""

from collections.abc import Iterator, Sequence

from budget_recovery_dagster.adapters.postgres_connection import Connection
from budget_recovery_dagster.domain.recovery_point import Usages
from budget_recovery_dagster.errors import DatabaseError

_READ = """
select c.content_id, c.entities, c.usages
from unnest(%s::bigint[]) with ordinality as wanted (content_id, position)
join budget_recovery.budget_content c using (content_id)
order by wanted.position
"""

# The server's limit of time is for one statement, and reading everything may well take longer.
_AT_ONCE = 500


def stream_contents(
    connection: Connection, content_ids: Sequence[int]
) -> Iterator[tuple[int, Usages]]:
    """Give contents with their ids, in the order of the ids; the aggregate's empty name is None.

    They come one by one, as many of them together may not fit into memory. Until the last one has
    come, the connection is of no other use.

    Raises:
        DatabaseError: some are not there.
    """
    for first in range(0, len(content_ids), _AT_ONCE):
        with connection.cursor() as cursor:
            wanted = list(content_ids[first : first + _AT_ONCE])
            found = 0
            for content_id, entities, usages in cursor.stream(_READ, (wanted,)):
                found += 1
                yield (
                    content_id,
                    {entity or None: usage for entity, usage in zip(entities, usages, strict=True)},
                )
        if found < len(wanted):
            raise DatabaseError(
                f"Of {len(wanted)} stored contents {len(wanted) - found} are missing, though "
                "records refer to them.",
                "restore the database from its own backup: rows of budget_content were removed.",
            )
