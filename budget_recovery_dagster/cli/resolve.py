"""``budget-recovery resolve``: close the open incident and accept the store as it is."""

from pathlib import Path
from typing import Any

import click

from budget_recovery_dagster.cli.console import answers, confirmed, progress, require_terminal
from budget_recovery_dagster.cli.options import (
    current_user,
    data_dir_option,
    json_option,
    order_of,
    order_options,
    settings_with_servers,
)
from budget_recovery_dagster.domain.snapshots import RecordedRun
from budget_recovery_dagster.errors import BudgetRecoveryError
from budget_recovery_dagster.ports import ControlPlane, OpenStore
from budget_recovery_dagster.presentation.documents import resolved_json
from budget_recovery_dagster.presentation.terminal import print_row
from budget_recovery_dagster.presentation.text import acceptance_lines, resolved_report
from budget_recovery_dagster.services.capture import capture_now
from budget_recovery_dagster.services.restore.manual import (
    Acceptance,
    Order,
    require_open_incident,
    require_reason,
    resolve_incident,
)
from budget_recovery_dagster.services.restore.preview import RestoreRequest, preview_restore
from budget_recovery_dagster.settings import Settings
from budget_recovery_dagster.wiring import opened_control_plane, store_opener

_DECLINED = 2
# Another capture may begin at once after ours.
_NEWEST_RUNS = 5


@click.command(short_help="Close the open incident and accept the store as it is.")
@order_options
@click.option(
    "--record-resets",
    is_flag=True,
    help="Usage that the store lacks was removed on purpose: exclude it from restores.",
)
@click.option(
    "--keep-snapshots",
    is_flag=True,
    help="Keep that usage for restores: the next loss brings it back.",
)
@click.option("--yes", is_flag=True, help="Do not ask for confirmation. --json needs it.")
@json_option
@data_dir_option
def resolve(
    data_dir: Path | None,
    *,
    record_resets: bool,
    keep_snapshots: bool,
    yes: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Close the open incident and accept the store as it is.

    Nothing more is restored automatically. Choose what happens to usage that the snapshots have and
    the store does not: --record-resets or --keep-snapshots. On a terminal, the command shows how
    much that is, and asks. Then captures resume, and the first one is taken at once.

    A manual `budget-recovery restore` is still possible, after --record-resets with
    --despite-resets. The command is refused while the store cannot be reached.
    """
    if as_json and not yes:
        raise click.UsageError("--json needs --yes: it cannot ask for confirmation.")
    require_reason(options["reason"])
    acceptance = _given(record_resets=record_resets, keep_snapshots=keep_snapshots)
    if yes and acceptance is None:
        raise click.UsageError("--yes needs --record-resets or --keep-snapshots.")
    if not yes:
        require_terminal(
            "The incident stays open", "pass --yes with --record-resets or --keep-snapshots."
        )
    settings = settings_with_servers(data_dir)
    with opened_control_plane(settings) as plane:
        preview_id = None
        require_open_incident(plane)
        if not yes:
            acceptance, preview_id = _chosen(plane, store_opener(settings), acceptance)
        if acceptance is None:
            click.echo("The incident stays open.")
            raise click.exceptions.Exit(_DECLINED)
        with progress("Reading") as report:
            order = order_of(options, report)
            resolved = resolve_incident(
                plane,
                store_opener(settings),
                order,
                acceptance=acceptance,
                retention=settings.retention,
                convergence_timeout=settings.convergence_timeout,
                preview_id=preview_id,
            )
        failure = _captured(plane, settings, order)
        run = _run_of(plane, order.run_id)
    if as_json:
        click.echo(resolved_json(resolved, run, failure))
        return
    console = answers()
    for line in resolved_report(resolved, run, failure):
        print_row(console, line)


def _given(*, record_resets: bool, keep_snapshots: bool) -> Acceptance | None:
    if record_resets and keep_snapshots:
        raise click.UsageError("--record-resets and --keep-snapshots are mutually exclusive.")
    if record_resets:
        return Acceptance.RECORD_RESETS
    return Acceptance.KEEP_SNAPSHOTS if keep_snapshots else None


def _captured(plane: ControlPlane, settings: Settings, order: Order) -> BudgetRecoveryError | None:
    """Capture the accepted store; return why not, because the incident is closed in any case."""
    try:
        capture_now(
            plane,
            store_opener(settings),
            source=settings.capture_source,
            retention=settings.retention,
            run_id=order.run_id,
            holder=order.by,
        )
    except BudgetRecoveryError as error:
        return error
    return None


def _run_of(plane: ControlPlane, run_id: str) -> RecordedRun | None:
    runs = plane.reports.newest_runs(_NEWEST_RUNS)
    return next((run for run in runs if run.run_id == run_id), None)


def _chosen(
    plane: ControlPlane, open_store: OpenStore, acceptance: Acceptance | None
) -> tuple[Acceptance | None, str]:
    """Show what each choice means, and ask; also return the id of the preview.

    None: the person declines.
    """
    with progress("Reading") as report:
        preview = preview_restore(
            plane, open_store, RestoreRequest(), by=current_user(), on_progress=report
        )
    console = answers()
    for line in acceptance_lines(preview, acceptance):
        print_row(console, line)
    if acceptance is not None:
        is_confirmed = confirmed("Accept the store as it is?")
        return acceptance if is_confirmed else None, preview.preview_id
    names = {f"--{each.value.replace('_', '-')}": each for each in Acceptance}
    try:
        name = click.prompt("Accept the store with", type=click.Choice(list(names)))
    except click.Abort:
        click.echo()
        return None, preview.preview_id
    return names[name], preview.preview_id
