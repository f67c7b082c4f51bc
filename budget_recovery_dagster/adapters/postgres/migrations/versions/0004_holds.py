"""Holds: that a person keeps the restore of an incident from going on."""

from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

# When it was released is kept, so that a run which a person terminated before then is known to be
# dealt with.
HOLD = """
alter table budget_recovery.incident
    add column held_at timestamptz,
    add column held_by text,
    add column held_reason text,
    add column released_at timestamptz,
    add constraint incident_hold_is_whole check (
        num_nulls(held_at, held_by, held_reason) in (0, 3)
    );
comment on column budget_recovery.incident.held_at is
    'Since when a person keeps its restore from going on; null: nobody does.';
comment on column budget_recovery.incident.held_by is 'Who does.';
comment on column budget_recovery.incident.held_reason is 'Why, for people.';
comment on column budget_recovery.incident.released_at is
    'When a hold was last ended; null: none ever was.';
comment on column budget_recovery.incident.attempts is
    'Attempts claimed for the newest loss; each further loss, and each release, begins again.';
comment on column budget_recovery.incident.launches_before is
    'Of these, those before the newest attempt, the newest loss or the newest release: the backoff '
    'counts from there.';
comment on column budget_recovery.restore_attempt.number is
    'From 1, for each loss; goes on where a release lets the attempts of the incident begin again.';
"""


def upgrade() -> None:
    """Make the columns."""
    op.execute(HOLD)


def downgrade() -> None:
    """Refuse, as the first step does.

    Raises:
        NotImplementedError: always; the way back is a backup of the database.
    """
    raise NotImplementedError("there is no way down; restore a backup of the database instead")
