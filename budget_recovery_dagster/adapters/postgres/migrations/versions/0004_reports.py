"""The fourth version: reports of what a loss costs, and keys that no maximum age drops."""

from alembic import op

from budget_recovery_dagster.adapters.postgres.migrations import v4

revision = "v4"
down_revision = "v3"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Change the tables and views; no snapshot is lost."""
    for block in v4.BLOCKS:
        op.execute(block)


def downgrade() -> None:
    """Refuse: the tables hold what a restore needs.

    Raises:
        NotImplementedError: always; restore a backup of the database instead.
    """
    raise NotImplementedError("Downgrades are not supported; restore a backup of the database.")
