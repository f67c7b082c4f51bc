"""The command ``budget-recovery``."""

from typing import Any

import click

from budget_recovery_dagster.cli.console import show_error
from budget_recovery_dagster.cli.demo import demo
from budget_recovery_dagster.cli.dev import dev
from budget_recovery_dagster.cli.doctor import doctor
from budget_recovery_dagster.cli.hold import hold, release
from budget_recovery_dagster.cli.migrate import migrate
from budget_recovery_dagster.cli.preview import preview
from budget_recovery_dagster.cli.record_reset import record_reset_command
from budget_recovery_dagster.cli.resolve import resolve
from budget_recovery_dagster.cli.restore import restore
from budget_recovery_dagster.cli.snapshots import snapshots
from budget_recovery_dagster.cli.status import status
from budget_recovery_dagster.cli.wipe import wipe
from budget_recovery_dagster.embedded import CannotStartError
from budget_recovery_dagster.errors import (
    BudgetRecoveryError,
    ChoiceError,
    LeaseHeldError,
    NotConfirmedError,
    PreviewOutdatedError,
    SettingsError,
)
from budget_recovery_dagster.presentation.documents import usage_error_json
from budget_recovery_dagster.sandbox import NoRunningDevError

FAILED = 1
REFUSED = 2

_REFUSALS = (
    CannotStartError,
    ChoiceError,
    LeaseHeldError,
    NoRunningDevError,
    NotConfirmedError,
    PreviewOutdatedError,
    SettingsError,
)


class _Commands(click.Group):
    """Shows our own errors as a sentence and a hint; any other error is a bug."""

    def invoke(self, ctx: click.Context) -> Any:
        is_json_wanted = "--json" in ctx.args
        try:
            return super().invoke(ctx)
        except click.UsageError as error:
            if is_json_wanted:
                click.echo(usage_error_json(error.format_message()))
            raise
        except BudgetRecoveryError as error:
            show_error(error, as_json=is_json_wanted)
            ctx.exit(REFUSED if isinstance(error, _REFUSALS) else FAILED)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="budget-recovery")
def main() -> None:
    """Back up the budget counters of an AI gateway and restore them after a loss.

    Exit codes, unless a command lists its own: 0, done; 1, failed; 2, refused or declined, nothing
    was done.
    """


main.add_command(demo)
main.add_command(dev)
main.add_command(doctor)
main.add_command(hold)
main.add_command(migrate)
main.add_command(preview)
main.add_command(record_reset_command)
main.add_command(release)
main.add_command(resolve)
main.add_command(restore)
main.add_command(snapshots)
main.add_command(status)
main.add_command(wipe)
