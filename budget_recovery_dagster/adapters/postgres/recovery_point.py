"""The one reader of recovery points."""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import KW_ONLY, dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, LiteralString, NamedTuple

from budget_recovery_dagster.adapters.postgres.contents import (
    Contents,
    TimeUpError,
    Verification,
    stream_contents,
)
from budget_recovery_dagster.adapters.postgres.database import Connection, Database
from budget_recovery_dagster.adapters.postgres.resets import (
    WindowKey,
    as_commit,
    read_keeping_out,
    read_resets,
    window_scope,
)
from budget_recovery_dagster.domain.counters import (
    BudgetWindow,
    OmittedCounter,
    TenantUsages,
    UnreadableKey,
    ValueShape,
)
from budget_recovery_dagster.domain.recovery_point import (
    Damage,
    RecordMarks,
    Reset,
    TenantPoint,
    WindowMerge,
    WindowPoint,
    concerning,
    latest_time,
)
from budget_recovery_dagster.domain.snapshots import CaptureSource, Commit
from budget_recovery_dagster.domain.windows import InvalidWindowError, Window, tokens_at
from budget_recovery_dagster.errors import DatabaseError

# Narrow rows only; the wide contents follow by id, each once. ``oldest`` is the least of all since:
# with it, the server begins with the few snapshots that count, and not with all records.
_CAPTURES_SINCE = """
with p as (
    select commit_number, captured_at, stored_at
    from budget_recovery.capture
    where tenant = %(tenant)s and commit_number >= %(oldest)s
      and captured_at <> all(%(without)s::timestamptz[])
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


class _Records(NamedTuple):
    """How records are read; ``without``: except those of snapshots of these times."""

    query: LiteralString
    without: Collection[datetime] = ()


_RECORDS = _Records(
    f"{_CAPTURES_SINCE}{_RECORD_COLUMNS} r.expiry_seconds, r.expiry_kind {_OF_SPANS}"
)
# For a comparison, which writes no keys, and for a point whose expiries come from newer records.
_RECORDS_WITHOUT_EXPIRIES = _Records(
    f"{_CAPTURES_SINCE}{_RECORD_COLUMNS} null::bigint, null::text {_OF_SPANS}"
)
# The records that know the expiries of their keys, the newest of each content first.
_WITH_EXPIRIES = """
select r.budget_id, r.window_token, max(p.commit_number), r.content_id, r.expiry_seconds,
       r.expiry_kind
from unnest(%(budgets)s::text[], %(windows)s::text[]) as w (budget_id, window_token)
join budget_recovery.budget_record r
  on r.tenant = %(tenant)s
 and r.budget_id = w.budget_id
 and r.window_token = w.window_token
join budget_recovery.capture p on p.tenant = r.tenant and p.captured_at = r.captured_at
where num_nonnulls(r.expiry_seconds, r.expiry_kind) > 0
group by r.budget_id, r.window_token, r.content_id, r.expiry_seconds, r.expiry_kind
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
    records: _Records = _RECORDS,
) -> None:
    """Add the records of ``spans``, and all others of a window if one of them is damaged.

    Records before a covering one need not be read. A damaged record covers nothing.
    """
    _add_records(connection, tenant, windows, spans, records)
    doubtful = {key: each for key, each in windows.items() if each.needs_all_records}
    _add_records(connection, tenant, doubtful, dict.fromkeys(doubtful, EVERYTHING), records)


def _add_records(
    connection: Connection,
    tenant: str,
    windows: Windows,
    spans: Spans,
    records: _Records = _RECORDS,
) -> None:
    wanted = [(key, spans[key]) for key in windows]
    if not wanted:
        return
    scope = window_scope(tenant, windows) | {
        "since": [span.since for _, span in wanted],
        "until": [span.until for _, span in wanted],
        "oldest": min(span.since or 0 for _, span in wanted),
        "without": list(records.without),
    }
    holders: defaultdict[int, list[tuple[WindowMerge, Commit, Any, Any]]] = defaultdict(list)
    # One object per commit: many counters share it.
    commits: dict[int, Commit] = {}
    for budget, token, content_id, number, *times_and_expiry in connection.execute(
        records.query, scope
    ):
        captured_at, stored_at, *expiry = times_and_expiry
        if number not in commits:
            commits[number] = as_commit(number, captured_at, stored_at)
        holders[content_id].append((windows[budget, token], commits[number], *expiry))
    # Ids rise with time: the newest contents come first, and older ones then change little.
    for content in stream_contents(connection, sorted(holders, reverse=True)):
        for window, commit, seconds, kind in holders[content.content_id]:
            window.add(commit, content.usages, content.expiries_in(seconds, kind))


def _add_expiries(connection: Connection, tenant: str, windows: Windows) -> None:
    """Look up the expiries that are unknown so far in all records, newest first."""
    lacking = [key for key, window in windows.items() if window.lacks_expiries]
    if not lacking:
        return
    knowing: defaultdict[WindowKey, list[tuple[Any, ...]]] = defaultdict(list)
    for budget, token, *record in connection.execute(_WITH_EXPIRIES, window_scope(tenant, lacking)):
        knowing[budget, token].append(tuple(record))
    for key, records in knowing.items():
        window, content_ids = windows[key], [content_id for _, content_id, *_ in records]
        # An open stream locks the connection, and usually the first record knows everything.
        with closing(stream_contents(connection, content_ids)) as contents:
            for (number, _, seconds, kind), content in zip(records, contents, strict=True):
                window.add_expiries(number, content.expiries_in(seconds, kind))
                if not window.lacks_expiries:
                    break


def _finish(connection: Connection, tenant: str, windows: Windows) -> tuple[WindowPoint, ...]:
    """Return the points of windows whose records were read, with the marks of the newest ones."""
    marked = {
        key: window.newest_intact
        for key, window in windows.items()
        if window.newest_intact is not None
    }
    scope = window_scope(tenant, marked) | {"times": list(marked.values())}
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
_OLDEST_FAILING = """
select min(newest.captured_at)
from budget_recovery.tenant_outcome o
cross join lateral (
    select c.captured_at
    from budget_recovery.capture c
    where c.tenant = o.tenant
    order by c.captured_at > %(latest)s, c.commit_number desc
    limit 1
) newest
where o.outcome = 'failed'
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
# For a comparison, which writes no keys.
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

    def current_usages(
        self, tenant: str, now: datetime, *, without: Collection[datetime] = ()
    ) -> TenantUsages:
        """Read only the usages of a tenant's open windows, for comparisons.

        Snapshots ``without`` are in the future, so they cover no record that has to be read.
        """
        scope = {"tenant": tenant, "tokens": list(tokens_at(now)), "latest": latest_time(now)}
        with self._database.reading() as connection:
            recorded = read_resets(connection, tenant)
            windows, spans = self._find_windows(connection, _CURRENT_WINDOWS, scope, recorded, now)
            records = _RECORDS_WITHOUT_EXPIRIES._replace(without=without)
            _read_all_spans(connection, tenant, windows, spans, records)
        merged = (window.merged(None) for window in windows.values())
        return {window.of: window.usages for window in merged if window.usages}

    def newest_points(self, now: datetime) -> Mapping[str, datetime]:
        """Return the time of each tenant's newest intact record of a window open at ``now``."""
        scope = {"tokens": list(tokens_at(now)), "latest": latest_time(now)}
        rows = self._database.rows(_NEWEST_POINTS, scope)
        return {tenant: captured_at.astimezone(UTC) for tenant, captured_at in rows}

    def damaged(
        self,
        now: datetime,
        *,
        tenant: str | None = None,
        within: timedelta | None = None,
        on_progress: Callable[[str], None] = lambda _: None,
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
            verification = Verification(connection, within, on_progress)
            try:
                contents = verification.contents_of(_USED_CONTENTS, scope)
                verification.verify(contents)
                if verification.damaged:
                    scope["damaged"] = list(verification.damaged)
                    contents = verification.contents_of(_DOUBTFUL_CONTENTS, scope)
                    all_are_listed = True
                    verification.verify(contents)
            except TimeUpError:
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


def read_oldest_failing_time(connection: Connection, now: datetime) -> datetime | None:
    """Return the oldest of the newest snapshots of tenants whose last capture failed."""
    row = connection.execute(_OLDEST_FAILING, {"latest": latest_time(now)}).fetchone()
    return None if row is None or row[0] is None else row[0].astimezone(UTC)


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
