"""SQL of version 4: amounts of single budgets and windows, and expiries that are protected."""

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
    'version 4, the sum of all counters.';
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

# The supervision reads the manual restores of the last day every 30 s.
AUDIT_TIMES = """
create index restore_audit_at on budget_recovery.restore_audit (at);
comment on column budget_recovery.restore_audit.run_id is
    'The Dagster run that restored, or the command: "command …".';
comment on column budget_recovery.restore_audit.who is
    'Who held the lease: "run … on host (pid …)", or the account and host of a command.';
"""

# Version 2 did not tell keys without a TTL of their own from those that no maximum age drops. It
# called both "never"; the first is what a gateway writes if it says nothing.
EXPIRY = """
alter table budget_recovery.budget_record
    add column expiry_kind text collate "C",
    add constraint record_expiry_kind_is_known check (
        expiry_kind in ('none', 'never', 'per_key')
    ),
    add constraint record_expiry_is_one check (num_nonnulls(expiry_seconds, expiry_kind) <= 1);
update budget_recovery.budget_record
set expiry_kind = case when never_expires then 'none' else 'per_key' end
where never_expires is not null;
alter table budget_recovery.budget_record drop column never_expires;
comment on column budget_recovery.budget_record.expiry_seconds is
    'When the store drops every key of it: seconds after the window''s end or, for a lifetime, '
    'after its last write; null: see expiry_kind.';
comment on column budget_recovery.budget_record.expiry_kind is
    'Without expiry_seconds: none (its keys have no TTL of their own, so only a maximum age of the '
    'bucket drops them), never (not even that drops them), or per_key (they differ, see '
    'budget_content.expiries); null: unknown.';
alter table budget_recovery.budget_content
    drop constraint content_expiries_are_whole,
    add column never_expires boolean[];
create function budget_recovery.expiries_are_intact(
    expiry_hash bytea, entities text[], expiries bigint[], never_expires boolean[]
) returns boolean
language sql immutable parallel safe cost 10000
return coalesce(
    num_nulls(expiry_hash, expiries, never_expires) = 3
    or cardinality(entities) = cardinality(expiries)
    and cardinality(entities) = cardinality(never_expires)
    and coalesce(array_ndims(entities), 1) = 1
    and coalesce(array_ndims(expiries), 1) = 1
    and coalesce(array_ndims(never_expires), 1) = 1
    and array_position(never_expires, null) is null
    and expiry_hash = (
        select sha256(convert_to(
            coalesce(
                string_agg(
                    octet_length(e.entity)::text || ':' || e.entity || '='
                        || case
                            when e.never_expires then 'never'
                            else coalesce(e.expiry::text, 'none')
                        end
                        || ';',
                    '' order by e.entity collate "C"
                ),
                ''
            ),
            'UTF8'
        ))
        from unnest(entities, expiries, never_expires) as e (entity, expiry, never_expires)
    ),
    false
);
comment on function budget_recovery.expiries_are_intact(bytea, text[], bigint[], boolean[]) is
    'Whether the expiries of a content match their hash. If they do not, they are unknown.';
update budget_recovery.budget_content c
set never_expires = array_fill(false, array[cardinality(entities)])
where expiries is not null;
-- Damaged ones keep the hash that shows it.
update budget_recovery.budget_content c
set expiry_hash = (
    select sha256(convert_to(
        string_agg(
            octet_length(e.entity)::text || ':' || e.entity || '='
                || coalesce(e.expiry::text, 'none') || ';',
            '' order by e.entity collate "C"
        ),
        'UTF8'
    ))
    from unnest(c.entities, c.expiries) as e (entity, expiry)
)
where expiries is not null and cardinality(entities) > 0
  and budget_recovery.expiries_are_intact(expiry_hash, entities, expiries);
drop function budget_recovery.expiries_are_intact(bytea, text[], bigint[]);
alter table budget_recovery.budget_content
    add constraint content_expiries_are_whole check (
        num_nulls(expiries, never_expires, expiry_hash) in (0, 3)
        and (
            expiries is null
            or coalesce(array_ndims(expiries), 1) = 1
            and coalesce(array_ndims(never_expires), 1) = 1
            and cardinality(expiries) = cardinality(entities)
            and cardinality(never_expires) = cardinality(entities)
            and octet_length(expiry_hash) = 32
        )
    );
comment on column budget_recovery.budget_content.expiries is
    'When the store drops the keys, in the order of entities, if that differs between them: as '
    'budget_record.expiry_seconds; null inside: the key has no TTL of its own, or never expires.';
comment on column budget_recovery.budget_content.never_expires is
    'With expiries, in the same order: whether no maximum age of the bucket drops the key.';
"""

# In databases of checkouts between versions, the constraint lacks an outcome.
FALLS = """
alter table budget_recovery.usage_fall
    drop constraint fall_outcome_is_known,
    add constraint fall_outcome_is_known check (
        outcome in ('restored', 'reset', 'window_ended', 'discarded')
    ),
    add column resets_before bigint not null default 0,
    add constraint fall_resets_are_counted check (resets_before >= 0);
update budget_recovery.usage_fall f
set resets_before = (
    select count(distinct coalesce(r.batch::text, r.reset_id::text))
    from budget_recovery.budget_reset r
    where r.tenant = f.tenant and r.recorded_at < f.found_at
);
alter table budget_recovery.usage_fall alter column resets_before drop default;
comment on column budget_recovery.usage_fall.resets_before is
    'Resets of the tenant that were recorded before it was found; a later one may cover it.';
"""

BLOCKS: tuple[str, ...] = (MOST_MISSING, AUDIT, AUDIT_TIMES, AMOUNTS, EXPIRY, FALLS)
"""In the order of their execution."""
