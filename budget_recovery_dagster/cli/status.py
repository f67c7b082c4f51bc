"""``budget-recovery status``: the state of the store, and the next step."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from budget_recovery_dagster.cli.console import answers, is_written, show_failure
from budget_recovery_dagster.cli.options import data_dir_option, json_option, settings_with_database
from budget_recovery_dagster.errors import describe_error
from budget_recovery_dagster.presentation.documents import failure_json, status_json
from budget_recovery_dagster.presentation.terminal import print_status
from budget_recovery_dagster.services.status import Condition, read_status
from budget_recovery_dagster.wiring import opened_control_plane

UNKNOWN = 3

_EXIT_CODES: Mapping[Condition, int] = {
    Condition.HEALTHY: 0,
    Condition.RECOVERING: 1,
    Condition.HELD: 2,
    Condition.FAILED: 2,
    Condition.UNKNOWN: UNKNOWN,
    Condition.ATTENTION: 4,
}


class _Status(click.Command):
    """Exits with 3 on a usage error: 1 and 2 are states of the store."""

    def make_context(self, *arguments: Any, **options: Any) -> click.Context:
        try:
            return super().make_context(*arguments, **options)
        except click.UsageError as error:
            error.show()
            raise click.exceptions.Exit(UNKNOWN) from error


@click.command(cls=_Status, short_help="Show the state of the store and the next step.")
@json_option
@data_dir_option
@click.pass_context
def status(context: click.Context, data_dir: Path | None, *, as_json: bool) -> None:
    """Show the state of the gateway's store as of the last check, and the next step.

    Uses the database of BUDGET_RECOVERY_POSTGRES_URL, or that of the running `budget-recovery dev`.
    The store itself is not read.

    Exit codes: 0, healthy; 1, recovering; 2, failed or on hold, an operator must act; 3, unknown;
    4, healthy but needs attention, such as failing captures.
    """
    try:
        settings = settings_with_database(data_dir)
        with opened_control_plane(settings) as plane:
            found = read_status(plane, check_interval=settings.check_interval)
    except Exception as error:  # noqa: BLE001 - see _Status
        message, hint = describe_error(error)
        show_failure(message, hint)
        if as_json:
            document = failure_json(error, UNKNOWN)
            is_written("status", lambda: click.echo(document))
        context.exit(UNKNOWN)
    exit_code = _EXIT_CODES[found.condition]

    def write() -> None:
        if as_json:
            click.echo(status_json(found, exit_code))
        else:
            print_status(answers(), found)

    context.exit(exit_code if is_written("status", write) else UNKNOWN)
