"""The one reader of recovery points, and the resets and verified contents that it needs."""

import math
import time
from collections import defaultdict
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from itertools import chain
from typing import Any, LiteralString, NamedTuple
from uuid import uuid4

import psycopg

from budget_recovery_dagster.adapters.postgres.database import Connection, Database, storable
from budget_recovery_dagster.domain.counters import (
    BudgetWindow,
    OmittedCounter,
    TenantUsages,
    UnreadableKey,
    Usages,
    ValueShape,
    hash_usages,
)
from budget_recovery_dagster.domain.recovery_point import (
    EVERYONE,
    Damage,
    RecordMarks,
    Reset,
    TenantPoint,
    WindowMerge,
    WindowPoint,
    concerning,
    newest_at,
)
from budget_recovery_dagster.domain.snapshots import CaptureSource
from budget_recovery_dagster.domain.windows import InvalidWindowError, Window, tokens_at
from budget_recovery_dagster.errors import DatabaseError

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
) -> Generator[tuple[int, Usages | None]]:
    """Yield contents with their ids, in the order of the ids; None if one is damaged.

    They are read one by one, because all of them may not fit into memory. Nothing else can use the
    connection until the last one is read, or the generator is closed: not even to roll back.
    """
    for first in range(0, len(content_ids), _AT_ONCE):
        with connection.cursor() as cursor:
            wanted = list(content_ids[first : first + _AT_ONCE])
            for content_id, *content in cursor.stream(_CONTENTS, (wanted,)):
                yield content_id, as_captured(*content)


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
# The marks of one record of each window.
_MARKS = """
select r.budget_id, r.window_token, c.source, r.is_truncated, c.is_partial, r.omitted,
       r.omitted_count
from unnest(%(budgets)s::text[], %(windows)s::text[], %(times)s::timestamptz[])
     as w (budget_id, window_token, captured_at)
join budget_recovery.budget_record r
  on r.tenant = %(tenant)s
 and r.budget_id = w.budget_id
 and r.window_token = w.window_token
 and r.captured_at = w.captured_at
join budget_recovery.capture c on c.tenant = r.tenant and c.captured_at = r.captured_at
"""
Contents = Mapping[str, Mapping[int, int]]
"""How many records have each content, by tenant and content id."""
WindowKey = tuple[str, str]
"""Budget and token of a window."""
Windows = dict[WindowKey, WindowMerge]


class Span(NamedTuple):
    """Records captured from ``since`` to ``until``, both included; None: without an end."""

    since: datetime | None
    until: datetime | None


EVERYTHING = Span(None, None)
Spans = Mapping[WindowKey, Collection[Span]]
"""The records to read of each window."""


def _read_all_spans(connection: Connection, tenant: str, windows: Windows, spans: Spans) -> None:
    """Add the records of ``spans``, and all others of a window if one of them is damaged.

    Records before a covering one need not be read. A damaged record covers nothing.
    """
    _add_records(connection, tenant, windows, spans)
    doubtful = {key: each for key, each in windows.items() if each.needs_all_records}
    _add_records(connection, tenant, doubtful, dict.fromkeys(doubtful, (EVERYTHING,)))


def _add_records(connection: Connection, tenant: str, windows: Windows, spans: Spans) -> None:
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
    holders: defaultdict[int, list[tuple[WindowMerge, datetime]]] = defaultdict(list)
    # One object per time: many counters share it.
    times: dict[datetime, datetime] = {}
    for budget, token, captured_at, content_id in connection.execute(_RECORDS, scope):
        at = times.setdefault(captured_at, captured_at.astimezone(UTC))
        holders[content_id].append((windows[budget, token], at))
    # Ids rise with time: the newest contents come first, and older ones then change little.
    for content_id, usages in stream_verified(connection, sorted(holders, reverse=True)):
        for window, captured_at in holders[content_id]:
            window.add(captured_at, usages)


def _finish(connection: Connection, tenant: str, windows: Windows) -> tuple[WindowPoint, ...]:
    """Return the points of windows whose records were read, with the marks of the newest ones."""
    marked = {
        key: window.newest_intact
        for key, window in windows.items()
        if window.newest_intact is not None
    }
    scope = {
        "tenant": tenant,
        "budgets": [budget for budget, _ in marked],
        "windows": [token for _, token in marked],
        "times": list(marked.values()),
    }
    marks: dict[WindowKey, RecordMarks] = {}
    for budget, token, source, is_truncated, is_partial, omitted, count in connection.execute(
        _MARKS, scope
    ):
        of = windows[budget, token].of
        marks[budget, token] = RecordMarks(
            source=CaptureSource(source),
            is_truncated=is_truncated,
            is_partial=is_partial,
            omitted=tuple(OmittedCounter(of, **each) for each in omitted or ()),
            omitted_count=count,
        )
    return tuple(window.merged(marks.get(key)) for key, window in windows.items())


_COPY_RESETS = """
copy budget_recovery.budget_reset (
    tenant, budget_id, window_token, of_everyone, entity, at, reset_by, reason, recorded_at, batch
) from stdin
"""
# One row for each reset, with its entities; the aggregate is an empty text.
_GROUPED_RESETS = """
with s as (
    select tenant, budget_id, window_token, of_everyone, batch is not null as is_several,
           array_agg(coalesce(entity, '')) as entities, at, reset_by, reason, recorded_at,
           min(reset_id) as reset_id
    from budget_recovery.budget_reset
    where tenant = %(tenant)s
    group by coalesce(batch::text, reset_id::text), tenant, budget_id, window_token, of_everyone,
             batch, at, reset_by, reason, recorded_at
)
"""
_IN_ORDER = """
select tenant, budget_id, window_token, of_everyone, is_several, entities, at, reset_by, reason,
       recorded_at
from s
order by reset_id
"""
_RESETS = f"{_GROUPED_RESETS}{_IN_ORDER}"
# For each window, the resets that exclude a usage of an older intact record. Usually the newest of
# these records has it. The server compares the entities, so no content is transferred.
_EXCLUDING = """
select w.budget_id, w.window_token,
       s.tenant, s.budget_id, s.window_token, s.of_everyone, s.is_several, s.entities, s.at,
       s.reset_by, s.reason, s.recorded_at
from unnest(%(budgets)s::text[], %(windows)s::text[]) as w (budget_id, window_token)
join s
  on s.budget_id = w.budget_id
 and (s.window_token is null or s.window_token = w.window_token)
cross join lateral (
    select
    from (
        select r.content_id
        from budget_recovery.budget_record r
        join budget_recovery.budget_content c using (content_id)
        where r.tenant = s.tenant
          and r.budget_id = w.budget_id
          and r.window_token = w.window_token
          and r.captured_at <= s.at
          and case when s.of_everyone then cardinality(c.entities) > 0
                   else s.entities && c.entities end
        order by r.captured_at desc
        offset 0
    ) r
    where budget_recovery.is_stored_intact(r.content_id)
    limit 1
) older
"""
_KEEPING_OUT = f"{_GROUPED_RESETS}{_EXCLUDING}"


def storable_reset(reset: Reset) -> Reset:
    """Return a reset in its stored form."""
    return replace(reset, by=storable(reset.by), reason=storable(reset.reason))


@dataclass(frozen=True, slots=True)
class PostgresResets:
    """The table of resets."""

    _database: Database

    def record(self, reset: Reset) -> Reset:
        """Store a reset, and return it as it is stored."""
        kept = storable_reset(reset)
        with self._database.writing() as connection:
            insert_resets(connection, [kept])
        return kept


def insert_resets(connection: Connection, resets: Iterable[Reset]) -> None:
    """Insert resets in their stored form; one of several entities has a row for each."""
    with connection.cursor() as cursor, cursor.copy(_COPY_RESETS) as copy:
        for reset in resets:
            batch = uuid4() if isinstance(reset.entity, frozenset) else None
            for entity in (None,) if reset.is_of_everyone else reset.names:
                copy.write_row(
                    (
                        *(reset.tenant, reset.budget, reset.window, reset.is_of_everyone, entity),
                        *(reset.at, reset.by, reset.reason, reset.recorded_at, batch),
                    )
                )


def read_resets(connection: Connection, tenant: str) -> tuple[Reset, ...]:
    """Return the resets of a tenant, in the order of their recording."""
    return tuple(_reset(row) for row in connection.execute(_RESETS, {"tenant": tenant}))


def read_keeping_out(
    connection: Connection, tenant: str, windows: Collection[tuple[str, str]]
) -> Iterator[tuple[tuple[str, str], Reset]]:
    """Yield each window, by budget and token, with the resets that exclude usages from it."""
    scope = {
        "tenant": tenant,
        "budgets": [budget for budget, _ in windows],
        "windows": [token for _, token in windows],
    }
    for budget, token, *row in connection.execute(_KEEPING_OUT, scope):
        yield (budget, token), _reset(row)


def _reset(row: Sequence[Any]) -> Reset:
    tenant, budget, window, of_everyone, is_several, entities, *rest = row
    names = frozenset(entity or None for entity in entities)
    who = names if is_several else next(iter(names))
    return Reset(tenant, budget, window, EVERYONE if of_everyone else who, *rest)


# A capture may have no record: only unreadable keys were found, or retention removed the records.
# The limit makes it one index lookup per tenant, however many records there are.
_TENANTS = """
select c.tenant
from (select distinct tenant from budget_recovery.capture) c
cross join lateral (
    select from budget_recovery.budget_record r where r.tenant = c.tenant limit 1
) recorded
"""
# The newest snapshot of any tenant that has an intact record, or that never had a record.
_NEWEST = """
select c.captured_at
from (
    select tenant, captured_at, record_count
    from budget_recovery.capture
    order by captured_at desc
    offset 0
) c
where c.record_count = 0
   or exists (
       select
       from budget_recovery.budget_record r
       where r.tenant = c.tenant
         and r.captured_at = c.captured_at
         and budget_recovery.is_stored_intact(r.content_id)
   )
order by c.captured_at desc
limit 1
"""
_CAPTURE = """
select captured_at, unreadable, unreadable_count
from budget_recovery.capture
where tenant = %(tenant)s
"""
_NEWEST_OF = f"{_CAPTURE} order by captured_at desc limit 1"
_NAMED_OF = f"{_CAPTURE} and captured_at = %(captured_at)s"
# Only the token decides whether a window is open, so damage to the stored start or end hides
# nothing. For each window: its newest record, and the newest that covers the earlier ones.
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
# For a capture, which writes no keys.
_WITHOUT_SHAPES = """
select budget_id, window_token, newest_at, since, null as value_shape, null as expiry_seconds
from w
"""
_CURRENT_WINDOWS = f"{_BY_TOKENS}{_WITHOUT_SHAPES}"
# For a restore: also the shape and expiry of the newest record of each window that has them.
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
# A closed window belongs to the point if the newest snapshot has it.
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
# Backwards in time to the first intact record. It is among the newest records, unless the tenant
# has no open window. `offset 0` makes the server verify in this order: usually one content of each
# tenant.
_NEWEST_POINTS = """
select t.tenant, newest.captured_at
from (select distinct tenant from budget_recovery.capture) t
cross join lateral (
    select r.captured_at
    from (
        select captured_at, content_id
        from budget_recovery.budget_record
        where tenant = t.tenant
          and window_token = any(%(tokens)s)
        order by captured_at desc
        offset 0
    ) r
    where budget_recovery.is_stored_intact(r.content_id)
    order by r.captured_at desc
    limit 1
) newest
order by t.tenant
"""
# The records of open windows since the covering one. Narrow rows only: the server verifies each
# content, so none is transferred.
_USED = """
with used as (
    select r.tenant, r.budget_id, r.window_token, r.content_id
    from (
        select tenant, budget_id, window_token,
               max(captured_at) filter (where covers_earlier) as since
        from budget_recovery.budget_record
        where window_token = any(%(tokens)s)
          and (%(tenant)s::text is null or tenant = %(tenant)s)
        group by tenant, budget_id, window_token
    ) w
    join budget_recovery.budget_record r
      on r.tenant = w.tenant
     and r.budget_id = w.budget_id
     and r.window_token = w.window_token
     and r.captured_at >= coalesce(w.since, '-infinity')
)
"""
# How many records have each content, by tenant.
_BY_CONTENT = """
select tenant, content_id, count(*)
from used
group by tenant, content_id
order by tenant, content_id
"""
_USED_CONTENTS = f"{_USED}{_BY_CONTENT}"
# The same for all records of the windows in which a damaged one is used: it covers no other.
_OF_DOUBTFUL_WINDOWS = """
select r.tenant, r.content_id, count(*)
from (
    select distinct tenant, budget_id, window_token
    from used
    where content_id = any(%(damaged)s)
) w
join budget_recovery.budget_record r using (tenant, budget_id, window_token)
group by r.tenant, r.content_id
order by r.tenant, r.content_id
"""
_DOUBTFUL_CONTENTS = f"{_USED}{_OF_DOUBTFUL_WINDOWS}"
_DAMAGED_OF = """
select content_id
from unnest(%(content_ids)s::bigint[]) as content_id
where not budget_recovery.is_stored_intact(content_id)
"""
# Few enough for a statement of a second or so, even if each content has ten thousand counters.
_VERIFIED_AT_ONCE = 200
_LIMIT_STATEMENT = "select set_config('statement_timeout', %s, true)"


class _TimeUpError(Exception):
    """The verification has used up its time."""


class _Verification:
    """Verifies contents on the server, in short statements and until a time limit."""

    def __init__(self, connection: Connection, within: timedelta | None) -> None:
        self._connection = connection
        self._until = None if within is None else time.monotonic() + within.total_seconds()
        self._verified: set[int] = set()
        self.damaged: set[int] = set()

    def contents_of(self, query: LiteralString, scope: Mapping[str, Any]) -> Contents:
        """Return the contents of a query."""
        contents: defaultdict[str, dict[int, int]] = defaultdict(dict)
        for tenant, content_id, count in self._rows(query, scope):
            contents[tenant][content_id] = count
        return contents

    def verify(self, contents: Contents) -> None:
        """Verify contents that are not verified yet, tenant by tenant."""
        left = [
            content_id
            for content_id in dict.fromkeys(chain.from_iterable(contents.values()))
            if content_id not in self._verified
        ]
        for first in range(0, len(left), _VERIFIED_AT_ONCE):
            batch = left[first : first + _VERIFIED_AT_ONCE]
            self.damaged.update(*self._rows(_DAMAGED_OF, {"content_ids": batch}))
            self._verified.update(batch)

    def is_complete(self, content_ids: Collection[int]) -> bool:
        """Whether all these contents are verified."""
        return self._verified.issuperset(content_ids)

    def count_damaged(self, contents: Mapping[int, int]) -> int:
        """Count the records whose content is known to be damaged."""
        return sum(count for each, count in contents.items() if each in self.damaged)

    def _rows(self, query: LiteralString, parameters: Mapping[str, Any]) -> list[tuple[Any, ...]]:
        if self._until is not None:
            left = math.ceil((self._until - time.monotonic()) * 1000)
            if left <= 0:
                raise _TimeUpError
            self._connection.execute(_LIMIT_STATEMENT, (str(left),))
        try:
            return self._connection.execute(query, parameters).fetchall()
        except psycopg.errors.QueryCanceled as error:
            if self._until is None:
                raise
            raise _TimeUpError from error


@dataclass(frozen=True, slots=True)
class PostgresRecoveryPoints:
    """Recovery points from the tables of captures, records, contents and resets."""

    _database: Database
    _: KW_ONLY
    heeds_resets: bool = True

    def tenants(self) -> frozenset[str]:
        """Return the tenants that have a retained record of any budget."""
        return frozenset(tenant for (tenant,) in self._database.rows(_TENANTS))

    def point_of(self, tenant: str, now: datetime) -> TenantPoint | None:
        """Read a tenant's recovery point: the records since the covering one of each window."""
        with self._database.reading() as connection:
            row = connection.execute(_NEWEST_OF, {"tenant": tenant}).fetchone()
            if row is None:
                return None
            recorded = read_resets(connection, tenant)
            scope = _scope(tenant, row[0], now)
            windows, spans = self._find_windows(connection, _WINDOWS, scope, recorded)
            _read_all_spans(connection, tenant, windows, spans)
            if self.heeds_resets and recorded:
                for key, reset in read_keeping_out(connection, tenant, windows):
                    windows[key].add_excluding(reset)
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
                    "choose another snapshot, or `latest`.",
                ) from error
            this = (Span(captured_at, captured_at),)
            _add_records(connection, tenant, windows, dict.fromkeys(windows, this))
            return _point(connection, tenant, row, windows)

    def despite_resets(self) -> "PostgresRecoveryPoints":
        """Return the same points as if no reset had been recorded."""
        return PostgresRecoveryPoints(self._database, heeds_resets=False)

    def current_usages(self, tenant: str, now: datetime) -> TenantUsages:
        """Read only the usages of a tenant's open windows, for the comparison in a capture."""
        scope = {"tenant": tenant, "tokens": list(tokens_at(now))}
        with self._database.reading() as connection:
            recorded = read_resets(connection, tenant)
            windows, spans = self._find_windows(connection, _CURRENT_WINDOWS, scope, recorded)
            _read_all_spans(connection, tenant, windows, spans)
        merged = (window.merged(None) for window in windows.values())
        return {window.of: window.usages for window in merged if window.usages}

    def newest_points(self, now: datetime) -> Mapping[str, datetime]:
        """Return the time of each tenant's newest intact record of a window open at ``now``."""
        rows = self._database.rows(_NEWEST_POINTS, {"tokens": list(tokens_at(now))})
        return {tenant: captured_at.astimezone(UTC) for tenant, captured_at in rows}

    def damaged(
        self, now: datetime, *, tenant: str | None = None, within: timedelta | None = None
    ) -> Damage:
        """Count the damaged records of open windows; the server verifies the contents."""
        scope: dict[str, Any] = {"tokens": list(tokens_at(now)), "tenant": tenant}
        contents: Contents | None = None
        all_are_listed = False
        # One transaction, so that a content that is pruned meanwhile does not look damaged.
        with self._database.reading() as connection:
            verification = _Verification(connection, within)
            try:
                contents = verification.contents_of(_USED_CONTENTS, scope)
                verification.verify(contents)
                if verification.damaged:
                    scope["damaged"] = list(verification.damaged)
                    contents = verification.contents_of(_DOUBTFUL_CONTENTS, scope)
                    all_are_listed = True
                    verification.verify(contents)
            except _TimeUpError:
                connection.rollback()
        if contents is None:
            return Damage({}, (tenant,) if tenant is not None else tuple(sorted(self.tenants())))
        counts = {each: verification.count_damaged(used) for each, used in contents.items()}
        return Damage(
            records={each: count for each, count in counts.items() if count},
            unverified=tuple(
                each
                for each, used in contents.items()
                if not verification.is_complete(used) or (counts[each] and not all_are_listed)
            ),
        )

    def _find_windows(
        self,
        connection: Connection,
        query: LiteralString,
        scope: dict[str, Any],
        recorded: Sequence[Reset],
    ) -> tuple[Windows, Spans]:
        """Return windows, and the records to read of each."""
        heeded, ignored = (recorded, ()) if self.heeds_resets else ((), recorded)
        windows: Windows = {}
        spans: dict[WindowKey, Collection[Span]] = {}
        for budget, token, last, since, shape, expiry in connection.execute(query, scope):
            of = BudgetWindow(budget, Window.parse(token))
            windows[budget, token] = WindowMerge(
                of,
                newest_at=last.astimezone(UTC),
                shape=shape and ValueShape(shape),
                expiry_seconds=expiry,
                resets=heeded,
            )
            spans[budget, token] = _spans(since, concerning(of, ignored))
        return windows, spans


def read_newest_point_time(connection: Connection) -> datetime | None:
    """Return the time of the newest snapshot of any tenant that is not completely damaged."""
    row = connection.execute(_NEWEST).fetchone()
    return None if row is None else row[0].astimezone(UTC)


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


def _spans(covered_since: datetime | None, resets: Sequence[Reset]) -> tuple[Span, ...]:
    """Return the spans of records to read for the point of a window, ignoring these resets.

    A covering record covers the usages of earlier intact records that were eligible at its
    capture. After the newest reset, all usages are eligible; the records before the reset must be
    read.
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
        windows=_finish(connection, tenant, windows),
        unreadable=tuple(UnreadableKey(**each) for each in unreadable),
        unreadable_count=unreadable_count,
    )
