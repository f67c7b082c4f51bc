"""``budget-recovery restore``: a manual restore of chosen counters."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from budget_recovery_dagster.cli.console import (
    answers,
    confirmed,
    progress,
    require_terminal,
    show_error,
    show_failure,
)
from budget_recovery_dagster.cli.options import (
    choice_options,
    current_user,
    data_dir_option,
    order_of,
    order_options,
    request_of,
    settings_with_servers,
)
from budget_recovery_dagster.errors import BudgetRecoveryError
from budget_recovery_dagster.ports import ControlPlane, OpenStore
from budget_recovery_dagster.presentation.documents import applied_json, interrupted_json
from budget_recovery_dagster.presentation.terminal import print_applied, print_preview
from budget_recovery_dagster.services.restore.manual import (
    Applied,
    require_reason,
    restore_manually,
)
from budget_recovery_dagster.services.restore.preview import RestoreRequest, preview_restore
from budget_recovery_dagster.wiring import opened_control_plane, store_opener

_NOT_ALL_DONE = 1
_REFUSED = 2
_INTERRUPTED = 130


@click.command(short_help="Restore chosen counters, after a preview.")
@choice_options
@order_options
@click.option(
    "--yes",
    is_flag=True,
    help="Show no preview and do not ask. A preview of the last 24 hours is still compared.",
)
@click.option("--json", "as_json", is_flag=True, help="Write JSON, for programs; needs --yes.")
@data_dir_option
def restore(data_dir: Path | None, *, yes: bool, as_json: bool, **options: Any) -> None:
    """Raise the chosen counters to the usage in the snapshots. No counter is ever lowered.

    The command shows a preview and asks for confirmation. Then it raises the counters and reports
    the differences from the preview. If no counter of the store is then lower than in the
    snapshots, the command closes the open incident.

    Exit codes: 0, restored; 1, not all restored, but raised counters stay raised; 2, nothing
    restored; 130, interrupted, raised counters stay raised.
    """
    if as_json and not yes:
        raise click.UsageError("--json needs --yes: it cannot ask for confirmation.")
    try:
        applied = _restore(data_dir, options, yes=yes)
    except BudgetRecoveryError as error:
        show_error(error, as_json=as_json)
        raise click.exceptions.Exit(_REFUSED) from error
    except KeyboardInterrupt as error:
        what = "Interrupted."
        hint = "see the table restore_audit: counters that were raised stay raised."
        if as_json:
            click.echo(interrupted_json(what, hint))
        show_failure(what, hint)
        raise click.exceptions.Exit(_INTERRUPTED) from error
    if applied is None:
        click.echo("Nothing is restored.")
        raise click.exceptions.Exit(_REFUSED)
    if as_json:
        click.echo(applied_json(applied))
    else:
        print_applied(answers(), applied)
    if applied.failure is not None:
        raise click.exceptions.Exit(_NOT_ALL_DONE)


def _restore(data_dir: Path | None, options: Mapping[str, Any], *, yes: bool) -> Applied | None:
    """Preview, ask and restore; None: the person declined."""
    request = request_of(options)
    require_reason(options["reason"])
    settings = settings_with_servers(data_dir)
    open_store = store_opener(settings)
    with opened_control_plane(settings) as plane:
        preview_id = None
        if not yes:
            preview_id = _confirmed_preview(plane, open_store, request)
            if preview_id is None:
                return None
        with progress("Restoring") as report:
            return restore_manually(
                plane,
                open_store,
                request,
                order_of(options, report),
                convergence_timeout=settings.convergence_timeout,
                preview_id=preview_id,
            )


def _confirmed_preview(
    plane: ControlPlane, open_store: OpenStore, request: RestoreRequest
) -> str | None:
    """Show the preview and ask; return its id, or None if the person declines."""
    require_terminal(
        "Nothing is restored",
        "check `budget-recovery preview` with the same options, then pass --yes.",
    )
    with progress("Reading") as report:
        previewed = preview_restore(
            plane, open_store, request, by=current_user(), on_progress=report
        )
    print_preview(answers(), previewed)
    click.echo()
    return previewed.preview_id if confirmed("Restore this?") else None
