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

# Rows of earlier versions do not have these amounts: null is unknown, never zero.
AMOUNTS = """
alter table budget_recovery.incident add column target_began_empty boolean;
comment on column budget_recovery.incident.target_began_empty is
    'Whether the restore target was provably created empty after the loss; null: not judged.';
alter table budget_recovery.restore_audit
    add column usage_restored numeric,
    add column usage_counted numeric,
    add column counted_bound text collate "C",
    add column shares jsonb,
    add column losses bigint,
    add constraint audit_amounts_are_in_bounds check (
        usage_restored >= 0 and usage_restored < 1e38
        and usage_counted >= 0 and usage_counted < 1e38
    ),
    add constraint audit_bound_is_known check (
        counted_bound in ('exact', 'at_most', 'at_least', 'estimate', 'unknown')
    ),
    add constraint audit_amounts_have_a_bound check (
        (counted_bound is null) = (usage_restored is null)
        and (counted_bound is null) = (losses is null)
        and (usage_counted is null) = (coalesce(counted_bound, 'unknown') = 'unknown')
    ),
    add constraint audit_shares_is_an_object check (jsonb_typeof(shares) = 'object');
comment on column budget_recovery.restore_audit.usage_restored is
    'By how much this and earlier restores of the incident raised the usage; until the restore '
    'ends, the planned amount. Null: unknown, because an earlier version did not store it or the '
    'restore only compared; or no incident was open.';
comment on column budget_recovery.restore_audit.usage_counted is
    'Usage that the gateway counted after the loss, and that is not added: for each counter the '
    'lower of the recovery point and the live usage before the first write of the incident. One '
    'amount, as usage_before. Null: unknown, never zero; or no incident was open.';
comment on column budget_recovery.restore_audit.counted_bound is
    'exact; at_most: the store may not have begun empty; at_least: some counters are unknown, or '
    'the worker died while it wrote; estimate: both; unknown: no counter could be read. Null: as '
    'usage_restored.';
comment on column budget_recovery.restore_audit.shares is
    'The parts of usage_counted by entity, as texts, of the counters that were raised, for the '
    'next restore of the incident; until the restore ends, of all counters, without zeros. An '
    'empty name is the aggregate. Null: all were raised to the recovery point, or were as high.';
comment on column budget_recovery.restore_audit.losses is
    'How many losses of the incident were found by then. Null: as usage_restored.';
"""

BLOCKS: tuple[str, ...] = (ATTEMPTS, MOST_MISSING, AUDIT, AMOUNTS)
"""In the order of their execution."""
