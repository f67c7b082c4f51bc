"""SQL of version 1: the store's row, leases, snapshots, budget definitions, resets and views.

Names compare byte by byte (COLLATE "C"). That is Python's order, and an upgrade of the operating
system's locales cannot break an index.
"""

# The one gateway store that this schema belongs to. The columns of the baseline are all set or all
# null, and so are those of the marker, which is part of it. A sequence of the store is an unsigned
# 64-bit number, for which bigint is too small.
STORE = """
create table budget_recovery.store (
    is_only_row boolean primary key default true,
    bucket text collate "C" not null,
    deployment_id text collate "C" not null,
    state text collate "C" not null default 'healthy',
    baseline_created_at timestamptz,
    baseline_last_sequence numeric(20),
    baseline_version bigint,
    marker_nonce text collate "C",
    marker_revision numeric(20),
    marked_at timestamptz,
    intended_nonce text collate "C",
    constraint store_has_one_row check (is_only_row),
    constraint store_deployment_is_a_uuid check (
        deployment_id ~ '^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$'
    ),
    constraint store_state_is_known check (state in ('healthy', 'recovering', 'failed')),
    constraint store_baseline_is_whole check (
        num_nulls(baseline_created_at, baseline_last_sequence, baseline_version) in (0, 3)
    ),
    constraint store_sequence_is_uint64 check (
        baseline_last_sequence between 0 and 18446744073709551615
    ),
    constraint store_version_is_positive check (baseline_version > 0),
    constraint store_marker_is_whole check (
        num_nulls(marker_nonce, marker_revision, marked_at) in (0, 3)
    ),
    constraint store_marker_revision_is_uint64 check (
        marker_revision between 0 and 18446744073709551615
    ),
    constraint store_marker_is_of_a_baseline check (
        baseline_version is not null or num_nonnulls(marker_nonce, intended_nonce) = 0
    ),
    constraint store_nonces_are_not_empty check (marker_nonce <> '' and intended_nonce <> '')
);
comment on table budget_recovery.store is
    'The gateway''s store of budget counters; always one row, created at first use.';
comment on column budget_recovery.store.is_only_row is 'Always true; limits the table to one row.';
comment on column budget_recovery.store.bucket is 'The NATS key-value bucket.';
comment on column budget_recovery.store.deployment_id is
    'The random id of this installation, which its marker in the store carries.';
comment on column budget_recovery.store.state is
    'healthy, recovering or failed; snapshots are stored only while healthy. An incident is open '
    'exactly while it is not healthy: both change in one transaction, under this row''s lock.';
comment on column budget_recovery.store.baseline_created_at is
    'The last accepted identity: when the store''s stream was created.';
comment on column budget_recovery.store.baseline_last_sequence is
    'The last accepted identity: the highest sequence of the stream.';
comment on column budget_recovery.store.baseline_version is
    'From 1, and one higher for each new baseline; a judgement against another version or another '
    'identity is void.';
comment on column budget_recovery.store.marker_nonce is
    'The nonce of our last marker, which is known to be in the store.';
comment on column budget_recovery.store.marker_revision is
    'The sequence of our last marker in the store.';
comment on column budget_recovery.store.marked_at is
    'About when our last marker was written; the store may drop it once it is too old.';
comment on column budget_recovery.store.intended_nonce is
    'The nonce of a marker that may have been written since; stored before the write.';
"""

# Released leases keep their rows, so that the fencing token only ever rises.
LEASE = """
create table budget_recovery.lease (
    name text collate "C" primary key,
    token bigint not null,
    holder text collate "C",
    acquired_at timestamptz,
    expires_at timestamptz,
    constraint lease_is_held_or_free check (num_nulls(holder, acquired_at, expires_at) in (0, 3)),
    constraint lease_token_is_not_negative check (token >= 0)
);
comment on table budget_recovery.lease is
    'Work for one holder at a time. The lease of a dead holder ends at expires_at.';
comment on column budget_recovery.lease.token is
    'The fencing token: one higher for every holder; work with an older token is refused.';
comment on column budget_recovery.lease.holder is 'The present holder; null: none.';
comment on column budget_recovery.lease.acquired_at is 'When the present holder acquired it.';
comment on column budget_recovery.lease.expires_at is
    'By this server''s clock; a living holder renews it every few seconds.';
"""

BUDGET = """
create table budget_recovery.budget (
    tenant text collate "C" not null,
    budget_id text collate "C" not null,
    period text collate "C" not null,
    limit_amount numeric not null,
    split_by text collate "C" not null,
    metadata_key text collate "C",
    enforcement text collate "C" not null,
    primary key (tenant, budget_id, period),
    constraint budget_names_are_not_empty check (
        tenant <> '' and budget_id <> '' and metadata_key <> ''
    ),
    constraint budget_period_is_known check (
        period in ('day', 'week', 'month', 'quarter', 'lifetime')
    ),
    constraint budget_limit_is_in_bounds check (
        limit_amount >= 0 and limit_amount < 100000000000000000000
    ),
    constraint budget_split_is_known check (
        split_by in ('nothing', 'user', 'model', 'virtual_account', 'agent', 'metadata')
    ),
    constraint budget_metadata_key_is_of_metadata check (
        (metadata_key is not null) = (split_by = 'metadata')
    ),
    constraint budget_enforcement_is_known check (enforcement in ('enforce', 'audit'))
);
comment on table budget_recovery.budget is
    'Budget limits as the gateway enforces them. Optional: previews use them to show what would be '
    'blocked; snapshots and restores do not need them.';
comment on column budget_recovery.budget.period is
    'day, week, month, quarter or lifetime; a budget with several periods has a row for each.';
comment on column budget_recovery.budget.limit_amount is
    'The limit of each entity in one window, in the gateway''s currency.';
comment on column budget_recovery.budget.split_by is
    'What usage is counted by: nothing, user, model, virtual_account, agent, metadata.';
comment on column budget_recovery.budget.metadata_key is
    'The metadata field of a request that splits the budget; null for any other split.';
comment on column budget_recovery.budget.enforcement is
    'enforce: requests beyond the limit are refused; audit: they are only logged.';
"""

CAPTURE = """
create table budget_recovery.capture (
    tenant text collate "C" not null,
    captured_at timestamptz not null,
    stored_at timestamptz not null,
    run_id text collate "C" not null,
    source text collate "C" not null,
    store_created_at timestamptz not null,
    store_last_sequence numeric(20) not null,
    record_count integer not null,
    entry_count bigint not null,
    omitted_count bigint not null,
    unreadable_count bigint not null,
    unreadable jsonb not null,
    drop_count bigint not null,
    drops jsonb not null,
    is_partial boolean not null,
    pruned_at timestamptz,
    primary key (tenant, captured_at),
    constraint capture_sequence_is_uint64 check (
        store_last_sequence between 0 and 18446744073709551615
    ),
    constraint capture_counts_are_not_negative check (
        least(record_count, entry_count, omitted_count, unreadable_count, drop_count) >= 0
    ),
    constraint capture_unreadable_is_a_list check (jsonb_typeof(unreadable) = 'array'),
    constraint capture_drops_is_a_list check (jsonb_typeof(drops) = 'array'),
    constraint capture_source_is_known check (source in ('counters', 'leaderboards'))
);
-- The newest snapshot of any tenant, and those of an hour.
create index capture_captured_at on budget_recovery.capture (captured_at);
create index capture_run_id on budget_recovery.capture (run_id);
comment on table budget_recovery.capture is
    'One snapshot of one tenant: all its counters as read by one run. All tenants of a run have '
    'the same captured_at.';
comment on column budget_recovery.capture.captured_at is 'The time of the snapshot.';
comment on column budget_recovery.capture.stored_at is 'When the snapshot was stored here.';
comment on column budget_recovery.capture.run_id is 'The Dagster run that stored the snapshot.';
comment on column budget_recovery.capture.source is
    'The keys of the store that were read: counters (every entity), or leaderboards (the 500 '
    'largest of each budget and window).';
comment on column budget_recovery.capture.store_created_at is
    'The store''s identity after the read: when its stream was created.';
comment on column budget_recovery.capture.store_last_sequence is
    'The store''s identity after the read: the highest sequence of its stream.';
comment on column budget_recovery.capture.record_count is
    'Captured budgets and windows; fewer are retained once pruned_at is set.';
comment on column budget_recovery.capture.entry_count is 'Captured counters.';
comment on column budget_recovery.capture.omitted_count is
    'Counters whose value could not be read; named in budget_record.omitted.';
comment on column budget_recovery.capture.unreadable_count is 'Keys that name no counter.';
comment on column budget_recovery.capture.unreadable is
    'The first of those keys: [{"key", "reason"}].';
comment on column budget_recovery.capture.drop_count is
    'Counters of earlier snapshots that were missing or lower in the store.';
comment on column budget_recovery.capture.drops is
    'The first of those: [{"budget", "window", "entity", "before", "after"}]; after null: '
    'missing.';
comment on column budget_recovery.capture.is_partial is
    'Fewer keys arrived than the store announced, in two reads.';
comment on column budget_recovery.capture.pruned_at is
    'When retention first removed records of this snapshot and kept those that recovery points '
    'need.';
"""

# The bound of 20 integer digits also refuses NaN and Infinity, which are greater than any number.
# A comparison with ALL ignores null elements, so nulls have a check of their own.
#
# The hash has no unique constraint: once a content is damaged, the next record with the same usages
# gets an intact content of its own. The damaged one is neither changed nor shared again.
CONTENT = """
create table budget_recovery.budget_content (
    content_id bigint generated always as identity primary key,
    content_hash bytea not null,
    entities text[] collate "C" not null,
    usages numeric[] not null,
    constraint content_hash_is_sha256 check (octet_length(content_hash) = 32),
    constraint content_lists_are_flat check (
        coalesce(array_ndims(entities), 1) = 1 and coalesce(array_ndims(usages), 1) = 1
    ),
    constraint content_lists_are_of_one_length check (
        cardinality(entities) = cardinality(usages)
    ),
    constraint content_has_no_null check (
        array_position(entities, null) is null and array_position(usages, null) is null
    ),
    constraint content_usages_are_in_bounds check (
        0 <= all (usages) and 100000000000000000000 > all (usages)
    )
);
create index budget_content_hash on budget_recovery.budget_content (content_hash);
comment on table budget_recovery.budget_content is
    'The usages of budgets. Immutable, and shared by all records with the same usages, so that an '
    'hour costs what changed in it.';
comment on column budget_recovery.budget_content.content_hash is
    'SHA-256 of the sorted entries as captured; equal for equal usages only. See '
    'content_is_intact.';
comment on column budget_recovery.budget_content.entities is
    'The entities: users, models, accounts, agents, metadata values; '''' is the budget''s '
    'aggregate.';
comment on column budget_recovery.budget_content.usages is
    'Their exact usages, in the order of entities.';
"""

# The same bytes as in Python's hash_usages, for every content that the columns can hold. What a
# damaged disk may return besides is refused first: a null, lists of two lengths, nested lists.
INTACT = """
create function budget_recovery.content_is_intact(
    content_hash bytea, entities text[], usages numeric[]
) returns boolean
language sql immutable parallel safe cost 10000
return cardinality(entities) = cardinality(usages)
    and coalesce(array_ndims(entities), 1) = 1
    and coalesce(array_ndims(usages), 1) = 1
    and array_position(entities, null) is null
    and array_position(usages, null) is null
    and content_hash = (
        select sha256(convert_to(
            coalesce(
                string_agg(
                    octet_length(e.entity)::text || ':' || e.entity || '=' || e.usage::text || ';',
                    '' order by e.entity collate "C"
                ),
                ''
            ),
            'UTF8'
        ))
        from unnest(entities, usages) as e (entity, usage)
    );
comment on function budget_recovery.content_is_intact is
    'Whether a content matches its hash. One that does not is damaged: nothing uses it.';

create function budget_recovery.is_stored_intact(content_id bigint) returns boolean
language sql stable parallel safe cost 10000
return coalesce(
    (
        select budget_recovery.content_is_intact(c.content_hash, c.entities, c.usages)
        from budget_recovery.budget_content c
        where c.content_id = is_stored_intact.content_id
    ),
    false
);
comment on function budget_recovery.is_stored_intact is
    'Whether a stored content is there and matches its hash.';
"""

RECORD = """
create table budget_recovery.budget_record (
    tenant text collate "C" not null,
    captured_at timestamptz not null,
    window_start timestamptz,
    window_end timestamptz,
    content_id bigint not null references budget_recovery.budget_content,
    expiry_seconds bigint,
    omitted_count integer not null,
    covers_earlier boolean not null,
    is_truncated boolean not null,
    budget_id text collate "C" not null,
    window_token text collate "C" not null,
    value_shape text collate "C",
    omitted jsonb,
    primary key (tenant, budget_id, window_token, captured_at),
    foreign key (tenant, captured_at) references budget_recovery.capture,
    constraint record_window_is_whole check (
        num_nulls(window_start, window_end) in (0, 2)
        and (window_start is null) = (window_token = 'lifetime')
    ),
    constraint record_window_has_length check (window_start < window_end),
    constraint record_omitted_is_counted check (
        omitted_count >= 0
        and (omitted is null) = (omitted_count = 0)
        and (omitted is null or jsonb_typeof(omitted) = 'array')
    )
);
-- A snapshot's records, and those past retention.
create index budget_record_capture on budget_recovery.budget_record (tenant, captured_at);
-- Whether a content is still referred to.
create index budget_record_content on budget_recovery.budget_record (content_id);
comment on table budget_recovery.budget_record is
    'One budget and window in a snapshot; its usages are in budget_content, or see budget_entry.';
comment on column budget_recovery.budget_record.window_start is
    'UTC; the window is [window_start, window_end), both null for a lifetime.';
comment on column budget_recovery.budget_record.expiry_seconds is
    'When the store drops a key: seconds after the window''s end or, for a lifetime, after its '
    'last write; null: never or, where value_shape is null, unknown.';
comment on column budget_recovery.budget_record.omitted_count is
    'Counters that the content does not have, because their value could not be read.';
comment on column budget_recovery.budget_record.covers_earlier is
    'No eligible usage of the earlier intact records of this window is missing or lower here, so a '
    'restore need not read them.';
comment on column budget_recovery.budget_record.is_truncated is
    'The source lists only the largest spenders, and its list was full.';
comment on column budget_recovery.budget_record.value_shape is
    'How the gateway writes the values, for keys that must be recreated: object_text, '
    'object_number or bare_number; null: no value was readable, or the source does not have them.';
comment on column budget_recovery.budget_record.omitted is
    'The first omitted counters: [{"entity", "key", "reason"}], with "is_entity_known": false '
    'where the entity is unknown; null: none.';
"""

RESET = """
create table budget_recovery.budget_reset (
    reset_id bigint generated always as identity primary key,
    tenant text collate "C" not null,
    budget_id text collate "C" not null,
    window_token text collate "C",
    of_everyone boolean not null,
    entity text collate "C",
    at timestamptz not null,
    reset_by text not null,
    reason text not null,
    recorded_at timestamptz not null,
    constraint reset_names_are_not_empty check (
        tenant <> '' and budget_id <> '' and window_token <> '' and entity <> ''
    ),
    constraint reset_of_everyone_names_nobody check (not of_everyone or entity is null),
    constraint reset_is_not_of_the_future check (at <= recorded_at)
);
create index budget_reset_tenant on budget_recovery.budget_reset (tenant, reset_id);
comment on table budget_recovery.budget_reset is
    'Counters that an operator lowered or cleared on purpose: no restore uses their usages from '
    'older snapshots. Rows are never changed or removed.';
comment on column budget_recovery.budget_reset.reset_id is 'Ascending in the order of recording.';
comment on column budget_recovery.budget_reset.tenant is 'The tenant.';
comment on column budget_recovery.budget_reset.budget_id is 'The budget.';
comment on column budget_recovery.budget_reset.window_token is
    'The window, such as 2026-11-29, 2026-W48, 2026-11, 2026-Q4 or lifetime; null: all of the '
    'budget''s windows.';
comment on column budget_recovery.budget_reset.of_everyone is
    'Whether it applies to all entities of the budget, including its aggregate.';
comment on column budget_recovery.budget_reset.entity is
    'The entity that was reset; null: the budget''s aggregate or, where of_everyone, all entities.';
comment on column budget_recovery.budget_reset.at is
    'When the counters were low: their usages in snapshots up to this time are not used.';
comment on column budget_recovery.budget_reset.reset_by is 'Who recorded it.';
comment on column budget_recovery.budget_reset.reason is 'Why they were lowered, for people.';
comment on column budget_recovery.budget_reset.recorded_at is
    'When it was recorded here, by this server''s clock.';
"""

ENTRY = """
create view budget_recovery.budget_entry as
select r.tenant, r.captured_at, r.budget_id, r.window_token,
       nullif(e.entity, '') as entity, e.usage
from budget_recovery.budget_record r
join budget_recovery.budget_content c using (content_id)
cross join lateral unnest(c.entities, c.usages) as e (entity, usage);
comment on view budget_recovery.budget_entry is
    'Every counter of every retained snapshot, one per row; entity null is the budget''s '
    'aggregate. Hashes are not verified here: damaged_record lists the records that do not match '
    'theirs.';
"""

# The same rule as for a restore, so that the view shows only what a restore would bring back:
# damaged records do not count, and a window is current by its token. Of the records that share a
# content the newest is enough, since resets never exclude it before the others. `offset 0` makes
# the planner verify each content once, and only those of the tenants that a query asks for.
POINT = """
create view budget_recovery.recovery_point as
select r.tenant, r.budget_id, r.window_token, nullif(e.entity, '') as entity,
       max(e.usage) as usage, max(r.captured_at) as last_captured_at
from (
    select tenant, budget_id, window_token, content_id, max(captured_at) as captured_at
    from budget_recovery.budget_record
    where window_token in (
        to_char(now() at time zone 'UTC', 'YYYY-MM-DD'),
        to_char(now() at time zone 'UTC', 'IYYY-"W"IW'),
        to_char(now() at time zone 'UTC', 'YYYY-MM'),
        to_char(now() at time zone 'UTC', 'YYYY-"Q"Q'),
        'lifetime'
    )
    group by tenant, budget_id, window_token, content_id
) r
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
      and r.captured_at <= s.at
      and (s.of_everyone or coalesce(s.entity, '') = e.entity)
)
group by r.tenant, r.budget_id, r.window_token, e.entity;
comment on view budget_recovery.recovery_point is
    'What a restore would bring back now: for every current window, the highest usage of each '
    'entity in all intact retained records, except what resets exclude. Damaged records do not '
    'count; damaged_record lists them.';
comment on column budget_recovery.recovery_point.last_captured_at is
    'The newest intact record that has this entity in this window and that no reset excludes.';
"""

DAMAGED = """
create view budget_recovery.damaged_record as
select r.tenant, r.captured_at, r.budget_id, r.window_token, r.content_id
from (
    select tenant, content_id from budget_recovery.budget_record group by tenant, content_id
) k
cross join lateral (
    select budget_recovery.is_stored_intact(k.content_id) as is_intact offset 0
) verified
join budget_recovery.budget_record r on r.tenant = k.tenant and r.content_id = k.content_id
where not verified.is_intact;
comment on view budget_recovery.damaged_record is
    'The retained records whose content does not match its hash, or is missing. Without a '
    'condition on the tenant it verifies all stored contents, which may take minutes.';
"""

FAILURE = """
create table budget_recovery.capture_failure (
    run_id text collate "C" not null,
    kind text collate "C" not null,
    name text collate "C" not null,
    hour timestamptz not null,
    failed_at timestamptz not null,
    reason text not null,
    hint text not null,
    primary key (run_id, kind, name),
    constraint failure_kind_is_known check (kind in ('tenant', 'key'))
);
create index capture_failure_failed_at on budget_recovery.capture_failure (failed_at);
comment on table budget_recovery.capture_failure is
    'What a run could not capture, and why. Removed once older than retention, whether or not the '
    'tenant is captured again.';
comment on column budget_recovery.capture_failure.kind is
    'tenant, or key: a key of the store that names no tenant.';
comment on column budget_recovery.capture_failure.hour is 'The UTC hour that was to be captured.';
comment on column budget_recovery.capture_failure.hint is 'What an operator can try.';
"""

# An hour is less than a hundredth of these tables. With the default trigger, a fifth, vacuum would
# run once in a day and a half, and the tables would grow by as much.
VACUUM = """
alter table budget_recovery.capture set (
    autovacuum_vacuum_scale_factor = 0.01, toast.autovacuum_vacuum_scale_factor = 0.01
);
alter table budget_recovery.budget_record set (
    autovacuum_vacuum_scale_factor = 0.01, toast.autovacuum_vacuum_scale_factor = 0.01
);
alter table budget_recovery.budget_content set (
    autovacuum_vacuum_scale_factor = 0.01, toast.autovacuum_vacuum_scale_factor = 0.01
);
"""

BLOCKS = (
    STORE,
    LEASE,
    BUDGET,
    CAPTURE,
    CONTENT,
    INTACT,
    RECORD,
    RESET,
    ENTRY,
    POINT,
    DAMAGED,
    FAILURE,
    VACUUM,
)
"""In the order of their creation."""
