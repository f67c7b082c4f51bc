"""Previews of restores, held against what is applied, and incidents that a person has ended."""

from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

PREVIEW = """
create table budget_recovery.restore_preview (
    preview_id text collate "C" primary key,
    at timestamptz not null,
    previewed_by text not null,
    tenant text collate "C",
    budget_id text collate "C",
    captured_at timestamptz,
    despite_resets boolean not null,
    store_created_at timestamptz not null,
    store_last_sequence numeric(20) not null,
    is_complete boolean not null,
    constraint preview_id_is_a_uuid check (
        preview_id ~ '^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$'
    ),
    constraint preview_names_are_not_empty check (tenant <> '' and budget_id <> ''),
    constraint preview_budget_is_of_a_tenant check (budget_id is null or tenant is not null),
    constraint preview_sequence_is_uint64 check (
        store_last_sequence between 0 and 18446744073709551615
    )
);
-- The newest, and those that are too old.
create index restore_preview_at on budget_recovery.restore_preview (at);
comment on table budget_recovery.restore_preview is
    'What people have looked at before they restored it; of the last day.';
comment on column budget_recovery.restore_preview.preview_id is 'A random id.';
comment on column budget_recovery.restore_preview.at is 'When it was made.';
comment on column budget_recovery.restore_preview.previewed_by is 'By whom, or by which run.';
comment on column budget_recovery.restore_preview.tenant is
    'Whose counters; null: every tenant''s.';
comment on column budget_recovery.restore_preview.budget_id is
    'Of which budget; null: of all of them.';
comment on column budget_recovery.restore_preview.captured_at is
    'From which snapshot; null: from the recovery point.';
comment on column budget_recovery.restore_preview.despite_resets is
    'Whether also what was reset on purpose was to come back.';
comment on column budget_recovery.restore_preview.store_created_at is
    'The store that was looked at: when its stream was created.';
comment on column budget_recovery.restore_preview.store_last_sequence is
    'The store that was looked at: the highest sequence that it had given out.';
comment on column budget_recovery.restore_preview.is_complete is
    'Whether all of it is kept; one that broke off counts for nothing.';
"""

# Lists, as a content has them: a row for each counter would be many for a preview of a whole store.
WINDOW = """
create table budget_recovery.restore_preview_window (
    preview_id text collate "C" not null
        references budget_recovery.restore_preview on delete cascade,
    tenant text collate "C" not null,
    budget_id text collate "C" not null,
    window_token text collate "C" not null,
    entities text[] collate "C" not null,
    live numeric[] not null,
    recorded numeric[] not null,
    actions text[] collate "C" not null,
    primary key (preview_id, tenant, budget_id, window_token),
    constraint preview_lists_are_of_one_length check (
        cardinality(entities) = cardinality(live)
        and cardinality(entities) = cardinality(recorded)
        and cardinality(entities) = cardinality(actions)
    )
);
comment on table budget_recovery.restore_preview_window is
    'What was planned for the counters of one budget and window in a preview.';
comment on column budget_recovery.restore_preview_window.preview_id is 'The preview.';
comment on column budget_recovery.restore_preview_window.tenant is 'Whose counters.';
comment on column budget_recovery.restore_preview_window.budget_id is 'Of which budget.';
comment on column budget_recovery.restore_preview_window.window_token is 'Of which window.';
comment on column budget_recovery.restore_preview_window.entities is
    'Who spends; '''' is the budget''s aggregate.';
comment on column budget_recovery.restore_preview_window.live is
    'What the store held, in the order of entities; null: nothing, or nothing readable.';
comment on column budget_recovery.restore_preview_window.recorded is
    'What the snapshots hold, in the order of entities.';
comment on column budget_recovery.restore_preview_window.actions is
    'What was to be done, in the order of entities.';
"""

OUTCOME = """
alter table budget_recovery.incident
    drop constraint incident_outcome_is_known,
    add constraint incident_outcome_is_known check (
        outcome in (
            'restored', 'restored in part', 'restored by hand', 'nothing lost', 'nothing current',
            'accepted by hand'
        )
    );
"""


def upgrade() -> None:
    """Make the tables, and let incidents end by hand."""
    for block in (PREVIEW, WINDOW, OUTCOME):
        op.execute(block)


def downgrade() -> None:
    """Refuse, as the first step does.

    Raises:
        NotImplementedError: always; the way back is a backup of the database.
    """
    raise NotImplementedError("there is no way down; restore a backup of the database instead")
