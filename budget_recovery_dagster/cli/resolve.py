"""``budget-recovery resolve``: close the open incident and accept the store as it is."""

from pathlib import Path
from typing import Any

import click

from budget_recovery_dagster.cli.console import answers, confirmed, progress, require_terminal
from budget_recovery_dagster.cli.options import (
    data_dir_option,
    json_option,
    order_of,
    order_options,
    settings_with_servers,
)
from budget_recovery_dagster.presentation.documents import resolved_json
from budget_recovery_dagster.presentation.terminal import print_row
from budget_recovery_dagster.services.restore.manual import require_reason, resolve_incident
from budget_recovery_dagster.wiring import opened_control_plane, store_opener

_DECLINED = 2


@click.command(short_help="Close the open incident and accept the store as it is.")
@order_options
@click.option("--yes", is_flag=True, help="Do not ask for confirmation. --json needs it.")
@json_option
@data_dir_option
def resolve(data_dir: Path | None, *, yes: bool, as_json: bool, **options: Any) -> None:
    """Close the open incident and accept the store as it is.

    Nothing more is restored automatically, and captures resume. A manual `budget-recovery restore`
    is still possible. The command is refused while the store cannot be reached.
    """
    if as_json and not yes:
        raise click.UsageError("--json needs --yes: it cannot ask for confirmation.")
    require_reason(options["reason"])
    if not yes and not _is_wanted():
        click.echo("The incident stays open.")
        raise click.exceptions.Exit(_DECLINED)
    settings = settings_with_servers(data_dir)
    with opened_control_plane(settings) as plane, progress("Reading") as report:
        resolved = resolve_incident(
            plane,
            store_opener(settings),
            order_of(options, report),
            convergence_timeout=settings.convergence_timeout,
        )
    if as_json:
        click.echo(resolved_json(resolved))
        return
    ended = resolved.incident.ended
    console = answers()
    print_row(console, f"Incident {resolved.incident.short_id} is closed; the store is HEALTHY.")
    if ended is not None:
        print_row(console, ended.detail)


def _is_wanted() -> bool:
    require_terminal("The incident stays open")
    click.echo("Usage that exists only in snapshots will not be restored.")
    click.echo("`budget-recovery preview` shows it.")
    return confirmed("Accept the store as it is?")
