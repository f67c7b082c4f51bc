"""The commands ``hold`` and ``release``."""

from pathlib import Path

import click

from budget_recovery_dagster.cli.options import (
    current_user,
    data_dir_option,
    settings_with_database,
)
from budget_recovery_dagster.presentation.documents import errors_in_json, held_json
from budget_recovery_dagster.services.restore.manual import hold_restore, release_restore
from budget_recovery_dagster.wiring import opened_control_plane


@click.command(short_help="Stop the restore of the open incident.")
@click.option("--reason", required=True, help="Why; everybody who looks is told.")
@click.option("--json", "as_json", is_flag=True, help="Write JSON, for programs.")
@data_dir_option
def hold(reason: str, data_dir: Path | None, *, as_json: bool) -> None:
    """Stop the restore of the open incident until `budget-recovery release`.

    None is launched, and one that works stops before the next tenant. Captures stay paused. The
    database is that of BUDGET_RECOVERY_POSTGRES_URL or else of the running `budget-recovery dev`.
    """
    if not reason.strip():
        raise click.BadParameter("it is empty.", param_hint="--reason")
    with (
        errors_in_json(wanted=as_json),
        opened_control_plane(settings_with_database(data_dir)) as plane,
    ):
        incident = hold_restore(plane, reason, by=current_user())
    if as_json:
        click.echo(held_json(incident))
        return
    held = incident.held
    if held is not None and (held.reason, held.by) != (reason, current_user()):
        click.echo(f"It was on hold already: {incident.on_hold}")
    click.echo(f"Incident {incident.short_id} is on hold. To let it go on: budget-recovery release")


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
        opened_control_plane(settings_with_database(data_dir)) as plane,
    ):
        incident = release_restore(plane, by=current_user())
    if as_json:
        click.echo(held_json(incident))
        return
    click.echo(f"Incident {incident.short_id} is not on hold; its restore is launched soon.")
