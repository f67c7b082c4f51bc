"""The first version of the schema.

Its SQL is in two modules: ``v1_snapshots`` and ``v1_recovery``.
"""

from alembic import op

from budget_recovery_dagster.adapters.postgres.migrations import v1_recovery, v1_snapshots

# Databases of unreleased checkouts have the versions 0001 to 0006 of another history. No revision
# may ever use such an id, or one of these databases would be taken for a current one.
revision = "v1"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the tables, the function and the views."""
    for block in (*v1_snapshots.BLOCKS, *v1_recovery.BLOCKS):
        op.execute(block)


def downgrade() -> None:
    """Refuse: the tables hold what a restore needs.

    Raises:
        NotImplementedError: always; restore a backup of the database instead.
    """
    raise NotImplementedError("Downgrades are not supported; restore a backup of the database.")
