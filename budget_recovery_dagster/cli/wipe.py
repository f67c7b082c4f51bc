"""``budget-recovery wipe``: delete the simulated gateway's counters, to see them restored."""

import shlex
from pathlib import Path

import click
from rich.text import Text

from budget_recovery_dagster.cli.console import answers, confirmed, require_terminal
from budget_recovery_dagster.cli.options import data_dir_option
from budget_recovery_dagster.errors import SettingsError
from budget_recovery_dagster.sandbox import RunningDev, find_running_dev, gateway
from budget_recovery_dagster.settings import PREFIX, Settings, load_settings

_DECLINED = 1

_console = answers(soft_wrap=True)


@click.command(short_help="Wipe the store of a running dev, to see it restored.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@data_dir_option
@click.pass_context
def wipe(context: click.Context, data_dir: Path | None, *, yes: bool) -> None:
    """Delete the store of the running `budget-recovery dev`, to see it restored.

    Afterwards requests do not fail: usage reads as zero, and blocks end. The command never wipes a
    store of BUDGET_RECOVERY_NATS_URL.

    Exit codes: 0, wiped; 1, declined or failed; 2, refused.
    """
    settings = load_settings()
    place = data_dir or settings.data_place
    running, bucket = _own_bucket(place, settings)
    held = gateway.count_contents(bucket)
    _console.print(f"Bucket {bucket.bucket} of the simulated gateway:")
    _console.print(f"{held.counters:>9,} counters of {held.tenants} tenants")
    _console.print(f"{held.blocked:>9,} blocked keys")
    if not yes:
        require_terminal("Nothing is wiped")
        if not confirmed("Wipe it?"):
            _console.print("Nothing is wiped.")
            context.exit(_DECLINED)
    seconds = gateway.wipe(bucket)
    stream = gateway.bucket_stream(bucket.bucket)
    _console.print(Text.assemble(("Wiped:", "bold red"), f" stream {stream} is deleted."))
    if seconds is None:
        _console.print("The gateway has not created a new one yet: see gateway.log.")
    else:
        _console.print(f"The gateway created an empty one after {seconds:.1f} s.")
    status = ["budget-recovery", "status"]
    if place != settings.data_place:
        status += ["--data-dir", str(place)]
    _console.print("\nThe next check of the store detects the loss. Watch it:")
    _console.print(Text(f"  {shlex.join(status)}"))
    _console.print(Text(f"  {running.ui_url}", "cyan"))


def _own_bucket(data_dir: Path, settings: Settings) -> tuple[RunningDev, gateway.Place]:
    """Return the running dev and its bucket, never one that a setting names."""
    if settings.nats_url is not None:
        raise SettingsError(
            f"{PREFIX}NATS_URL is set, and the store that it names is never wiped.",
            f"unset {PREFIX}NATS_URL to wipe the embedded store of `budget-recovery dev`.",
        )
    running = find_running_dev(data_dir)
    if running.nats_url is None:
        raise SettingsError(
            f"The running dev uses the store of its {PREFIX}NATS_URL, which is never wiped.",
            f"start `budget-recovery dev` without {PREFIX}NATS_URL.",
        )
    return running, gateway.Place(running.nats_url, running.bucket)
