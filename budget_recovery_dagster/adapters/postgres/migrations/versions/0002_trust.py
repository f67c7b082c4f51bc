"""The second version: what detection, retention and restores need in order to trust less."""

from alembic import op

from budget_recovery_dagster.adapters.postgres.migrations import v2

revision = "v2"
down_revision = "v1"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Change the tables and views; no snapshot is lost."""
    for block in v2.BLOCKS:
        op.execute(block)


def downgrade() -> None:
    """Refuse: the tables hold what a restore needs.

    Raises:
        NotImplementedError: always; restore a backup of the database instead.
    """
    raise NotImplementedError("Downgrades are not supported; restore a backup of the database.")
