"""``budget-recovery release``: let the restore of the open incident go on."""

from pathlib import Path

import click

from budget_recovery_dagster.bootstrap import opened_database
from budget_recovery_dagster.cli.control_plane import settings_with_database
from budget_recovery_dagster.cli.data_dir import data_dir_option
from budget_recovery_dagster.cli.held_json import held_json
from budget_recovery_dagster.cli.json_values import errors_in_json
from budget_recovery_dagster.cli.person import this_person


@click.command(short_help="Let a restore go on that is on hold.")
@click.option("--json", "as_json", is_flag=True, help="Write JSON, for programs.")
@data_dir_option
def release(data_dir: Path | None, *, as_json: bool) -> None:
    """Let the restore of the open incident go on, at once and with all its attempts.

    The database is that of BUDGET_RECOVERY_POSTGRES_URL or else of the running
    `budget-recovery dev`.
    """
    with (
        errors_in_json(wanted=as_json),
        opened_database(settings_with_database(data_dir)) as database,
    ):
        incident = database.hold_service().release(by=this_person())
    if as_json:
        click.echo(held_json(incident))
        return
    click.echo(f"Incident {incident.short_id} is not on hold; its restore is launched soon.")
