"""``budget-recovery release``: let the restore of the open incident go on."""

from pathlib import Path

import click

from budget_recovery_dagster.bootstrap import opened_database
from budget_recovery_dagster.cli.control_plane import settings_with_database
from budget_recovery_dagster.cli.data_dir import data_dir_option
from budget_recovery_dagster.cli.person import this_person


@click.command(short_help="Let a restore go on that is on hold.")
@data_dir_option
def release(data_dir: Path | None) -> None:
    """Let the restore of the open incident go on, at once and with all its attempts.

    The database is that of BUDGET_RECOVERY_POSTGRES_URL or else of the running
    `budget-recovery dev`.
    """
    with opened_database(settings_with_database(data_dir)) as database:
        incident = database.hold_service().release(by=this_person())
    click.echo(f"Incident {incident.short_id} is not on hold; its restore is launched soon.")
