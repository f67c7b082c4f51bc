"""SQL of version 2, which changes tables and views of version 1.

Names compare byte by byte (COLLATE "C"), as in ``v1_snapshots``.
"""

# Numbers are given out under the lock on the store's row, so they rise in the order of commits.
# The rows of version 1 get theirs in the order of their times: the database knows no other.
COMMITS = """
alter table budget_recovery.capture add column commit_number bigint;
update budget_recovery.capture c
set commit_number = numbered.position
from (
    select tenant, captured_at,
           row_number() over (order by stored_at, captured_at, tenant) as position
    from budget_recovery.capture
) numbered
where c.tenant = numbered.tenant and c.captured_at = numbered.captured_at;
alter table budget_recovery.capture
    alter column commit_number set not null,
    alter column commit_number add generated always as identity;
select setval(pg_get_serial_sequence('budget_recovery.capture', 'commit_number'), newest)
from (select max(commit_number) as newest from budget_recovery.capture) c
where newest is not null;
create unique index capture_commit_number on budget_recovery.capture (commit_number);
-- A tenant's newest snapshots.
create index capture_tenant_commit on budget_recovery.capture (tenant, commit_number);
comment on column budget_recovery.capture.commit_number is
    'Ascending in the order of commits, whatever the clocks show. Newest, covering and resets '
    'compare it, not captured_at.';

alter table budget_recovery.budget_reset add column last_excluded bigint;
update budget_recovery.budget_reset s
set last_excluded = coalesce(
    (
        select max(c.commit_number)
        from budget_recovery.capture c
        where c.tenant = s.tenant and c.captured_at <= s.at and c.stored_at <= s.recorded_at
    ),
    0
);
alter table budget_recovery.budget_reset
    alter column last_excluded set not null,
    add constraint reset_last_excluded_is_not_negative check (last_excluded >= 0);
comment on column budget_recovery.budget_reset.last_excluded is
    'The commit_number of the last snapshot, of those stored before the reset, whose usages are '
    'not used; 0: none. See reset_excludes.';
comment on column budget_recovery.budget_reset.at is
    'When the counters were low, as the operator said, or when the reset was recorded.';
"""

EXCLUDES = """
create function budget_recovery.reset_excludes(
    last_excluded bigint, at timestamptz, recorded_at timestamptz,
    commit_number bigint, captured_at timestamptz, stored_at timestamptz
) returns boolean
language sql immutable parallel safe
return commit_number <= last_excluded or (captured_at <= at and stored_at >= recorded_at);
comment on function budget_recovery.reset_excludes is
    'Whether a reset (first three) excludes usages of a snapshot (last three): one up to '
    'last_excluded, or one that was being captured while the reset was recorded.';
"""

# As in version 1, but in the order of commits. Of the records that share a content the last
# commit is enough, since resets never exclude it before the others.
POINT = """
create or replace view budget_recovery.recovery_point as
select r.tenant, r.budget_id, r.window_token, nullif(e.entity, '') as entity,
       max(e.usage) as usage,
       (array_agg(
           p.captured_at
           order by p.captured_at > now() + interval '1 minute', p.commit_number desc
       ))[1] as last_captured_at
from (
    select r.tenant, r.budget_id, r.window_token, r.content_id,
           max(p.commit_number) as commit_number
    from budget_recovery.budget_record r
    join budget_recovery.capture p on p.tenant = r.tenant and p.captured_at = r.captured_at
    where r.window_token in (
        to_char(now() at time zone 'UTC', 'YYYY-MM-DD'),
        to_char(now() at time zone 'UTC', 'IYYY-"W"IW'),
        to_char(now() at time zone 'UTC', 'YYYY-MM'),
        to_char(now() at time zone 'UTC', 'YYYY-"Q"Q'),
        'lifetime'
    )
    group by r.tenant, r.budget_id, r.window_token, r.content_id
) r
join budget_recovery.capture p on p.commit_number = r.commit_number
cross join lateral (
    select c.entities, c.usages
    from budget_recovery.budget_content c
    where c.content_id = r.content_id
      and budget_recovery.content_is_intact(c.content_hash, c.entities, c.usages)
    offset 0
) c
cross join lateral unnest(c.entities, c.usages) as e (entity, usage)
where not exists (
    select from budget_recovery.budget_reset s
    where s.tenant = r.tenant
      and s.budget_id = r.budget_id
      and (s.window_token is null or s.window_token = r.window_token)
      and budget_recovery.reset_excludes(
          s.last_excluded, s.at, s.recorded_at, p.commit_number, p.captured_at, p.stored_at
      )
      and (s.of_everyone or coalesce(s.entity, '') = e.entity)
)
group by r.tenant, r.budget_id, r.window_token, e.entity;
comment on column budget_recovery.recovery_point.last_captured_at is
    'The newest intact record that has this entity in this window and that no reset excludes; one '
    'dated in the future only if there is no other.';
"""

DISCARDED = """
create table budget_recovery.discarded_capture (
    commit_number bigint primary key,
    tenant text collate "C" not null,
    captured_at timestamptz not null,
    stored_at timestamptz not null,
    run_id text collate "C" not null,
    record_count integer not null,
    entry_count bigint not null,
    discarded_at timestamptz not null,
    discarded_by text not null,
    reason text not null
);
comment on table budget_recovery.discarded_capture is
    'Snapshots dated in the future that an operator discarded. Rows are never changed or removed.';
comment on column budget_recovery.discarded_capture.commit_number is
    'The number that the snapshot had; it is not given out again.';
comment on column budget_recovery.discarded_capture.captured_at is
    'The time of the snapshot, by a clock that was wrong.';
comment on column budget_recovery.discarded_capture.stored_at is
    'When the snapshot was stored here, by a clock that was wrong.';
comment on column budget_recovery.discarded_capture.run_id is
    'The Dagster run that stored the snapshot.';
comment on column budget_recovery.discarded_capture.record_count is 'Captured budgets and windows.';
comment on column budget_recovery.discarded_capture.entry_count is 'Captured counters.';
comment on column budget_recovery.discarded_capture.discarded_at is
    'When it was discarded, by this server''s clock.';
comment on column budget_recovery.discarded_capture.discarded_by is 'Who discarded it.';
comment on column budget_recovery.discarded_capture.reason is 'Why, for people.';
"""

BLOCKS: tuple[str, ...] = (
    COMMITS,
    EXCLUDES,
    POINT,
    DISCARDED,
)
"""In the order of their execution."""
