"""SQL of version 3, which changes tables and views of version 2.

Names compare byte by byte (COLLATE "C"), as in ``v1_snapshots``.
"""

ATTEMPTS = """
alter table budget_recovery.incident
    add column next_attempt_at timestamptz,
    add column failure_code text collate "C";
comment on column budget_recovery.incident.next_attempt_at is
    'The earliest time of the next attempt; null: now.';
comment on column budget_recovery.incident.failure_code is
    'The code of the error that ended the last attempt before the failure; null: unknown.';
"""

# A sum over budgets and windows counts one request many times. Rows that name all their drops have
# the amount of each budget and window in them: of its aggregate, or else of its entities.
MOST_MISSING = """
alter table budget_recovery.capture
    drop constraint capture_drop_usage_is_in_bounds,
    drop column drop_usage,
    add column most_missing numeric;
update budget_recovery.capture c
set most_missing = coalesce(
    (
        select max(coalesce(amount.of_aggregate, amount.of_entities))
        from (
            select sum(lacks.usage) filter (where lacks.entity is null) as of_aggregate,
                   sum(lacks.usage) as of_entities
            from (
                select d.value ->> 'budget' as budget, d.value ->> 'window' as of_window,
                       d.value ->> 'entity' as entity,
                       (d.value ->> 'before')::numeric
                           - coalesce((d.value ->> 'after')::numeric, 0) as usage
                from jsonb_array_elements(c.drops) as d (value)
            ) lacks
            group by lacks.budget, lacks.of_window
        ) amount
    ),
    0
)
where c.drop_count = jsonb_array_length(c.drops);
alter table budget_recovery.capture add constraint capture_most_missing_is_in_bounds check (
    most_missing >= 0 and most_missing < 1e38
);
comment on column budget_recovery.capture.most_missing is
    'The usage that the store lacked in the budget and window that lacked most; null: unknown, '
    'because an earlier version did not store it.';
comment on column budget_recovery.usage_fall.usage is
    'The usage that the store lacked then: of the aggregate if it is among these counters, or else '
    'of all of them.';
comment on column budget_recovery.restore_audit.usage_before is
    'The live usage before: of the aggregate, or else the sum of the entities. In rows from before '
    'version 3, the sum of all counters.';
comment on column budget_recovery.restore_audit.usage_after is
    'The live usage after, as usage_before; until the restore ends, the planned one.';
"""

# In earlier versions, only the end of an incident counted the leaderboards of its last restore.
AUDIT = """
alter table budget_recovery.restore_audit add column wrote_board boolean not null default false;
comment on column budget_recovery.restore_audit.wrote_board is
    'Whether the leaderboard of the budget and window was written.';
"""

# The supervision reads the manual restores of the last day every 30 s.
AUDIT_TIMES = """
create index restore_audit_at on budget_recovery.restore_audit (at);
comment on column budget_recovery.restore_audit.run_id is
    'The Dagster run that restored, or the command: "command …".';
comment on column budget_recovery.restore_audit.who is
    'Who held the lease: "run … on host (pid …)", or the account and host of a command.';
"""

BLOCKS: tuple[str, ...] = (ATTEMPTS, MOST_MISSING, AUDIT, AUDIT_TIMES)
"""In the order of their execution."""
