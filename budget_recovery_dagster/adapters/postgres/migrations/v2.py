"""SQL of version 2, which changes tables and views of version 1.

Names compare byte by byte (COLLATE "C"), as in ``v1_snapshots``.
"""

# Never pruned: about one row an hour. An id is random, so that a database that was restored from a
# backup never gives an id a second time.
LANDMARK = """
create table budget_recovery.landmark (
    position bigint generated always as identity primary key,
    landmark_id text collate "C" not null unique default gen_random_uuid()::text,
    at timestamptz not null,
    kind text collate "C" not null,
    about text collate "C",
    deployment_id text collate "C" not null,
    marker_number bigint not null,
    store_created_at timestamptz,
    constraint landmark_kind_is_known check (
        kind in (
            'capture', 'reset', 'incident_opened', 'incident_closed', 'acceptance',
            'renewals_lost'
        )
    ),
    constraint landmark_number_is_not_negative check (marker_number >= 0)
);
-- A run of captures has one landmark.
create unique index landmark_of_capture on budget_recovery.landmark (about)
where kind = 'capture';
comment on table budget_recovery.landmark is
    'Events that an older copy of this database lacks. Our marker in the store names the newest '
    'one, so the store shows whether the database went back. Never pruned.';
comment on column budget_recovery.landmark.position is 'Ascending in the order of recording.';
comment on column budget_recovery.landmark.landmark_id is 'A random id, which a marker names.';
comment on column budget_recovery.landmark.at is 'When the event was recorded.';
comment on column budget_recovery.landmark.kind is
    'capture (a run), reset, incident_opened, incident_closed, acceptance (of a store), or '
    'renewals_lost: the database had lost renewals of the marker and nothing else.';
comment on column budget_recovery.landmark.about is
    'The run of a capture or the id of an incident; null: nothing further.';
comment on column budget_recovery.landmark.deployment_id is
    'The installation, in case the row of the store is lost.';
comment on column budget_recovery.landmark.marker_number is
    'The highest number of a marker at that time, in case the row of the store is lost.';
comment on column budget_recovery.landmark.store_created_at is
    'When the accepted store was created; null: the event says nothing about it.';
"""

# Markers of version 1 have no number; 0 stands for that. The age limit at their writing is unknown:
# null, as for a marker that never expires, so at worst a restore finds that nothing was lost.
IDENTITY = """
alter table budget_recovery.store
    add column given_number bigint not null default 0,
    add column given_nonce text collate "C",
    add column marker_number bigint not null default 0,
    add column marker_keeps_for interval,
    add column intended_number bigint not null default 0,
    add column intended_landmark text collate "C",
    add column seen_at timestamptz,
    add column other_markers text[] collate "C",
    add constraint store_numbers_are_in_order check (
        0 <= marker_number and marker_number <= given_number
        and 0 <= intended_number and intended_number <= given_number
    );
comment on column budget_recovery.store.given_number is
    'The highest number that was given to a marker; 0: none.';
comment on column budget_recovery.store.given_nonce is 'The nonce of the marker with that number.';
comment on column budget_recovery.store.marker_number is
    'The number of our last marker in the store; 0: it has none.';
comment on column budget_recovery.store.marker_keeps_for is
    'The age at which the store drops our last marker, as of its writing; null: never.';
comment on column budget_recovery.store.intended_number is 'The number of the intended marker.';
comment on column budget_recovery.store.intended_landmark is
    'The landmark that the intended marker names; null: none.';
comment on column budget_recovery.store.seen_at is
    'The time of the last good observation by the clock of the stream''s leader.';
comment on column budget_recovery.store.other_markers is
    'Other installations with a marker in the store at that time; null: unknown.';

alter table budget_recovery.incident
    add column target_marker_number bigint not null default 0,
    add column target_marker_keeps_for interval,
    add column target_intended_number bigint not null default 0,
    add column target_intended_landmark text collate "C",
    add column target_seen_at timestamptz,
    add column target_other_markers text[] collate "C",
    drop constraint incident_outcome_is_known,
    add constraint incident_outcome_is_known check (
        outcome in (
            'restored', 'restored_in_part', 'nothing_lost', 'nothing_current', 'returned',
            'restored_manually', 'accepted'
        )
    );
comment on column budget_recovery.incident.target_marker_number is
    'The restore target: the number of our marker in it.';
comment on column budget_recovery.incident.target_marker_keeps_for is
    'The restore target: the age at which it drops our marker; null: never.';
comment on column budget_recovery.incident.target_intended_number is
    'The restore target: the number of the intended marker.';
comment on column budget_recovery.incident.target_intended_landmark is
    'The restore target: the landmark that the intended marker names.';
comment on column budget_recovery.incident.target_seen_at is
    'The restore target: when it was observed, by the clock of its leader.';
comment on column budget_recovery.incident.target_other_markers is
    'The restore target: other installations with a marker in it; null: unknown.';
comment on column budget_recovery.incident.outcome is
    'How it ended: restored, restored_in_part, nothing_lost, nothing_current, returned, '
    'restored_manually or accepted.';
"""

VERDICT = """
comment on table budget_recovery.store_check is
    'Comparisons of the store with the baseline: all checks of the sensor, the losses that '
    'captures and restores found, and the new baseline after each recovery. Kept for 30 days, and '
    'the newest 1,000 in any case; the newest check that found the store intact is kept longer.';
alter table budget_recovery.store_loss
    add column evidence text collate "C",
    drop constraint loss_verdict_is_known;
update budget_recovery.store_loss
set evidence = case verdict
        when 'recreated' then case when after_created_at is null then 'gone' else 'recreated' end
        when 'regressed' then 'sequence_back'
        else 'marker_gone'
    end,
    verdict = 'lost';
alter table budget_recovery.store_loss
    add constraint loss_verdict_is_known check (
        verdict in ('lost', 'database_behind', 'other_store')
    );
comment on column budget_recovery.store_loss.verdict is 'lost, database_behind or other_store.';
comment on column budget_recovery.store_loss.evidence is
    'What the verdict rests on: gone, recreated, sequence_back, older_copy, marker_gone, '
    'landmark_missing, number_ahead, former_store, foreign_marker or predates; null: observations '
    'of the store did not agree.';

alter table budget_recovery.store_check
    add column evidence text collate "C",
    drop constraint check_verdict_is_known;
update budget_recovery.store_check
set evidence = case verdict
        when 'recreated' then case when store_created_at is null then 'gone' else 'recreated' end
        when 'regressed' then 'sequence_back'
        when 'marker_lost' then 'marker_gone'
    end,
    verdict = case
        when verdict in ('unchanged', 'advanced') then 'same'
        when verdict in ('recreated', 'regressed', 'marker_lost') then 'lost'
        else verdict
    end;
alter table budget_recovery.store_check
    add constraint check_verdict_is_known check (
        verdict in ('unknown', 'first_seen', 'same', 'lost', 'database_behind', 'other_store')
    );
comment on column budget_recovery.store_check.verdict is
    'unknown, first_seen or same; or an alarm: lost, database_behind, other_store.';
comment on column budget_recovery.store_check.evidence is
    'What an alarm rests on, as in store_loss; or what is reported of the accepted store: '
    'marker_removed or marker_not_written.';
"""

# What version 1 knows of earlier stores and events. The order of the runs is that of their times.
FORMER = """
insert into budget_recovery.landmark (
    at, kind, about, deployment_id, marker_number, store_created_at
)
select min(c.captured_at), 'capture', c.run_id, s.deployment_id, 0, min(c.store_created_at)
from budget_recovery.capture c, budget_recovery.store s
group by c.run_id, s.deployment_id
order by min(c.captured_at);
insert into budget_recovery.landmark (at, kind, deployment_id, marker_number, store_created_at)
select clock_timestamp(), 'acceptance', deployment_id, 0, baseline_created_at
from budget_recovery.store
where baseline_created_at is not null;
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
# commit is enough, since resets never exclude it before the others. The resets of entities are a
# condition of their own, so that the server can hash them.
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
      and not exists (
          select from budget_recovery.budget_reset s
          where s.tenant = r.tenant
            and s.budget_id = r.budget_id
            and s.of_everyone
            and (s.window_token is null or s.window_token = r.window_token)
            and budget_recovery.reset_excludes(
                s.last_excluded, s.at, s.recorded_at, p.commit_number, p.captured_at, p.stored_at
            )
      )
    offset 0
) c
cross join lateral unnest(c.entities, c.usages) as e (entity, usage)
where not exists (
    select from budget_recovery.budget_reset s
    where s.tenant = r.tenant
      and s.budget_id = r.budget_id
      and coalesce(s.entity, '') = e.entity
      and not s.of_everyone
      and (s.window_token is null or s.window_token = r.window_token)
      and budget_recovery.reset_excludes(
          s.last_excluded, s.at, s.recorded_at, p.commit_number, p.captured_at, p.stored_at
      )
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

# Nothing is known of leaderboards in snapshots of version 1: null.
BOARD = """
alter table budget_recovery.budget_record add column has_board boolean;
comment on column budget_recovery.budget_record.has_board is
    'Whether the gateway kept a leaderboard of this window, so that a restore may create one; '
    'null: unknown.';
"""

# Version 1 recorded the longest expiry of a window's keys, and null if any key has none. So null is
# unknown there. A content has the expiries of its keys only if they differ, so that most hours cost
# no more than before. The hash is that of Python's hash_expiries.
EXPIRY = """
alter table budget_recovery.budget_record add column never_expires boolean;
comment on column budget_recovery.budget_record.expiry_seconds is
    'When the store drops every key of it: seconds after the window''s end or, for a lifetime, '
    'after its last write; null: see never_expires.';
comment on column budget_recovery.budget_record.never_expires is
    'Without expiry_seconds, whether none of its keys expires; false: they differ, see '
    'budget_content.expiries; null: unknown.';
alter table budget_recovery.budget_content
    add column expiries bigint[],
    add column expiry_hash bytea,
    add constraint content_expiries_are_whole check (
        num_nulls(expiries, expiry_hash) in (0, 2)
        and (
            expiries is null
            or coalesce(array_ndims(expiries), 1) = 1
            and cardinality(expiries) = cardinality(entities)
            and octet_length(expiry_hash) = 32
        )
    );
comment on column budget_recovery.budget_content.expiries is
    'When the store drops the keys, in the order of entities, if that differs between them: as '
    'budget_record.expiry_seconds; null inside: never.';
comment on column budget_recovery.budget_content.expiry_hash is
    'SHA-256 of the sorted entities with their expiries; see expiries_are_intact.';
create function budget_recovery.expiries_are_intact(
    expiry_hash bytea, entities text[], expiries bigint[]
) returns boolean
language sql immutable parallel safe cost 10000
return coalesce(
    num_nulls(expiry_hash, expiries) = 2
    or cardinality(entities) = cardinality(expiries)
    and coalesce(array_ndims(entities), 1) = 1
    and coalesce(array_ndims(expiries), 1) = 1
    and expiry_hash = (
        select sha256(convert_to(
            coalesce(
                string_agg(
                    octet_length(e.entity)::text || ':' || e.entity || '='
                        || coalesce(e.expiry::text, 'never') || ';',
                    '' order by e.entity collate "C"
                ),
                ''
            ),
            'UTF8'
        ))
        from unnest(entities, expiries) as e (entity, expiry)
    ),
    false
);
comment on function budget_recovery.expiries_are_intact is
    'Whether the expiries of a content match their hash. If they do not, they are unknown.';
"""

# Rows of version 1 that name all their drops have the sum in them.
DROP_USAGE = """
alter table budget_recovery.capture add column drop_usage numeric;
update budget_recovery.capture c
set drop_usage = (
    select coalesce(
        sum((d.value ->> 'before')::numeric - coalesce((d.value ->> 'after')::numeric, 0)), 0
    )
    from jsonb_array_elements(c.drops) as d (value)
)
where c.drop_count = jsonb_array_length(c.drops);
alter table budget_recovery.capture add constraint capture_drop_usage_is_in_bounds check (
    drop_usage >= 0 and drop_usage < 1e38
);
comment on column budget_recovery.capture.drop_usage is
    'The usage that the store lacked in all these counters; null: unknown, because version 1 did '
    'not store it.';
comment on column budget_recovery.capture.drops is
    'Those with the largest missing usage: [{"budget", "window", "entity", "before", "after"}]; '
    'after null: missing. Version 1 stored the first ones by name.';
"""

# What is missing from a store whose identity is unchanged.
FALLS = """
create table budget_recovery.key_count (
    tenant text collate "C" not null,
    budget_id text collate "C" not null,
    window_token text collate "C" not null,
    keys bigint not null,
    sequence numeric(20) not null,
    counted_at timestamptz not null,
    missing bigint not null,
    missing_since timestamptz,
    is_outdated boolean not null,
    primary key (tenant, budget_id, window_token),
    constraint key_count_is_not_negative check (least(keys, missing) >= 0),
    constraint key_count_missing_has_a_time check ((missing > 0) = (missing_since is not null)),
    constraint key_count_sequence_is_uint64 check (
        sequence between 0 and 18446744073709551615
    )
);
comment on table budget_recovery.key_count is
    'How many keys of counters each open budget and window has in the store. A capture of the '
    'tenant replaces its rows, checks update them.';
comment on column budget_recovery.key_count.tenant is 'The tenant.';
comment on column budget_recovery.key_count.budget_id is 'The budget.';
comment on column budget_recovery.key_count.window_token is 'The window.';
comment on column budget_recovery.key_count.keys is
    'Keys at the last count, with delete marks; of leaderboards, their entries.';
comment on column budget_recovery.key_count.sequence is
    'The store''s sequence before the capture read, which accounts for all deletions up to it.';
comment on column budget_recovery.key_count.counted_at is 'When they were last counted.';
comment on column budget_recovery.key_count.missing is
    'Counters that checks found gone since the tenant''s newest snapshot.';
comment on column budget_recovery.key_count.missing_since is
    'When the last of them were found gone; null: none is.';
comment on column budget_recovery.key_count.is_outdated is
    'Whether an incident ended since the count, so that it is of the store before.';

alter table budget_recovery.store add column deletions_until numeric(20);
alter table budget_recovery.store add constraint store_deletions_until_is_uint64 check (
    deletions_until between 0 and 18446744073709551615
);
comment on column budget_recovery.store.deletions_until is
    'The sequence up to which checks have read deletions of counters; null: none was read, or '
    'an incident ended since.';

create table budget_recovery.usage_fall (
    tenant text collate "C" not null,
    budget_id text collate "C" not null,
    window_token text collate "C" not null,
    found_at timestamptz not null,
    judged_at timestamptz not null,
    counters bigint not null,
    usage numeric not null,
    ended_at timestamptz,
    outcome text collate "C",
    primary key (tenant, budget_id, window_token, found_at),
    constraint fall_counts_are_in_bounds check (counters > 0 and usage >= 0 and usage < 1e38),
    constraint fall_end_is_whole check (num_nulls(ended_at, outcome) in (0, 2)),
    constraint fall_outcome_is_known check (
        outcome in ('restored', 'reset', 'window_ended', 'discarded')
    )
);
-- At most one of a budget and window is open.
create unique index usage_fall_open on budget_recovery.usage_fall (tenant, budget_id, window_token)
where ended_at is null;
comment on table budget_recovery.usage_fall is
    'Counters of a budget and window that were missing from the store or lower than in snapshots, '
    'while the store kept its identity. Open until they are as high as before, a reset covers '
    'them, the window ends, or the snapshots that alone held the missing usage are discarded; then '
    'kept for 30 days.';
comment on column budget_recovery.usage_fall.tenant is 'The tenant.';
comment on column budget_recovery.usage_fall.budget_id is 'The budget.';
comment on column budget_recovery.usage_fall.window_token is 'The window.';
comment on column budget_recovery.usage_fall.found_at is 'The snapshot that found it.';
comment on column budget_recovery.usage_fall.judged_at is 'The newest snapshot that compared it.';
comment on column budget_recovery.usage_fall.counters is
    'Counters that were missing or lower at judged_at, without those that only discarded '
    'snapshots held.';
comment on column budget_recovery.usage_fall.usage is
    'The usage that the store lacked in them: of the entities, or of the aggregate if that is '
    'more.';
comment on column budget_recovery.usage_fall.ended_at is
    'The snapshot that found it ended, or when snapshots were discarded; null: it is open, or its '
    'window has ended since.';
comment on column budget_recovery.usage_fall.outcome is
    'restored, reset, window_ended, or discarded: the snapshots that alone held the missing usage '
    'were discarded before a capture found it restored.';

create table budget_recovery.bucket_configuration (
    number bigint generated always as identity primary key,
    found_at timestamptz not null,
    settings jsonb not null,
    constraint configuration_is_an_object check (jsonb_typeof(settings) = 'object')
);
comment on table budget_recovery.bucket_configuration is
    'What the bucket keeps by its configuration; a row for each change, kept for 30 days.';
comment on column budget_recovery.bucket_configuration.number is
    'Ascending in the order of recording, which a wrong clock does not disturb.';
comment on column budget_recovery.bucket_configuration.found_at is
    'The check that found this configuration.';
comment on column budget_recovery.bucket_configuration.settings is
    'Its settings by name, as text.';
"""


# Ordered by number, which no wrong clock can disturb. The capture lease is held when a number is
# given out, so a higher number belongs to the later capture.
CAPTURE_RUN = """
create table budget_recovery.capture_run (
    number bigint generated always as identity primary key,
    run_id text collate "C" not null,
    hour timestamptz not null,
    started_at timestamptz not null,
    ended_at timestamptz,
    outcome text collate "C",
    stored bigint,
    absent bigint,
    failed bigint,
    code text collate "C",
    reason text,
    hint text,
    clock_skew interval,
    constraint capture_run_is_whole check (
        num_nulls(ended_at, outcome, stored, absent, failed) in (0, 5)
    ),
    constraint capture_run_outcome_is_known check (
        outcome in ('stored', 'stored_in_part', 'nothing_to_store', 'failed')
    ),
    constraint capture_run_reason_is_whole check (num_nulls(code, reason, hint) in (0, 3))
);
create index capture_run_run_id on budget_recovery.capture_run (run_id);
create index capture_run_started_at on budget_recovery.capture_run (started_at);
comment on table budget_recovery.capture_run is
    'Captures of the current hour and how they ended, also those that stored nothing; kept for 30 '
    'days, and the newest 168 in any case. Captures that were refused or skipped because captures '
    'are paused are not listed.';
comment on column budget_recovery.capture_run.hour is 'The UTC hour that was to be captured.';
comment on column budget_recovery.capture_run.ended_at is
    'Null: it is running, or its process died.';
comment on column budget_recovery.capture_run.stored is 'Tenants whose snapshot was stored.';
comment on column budget_recovery.capture_run.absent is
    'Tenants that were read, had nothing in the store, and of which nothing was expected.';
comment on column budget_recovery.capture_run.failed is 'Tenants that were not captured.';
comment on column budget_recovery.capture_run.code is
    'The code of the error that ended the run or made most tenants fail; null: none did.';
comment on column budget_recovery.capture_run.clock_skew is
    'How far the clock of the store was ahead of that of the database; null: not measured.';

create table budget_recovery.tenant_outcome (
    tenant text collate "C" primary key,
    outcome text collate "C" not null,
    at timestamptz not null,
    run_number bigint,
    reason text,
    hint text,
    constraint tenant_outcome_is_known check (outcome in ('stored', 'absent', 'failed')),
    constraint tenant_outcome_reason_is_of_a_failure check (
        num_nulls(reason, hint) = case when outcome = 'failed' then 0 else 2 end
    )
);
create index tenant_outcome_at on budget_recovery.tenant_outcome (at);
comment on table budget_recovery.tenant_outcome is
    'How the last capture of each tenant ended. Removed once older than retention.';
comment on column budget_recovery.tenant_outcome.outcome is
    'stored; absent: the tenant was read and had nothing in the store, and nothing was expected; '
    'failed: it was not captured.';
comment on column budget_recovery.tenant_outcome.run_number is
    'The run in capture_run; null: older than that table.';
insert into budget_recovery.tenant_outcome (tenant, outcome, at, reason, hint)
select distinct on (tenant) tenant, outcome, at, reason, hint
from (
    select tenant, 'stored' as outcome, max(stored_at) as at, null as reason, null as hint
    from budget_recovery.capture
    group by tenant
    union all
    select name, 'failed', failed_at, reason, hint
    from budget_recovery.capture_failure
    where kind = 'tenant'
) ended
order by tenant, at desc, outcome desc;
"""

# A reset of many entities has a row for each, which older readers understand, too.
RESET_BATCH = """
alter table budget_recovery.budget_reset add column batch uuid;
comment on column budget_recovery.budget_reset.batch is
    'The same in all rows of one reset of several entities; null: the row is a reset of its own.';
"""

BLOCKS: tuple[str, ...] = (
    LANDMARK,
    IDENTITY,
    VERDICT,
    FORMER,
    COMMITS,
    EXCLUDES,
    POINT,
    DISCARDED,
    BOARD,
    EXPIRY,
    DROP_USAGE,
    FALLS,
    CAPTURE_RUN,
    RESET_BATCH,
)
"""In the order of their execution."""
