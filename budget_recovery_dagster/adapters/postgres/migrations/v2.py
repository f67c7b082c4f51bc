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
    constraint fall_times_are_in_order check (found_at <= judged_at and judged_at <= ended_at),
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
    found_at timestamptz primary key,
    settings jsonb not null,
    constraint configuration_is_an_object check (jsonb_typeof(settings) = 'object')
);
comment on table budget_recovery.bucket_configuration is
    'What the bucket keeps by its configuration; a row for each change, kept for 30 days.';
comment on column budget_recovery.bucket_configuration.found_at is
    'The check that found this configuration.';
comment on column budget_recovery.bucket_configuration.settings is
    'Its settings by name, as text.';
"""

BLOCKS: tuple[str, ...] = (DROP_USAGE, FALLS)
"""In the order of their execution."""
