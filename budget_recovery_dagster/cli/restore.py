"""``budget-recovery restore``: bring back what a person has chosen."""

import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from budget_recovery_dagster.bootstrap import OpenedDatabase, opened_database
from budget_recovery_dagster.cli.choice_options import choice_options, request_of
from budget_recovery_dagster.cli.control_plane import settings_with_servers
from budget_recovery_dagster.cli.data_dir import data_dir_option
from budget_recovery_dagster.cli.json_values import errors_in_json
from budget_recovery_dagster.cli.order_options import order_of, order_options
from budget_recovery_dagster.cli.person import this_person
from budget_recovery_dagster.cli.preview_json import applied_json
from budget_recovery_dagster.cli.preview_page import print_applied, print_preview
from budget_recovery_dagster.cli.progress import progress
from budget_recovery_dagster.sandbox.errors import NotConfirmedError
from budget_recovery_dagster.services.chosen_points import RestoreRequest

_NOT_ALL_DONE = 1


@click.command(short_help="Bring back what you choose, after a preview.")
@choice_options
@order_options
@click.option("--yes", is_flag=True, help="Do not preview, do not ask.")
@click.option("--json", "as_json", is_flag=True, help="Write JSON, for programs; needs --yes.")
@data_dir_option
def restore(data_dir: Path | None, *, yes: bool, as_json: bool, **options: Any) -> None:
    """Raise the counters that you choose to what the snapshots say, and never lower one.

    It previews, asks, and then does just that; what has changed in between is told. A restore
    after which nothing of the whole store is left to be raised ends the open incident. Exits with
    0: done; 1: something is not done, or was cut short; 2: refused, and nothing was written.
    """
    if as_json and not yes:
        raise click.UsageError("--json needs --yes: there is nobody to ask.")
    request = request_of(options)
    with (
        errors_in_json(wanted=as_json),
        opened_database(settings_with_servers(data_dir)) as database,
    ):
        if not yes and not _is_wanted(database, request):
            click.echo("Nothing is restored.")
            return
        with progress("Restoring") as tell:
            applied = database.manual_restore_service().apply(request, order_of(options, tell))
    if as_json:
        click.echo(applied_json(applied))
    else:
        print_applied(Console(highlight=False, file=sys.stdout), applied)
    if applied.failure is not None:
        raise click.exceptions.Exit(_NOT_ALL_DONE)


def _is_wanted(database: OpenedDatabase, request: RestoreRequest) -> bool:
    if not sys.stdin.isatty():
        raise NotConfirmedError(
            "Nothing is restored: it was not confirmed, and there is no terminal to ask at.",
            "look at `budget-recovery preview` of the same, then pass --yes.",
        )
    with progress("Reading") as tell:
        previewed = database.preview_service().preview(request, by=this_person(), tell=tell)
    print_preview(Console(highlight=False, file=sys.stdout), previewed)
    click.echo()
    return click.confirm("Restore this?")
