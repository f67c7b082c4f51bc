"""SQL of version 2, which changes tables and views of version 1.

Names compare byte by byte (COLLATE "C"), as in ``v1_snapshots``.
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

BLOCKS: tuple[str, ...] = (CAPTURE_RUN, RESET_BATCH)
"""In the order of their execution."""
