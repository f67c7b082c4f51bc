"""The recovery points that a restore uses, in PostgreSQL: each content is verified as it is read.

A record that covers all earlier ones usually spares reading them. Where a record turns out to hold
something else than was captured, its claim is worth nothing, and all others of its window are read.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator
from datetime import UTC, datetime

from budget_recovery_dagster.adapters.postgres_connection import Connection
from budget_recovery_dagster.adapters.postgres_database import Database
from budget_recovery_dagster.adapters.postgres_integrity import as_captured
from budget_recovery_dagster.adapters.restore_windows import WindowInMaking, tokens_at
from budget_recovery_dagster.domain.counters import BudgetWindow, ValueShape
from budget_recovery_dagster.domain.recovery_point import RecoveryPoint, Usages
from budget_recovery_dagster.domain.windows import Window
from budget_recovery_dagster.restore_ports import TenantPoint, WindowPoint

# A capture may have no record: it found only keys that it could not read, or retention took them.
# The limit keeps it at one look into an index for each tenant, however many records there are.
_TENANTS = """
select c.tenant
from (select distinct tenant from budget_recovery.capture) c
cross join lateral (
    select from budget_recovery.budget_record r where r.tenant = c.tenant limit 1
) recorded
"""

_NEWEST = "select max(captured_at) from budget_recovery.capture"

_NEWEST_OF = f"{_NEWEST} where tenant = %s"

# Windows are found by their tokens, which alone tell what they are: damage to the edges that are
# stored beside them hides nothing. Of each: its newest record, and the newest that covers the
# earlier ones.
_BY_TOKENS = """
with w as (
    select budget_id, window_token, max(captured_at) as newest_at,
           max(captured_at) filter (where covers_earlier) as since
    from budget_recovery.budget_record
    where tenant = %(tenant)s
      and window_token = any(%(tokens)s)
    group by budget_id, window_token
)
"""

# For a capture, which writes no key.
_AS_THEY_ARE = """
select budget_id, window_token, newest_at, since
from w
"""
_CURRENT_WINDOWS = f"{_BY_TOKENS}{_AS_THEY_ARE}"

# For a restore. Those that have closed count if the newest snapshot has them. Of each also the
# newest record that tells how its keys are written.
_WITH_SHAPES = """
select w.budget_id, w.window_token, w.newest_at, w.since, s.value_shape, s.expiry_seconds
from w
left join lateral (
    select r.value_shape, r.expiry_seconds
    from budget_recovery.budget_record r
    where r.tenant = %(tenant)s
      and r.budget_id = w.budget_id
      and r.window_token = w.window_token
      and r.value_shape = any(%(shapes)s)
    order by r.captured_at desc
    limit 1
) s on true
where w.window_token = any(%(current)s) or w.newest_at = %(newest_at)s
order by w.budget_id, w.window_token
"""
_WINDOWS = f"{_BY_TOKENS}{_WITH_SHAPES}"

# Narrow rows only; the wide contents follow by id, each once.
_RECORDS = """
select r.budget_id, r.window_token, r.captured_at, r.content_id
from unnest(%(budgets)s::text[], %(windows)s::text[], %(since)s::timestamptz[])
     as w (budget_id, window_token, since)
join budget_recovery.budget_record r
  on r.tenant = %(tenant)s
 and r.budget_id = w.budget_id
 and r.window_token = w.window_token
 and r.captured_at >= coalesce(w.since, '-infinity')
"""

# One that is not there at all is damage like any other.
_CONTENTS = """
select wanted.content_id, c.content_hash, c.entities, c.usages
from unnest(%s::bigint[]) as wanted (content_id)
left join budget_recovery.budget_content c using (content_id)
"""

# The server's limit of time is for one statement, and reading everything may well take longer.
_AT_ONCE = 500

Windows = dict[tuple[str, str], WindowInMaking]
"""Windows in the making by budget and token."""

ReadsFrom = dict[tuple[str, str], datetime | None]
"""From when on the records of each window are to be read; None: all of them."""


class PostgresRestorePoints:
    """What a restore would bring back, verified."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def tenants(self) -> frozenset[str]:
        """Return the tenants that have a retained record of any budget."""
        with self._database.reading() as connection:
            return frozenset(tenant for (tenant,) in connection.execute(_TENANTS))

    def point_of(self, tenant: str, now: datetime) -> TenantPoint | None:
        """Read a tenant's recovery point; None where nothing of the tenant is retained."""
        with self._database.reading() as connection:
            return read_point(connection, tenant, now)


def read_point(connection: Connection, tenant: str, now: datetime) -> TenantPoint | None:
    """Read a tenant's recovery point; None where nothing of the tenant is retained."""
    [(newest_at,)] = connection.execute(_NEWEST_OF, (tenant,)).fetchall()
    if newest_at is None:
        return None
    windows, since = _find_windows(connection, tenant, newest_at.astimezone(UTC), now)
    return TenantPoint(
        tenant=tenant,
        newest_at=newest_at.astimezone(UTC),
        windows=_read_windows(connection, tenant, windows, since),
    )


def read_current_usages(connection: Connection, tenant: str, now: datetime) -> RecoveryPoint:
    """Read no more of a tenant's recovery point than the usages of its current windows.

    Verified as ``read_point`` does it: a record must not claim to cover what is damaged.
    """
    scope = {"tenant": tenant, "tokens": list(tokens_at(now))}
    windows: Windows = {}
    reads_from: ReadsFrom = {}
    for budget, token, newest_at, since in connection.execute(_CURRENT_WINDOWS, scope):
        windows[budget, token] = WindowInMaking(
            BudgetWindow(budget, Window.parse(token)),
            newest_at=newest_at.astimezone(UTC),
            shape=None,
            expiry_seconds=None,
        )
        reads_from[budget, token] = since
    return {
        window.of: window.usages
        for window in _read_windows(connection, tenant, windows, reads_from)
        if window.usages
    }


def read_newest_point_time(connection: Connection) -> datetime | None:
    """Return the time of the newest snapshot of any tenant."""
    [(newest_at,)] = connection.execute(_NEWEST).fetchall()
    return None if newest_at is None else newest_at.astimezone(UTC)


def _find_windows(
    connection: Connection, tenant: str, newest_at: datetime, now: datetime
) -> tuple[Windows, ReadsFrom]:
    """Return the windows of a point, and from when on their records are to be read."""
    current = tokens_at(now)
    scope = {
        "tenant": tenant,
        "tokens": list(current | tokens_at(newest_at)),
        "current": list(current),
        "newest_at": newest_at,
        "shapes": [shape.value for shape in ValueShape],
    }
    windows: Windows = {}
    reads_from: ReadsFrom = {}
    for budget, token, last, since, shape, expiry in connection.execute(_WINDOWS, scope):
        windows[budget, token] = WindowInMaking(
            BudgetWindow(budget, Window.parse(token)),
            newest_at=last.astimezone(UTC),
            shape=shape and ValueShape(shape),
            expiry_seconds=expiry,
        )
        reads_from[budget, token] = since
    return windows, reads_from


def _read_windows(
    connection: Connection, tenant: str, windows: Windows, since: ReadsFrom
) -> tuple[WindowPoint, ...]:
    """Read windows to their end; of one with a damaged record, all others too."""
    _add_records(connection, tenant, windows, since)
    doubtful = {key: each for key, each in windows.items() if each.needs_all_records}
    _add_records(connection, tenant, doubtful, dict.fromkeys(doubtful))
    return tuple(window.finished() for window in windows.values())


def _add_records(connection: Connection, tenant: str, windows: Windows, since: ReadsFrom) -> None:
    """Read the records of windows from a time on, of each its own."""
    if not windows:
        return
    scope = {
        "tenant": tenant,
        "budgets": [budget for budget, _ in windows],
        "windows": [token for _, token in windows],
        "since": [since[key] for key in windows],
    }
    holders: defaultdict[int, list[tuple[WindowInMaking, datetime]]] = defaultdict(list)
    for budget, token, captured_at, content_id in connection.execute(_RECORDS, scope):
        holders[content_id].append((windows[budget, token], captured_at.astimezone(UTC)))
    for content_id, usages in _stream_verified(connection, sorted(holders)):
        for window, captured_at in holders[content_id]:
            window.add(captured_at, usages)


def _stream_verified(
    connection: Connection, content_ids: Collection[int]
) -> Iterator[tuple[int, Usages | None]]:
    """Give contents with their ids one by one; None where one is not what was captured."""
    ids = list(content_ids)
    for first in range(0, len(ids), _AT_ONCE):
        with connection.cursor() as cursor:
            for content_id, *content in cursor.stream(_CONTENTS, (ids[first : first + _AT_ONCE],)):
                yield content_id, as_captured(*content)
