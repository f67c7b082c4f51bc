"""The command ``budget-recovery``."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import click

from budget_recovery_dagster.cli.console import can_write_output, show_error, show_failure
from budget_recovery_dagster.embedded import CannotStartError
from budget_recovery_dagster.errors import (
    BudgetRecoveryError,
    CapturesPausedError,
    ChoiceError,
    ClockSkewError,
    LeaseHeldError,
    NotConfirmedError,
    PreviewOutdatedError,
    SettingsError,
)
from budget_recovery_dagster.presentation.documents import error_json, usage_error_json
from budget_recovery_dagster.sandbox import NoRunningDevError

_COMMANDS: Mapping[str, str] = {
    "demo": "demo:demo",
    "dev": "dev:dev",
    "discard-future": "discard_future:discard_future_command",
    "doctor": "doctor:doctor",
    "hold": "hold:hold",
    "migrate": "migrate:migrate",
    "preview": "preview:preview",
    "record-reset": "record_reset:record_reset_command",
    "release": "hold:release",
    "resolve": "resolve:resolve",
    "restore": "restore:restore",
    "snapshot": "snapshot:snapshot",
    "snapshots": "snapshots:snapshots",
    "status": "status:status",
    "wipe": "wipe:wipe",
}
"""The module of each command in this package, and the command's name in it."""

FAILED = 1
REFUSED = 2

_REFUSALS = (
    CannotStartError,
    CapturesPausedError,
    ChoiceError,
    ClockSkewError,
    LeaseHeldError,
    NoRunningDevError,
    NotConfirmedError,
    PreviewOutdatedError,
    SettingsError,
)


class _Commands(click.Group):
    """Shows our own errors as a sentence and a hint; any other error is a bug, with a traceback.

    With `--json`, each of them is a document as well.

    The module of a command is imported when the command is used: most of them import libraries
    that the others do not need.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click passes it
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        # For an unknown name, click suggests similar ones from `self.commands`.
        for name in [cmd_name] if cmd_name in _COMMANDS else _COMMANDS:
            if name not in self.commands:
                module, _, command = _COMMANDS[name].partition(":")
                imported = import_module(f"{__package__}.{module}")
                self.add_command(getattr(imported, command), name)
        return super().get_command(ctx, cmd_name)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return self._invoke(ctx)
        except BrokenPipeError:
            # The reader has seen enough, as `head` does; click ends the command quietly.
            raise
        except OSError as error:
            # Adapters turn those of servers and files into errors of ours.
            if can_write_output():
                raise
            show_failure(
                f"The output cannot be written: {error.strerror}.",
                "check the output, and whether the command did its work before you repeat it.",
            )
            ctx.exit(FAILED)

    def _invoke(self, ctx: click.Context) -> Any:
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
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except Exception as error:
            if is_json_wanted:
                click.echo(error_json(error))
            raise


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="budget-recovery")
def main() -> None:
    """Back up the budget counters of an AI gateway and restore them after a loss.

    Exit codes, unless a command lists its own: 0, done; 1, failed; 2, invalid options or settings,
    refused, or declined.
    """
