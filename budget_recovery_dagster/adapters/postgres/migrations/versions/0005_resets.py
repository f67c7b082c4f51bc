"""Deliberate resets, and recovery points without what they make ineligible."""

from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

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
    'Counters that an operator has lowered or cleared on purpose: no restore uses what older '
    'snapshots hold of them. Never changed, and kept for ever.';
comment on column budget_recovery.budget_reset.reset_id is 'In the order of their recording.';
comment on column budget_recovery.budget_reset.tenant is 'The tenant.';
comment on column budget_recovery.budget_reset.budget_id is 'The budget.';
comment on column budget_recovery.budget_reset.window_token is
    'The window, such as 2026-11-29, 2026-W48, 2026-11, 2026-Q4 or lifetime; null: all of the '
    'budget''s windows.';
comment on column budget_recovery.budget_reset.of_everyone is
    'Whether it is about all entities of the budget, its aggregate among them.';
comment on column budget_recovery.budget_reset.entity is
    'Whose counter it is about: null is the budget''s aggregate or, where of_everyone, nobody in '
    'particular.';
comment on column budget_recovery.budget_reset.at is
    'When the counters were low: what snapshots of this moment and before it hold of them is not '
    'used.';
comment on column budget_recovery.budget_reset.reset_by is 'Who has recorded it.';
comment on column budget_recovery.budget_reset.reason is 'Why they were lowered, for people.';
comment on column budget_recovery.budget_reset.recorded_at is
    'When it was recorded here, by this server''s clock.';
"""

POINT = """
create or replace view budget_recovery.recovery_point as
select r.tenant, r.budget_id, r.window_token, nullif(e.entity, '') as entity,
       max(e.usage) as usage, max(r.captured_at) as last_captured_at
from budget_recovery.budget_record r
join budget_recovery.budget_content c using (content_id)
cross join lateral unnest(c.entities, c.usages) as e (entity, usage)
where (r.window_start is null or r.window_start <= now())
  and (r.window_end is null or r.window_end > now())
  and not exists (
      select from budget_recovery.budget_reset s
      where s.tenant = r.tenant
        and s.budget_id = r.budget_id
        and (s.window_token is null or s.window_token = r.window_token)
        and r.captured_at <= s.at
        and (s.of_everyone or coalesce(s.entity, '') = e.entity)
  )
group by r.tenant, r.budget_id, r.window_token, e.entity;
comment on view budget_recovery.recovery_point is
    'What a restore would bring back now: of every window that is still current, the highest usage '
    'of each entity over all retained snapshots, except what resets have made ineligible.';
comment on column budget_recovery.recovery_point.last_captured_at is
    'The newest snapshot that has this entity in this window and may be used for it.';
"""

OMITTED = """
comment on column budget_recovery.budget_record.omitted is
    'The first omitted counters: [{"entity", "key", "reason"}], with "is_entity_known": false '
    'where nobody can tell whose it is; null: none.';
"""


def upgrade() -> None:
    """Make the table, and the view anew."""
    for block in (RESET, POINT, OMITTED):
        op.execute(block)


def downgrade() -> None:
    """Refuse, as the first step does.

    Raises:
        NotImplementedError: always; the way back is a backup of the database.
    """
    raise NotImplementedError("there is no way down; restore a backup of the database instead")
