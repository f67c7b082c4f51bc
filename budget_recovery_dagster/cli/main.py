"""The command ``budget-recovery``."""

from typing import Any

import click
from rich.console import Console
from rich.text import Text

from budget_recovery_dagster.cli.dev import dev
from budget_recovery_dagster.cli.migrate import migrate
from budget_recovery_dagster.errors import BudgetRecoveryError, SettingsError
from budget_recovery_dagster.sandbox.errors import CannotStartError

FAILED = 1
REFUSED = 2


class _Commands(click.Group):
    """Shows our own errors as a sentence and a hint; any other error is a fault of the program."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BudgetRecoveryError as error:
            console = Console(stderr=True, soft_wrap=True)
            console.print(Text.assemble(("Error:", "bold red"), " ", error.message))
            if error.hint:
                console.print(Text.assemble(("Try:", "bold"), " ", error.hint))
            refused = isinstance(error, CannotStartError | SettingsError)
            ctx.exit(REFUSED if refused else FAILED)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="budget-recovery")
def main() -> None:
    """Keep the budget counters of an AI gateway recoverable."""


main.add_command(dev)
main.add_command(migrate)
