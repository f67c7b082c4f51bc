"""The one reader of recovery points, and the resets and verified contents that it needs."""

import math
import time
from collections import defaultdict
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import KW_ONLY, dataclass, replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from itertools import chain
from typing import Any, LiteralString, NamedTuple
from uuid import uuid4

import psycopg

from budget_recovery_dagster.adapters.postgres.database import Connection, Database, storable
from budget_recovery_dagster.adapters.postgres.store import add_landmark, lock_store
from budget_recovery_dagster.domain.counters import (
    NO_EXPIRY,
    BudgetWindow,
    Expiries,
    OmittedCounter,
    TenantUsages,
    UnreadableKey,
    Usages,
    ValueShape,
    hash_expiries,
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
    last_excluded,
    latest_time,
)
from budget_recovery_dagster.domain.snapshots import CaptureSource, Commit
from budget_recovery_dagster.domain.store import LandmarkKind
from budget_recovery_dagster.domain.windows import InvalidWindowError, Window, tokens_at
from budget_recovery_dagster.errors import DatabaseError

# A content that is missing is damage like any other.
_CONTENTS = """
select wanted.content_id, c.content_hash, c.entities, c.usages, c.expiry_hash, c.expiries
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


def _known_expiries(
    expiry_hash: bytes | None, entities: list[Any] | None, expiries: list[Any] | None
) -> Expiries:
    """Return the expiries of a stored content that is intact; none if they are damaged.

    ``expiries_are_intact`` is the same rule in SQL.
    """
    if expiry_hash is None or entities is None or expiries is None:
        return {}
    if not all(expiry is None or isinstance(expiry, int) for expiry in expiries):
        return {}
    known: Expiries = {
        entity or None: NO_EXPIRY if expiry is None else expiry
        for entity, expiry in zip(entities, expiries, strict=False)
    }
    is_whole = len(known) == len(entities) == len(expiries)
    return known if is_whole and hash_expiries(known) == expiry_hash else {}


class _Content(NamedTuple):
    """A stored content; ``usages`` is None if it is damaged.

    ``stored`` are the hash, the entities and the expiries of its keys, if these differ from each
    other. They are verified when they are used, since most readers want only the usages.
    """

    content_id: int
    usages: Usages | None
    stored: tuple[bytes | None, list[Any] | None, list[Any] | None]

    def expiries_in(self, seconds: int | None, never: bool | None) -> Expiries:  # noqa: FBT001 - a column
        """Return what a record with these columns, and this content, knows."""
        if self.usages is None:
            return {}
        if seconds is not None:
            return dict.fromkeys(self.usages, seconds)
        if never:
            return dict.fromkeys(self.usages, NO_EXPIRY)
        return {} if never is None else _known_expiries(*self.stored)


def _stream_contents(connection: Connection, content_ids: Sequence[int]) -> Generator[_Content]:
    """Yield contents in the order of the ids; see ``stream_verified``."""
    for first in range(0, len(content_ids), _AT_ONCE):
        with connection.cursor() as cursor:
            wanted = list(content_ids[first : first + _AT_ONCE])
            for content_id, content_hash, entities, usages, *rest in cursor.stream(
                _CONTENTS, (wanted,)
            ):
                expiry_hash, expiries = rest
                captured = as_captured(content_hash, entities, usages)
                yield _Content(content_id, captured, (expiry_hash, entities, expiries))


def stream_verified(
    connection: Connection, content_ids: Sequence[int]
) -> Generator[tuple[int, Usages | None]]:
    """Yield contents with their ids, in the order of the ids; None if one is damaged.

    They are read one by one, because all of them may not fit into memory. Nothing else can use the
    connection until the last one is read, or the generator is closed: not even to roll back.
    """
    with closing(_stream_contents(connection, content_ids)) as contents:
        for content in contents:
            yield content.content_id, content.usages


# Narrow rows only; the wide contents follow by id, each once. ``oldest`` is the least of all since:
# with it, the server begins with the few snapshots that count, and not with all records.
_CAPTURES_SINCE = """
with p as (
    select commit_number, captured_at, stored_at
    from budget_recovery.capture
    where tenant = %(tenant)s and commit_number >= %(oldest)s
)
"""
_OF_SPANS = """
from unnest(
    %(budgets)s::text[], %(windows)s::text[], %(since)s::bigint[], %(until)s::bigint[]
) as w (budget_id, window_token, since, until)
join p
  on p.commit_number >= coalesce(w.since, 0)
 and (w.until is null or p.commit_number <= w.until)
join budget_recovery.budget_record r
  on r.tenant = %(tenant)s
 and r.budget_id = w.budget_id
 and r.window_token = w.window_token
 and r.captured_at = p.captured_at
order by p.commit_number desc
"""
_RECORD_COLUMNS = """
select r.budget_id, r.window_token, r.content_id, p.commit_number, p.captured_at, p.stored_at,
"""
_RECORDS = f"{_CAPTURES_SINCE}{_RECORD_COLUMNS} r.expiry_seconds, r.never_expires {_OF_SPANS}"
# For a capture, which writes no keys, and for a point whose expiries come from newer records.
_RECORDS_WITHOUT_EXPIRIES = (
    f"{_CAPTURES_SINCE}{_RECORD_COLUMNS} null::bigint, null::boolean {_OF_SPANS}"
)
# The records that know the expiries of their keys, the newest of each content first.
_WITH_EXPIRIES = """
select r.budget_id, r.window_token, max(p.commit_number), r.content_id, r.expiry_seconds,
       r.never_expires
from unnest(%(budgets)s::text[], %(windows)s::text[]) as w (budget_id, window_token)
join budget_recovery.budget_record r
  on r.tenant = %(tenant)s
 and r.budget_id = w.budget_id
 and r.window_token = w.window_token
join budget_recovery.capture p on p.tenant = r.tenant and p.captured_at = r.captured_at
where num_nonnulls(r.expiry_seconds, r.never_expires) > 0
group by r.budget_id, r.window_token, r.content_id, r.expiry_seconds, r.never_expires
order by max(p.commit_number) desc
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
    """Records committed from ``since`` to ``until``, both included; None: without an end."""

    since: int | None
    until: int | None


EVERYTHING = Span(None, None)
Spans = Mapping[WindowKey, Span]
"""The records to read of each window."""


def _read_all_spans(
    connection: Connection,
    tenant: str,
    windows: Windows,
    spans: Spans,
    records: LiteralString = _RECORDS,
) -> None:
    """Add the records of ``spans``, and all others of a window if one of them is damaged.

    Records before a covering one need not be read. A damaged record covers nothing.
    """
    _add_records(connection, tenant, windows, spans, records)
    doubtful = {key: each for key, each in windows.items() if each.needs_all_records}
    _add_records(connection, tenant, doubtful, dict.fromkeys(doubtful, EVERYTHING), records)


def _scope_of(tenant: str, windows: Collection[WindowKey]) -> dict[str, Any]:
    """Return the parameters of a query about these windows of a tenant."""
    return {
        "tenant": tenant,
        "budgets": [budget for budget, _ in windows],
        "windows": [token for _, token in windows],
    }


def _add_records(
    connection: Connection,
    tenant: str,
    windows: Windows,
    spans: Spans,
    records: LiteralString = _RECORDS,
) -> None:
    wanted = [(key, spans[key]) for key in windows]
    if not wanted:
        return
    scope = _scope_of(tenant, windows) | {
        "since": [span.since for _, span in wanted],
        "until": [span.until for _, span in wanted],
        "oldest": min(span.since or 0 for _, span in wanted),
    }
    holders: defaultdict[int, list[tuple[WindowMerge, Commit, Any, Any]]] = defaultdict(list)
    # One object per commit: many counters share it.
    commits: dict[int, Commit] = {}
    for budget, token, content_id, number, *times_and_expiry in connection.execute(records, scope):
        captured_at, stored_at, *expiry = times_and_expiry
        if number not in commits:
            commits[number] = as_commit(number, captured_at, stored_at)
        holders[content_id].append((windows[budget, token], commits[number], *expiry))
    # Ids rise with time: the newest contents come first, and older ones then change little.
    for content in _stream_contents(connection, sorted(holders, reverse=True)):
        for window, commit, seconds, never in holders[content.content_id]:
            window.add(commit, content.usages, content.expiries_in(seconds, never))


def as_commit(number: int, captured_at: datetime, stored_at: datetime) -> Commit:
    """Return a commit from the columns of a capture."""
    return Commit(number, captured_at.astimezone(UTC), stored_at.astimezone(UTC))


def _add_expiries(connection: Connection, tenant: str, windows: Windows) -> None:
    """Look up the expiries that are unknown so far in all records, newest first."""
    lacking = [key for key, window in windows.items() if window.lacks_expiries]
    if not lacking:
        return
    knowing: defaultdict[WindowKey, list[tuple[Any, ...]]] = defaultdict(list)
    for budget, token, *record in connection.execute(_WITH_EXPIRIES, _scope_of(tenant, lacking)):
        knowing[budget, token].append(tuple(record))
    for key, records in knowing.items():
        window, content_ids = windows[key], [content_id for _, content_id, *_ in records]
        # An open stream locks the connection, and usually the first record knows everything.
        with closing(_stream_contents(connection, content_ids)) as contents:
            for (number, _, seconds, never), content in zip(records, contents, strict=True):
                window.add_expiries(number, content.expiries_in(seconds, never))
                if not window.lacks_expiries:
                    break


def _finish(connection: Connection, tenant: str, windows: Windows) -> tuple[WindowPoint, ...]:
    """Return the points of windows whose records were read, with the marks of the newest ones."""
    marked = {
        key: window.newest_intact
        for key, window in windows.items()
        if window.newest_intact is not None
    }
    scope = _scope_of(tenant, marked) | {"times": list(marked.values())}
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
    tenant, budget_id, window_token, of_everyone, entity, at, reset_by, reason, recorded_at,
    last_excluded, batch
) from stdin
"""
_COMMITS = """
select commit_number, captured_at, stored_at from budget_recovery.capture where tenant = %s
"""
# One row for each reset, with its entities; the aggregate is an empty text.
_GROUPED_RESETS = """
with s as (
    select tenant, budget_id, window_token, of_everyone, batch is not null as is_several,
           array_agg(coalesce(entity, '')) as entities, at, reset_by, reason, recorded_at,
           last_excluded, min(reset_id) as reset_id
    from budget_recovery.budget_reset
    where tenant = %(tenant)s
    group by coalesce(batch::text, reset_id::text), tenant, budget_id, window_token, of_everyone,
             batch, at, reset_by, reason, recorded_at, last_excluded
)
"""
_AS_RECORDED = """
select tenant, budget_id, window_token, of_everyone, is_several, entities, at, reset_by, reason,
       recorded_at, last_excluded
from s
order by reset_id
"""
_RESETS = f"{_GROUPED_RESETS}{_AS_RECORDED}"
# For each window, the resets that exclude a usage of an older intact record. Usually the newest of
# these records has it. The server compares the entities, so no content is transferred.
_EXCLUDING = """
select w.budget_id, w.window_token,
       s.tenant, s.budget_id, s.window_token, s.of_everyone, s.is_several, s.entities, s.at,
       s.reset_by, s.reason, s.recorded_at, s.last_excluded
from unnest(%(budgets)s::text[], %(windows)s::text[]) as w (budget_id, window_token)
join s
  on s.budget_id = w.budget_id
 and (s.window_token is null or s.window_token = w.window_token)
cross join lateral (
    select
    from (
        select r.content_id
        from budget_recovery.budget_record r
        join budget_recovery.capture p on p.tenant = r.tenant and p.captured_at = r.captured_at
        join budget_recovery.budget_content c using (content_id)
        where r.tenant = s.tenant
          and r.budget_id = w.budget_id
          and r.window_token = w.window_token
          and budget_recovery.reset_excludes(
              s.last_excluded, s.at, s.recorded_at, p.commit_number, p.captured_at, p.stored_at
          )
          and case when s.of_everyone then cardinality(c.entities) > 0
                   else s.entities && c.entities end
        order by p.commit_number desc
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
        """Store a reset, and return it as it is stored, with the last commit that it excludes."""
        kept = storable_reset(reset)
        with self._database.writing() as connection:
            # No snapshot is committed meanwhile: it is either before the reset or after it.
            lock_store(connection)
            [kept] = insert_resets(connection, [kept])
            # A database without this reset would restore what it excludes.
            add_landmark(connection, LandmarkKind.RESET, at=kept.recorded_at)
        return kept


def insert_resets(connection: Connection, resets: Sequence[Reset]) -> list[Reset]:
    """Insert resets in their stored form; one of several entities has a row for each.

    The caller holds the lock on the store's row. Returned are the resets with the last commits that
    they exclude.
    """
    commits = {
        tenant: [as_commit(*row) for row in connection.execute(_COMMITS, (tenant,))]
        for tenant in {reset.tenant for reset in resets}
    }
    kept = [
        replace(each, last_excluded=last_excluded(commits[each.tenant], each.at, each.recorded_at))
        for each in resets
    ]
    with connection.cursor() as cursor, cursor.copy(_COPY_RESETS) as copy:
        for reset in kept:
            batch = uuid4() if isinstance(reset.entity, frozenset) else None
            for entity in (None,) if reset.is_of_everyone else reset.names:
                copy.write_row(
                    (
                        *(reset.tenant, reset.budget, reset.window, reset.is_of_everyone, entity),
                        *(reset.at, reset.by, reset.reason, reset.recorded_at),
                        *(reset.last_excluded, batch),
                    )
                )
    return kept


def read_resets(connection: Connection, tenant: str) -> tuple[Reset, ...]:
    """Return the resets of a tenant, in the order of their recording."""
    return tuple(_reset(row) for row in connection.execute(_RESETS, {"tenant": tenant}))


def read_keeping_out(
    connection: Connection, tenant: str, windows: Collection[tuple[str, str]]
) -> Iterator[tuple[tuple[str, str], Reset]]:
    """Yield each window, by budget and token, with the resets that exclude usages from it."""
    for budget, token, *row in connection.execute(_KEEPING_OUT, _scope_of(tenant, windows)):
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
# In all queries, the newest snapshot is the last commit; one dated in the future (see
# ``latest_time``) is newest only if there is no other.
#
# The newest snapshot of any tenant that has an intact record, or that never had a record.
_NEWEST = """
select c.captured_at
from (
    select tenant, captured_at, record_count, captured_at > %(latest)s as is_ahead, commit_number
    from budget_recovery.capture
    order by is_ahead, commit_number desc
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
order by c.is_ahead, c.commit_number desc
limit 1
"""
_CAPTURE = """
select captured_at, unreadable, unreadable_count, commit_number
from budget_recovery.capture
where tenant = %(tenant)s
"""
_NEWEST_OF = f"{_CAPTURE} order by captured_at > %(latest)s, commit_number desc limit 1"
_NAMED_OF = f"{_CAPTURE} and captured_at = %(captured_at)s"
# For each window, as commit numbers: its newest record, and the newest that covers earlier ones.
# One that is dated in the future covers none.
_NUMBERS = """
    select r.budget_id, r.window_token,
           coalesce(
               max(p.commit_number) filter (where p.captured_at <= %(latest)s),
               max(p.commit_number)
           ) as newest,
           max(p.commit_number) filter (
               where p.captured_at <= %(latest)s and r.covers_earlier
           ) as since
"""
# For a restore: also the newest record that has a shape, and the newest one that knows whether
# there was a leaderboard.
_DESCRIBED = """,
           coalesce(
               max(p.commit_number) filter (
                   where p.captured_at <= %(latest)s and r.value_shape = any(%(shapes)s)
               ),
               max(p.commit_number) filter (where r.value_shape = any(%(shapes)s))
           ) as shaped,
           coalesce(
               max(p.commit_number) filter (
                   where p.captured_at <= %(latest)s and r.has_board is not null
               ),
               max(p.commit_number) filter (where r.has_board is not null)
           ) as boarded
"""
_OF_TENANT = """
    from budget_recovery.budget_record r
    join budget_recovery.capture p on p.tenant = r.tenant and p.captured_at = r.captured_at
    where r.tenant = %(tenant)s
"""
# Only the token decides whether a window is open, so damage to the stored start or end hides
# nothing.
_BY_TOKENS = """
      and r.window_token = any(%(tokens)s)
    group by r.budget_id, r.window_token
)
"""
# For a capture, which writes no keys.
_WITHOUT_SHAPES = """
select w.budget_id, w.window_token, p.captured_at, w.since, null as value_shape, null as has_board
from w
join budget_recovery.capture p on p.commit_number = w.newest
"""
_CURRENT_WINDOWS = f"with w as ({_NUMBERS}{_OF_TENANT}{_BY_TOKENS}{_WITHOUT_SHAPES}"
# For a restore: also the shape, and whether there was a leaderboard.
_WITH_SHAPES = """
select w.budget_id, w.window_token, p.captured_at, w.since, s.value_shape, b.has_board
from w
join budget_recovery.capture p on p.commit_number = w.newest
left join budget_recovery.capture sp on sp.commit_number = w.shaped
left join budget_recovery.budget_record s
  on s.tenant = sp.tenant
 and s.budget_id = w.budget_id
 and s.window_token = w.window_token
 and s.captured_at = sp.captured_at
left join budget_recovery.capture bp on bp.commit_number = w.boarded
left join budget_recovery.budget_record b
  on b.tenant = bp.tenant
 and b.budget_id = w.budget_id
 and b.window_token = w.window_token
 and b.captured_at = bp.captured_at
"""
_IN_ORDER = "order by w.budget_id, w.window_token"
# A closed window belongs to the point if the newest snapshot has it.
_WINDOWS = f"""
with w as ({_NUMBERS}{_DESCRIBED}{_OF_TENANT}{_BY_TOKENS}{_WITH_SHAPES}
where w.window_token = any(%(current)s) or w.newest = %(newest)s
{_IN_ORDER}
"""
_OF_SNAPSHOT = """
      and (r.budget_id, r.window_token) in (
          select budget_id, window_token
          from budget_recovery.budget_record
          where tenant = %(tenant)s and captured_at = %(captured_at)s
      )
    group by r.budget_id, r.window_token
), w as (
    select budget_id, window_token, %(number)s::bigint as newest, shaped, boarded,
           %(number)s::bigint as since
    from numbers
)
"""
_WINDOWS_OF_SNAPSHOT = f"""
with numbers as ({_NUMBERS}{_DESCRIBED}{_OF_TENANT}{_OF_SNAPSHOT}{_WITH_SHAPES}{_IN_ORDER}
"""
# From the newest snapshot to the first with an intact record. It is among the newest, unless the
# tenant has no open window. `offset 0` makes the server verify in this order: usually one content
# of each tenant.
_NEWEST_POINTS = """
select t.tenant, newest.captured_at
from (select distinct tenant from budget_recovery.capture) t
cross join lateral (
    select c.captured_at
    from (
        select captured_at, captured_at > %(latest)s as is_ahead, commit_number
        from budget_recovery.capture
        where tenant = t.tenant
        order by is_ahead, commit_number desc
        offset 0
    ) c
    where exists (
        select
        from budget_recovery.budget_record r
        where r.tenant = t.tenant
          and r.captured_at = c.captured_at
          and r.window_token = any(%(tokens)s)
          and budget_recovery.is_stored_intact(r.content_id)
    )
    order by c.is_ahead, c.commit_number desc
    limit 1
) newest
order by t.tenant
"""
# The records of open windows since the covering one. Narrow rows only: the server verifies each
# content, so none is transferred.
_USED = """
with w as (
    select r.tenant, r.budget_id, r.window_token,
           max(p.commit_number) filter (
               where r.covers_earlier and p.captured_at <= %(latest)s
           ) as since
    from budget_recovery.budget_record r
    join budget_recovery.capture p on p.tenant = r.tenant and p.captured_at = r.captured_at
    where r.window_token = any(%(tokens)s)
      and (%(tenant)s::text is null or r.tenant = %(tenant)s)
    group by r.tenant, r.budget_id, r.window_token
), used as (
    select w.tenant, w.budget_id, w.window_token, r.content_id
    from w
    cross join lateral (
        select captured_at
        from budget_recovery.capture
        where tenant = w.tenant and commit_number >= coalesce(w.since, 0)
        offset 0
    ) p
    cross join lateral (
        select content_id
        from budget_recovery.budget_record
        where tenant = w.tenant
          and budget_id = w.budget_id
          and window_token = w.window_token
          and captured_at = p.captured_at
        offset 0
    ) r
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
            scope: dict[str, Any] = {"tenant": tenant, "latest": latest_time(now)}
            row = connection.execute(_NEWEST_OF, scope).fetchone()
            if row is None:
                return None
            captured_at, *_, newest = row
            recorded = read_resets(connection, tenant)
            current = tokens_at(now)
            scope |= {
                "tokens": list(current | tokens_at(captured_at)),
                "current": list(current),
                "newest": newest,
            }
            windows, spans = self._find_windows(connection, _WINDOWS, scope, recorded, now)
            _read_all_spans(connection, tenant, windows, spans)
            _add_expiries(connection, tenant, windows)
            if self.heeds_resets and recorded:
                for key, reset in read_keeping_out(connection, tenant, windows):
                    windows[key].add_excluding(reset)
            return _point(connection, tenant, row, windows)

    def snapshot_of(self, tenant: str, captured_at: datetime) -> TenantPoint | None:
        """Read the records of one snapshot of a tenant, and no others; None: there is none."""
        with self._database.reading() as connection:
            now = self._database.time_on(connection)
            scope = {"tenant": tenant, "captured_at": captured_at, "latest": latest_time(now)}
            row = connection.execute(_NAMED_OF, scope).fetchone()
            if row is None:
                return None
            number = row[-1]
            scope["number"] = number
            recorded = read_resets(connection, tenant)
            try:
                windows, _ = self._find_windows(
                    connection, _WINDOWS_OF_SNAPSHOT, scope, recorded, now
                )
            except InvalidWindowError as error:
                raise DatabaseError(
                    f"The snapshot of tenant {tenant!r} of {captured_at.astimezone(UTC)} is"
                    f" damaged: {error}.",
                    "choose another snapshot, or `latest`.",
                ) from error
            spans = dict.fromkeys(windows, Span(number, number))
            _add_records(connection, tenant, windows, spans, _RECORDS_WITHOUT_EXPIRIES)
            _add_expiries(connection, tenant, windows)
            return _point(connection, tenant, row, windows)

    def despite_resets(self) -> "PostgresRecoveryPoints":
        """Return the same points as if no reset had been recorded."""
        return PostgresRecoveryPoints(self._database, heeds_resets=False)

    def current_usages(self, tenant: str, now: datetime) -> TenantUsages:
        """Read only the usages of a tenant's open windows, for the comparison in a capture."""
        scope = {"tenant": tenant, "tokens": list(tokens_at(now)), "latest": latest_time(now)}
        with self._database.reading() as connection:
            recorded = read_resets(connection, tenant)
            windows, spans = self._find_windows(connection, _CURRENT_WINDOWS, scope, recorded, now)
            _read_all_spans(connection, tenant, windows, spans, _RECORDS_WITHOUT_EXPIRIES)
        merged = (window.merged(None) for window in windows.values())
        return {window.of: window.usages for window in merged if window.usages}

    def newest_points(self, now: datetime) -> Mapping[str, datetime]:
        """Return the time of each tenant's newest intact record of a window open at ``now``."""
        scope = {"tokens": list(tokens_at(now)), "latest": latest_time(now)}
        rows = self._database.rows(_NEWEST_POINTS, scope)
        return {tenant: captured_at.astimezone(UTC) for tenant, captured_at in rows}

    def damaged(
        self, now: datetime, *, tenant: str | None = None, within: timedelta | None = None
    ) -> Damage:
        """Count the damaged records of open windows; the server verifies the contents."""
        scope: dict[str, Any] = {
            "tokens": list(tokens_at(now)),
            "latest": latest_time(now),
            "tenant": tenant,
        }
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
        now: datetime,
    ) -> tuple[Windows, Spans]:
        """Return windows, and the records to read of each."""
        heeded, ignored = (recorded, ()) if self.heeds_resets else ((), recorded)
        windows: Windows = {}
        spans: dict[WindowKey, Span] = {}
        rows = connection.execute(query, {**scope, "shapes": _SHAPES})
        for budget, token, last, since, shape, has_board in rows:
            of = BudgetWindow(budget, Window.parse(token))
            windows[budget, token] = WindowMerge(
                of,
                now=now,
                newest_at=last.astimezone(UTC),
                shape=shape and ValueShape(shape),
                has_board=has_board,
                resets=heeded,
            )
            # A covering record covers only the usages that were eligible at its capture.
            spans[budget, token] = EVERYTHING if concerning(of, ignored) else Span(since, None)
        return windows, spans


def read_newest_point_time(connection: Connection, now: datetime) -> datetime | None:
    """Return the time of the newest snapshot of any tenant that is not completely damaged."""
    row = connection.execute(_NEWEST, {"latest": latest_time(now)}).fetchone()
    return None if row is None else row[0].astimezone(UTC)


_SHAPES = [shape.value for shape in ValueShape]


def _point(
    connection: Connection, tenant: str, capture: tuple[Any, ...], windows: Windows
) -> TenantPoint:
    captured_at, unreadable, unreadable_count, _ = capture
    return TenantPoint(
        tenant=tenant,
        newest_at=captured_at.astimezone(UTC),
        windows=_finish(connection, tenant, windows),
        unreadable=tuple(UnreadableKey(**each) for each in unreadable),
        unreadable_count=unreadable_count,
    )
