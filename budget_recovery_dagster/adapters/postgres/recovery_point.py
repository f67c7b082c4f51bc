"""Reads recovery points: the maximum of all retained, eligible, intact records."""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, LiteralString, NamedTuple

from budget_recovery_dagster.adapters.postgres.connection import Connection
from budget_recovery_dagster.adapters.postgres.database import Database
from budget_recovery_dagster.adapters.postgres.records import (
    RecordRow,
    as_captured,
    stream_contents,
)
from budget_recovery_dagster.adapters.postgres.resets import read_keeping_out, read_resets
from budget_recovery_dagster.adapters.postgres.storable import omissions_from
from budget_recovery_dagster.domain.counters import (
    BudgetWindow,
    Entity,
    OmittedCounter,
    RecoveryPoint,
    UnreadableKey,
    Usages,
    ValueShape,
    max_merge,
)
from budget_recovery_dagster.domain.recovery_point import PointRecord, TenantPoint, WindowPoint
from budget_recovery_dagster.domain.resets import (
    Reset,
    concerning,
    eligible,
    keeping_out,
    newest_at,
)
from budget_recovery_dagster.domain.snapshots import StoredRecord
from budget_recovery_dagster.domain.windows import InvalidWindowError, Period, Window
from budget_recovery_dagster.errors import DatabaseError


def tokens_at(moment: datetime) -> frozenset[str]:
    """Return the tokens of all windows that are current at a moment."""
    return frozenset(Window.containing(period, moment).token for period in Period)


@dataclass(frozen=True, slots=True)
class RecordMarks:
    """What is told of one record beside its usages."""

    is_truncated: bool = False
    is_partial: bool = False
    omitted: tuple[OmittedCounter, ...] = ()
    omitted_count: int = 0


_UNMARKED = RecordMarks()


class WindowInMaking:
    """One budget and window; records may be added in any order, and more than once.

    What ``resets``, which may be all of the tenant, make ineligible is left out.
    """

    def __init__(
        self,
        of: BudgetWindow,
        *,
        newest_at: datetime,
        shape: ValueShape | None,
        expiry_seconds: int | None,
        resets: Sequence[Reset] = (),
    ) -> None:
        self.of = of
        self._newest_at = newest_at
        self._shape = shape
        self._expiry_seconds = expiry_seconds
        self._resets = concerning(of, resets)
        self._kept_out: set[Reset] = set()
        self._usages: dict[Entity, Decimal] = {}
        self._sources: dict[Entity, datetime] = {}
        self._sound: set[datetime] = set()
        self._corrupt: set[datetime] = set()

    @property
    def needs_all_records(self) -> bool:
        """Whether a record that should have stood for earlier ones cannot."""
        return bool(self._corrupt)

    @property
    def newest_sound(self) -> datetime | None:
        """The time of the newest sound record that was added; None: there was none."""
        return max(self._sound, default=None)

    def add(self, captured_at: datetime, usages: Usages | None) -> None:
        """Add a record; ``usages`` None: it holds something else than was captured."""
        if usages is None:
            self._corrupt.add(captured_at)
            return
        self._sound.add(captured_at)
        if self._resets:
            self._kept_out.update(keeping_out(usages, captured_at, self.of, self._resets))
            usages = eligible(usages, captured_at, self.of, self._resets)
        self._merge(captured_at, usages)

    def note_kept_out(self, reset: Reset) -> None:
        """Note that a reset keeps usages of records out that need not be added."""
        self._kept_out.add(reset)

    def _merge(self, captured_at: datetime, usages: Usages) -> None:
        best, sources = self._usages, self._sources
        if not best:
            best.update(usages)
            self._sources = dict.fromkeys(usages, captured_at)
            return
        for entity, usage in usages.items():
            known = best.get(entity)
            if known is None or usage > known:
                best[entity] = usage
                sources[entity] = captured_at
            elif captured_at > sources[entity] and usage == known:
                sources[entity] = captured_at

    def finished(self, marks: RecordMarks = _UNMARKED) -> WindowPoint:
        """Return the window as the records that were added make it.

        ``marks`` are those of the newest sound one.
        """
        return WindowPoint(
            of=self.of,
            usages=self._usages,
            newest_at=self.newest_sound or self._newest_at,
            shape=self._shape,
            expiry_seconds=self._expiry_seconds,
            corrupt=tuple(sorted(self._corrupt)),
            sources=self._sources,
            is_truncated=marks.is_truncated,
            is_partial=marks.is_partial,
            omitted=marks.omitted,
            omitted_count=marks.omitted_count,
            resets=tuple(reset for reset in self._resets if reset in self._kept_out),
        )


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


# For every budget and window that is current: the contents of its newest record that covers all
# earlier ones and of those after it; of all its records, if none covers. Of records with one
# content the newest stands for all: whatever resets there are, of no other is more eligible. Only
# narrow rows are looked at here; the wide contents follow by id, each once.
_POINT = """
with newest_covering as (
    select budget_id, window_token, max(captured_at) filter (where covers_earlier) as since
    from budget_recovery.budget_record
    where tenant = %(tenant)s
      and (window_start is null or window_start <= %(now)s)
      and (window_end is null or window_end > %(now)s)
    group by budget_id, window_token
)
select r.budget_id, r.window_token, r.content_id, max(r.captured_at)
from newest_covering n
join budget_recovery.budget_record r
  on r.tenant = %(tenant)s
 and r.budget_id = n.budget_id
 and r.window_token = n.window_token
 and r.captured_at >= coalesce(n.since, '-infinity')
group by r.budget_id, r.window_token, r.content_id
"""


class Holder(NamedTuple):
    """A window that has records with some content, and when the newest of them was captured."""

    of: BudgetWindow
    captured_at: datetime


def stream_point(
    connection: Connection, tenant: str, now: datetime
) -> Iterator[tuple[int, list[Holder], Usages]]:
    """Give the contents that a tenant's recovery point is made of, and of which windows each is.

    They are whole: what resets make ineligible is among them, and so is the newest record of each
    current window. Until the last one has come, the connection is of no other use.
    """
    holders: defaultdict[int, list[Holder]] = defaultdict(list)
    scope = {"tenant": tenant, "now": now}
    for budget, token, content_id, captured_at in connection.execute(_POINT, scope):
        of = BudgetWindow(budget, Window.parse(token))
        holders[content_id].append(Holder(of, captured_at))
    for content_id, usages in stream_contents(connection, sorted(holders)):
        yield content_id, holders[content_id], usages


_NEWEST_SNAPSHOTS = """
select tenant, max(captured_at) from budget_recovery.capture group by tenant order by tenant
"""
# Backwards by time and only to the first: it is among the newest records, except of a tenant that
# has nothing current.
_NEWEST_POINTS = """
select t.tenant, newest.captured_at
from (select distinct tenant from budget_recovery.capture) t
cross join lateral (
    select r.captured_at
    from budget_recovery.budget_record r
    where r.tenant = t.tenant
      and (r.window_start is null or r.window_start <= %(now)s)
      and (r.window_end is null or r.window_end > %(now)s)
    order by r.captured_at desc
    limit 1
) newest
order by t.tenant
"""
# Whoever a run failed to capture after the last snapshot that there is of them.
_FAILING = """
select f.tenant, newest.captured_at
from (
    select name as tenant, max(failed_at) as failed_at
    from budget_recovery.capture_failure
    where kind = 'tenant'
    group by name
) f
left join lateral (
    select max(c.captured_at) as captured_at, max(c.stored_at) as stored_at
    from budget_recovery.capture c
    where c.tenant = f.tenant
) newest on true
where newest.stored_at is null or newest.stored_at < f.failed_at
order by f.tenant
"""
# Of every budget and window that is current: its newest record.
_NEWEST_RECORDS = """
with newest as (
    select budget_id, window_token, max(captured_at) as captured_at
    from budget_recovery.budget_record
    where tenant = %(tenant)s
      and (window_start is null or window_start <= %(now)s)
      and (window_end is null or window_end > %(now)s)
    group by budget_id, window_token
)
select captured_at, c.source, budget_id, window_token, r.is_truncated, c.is_partial,
       r.omitted_count, r.content_id
from newest
join budget_recovery.budget_record r using (budget_id, window_token, captured_at)
join budget_recovery.capture c using (tenant, captured_at)
where tenant = %(tenant)s
order by budget_id, window_token
"""


class PostgresRecoveryPoints:
    """What a restore would bring back, and where it comes from."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def newest_snapshots(self) -> Mapping[str, datetime]:
        """Return the time of each tenant's newest snapshot, of all that have one."""
        with self._database.reading() as connection:
            rows = connection.execute(_NEWEST_SNAPSHOTS)
            return {tenant: captured_at.astimezone(UTC) for tenant, captured_at in rows}

    def newest_points(self, now: datetime) -> Mapping[str, datetime]:
        """Return the time of each tenant's newest record of a window that is current at ``now``."""
        with self._database.reading() as connection:
            rows = connection.execute(_NEWEST_POINTS, {"now": now})
            return {tenant: captured_at.astimezone(UTC) for tenant, captured_at in rows}

    def failing(self) -> Mapping[str, datetime | None]:
        """Return the tenants whose last capture failed, with the time of their newest snapshot."""
        with self._database.reading() as connection:
            return {
                tenant: captured_at and captured_at.astimezone(UTC)
                for tenant, captured_at in connection.execute(_FAILING)
            }

    def windows_of(self, tenant: str, now: datetime) -> tuple[PointRecord, ...]:
        """Return the windows of a tenant that are current at ``now``, by budget and token."""
        point: dict[BudgetWindow, Usages] = {}
        newest: dict[BudgetWindow, StoredRecord] = {}
        with self._database.reading() as connection:
            found = connection.execute(_NEWEST_RECORDS, {"tenant": tenant, "now": now}).fetchall()
            rows = {row.of: row for row in (RecordRow(*each) for each in found)}
            resets = read_resets(connection, tenant)
            for content_id, holders, usages in stream_point(connection, tenant, now):
                for of, captured_at in holders:
                    used = eligible(usages, captured_at, of, resets)
                    point[of] = max_merge(point.get(of, {}), used)
                    if content_id == rows[of].content_id:
                        newest[of] = rows[of].holding(usages)
        return tuple(PointRecord(newest[of], point[of]) for of in rows)


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
