"""Budget definitions, the second source of snapshots, and recovery points for people."""

from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

# The limit is bounded like usages are, which also refuses NaN and Infinity.
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
        split_by in ('nothing', 'user', 'model', 'virtual account', 'agent', 'metadata')
    ),
    constraint budget_metadata_key_is_of_metadata check (
        (metadata_key is not null) = (split_by = 'metadata')
    ),
    constraint budget_enforcement_is_known check (enforcement in ('enforce', 'audit'))
);
comment on table budget_recovery.budget is
    'What may be spent, as the gateway enforces it. Optional: it lets previews say what would be '
    'blocked; snapshots and restores do not need it.';
comment on column budget_recovery.budget.period is
    'day, week, month, quarter or lifetime; a budget with several periods has a row for each.';
comment on column budget_recovery.budget.limit_amount is
    'What each entity may use in one window, in the gateway''s currency.';
comment on column budget_recovery.budget.split_by is
    'By what usage is counted separately: nothing, user, model, virtual account, agent, metadata.';
comment on column budget_recovery.budget.metadata_key is
    'The field of a request''s metadata by which the budget is split; null for any other split.';
comment on column budget_recovery.budget.enforcement is
    'enforce: requests beyond the limit are refused; audit: they are only noted.';
"""

# The maximum over all retained records, as a restore takes it.
POINT = """
create view budget_recovery.recovery_point as
select r.tenant, r.budget_id, r.window_token, nullif(e.entity, '') as entity,
       max(e.usage) as usage, max(r.captured_at) as last_captured_at
from budget_recovery.budget_record r
join budget_recovery.budget_content c using (content_id)
cross join lateral unnest(c.entities, c.usages) as e (entity, usage)
where (r.window_start is null or r.window_start <= now())
  and (r.window_end is null or r.window_end > now())
group by r.tenant, r.budget_id, r.window_token, e.entity;
comment on view budget_recovery.recovery_point is
    'What a restore would bring back now: of every window that is still current, the highest usage '
    'of each entity over all retained snapshots.';
comment on column budget_recovery.recovery_point.last_captured_at is
    'The newest snapshot that has this entity in this window.';
"""

SOURCE = """
alter table budget_recovery.capture add constraint capture_source_is_known check (
    source in ('counters', 'leaderboards')
);
comment on column budget_recovery.capture.source is
    'From which of the store''s keys it was read: counters (every entity), or leaderboards (the '
    '500 largest of each budget and window).';
comment on column budget_recovery.budget_record.value_shape is
    'How the gateway writes the values, for keys that must be made anew; null: none was readable, '
    'or the source does not tell.';
comment on column budget_recovery.budget_record.expiry_seconds is
    'When the store drops a key: seconds after the window''s end or, for a lifetime, after its '
    'last writing; null: never, or, where value_shape is null, not known.';
"""


def upgrade() -> None:
    """Make the table and the view."""
    for block in (BUDGET, POINT, SOURCE):
        op.execute(block)


def downgrade() -> None:
    """Refuse, as the first step does.

    Raises:
        NotImplementedError: always; the way back is a backup of the database.
    """
    raise NotImplementedError("there is no way down; restore a backup of the database instead")
