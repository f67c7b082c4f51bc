"""``budget-recovery discard-future``: discard snapshots that a wrong clock dated in the future."""

from pathlib import Path
from uuid import uuid4

import click

from budget_recovery_dagster.cli.console import answers, confirmed, errors, require_terminal
from budget_recovery_dagster.cli.options import (
    current_user,
    data_dir_option,
    json_option,
    optional_store,
    settings_with_database,
)
from budget_recovery_dagster.presentation.documents import discarded_json
from budget_recovery_dagster.presentation.terminal import (
    print_discarded,
    print_future,
    print_row,
)
from budget_recovery_dagster.services.future_snapshots import (
    discard_future,
    list_future,
)
from budget_recovery_dagster.services.restore.manual import require_reason
from budget_recovery_dagster.wiring import opened_control_plane

_DECLINED = 2


@click.command("discard-future", short_help="Discard snapshots dated in the future.")
@click.option("--reason", required=True, help="Reason, stored with each discarded snapshot.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation. --json needs it.")
@json_option
@data_dir_option
def discard_future_command(data_dir: Path | None, reason: str, *, yes: bool, as_json: bool) -> None:
    """Discard the snapshots of all tenants that are dated in the future.

    The clock of PostgreSQL was ahead when they were captured. They block nothing and hide nothing,
    but a restore uses their usage. The command lists them, and the usage of open windows that only
    they hold, and asks for confirmation. Capture the current hour first, so that another snapshot
    holds what the store has.

    Refused if there is none, if the clock of PostgreSQL disagrees with that of this host or of
    NATS, and while captures are paused. If NATS is away, a warning says that its clock was not
    compared. The table discarded_capture records each discarded snapshot.

    Uses the database of BUDGET_RECOVERY_POSTGRES_URL, or that of the running `budget-recovery dev`.
    """
    if as_json and not yes:
        raise click.UsageError("--json needs --yes: it cannot ask for confirmation.")
    require_reason(reason)
    with opened_control_plane(settings_with_database(data_dir)) as plane:
        open_store = optional_store(data_dir)
        listed = list_future(plane, open_store)
        if listed.unmeasured is not None:
            print_row(errors(), f"Warning: the clock of NATS was not compared. {listed.unmeasured}")
        if not as_json:
            console = answers()
            print_future(console, listed)
        if not yes:
            require_terminal("Nothing was discarded")
            if not confirmed("Discard them?"):
                click.echo("Nothing was discarded.")
                raise click.exceptions.Exit(_DECLINED)
        discarded = discard_future(
            plane,
            listed.found,
            open_store,
            by=current_user(),
            reason=reason,
            holder=f"command {uuid4()}",
        )
    if as_json:
        click.echo(discarded_json(discarded))
        return
    print_discarded(console, discarded)
