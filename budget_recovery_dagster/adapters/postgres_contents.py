"""Reading stored usages back: the contents that records share, each transferred once."""

from collections.abc import Iterable

from budget_recovery_dagster.adapters.postgres_connection import Connection
from budget_recovery_dagster.domain.recovery_point import Usages

_READ = """
select content_id, entities, usages from budget_recovery.budget_content where content_id = any(%s)
"""


def read_contents(connection: Connection, content_ids: Iterable[int]) -> dict[int, Usages]:
    """Return contents by id; the aggregate, stored as an empty name, is None again."""
    rows = connection.execute(_READ, (list(set(content_ids)),))
    return {
        content_id: {entity or None: usage for entity, usage in zip(entities, usages, strict=True)}
        for content_id, entities, usages in rows
    }
