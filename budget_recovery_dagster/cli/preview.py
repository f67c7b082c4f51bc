"""``budget-recovery preview``: a dry run of a restore."""

from pathlib import Path
from typing import Any

import click

from budget_recovery_dagster.cli.console import answers, progress
from budget_recovery_dagster.cli.options import (
    choice_options,
    current_user,
    data_dir_option,
    json_option,
    request_of,
    settings_with_servers,
)
from budget_recovery_dagster.presentation.documents import preview_json
from budget_recovery_dagster.presentation.terminal import print_how_to_apply, print_preview
from budget_recovery_dagster.services.restore.preview import preview_restore
from budget_recovery_dagster.wiring import opened_control_plane, store_opener


@click.command(short_help="Show what a restore would change.")
@choice_options
@json_option
@data_dir_option
def preview(data_dir: Path | None, *, as_json: bool, **choice: Any) -> None:
    """Show what a restore would change in each budget. Read-only for the gateway's store.

    The preview is stored for a day. `budget-recovery restore` with the same options reports what
    changed since the preview.

    Uses the configured servers, or those of the running `budget-recovery dev`.
    """
    settings = settings_with_servers(data_dir)
    with opened_control_plane(settings) as plane, progress("Reading") as report:
        previewed = preview_restore(
            plane,
            store_opener(settings),
            request_of(choice),
            by=current_user(),
            on_progress=report,
        )
    if as_json:
        click.echo(preview_json(previewed))
    else:
        console = answers()
        print_preview(console, previewed)
        print_how_to_apply(console, previewed)
