"""``budget-recovery wipe``: loses the simulated gateway's counters, to see them recovered."""

import shlex
import sys
from pathlib import Path

import click
from rich.text import Text

from budget_recovery_dagster.cli.console import answers
from budget_recovery_dagster.cli.options import data_dir_option
from budget_recovery_dagster.errors import SettingsError
from budget_recovery_dagster.sandbox.errors import NotConfirmedError
from budget_recovery_dagster.sandbox.gateway.lifecycle import Place
from budget_recovery_dagster.sandbox.gateway.wiping import Wiped, count_contents
from budget_recovery_dagster.sandbox.gateway.wiping import wipe as wipe_bucket
from budget_recovery_dagster.sandbox.running_dev import RunningDev, find_running_dev
from budget_recovery_dagster.settings import PREFIX, Settings, load_settings

_DECLINED = 1

_console = answers(soft_wrap=True)


@click.command(short_help="Lose the counters of a running dev, to see them recovered.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@data_dir_option
@click.pass_context
def wipe(context: click.Context, data_dir: Path | None, *, yes: bool) -> None:
    """Destroy the bucket of the running `budget-recovery dev`, as it might get lost.

    Nothing errors then: usages read as zero, and blocks drop. A store that
    BUDGET_RECOVERY_NATS_URL names is never wiped.
    """
    settings = load_settings()
    _require_no_store_of_others(settings)
    place = data_dir or settings.data_place
    running = find_running_dev(place)
    bucket = _own_bucket(running)
    held = count_contents(bucket)
    _console.print(f"Bucket {bucket.bucket} of the simulated gateway holds")
    _console.print(f"{held.counters:>9,} counters of {held.tenants} tenants")
    _console.print(f"{held.blocked:>9,} blocked keys")
    if not yes:
        _confirm(context)
    _show(wipe_bucket(bucket), running, place, settings)


def _require_no_store_of_others(settings: Settings) -> None:
    if settings.nats_url is not None:
        raise SettingsError(
            f"{PREFIX}NATS_URL is set, and a store that it names is never wiped.",
            f"unset {PREFIX}NATS_URL to wipe the one that `budget-recovery dev` brings.",
        )


def _own_bucket(running: RunningDev) -> Place:
    if running.nats_url is None:
        raise SettingsError(
            f"The running dev uses the store that its {PREFIX}NATS_URL names, which is never"
            " wiped.",
            f"start `budget-recovery dev` without {PREFIX}NATS_URL.",
        )
    return Place(running.nats_url, running.bucket)


def _confirm(context: click.Context) -> None:
    if not sys.stdin.isatty():
        raise NotConfirmedError(
            "Nothing is wiped: it was not confirmed, and there is no terminal to ask at.",
            "pass --yes.",
        )
    if not click.confirm("Wipe it?"):
        _console.print("Nothing is wiped.")
        context.exit(_DECLINED)


def _show(wiped: Wiped, running: RunningDev, place: Path, settings: Settings) -> None:
    _console.print(Text.assemble(("Gone:", "bold red"), f" stream {wiped.stream} is deleted."))
    if wiped.seconds is None:
        _console.print("The gateway has not made it anew yet; its gateway.log says why.")
    else:
        _console.print(f"The gateway made it anew after {wiped.seconds:.1f} s; it is empty.")
    status = ["budget-recovery", "status"]
    if place != settings.data_place:
        status += ["--data-dir", str(place)]
    _console.print("\nThe next check of the store finds that out. Watch it:")
    _console.print(Text(f"  {shlex.join(status)}"))
    _console.print(Text(f"  {running.ui_url}", "cyan"))
