"""The commands ``hold`` and ``release``."""

from pathlib import Path

import click

from budget_recovery_dagster.cli.console import answers
from budget_recovery_dagster.cli.options import (
    current_user,
    data_dir_option,
    json_option,
    settings_with_database,
)
from budget_recovery_dagster.presentation.documents import held_json
from budget_recovery_dagster.presentation.terminal import print_row
from budget_recovery_dagster.presentation.text import hold_report, release_report
from budget_recovery_dagster.services.restore.manual import (
    hold_restore,
    release_restore,
    require_reason,
)
from budget_recovery_dagster.wiring import opened_control_plane


@click.command(short_help="Pause the automatic restore of the open incident.")
@click.option("--reason", required=True, help="Reason, shown by `budget-recovery status`.")
@json_option
@data_dir_option
def hold(reason: str, data_dir: Path | None, *, as_json: bool) -> None:
    """Pause the automatic restore of the open incident until `budget-recovery release`.

    No automatic restore starts, and a running one stops after the current tenant. Captures stay
    paused. A manual `budget-recovery restore` still works.

    Uses the database of BUDGET_RECOVERY_POSTGRES_URL, or that of the running `budget-recovery dev`.
    """
    require_reason(reason)
    with opened_control_plane(settings_with_database(data_dir)) as plane:
        held = hold_restore(plane, reason, by=current_user())
    if as_json:
        click.echo(held_json(held.incident))
        return
    console = answers()
    for paragraph in hold_report(held):
        print_row(console, paragraph)


@click.command(short_help="Resume the restore that is on hold.")
@json_option
@data_dir_option
def release(data_dir: Path | None, *, as_json: bool) -> None:
    """Release the hold of the open incident.

    The automatic restore starts within 30 s, with three new attempts.

    Uses the database of BUDGET_RECOVERY_POSTGRES_URL, or that of the running `budget-recovery dev`.
    """
    with opened_control_plane(settings_with_database(data_dir)) as plane:
        released = release_restore(plane, by=current_user())
    if as_json:
        click.echo(held_json(released.incident))
        return
    print_row(answers(), release_report(released))
