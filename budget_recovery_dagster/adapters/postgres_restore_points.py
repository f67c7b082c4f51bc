"""The recovery points that a restore uses, in PostgreSQL."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, LiteralString

from budget_recovery_dagster.adapters.postgres_connection import Connection
from budget_recovery_dagster.adapters.postgres_database import Database
from budget_recovery_dagster.adapters.postgres_point_records import (
    EVERYTHING,
    Span,
    Spans,
    WindowKey,
    Windows,
    add_records,
    finish,
    read_to_the_end,
)
from budget_recovery_dagster.adapters.postgres_resets import read_keeping_out, read_resets
from budget_recovery_dagster.adapters.restore_windows import WindowInMaking, tokens_at
from budget_recovery_dagster.domain.counters import BudgetWindow, UnreadableKey, ValueShape
from budget_recovery_dagster.domain.recovery_point import RecoveryPoint
from budget_recovery_dagster.domain.resets import Reset, concerning, newest_at
from budget_recovery_dagster.domain.windows import InvalidWindowError, Window
from budget_recovery_dagster.errors import DatabaseError
from budget_recovery_dagster.restore_ports import TenantPoint

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

_CAPTURE = """
select captured_at, unreadable, unreadable_count
from budget_recovery.capture
where tenant = %(tenant)s
"""
_NEWEST_OF = f"{_CAPTURE} order by captured_at desc limit 1"
_NAMED_OF = f"{_CAPTURE} and captured_at = %(captured_at)s"

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

# For a restore. Of each window also the newest record that tells how its keys are written.
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
"""
_IN_ORDER = "order by w.budget_id, w.window_token"
# Those that have closed count if the newest snapshot has them.
_WINDOWS = f"""{_BY_TOKENS}{_WITH_SHAPES}
where w.window_token = any(%(current)s) or w.newest_at = %(newest_at)s
{_IN_ORDER}
"""

_IN_SNAPSHOT = """
with w as (
    select budget_id, window_token, captured_at as newest_at, captured_at as since
    from budget_recovery.budget_record
    where tenant = %(tenant)s and captured_at = %(captured_at)s
)
"""
_WINDOWS_OF_SNAPSHOT = f"{_IN_SNAPSHOT}{_WITH_SHAPES}{_IN_ORDER}"


class PostgresRestorePoints:
    """What a restore would bring back, verified."""

    def __init__(self, database: Database, *, heeds_resets: bool = True) -> None:
        self._database = database
        self._heeds_resets = heeds_resets

    def tenants(self) -> frozenset[str]:
        """Return the tenants that have a retained record of any budget."""
        with self._database.reading() as connection:
            return frozenset(tenant for (tenant,) in connection.execute(_TENANTS))

    def point_of(self, tenant: str, now: datetime) -> TenantPoint | None:
        """Read a tenant's recovery point; None where nothing of the tenant is retained."""
        with self._database.reading() as connection:
            row = connection.execute(_NEWEST_OF, {"tenant": tenant}).fetchone()
            if row is None:
                return None
            recorded = read_resets(connection, tenant)
            scope = _scope(tenant, row[0], now)
            windows, since = self._find_windows(connection, _WINDOWS, scope, recorded)
            if self._heeds_resets:
                read_to_the_end(connection, tenant, windows, _covering(since))
                for key, reset in read_keeping_out(connection, tenant, windows) if recorded else ():
                    windows[key].note_kept_out(reset)
            else:
                spans = {
                    key: _spans(since[key], concerning(window.of, recorded))
                    for key, window in windows.items()
                }
                read_to_the_end(connection, tenant, windows, spans)
            return _point(connection, tenant, row, windows)

    def snapshot_of(self, tenant: str, captured_at: datetime) -> TenantPoint | None:
        """Read the records of one snapshot of a tenant, and no others; None: there is none."""
        scope = {"tenant": tenant, "captured_at": captured_at, "shapes": _SHAPES}
        with self._database.reading() as connection:
            row = connection.execute(_NAMED_OF, scope).fetchone()
            if row is None:
                return None
            recorded = read_resets(connection, tenant)
            try:
                windows, _ = self._find_windows(connection, _WINDOWS_OF_SNAPSHOT, scope, recorded)
            except InvalidWindowError as error:
                raise DatabaseError(
                    f"The snapshot of tenant {tenant!r} of {captured_at.astimezone(UTC)} is"
                    f" damaged: {error}.",
                    "name another snapshot, or `latest`.",
                ) from error
            this = (Span(captured_at, captured_at),)
            add_records(connection, tenant, windows, dict.fromkeys(windows, this))
            return _point(connection, tenant, row, windows)

    def despite_resets(self) -> "PostgresRestorePoints":
        """Return the same points as if no reset had been recorded."""
        return PostgresRestorePoints(self._database, heeds_resets=False)

    def _find_windows(
        self,
        connection: Connection,
        query: LiteralString,
        scope: dict[str, Any],
        recorded: Sequence[Reset],
    ) -> tuple[Windows, dict[WindowKey, datetime | None]]:
        """Return windows, and of each when its newest record was captured that covers the rest."""
        windows: Windows = {}
        covered_since: dict[WindowKey, datetime | None] = {}
        for budget, token, last, since, shape, expiry in connection.execute(query, scope):
            windows[budget, token] = WindowInMaking(
                BudgetWindow(budget, Window.parse(token)),
                newest_at=last.astimezone(UTC),
                shape=shape and ValueShape(shape),
                expiry_seconds=expiry,
                resets=recorded if self._heeds_resets else (),
            )
            covered_since[budget, token] = since
        return windows, covered_since


def read_current_usages(connection: Connection, tenant: str, now: datetime) -> RecoveryPoint:
    """Read no more of a tenant's recovery point than the usages of its current windows.

    Verified as for a restore: a record must not claim to cover what is damaged. What resets make
    ineligible is left out, so that nothing is missed that was taken away on purpose.
    """
    recorded = read_resets(connection, tenant)
    scope = {"tenant": tenant, "tokens": list(tokens_at(now))}
    windows: Windows = {}
    covered_since: dict[WindowKey, datetime | None] = {}
    for budget, token, last, since in connection.execute(_CURRENT_WINDOWS, scope):
        windows[budget, token] = WindowInMaking(
            BudgetWindow(budget, Window.parse(token)),
            newest_at=last.astimezone(UTC),
            shape=None,
            expiry_seconds=None,
            resets=recorded,
        )
        covered_since[budget, token] = since
    read_to_the_end(connection, tenant, windows, _covering(covered_since))
    finished = (window.finished() for window in windows.values())
    return {window.of: window.usages for window in finished if window.usages}


def read_newest_point_time(connection: Connection) -> datetime | None:
    """Return the time of the newest snapshot of any tenant."""
    [(newest_at,)] = connection.execute(_NEWEST).fetchall()
    return None if newest_at is None else newest_at.astimezone(UTC)


_SHAPES = [shape.value for shape in ValueShape]


def _scope(tenant: str, newest_at: datetime, now: datetime) -> dict[str, Any]:
    current = tokens_at(now)
    return {
        "tenant": tenant,
        "tokens": list(current | tokens_at(newest_at)),
        "current": list(current),
        "newest_at": newest_at,
        "shapes": _SHAPES,
    }


def _covering(covered_since: Mapping[WindowKey, datetime | None]) -> Spans:
    """Say which records make the points of windows: whatever is eligible before, they cover."""
    return {key: (Span(since, None),) for key, since in covered_since.items()}


def _spans(covered_since: datetime | None, resets: Sequence[Reset]) -> tuple[Span, ...]:
    """Say which records of a window make its point despite the resets.

    A record that covers the earlier ones covers what was eligible in them when it was captured. Of
    those after the newest reset, that is everything; those before it have to be read.
    """
    reset_at = newest_at(resets)
    if reset_at is None or covered_since is None:
        return (Span(covered_since, None),)
    if reset_at >= covered_since:
        return (EVERYTHING,)
    return (Span(covered_since, None), Span(None, reset_at))


def _point(
    connection: Connection, tenant: str, capture: tuple[Any, ...], windows: Windows
) -> TenantPoint:
    captured_at, unreadable, unreadable_count = capture
    return TenantPoint(
        tenant=tenant,
        newest_at=captured_at.astimezone(UTC),
        windows=finish(connection, tenant, windows),
        unreadable=tuple(UnreadableKey(**each) for each in unreadable),
        unreadable_count=unreadable_count,
    )
