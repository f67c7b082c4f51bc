"""The third version: what recovery needs to start on time and to report what it did."""

from alembic import op

from budget_recovery_dagster.adapters.postgres.migrations import v3

revision = "v3"
down_revision = "v2"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Change the tables and views; no snapshot is lost."""
    for block in v3.BLOCKS:
        op.execute(block)


def downgrade() -> None:
    """Refuse: the tables hold what a restore needs.

    Raises:
        NotImplementedError: always; restore a backup of the database instead.
    """
    raise NotImplementedError("Downgrades are not supported; restore a backup of the database.")
