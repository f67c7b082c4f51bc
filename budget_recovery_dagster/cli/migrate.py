"""``budget-recovery migrate``: brings the control-plane database's schema up to date."""

import click

from budget_recovery_dagster.cli.console import progress
from budget_recovery_dagster.settings import load_settings
from budget_recovery_dagster.wiring import migrate_schema


@click.command(short_help="Create or upgrade the database schema.")
def migrate() -> None:
    """Create or upgrade the schema in the database of BUDGET_RECOVERY_POSTGRES_URL.

    The user in that URL must be the role that owns the database. It is safe to repeat. If another
    process holds a lock for more than 5 seconds, it ends, names that process and changes nothing.
    """
    with progress("Migrating ...") as show:
        migration = migrate_schema(load_settings(), on_wait=show)
    if not migration.changed:
        click.echo(f"The schema is already at version {migration.to_version}.")
    elif migration.from_version is None:
        click.echo(f"Created the schema, version {migration.to_version}.")
    else:
        click.echo(f"Migrated from version {migration.from_version} to {migration.to_version}.")
