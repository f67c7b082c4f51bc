"""SQL of version 2, which changes tables and views of version 1.

Names compare byte by byte (COLLATE "C"), as in ``v1_snapshots``.
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
    primary key (tenant, budget_id, window_token),
    constraint key_count_is_not_negative check (least(keys, missing) >= 0),
    constraint key_count_missing_has_a_time check ((missing > 0) = (missing_since is not null)),
    constraint key_count_sequence_is_uint64 check (
        sequence between 0 and 18446744073709551615
    )
);
comment on table budget_recovery.key_count is
    'How many keys of counters each open budget and window has in the store. A capture of the '
    'tenant replaces its rows, checks update them. Rows of closed windows are removed.';
comment on column budget_recovery.key_count.tenant is 'The tenant.';
comment on column budget_recovery.key_count.budget_id is 'The budget.';
comment on column budget_recovery.key_count.window_token is 'The window.';
comment on column budget_recovery.key_count.keys is
    'Keys at the last count; a check also counts delete marks.';
comment on column budget_recovery.key_count.sequence is
    'The store''s sequence at the capture, which accounts for all deletions up to it.';
comment on column budget_recovery.key_count.counted_at is 'When they were last counted.';
comment on column budget_recovery.key_count.missing is
    'Counters that checks found gone since the tenant''s newest snapshot.';
comment on column budget_recovery.key_count.missing_since is
    'When the last of them were found gone; null: none is.';

alter table budget_recovery.store add column deletions_until numeric(20);
alter table budget_recovery.store add constraint store_deletions_until_is_uint64 check (
    deletions_until between 0 and 18446744073709551615
);
comment on column budget_recovery.store.deletions_until is
    'The sequence up to which checks have read deletions of counters; null: none was read.';

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
    constraint fall_outcome_is_known check (outcome in ('restored', 'reset', 'window_ended'))
);
-- At most one of a budget and window is open.
create unique index usage_fall_open on budget_recovery.usage_fall (tenant, budget_id, window_token)
where ended_at is null;
comment on table budget_recovery.usage_fall is
    'Counters of a budget and window that were missing from the store or lower than in snapshots, '
    'while the store kept its identity. Open until they are as high as before, a reset covers them '
    'or the window ends; then kept for 30 days.';
comment on column budget_recovery.usage_fall.tenant is 'The tenant.';
comment on column budget_recovery.usage_fall.budget_id is 'The budget.';
comment on column budget_recovery.usage_fall.window_token is 'The window.';
comment on column budget_recovery.usage_fall.found_at is 'The snapshot that found it.';
comment on column budget_recovery.usage_fall.judged_at is 'The newest snapshot that compared it.';
comment on column budget_recovery.usage_fall.counters is
    'Counters that were missing or lower at judged_at.';
comment on column budget_recovery.usage_fall.usage is
    'The usage that the store lacked at judged_at: of the entities, or of the aggregate if that is '
    'more.';
comment on column budget_recovery.usage_fall.ended_at is
    'The snapshot that found it ended; null: it is open, or its window has ended since.';
comment on column budget_recovery.usage_fall.outcome is 'restored, reset or window_ended.';

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
    'days. Captures that were refused or skipped because captures are paused are not listed.';
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

BLOCKS: tuple[str, ...] = (DROP_USAGE, FALLS, CAPTURE_RUN, RESET_BATCH)
"""In the order of their execution."""
