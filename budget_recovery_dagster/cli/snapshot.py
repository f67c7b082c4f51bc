"""``budget-recovery snapshot``: capture every tenant now."""

from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

import click

from budget_recovery_dagster.cli.console import answers, progress
from budget_recovery_dagster.cli.options import (
    current_user,
    data_dir_option,
    json_option,
    settings_with_servers,
)
from budget_recovery_dagster.presentation.documents import captured_json
from budget_recovery_dagster.presentation.terminal import print_row
from budget_recovery_dagster.presentation.text import captured_report
from budget_recovery_dagster.services.capture import (
    Captured,
    TenantFailed,
    TenantOutcome,
    capture_now,
)
from budget_recovery_dagster.settings import Settings
from budget_recovery_dagster.wiring import opened_control_plane, store_opener

_NOT_ALL_DONE = 1
# On a terminal only the newest sentence is shown; elsewhere each is a line.
_REPORT_EVERY = 100


@click.command(short_help="Take a snapshot of all tenants now.")
@json_option
@data_dir_option
def snapshot(data_dir: Path | None, *, as_json: bool) -> None:
    """Take a snapshot of all tenants now, in addition to the hourly ones.

    It is a snapshot like the hourly ones: restores use it, and checks compare with it. It replaces
    none. Dagster shows it only in the next materialization of its assets.

    The command is refused while captures are paused, while another capture runs, and if the clocks
    of PostgreSQL and NATS differ.

    Exit codes: 0, all tenants are stored, or none has usage; 1, failed, or not all are stored; 2,
    invalid options or settings, or refused.
    """
    captured = _captured(settings_with_servers(data_dir))
    if as_json:
        click.echo(captured_json(captured))
    else:
        console = answers()
        for line in captured_report(captured):
            print_row(console, line)
    if captured.failed or captured.stopped_by:
        raise click.exceptions.Exit(_NOT_ALL_DONE)


def _captured(settings: Settings) -> Captured:
    """Capture the current hour.

    Raises:
        BudgetRecoveryError: nothing is stored, for one reason that holds for all tenants.
    """
    with opened_control_plane(settings) as plane, progress("Reading") as report:
        captured = capture_now(
            plane,
            store_opener(settings),
            source=settings.capture_source,
            retention=settings.retention,
            run_id=f"command {uuid4()}",
            holder=current_user(),
            on_outcome=_reported(report),
        )
    if captured.stopped_by is not None and not captured.stored:
        raise captured.stopped_by
    return captured


def _reported(report: Callable[[str], None]) -> Callable[[TenantOutcome], None]:
    """Return what reports every failed tenant, and how many are done."""
    done = 0

    def show(outcome: TenantOutcome) -> None:
        nonlocal done
        done += 1
        if isinstance(outcome, TenantFailed) and outcome.seconds:
            report(f"Tenant {outcome.tenant!r} failed: {outcome.reason}")
        elif done == 1 or not done % _REPORT_EVERY:
            report(f"{done:,} done, the newest: tenant {outcome.tenant!r}")

    return show
