"""The store's row, leases, and snapshots with the contents that they share.

Names are compared byte by byte (COLLATE "C"): the order is that of Python, and an upgrade of the
operating system's locales cannot break an index.
"""

from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

# The one gateway store that this schema belongs to. The baseline is all there or all absent; a
# sequence of the store is an unsigned 64-bit number, for which bigint is too small.
STORE = """
create table budget_recovery.store (
    is_only_row boolean primary key default true,
    bucket text collate "C" not null,
    deployment_id text collate "C" not null,
    state text collate "C" not null default 'HEALTHY',
    baseline_created_at timestamptz,
    baseline_last_sequence numeric(20),
    baseline_version bigint,
    constraint store_has_one_row check (is_only_row),
    constraint store_deployment_is_a_uuid check (
        deployment_id ~ '^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$'
    ),
    constraint store_state_is_known check (state in ('HEALTHY', 'RECOVERING', 'FAILED')),
    constraint store_baseline_is_whole check (
        num_nulls(baseline_created_at, baseline_last_sequence, baseline_version) in (0, 3)
    ),
    constraint store_sequence_is_uint64 check (
        baseline_last_sequence between 0 and 18446744073709551615
    ),
    constraint store_version_is_positive check (baseline_version > 0)
);
comment on table budget_recovery.store is
    'The gateway''s store of budget counters, made at first use: always a single row.';
comment on column budget_recovery.store.is_only_row is 'Always true; keeps the table to one row.';
comment on column budget_recovery.store.bucket is 'The NATS key-value bucket.';
comment on column budget_recovery.store.deployment_id is
    'A random id of this installation, by which its marker in the store is recognized.';
comment on column budget_recovery.store.state is
    'HEALTHY, RECOVERING or FAILED; snapshots are stored only while HEALTHY.';
comment on column budget_recovery.store.baseline_created_at is
    'The last accepted identity: when the store''s stream was created.';
comment on column budget_recovery.store.baseline_last_sequence is
    'The last accepted identity: the highest sequence that the stream had given out.';
comment on column budget_recovery.store.baseline_version is
    'One higher whenever the baseline is replaced, from 1 in a new row; what was judged against '
    'another version or another identity is void.';
"""

# Rows are kept when released, so that the fencing token only ever rises.
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
    'Work that only one may do at a time. A dead holder''s lease ends at expires_at.';
comment on column budget_recovery.lease.token is
    'The fencing token: one higher with every taking; work under an older one is refused.';
comment on column budget_recovery.lease.holder is 'Who holds it now; null: nobody.';
comment on column budget_recovery.lease.acquired_at is 'When the present holder took it.';
comment on column budget_recovery.lease.expires_at is
    'Pushed forward every few seconds by a living holder, by this server''s clock.';
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
    constraint capture_drops_is_a_list check (jsonb_typeof(drops) = 'array')
);
-- The newest snapshot of any tenant, and those of an hour.
create index capture_captured_at on budget_recovery.capture (captured_at);
create index capture_run_id on budget_recovery.capture (run_id);
comment on table budget_recovery.capture is
    'One snapshot of one tenant: all its counters as read at one moment. All tenants of a run '
    'carry the same captured_at.';
comment on column budget_recovery.capture.captured_at is 'The moment that the snapshot stands for.';
comment on column budget_recovery.capture.stored_at is 'When it was written here.';
comment on column budget_recovery.capture.run_id is 'The Dagster run that stored it.';
comment on column budget_recovery.capture.source is
    'From which of the store''s keys it was read: counters.';
comment on column budget_recovery.capture.store_created_at is
    'The store''s identity after the reading: when its stream was created.';
comment on column budget_recovery.capture.store_last_sequence is
    'The store''s identity after the reading: the highest sequence given out.';
comment on column budget_recovery.capture.record_count is
    'Budgets and windows captured; fewer are left once pruned_at is set.';
comment on column budget_recovery.capture.entry_count is 'Counters captured.';
comment on column budget_recovery.capture.omitted_count is
    'Counters whose value could not be read; named in budget_record.omitted.';
comment on column budget_recovery.capture.unreadable_count is 'Keys that name no counter.';
comment on column budget_recovery.capture.unreadable is
    'The first of those keys: [{"key", "reason"}].';
comment on column budget_recovery.capture.drop_count is
    'Counters that an earlier snapshot holds and the store had lost or held lower.';
comment on column budget_recovery.capture.drops is
    'The first of those: [{"budget", "window", "entity", "before", "after"}]; after null: gone.';
comment on column budget_recovery.capture.is_partial is
    'Fewer keys arrived than the store had announced, twice.';
comment on column budget_recovery.capture.pruned_at is
    'When retention first removed records of this snapshot and kept those still needed.';
"""

# A bound of 20 integer digits also refuses NaN and Infinity, which are greater than any number.
# Comparing with ALL passes a null element over, so nulls are looked for by themselves.
CONTENT = """
create table budget_recovery.budget_content (
    content_id bigint generated always as identity primary key,
    content_hash bytea not null unique,
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
comment on table budget_recovery.budget_content is
    'What budgets held: immutable, and shared by all records that held just the same, so that an '
    'hour costs what changed in it.';
comment on column budget_recovery.budget_content.content_hash is
    'SHA-256 of the sorted entries; equal contents, and only they, have the same.';
comment on column budget_recovery.budget_content.entities is
    'Who spent: users, models, accounts, agents, metadata values; '''' is the budget''s aggregate.';
comment on column budget_recovery.budget_content.usages is
    'What they spent, exactly; in the order of entities.';
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
    'last writing; null: never.';
comment on column budget_recovery.budget_record.omitted_count is
    'Counters that are not among the entries because their value could not be read.';
comment on column budget_recovery.budget_record.covers_earlier is
    'No entity of the earlier records of this window is missing or lower here, so a restore need '
    'not look further back.';
comment on column budget_recovery.budget_record.is_truncated is
    'The source lists only the largest spenders, and its list was full.';
comment on column budget_recovery.budget_record.value_shape is
    'How the gateway writes the values, for keys that must be made anew; null: none was readable.';
comment on column budget_recovery.budget_record.omitted is
    'The first omitted counters: [{"entity", "key", "reason"}]; null: none.';
"""

ENTRY = """
create view budget_recovery.budget_entry as
select r.tenant, r.captured_at, r.budget_id, r.window_token,
       nullif(e.entity, '') as entity, e.usage
from budget_recovery.budget_record r
join budget_recovery.budget_content c using (content_id)
cross join lateral unnest(c.entities, c.usages) as e (entity, usage);
comment on view budget_recovery.budget_entry is
    'Every counter of every retained snapshot, a row each; entity null is the budget''s aggregate.';
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
    'What a run could not capture, and why; removed once it is older than retention, whether or '
    'not the tenant is captured again.';
comment on column budget_recovery.capture_failure.kind is
    'tenant, or key: a key of the store that names no tenant.';
comment on column budget_recovery.capture_failure.hour is 'The UTC hour that was to be captured.';
comment on column budget_recovery.capture_failure.hint is 'What an operator may try.';
"""

# One hour is less than a hundredth of these tables, so the usual trigger, a fifth, would come once
# in a day and a half and let them grow by as much.
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


def upgrade() -> None:
    """Make the tables."""
    for block in (STORE, LEASE, CAPTURE, CONTENT, RECORD, ENTRY, FAILURE, VACUUM):
        op.execute(block)


def downgrade() -> None:
    """Refuse: the tables hold what a restore needs.

    Raises:
        NotImplementedError: always; the way back is a backup of the database.
    """
    raise NotImplementedError("there is no way down; restore a backup of the database instead")
