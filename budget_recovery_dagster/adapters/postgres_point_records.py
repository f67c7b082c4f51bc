"""Reading the records of windows from PostgreSQL: each content is verified as it is read."""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from datetime import UTC, datetime
from typing import NamedTuple

from budget_recovery_dagster.adapters.postgres_connection import Connection
from budget_recovery_dagster.adapters.postgres_integrity import as_captured
from budget_recovery_dagster.adapters.restore_windows import RecordMarks, WindowInMaking
from budget_recovery_dagster.adapters.stored_forms import omissions_from
from budget_recovery_dagster.domain.recovery_point import Usages
from budget_recovery_dagster.restore_ports import WindowPoint

# Narrow rows only; the wide contents follow by id, each once.
_RECORDS = """
select r.budget_id, r.window_token, r.captured_at, r.content_id
from unnest(
    %(budgets)s::text[], %(windows)s::text[], %(since)s::timestamptz[], %(until)s::timestamptz[]
) as w (budget_id, window_token, since, until)
join budget_recovery.budget_record r
  on r.tenant = %(tenant)s
 and r.budget_id = w.budget_id
 and r.window_token = w.window_token
 and r.captured_at >= coalesce(w.since, '-infinity')
 and r.captured_at <= coalesce(w.until, 'infinity')
"""

# One that is not there at all is damage like any other.
_CONTENTS = """
select wanted.content_id, c.content_hash, c.entities, c.usages
from unnest(%s::bigint[]) as wanted (content_id)
left join budget_recovery.budget_content c using (content_id)
"""

# What is told of one record of each window.
_MARKS = """
select r.budget_id, r.window_token, r.is_truncated, c.is_partial, r.omitted, r.omitted_count
from unnest(%(budgets)s::text[], %(windows)s::text[], %(times)s::timestamptz[])
     as w (budget_id, window_token, captured_at)
join budget_recovery.budget_record r
  on r.tenant = %(tenant)s
 and r.budget_id = w.budget_id
 and r.window_token = w.window_token
 and r.captured_at = w.captured_at
join budget_recovery.capture c on c.tenant = r.tenant and c.captured_at = r.captured_at
"""

# The server's limit of time is for one statement, and reading everything may well take longer.
_AT_ONCE = 500

WindowKey = tuple[str, str]
"""Budget and token of a window."""

Windows = dict[WindowKey, WindowInMaking]
"""Windows in the making."""


class Span(NamedTuple):
    """Records captured from ``since`` to ``until``, both included; None: without an end."""

    since: datetime | None
    until: datetime | None


EVERYTHING = Span(None, None)

Spans = Mapping[WindowKey, Collection[Span]]
"""Which records of each window are to be read."""


def read_to_the_end(connection: Connection, tenant: str, windows: Windows, spans: Spans) -> None:
    """Read windows to their end; of one with a damaged record, all others too.

    A record that covers the earlier ones usually spares reading them. Where a record turns out to
    hold something else than was captured, its claim is worth nothing.
    """
    add_records(connection, tenant, windows, spans)
    doubtful = {key: each for key, each in windows.items() if each.needs_all_records}
    add_records(connection, tenant, doubtful, dict.fromkeys(doubtful, (EVERYTHING,)))


def add_records(connection: Connection, tenant: str, windows: Windows, spans: Spans) -> None:
    """Add the records of some spans of time to windows, of each its own."""
    wanted = [(key, span) for key in windows for span in spans[key]]
    if not wanted:
        return
    scope = {
        "tenant": tenant,
        "budgets": [budget for (budget, _), _ in wanted],
        "windows": [token for (_, token), _ in wanted],
        "since": [span.since for _, span in wanted],
        "until": [span.until for _, span in wanted],
    }
    holders: defaultdict[int, list[tuple[WindowInMaking, datetime]]] = defaultdict(list)
    # One object for each moment, however many counters come from it.
    moments: dict[datetime, datetime] = {}
    for budget, token, captured_at, content_id in connection.execute(_RECORDS, scope):
        moment = moments.setdefault(captured_at, captured_at.astimezone(UTC))
        holders[content_id].append((windows[budget, token], moment))
    # Contents are numbered as time goes on: of the newest, nearly everything stands.
    for content_id, usages in _stream_verified(connection, sorted(holders, reverse=True)):
        for window, captured_at in holders[content_id]:
            window.add(captured_at, usages)


def finish(connection: Connection, tenant: str, windows: Windows) -> tuple[WindowPoint, ...]:
    """Return windows whose records have been read, with the marks of the newest sound ones."""
    marked = {
        key: window.newest_sound
        for key, window in windows.items()
        if window.newest_sound is not None
    }
    scope = {
        "tenant": tenant,
        "budgets": [budget for budget, _ in marked],
        "windows": [token for _, token in marked],
        "times": list(marked.values()),
    }
    marks: dict[WindowKey, RecordMarks] = {}
    for budget, token, is_truncated, is_partial, omitted, count in connection.execute(
        _MARKS, scope
    ):
        of = windows[budget, token].of
        marks[budget, token] = RecordMarks(
            is_truncated, is_partial, omissions_from(of, omitted or []), count
        )
    return tuple(
        window.finished(marks[key]) if key in marks else window.finished()
        for key, window in windows.items()
    )


def _stream_verified(
    connection: Connection, content_ids: Collection[int]
) -> Iterator[tuple[int, Usages | None]]:
    """Give contents with their ids one by one; None where one is not what was captured."""
    ids = list(content_ids)
    for first in range(0, len(ids), _AT_ONCE):
        with connection.cursor() as cursor:
            for content_id, *content in cursor.stream(_CONTENTS, (ids[first : first + _AT_ONCE],)):
                yield content_id, as_captured(*content)
