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

BLOCKS: tuple[str, ...] = (DROP_USAGE,)
"""In the order of their execution."""
