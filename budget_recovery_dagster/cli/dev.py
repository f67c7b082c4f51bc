"""``budget-recovery dev``: everything on this machine, as children of one command."""

import math
import shlex
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import click
from rich.text import Text

from budget_recovery_dagster.cli.console import answers
from budget_recovery_dagster.cli.options import data_dir_option
from budget_recovery_dagster.cli.starting import starting
from budget_recovery_dagster.cli.stop_signals import stop_signals_interrupt
from budget_recovery_dagster.domain.windows import Hour
from budget_recovery_dagster.sandbox.child_process import Found, poll
from budget_recovery_dagster.sandbox.dagster_ui import DagsterUi
from budget_recovery_dagster.sandbox.data_directory import held_data_dir
from budget_recovery_dagster.sandbox.errors import DagsterUiError
from budget_recovery_dagster.sandbox.first_snapshot import (
    ASSET,
    SnapshotRun,
    look_at,
    request_snapshot,
)
from budget_recovery_dagster.sandbox.running_dev import RunningDev, announced
from budget_recovery_dagster.sandbox.stack import CONTROL_DATABASE, Stack, running_stack
from budget_recovery_dagster.settings import PREFIX, Settings, load_settings

_FIRST_RUN_SECONDS = 300
_WATCH_INTERVAL_SECONDS = 0.2

# Output is ASCII where it is ours, so that no terminal's encoding can break it.
_console = answers(soft_wrap=True)


@click.command(short_help="Run everything here, with simulated traffic.")
@click.option(
    "--port",
    default=3000,
    show_default=True,
    type=click.IntRange(1, 65535),
    help="Where to serve the UI.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="On which address.")
@data_dir_option
def dev(port: int, host: str, data_dir: Path | None) -> None:
    """Run everything on this machine, with simulated traffic, until Ctrl-C.

    PostgreSQL and NATS come with the package; BUDGET_RECOVERY_POSTGRES_URL and
    BUDGET_RECOVERY_NATS_URL name servers to use instead. A given NATS gets no simulated traffic.
    """
    settings = load_settings()
    ui = DagsterUi(host, port)
    data_dir = data_dir or settings.data_place
    try:
        with (
            stop_signals_interrupt(),
            held_data_dir(data_dir) as held,
            running_stack(settings, held, ui, starting(_console)) as stack,
            announced(held, _running(stack, settings, ui)),
        ):
            _show_where_to_look(stack, settings, ui, held)
            try:
                _take_first_snapshot(stack, ui)
            except DagsterUiError as error:
                # The webserver only passes on that the code server is gone.
                if ended := stack.ended():
                    raise ended.ended_error() from error
                raise
            _console.print("[dim]Ctrl-C stops everything; the data are kept.[/]")
            _watch(stack, lambda: None, seconds=math.inf)
    except KeyboardInterrupt:
        _console.print(Text(f"Stopped. The data are kept in {data_dir.absolute()}"))


def _running(stack: Stack, settings: Settings, ui: DagsterUi) -> RunningDev:
    postgres = stack.postgres if settings.postgres_url is None else None
    return RunningDev(
        ui_url=ui.url,
        bucket=settings.bucket,
        check_interval_seconds=settings.check_interval_seconds,
        nats_url=stack.nats.url if stack.nats else None,
        postgres_url=postgres.url(CONTROL_DATABASE) if postgres else None,
    )


def _show_where_to_look(stack: Stack, settings: Settings, ui: DagsterUi, data_dir: Path) -> None:
    nats = stack.nats.url if stack.nats else f"as {PREFIX}NATS_URL says"
    places = {
        "Dagster UI": ui.url,
        "Snapshots": f"{ui.url}/assets/{ASSET}",
        "NATS": f"{nats}, bucket {settings.bucket}",
        "PostgreSQL": f"as {PREFIX}POSTGRES_URL says",
        "Data": str(data_dir),
        "Logs": f"{data_dir}/*.log",
        "Status": f"{shlex.quote(sys.argv[0])} status --data-dir {shlex.quote(str(data_dir))}",
    }
    if settings.postgres_url is None and stack.postgres is not None:
        places["PostgreSQL"] = stack.postgres.psql(CONTROL_DATABASE)
    _console.print()
    for name, place in places.items():
        _console.print(Text.assemble((f"{name:<11} ", "bold"), place))
    _console.print()


def _take_first_snapshot(stack: Stack, ui: DagsterUi) -> None:
    """Have the present hour captured, unless it is, and tell how that went."""
    hour = _present_hour()
    run = request_snapshot(ui, hour)
    # Not before: at its start the scheduler makes up for a missed tick, perhaps this hour's.
    stack.dagster.start_daemon()
    while run is not None:
        run = _follow(stack, ui, run)
        if run.has_stored or hour == _present_hour():
            break
        # The hour closed before its snapshot was stored.
        hour = _present_hour()
        run = request_snapshot(ui, hour)
    if run is None:
        _console.print(f"The snapshot of {hour} was taken before.")
        return
    outcome = "is taken" if run.has_stored else f"is not taken, its run ended as {run.status}"
    _console.print(Text(f"The snapshot of {hour} {outcome}:"))
    _console.print(Text(f"{ui.url}/runs/{run.run_id}", "cyan"))
    if run.failure:
        _console.print(Text(run.failure))


def _follow(stack: Stack, ui: DagsterUi, run: SnapshotRun) -> SnapshotRun:
    """Show how a run proceeds until it is over, or has taken suspiciously long."""
    with _console.status("", spinner="line") as status:

        def look() -> SnapshotRun | None:
            nonlocal run
            run = look_at(ui, run.run_id)
            status.update(f"First snapshot: {run.status.lower()} ...")
            return run if run.is_over else None

        _watch(stack, look, seconds=_FIRST_RUN_SECONDS)
    return run


def _watch(stack: Stack, find: Callable[[], Found | None], *, seconds: float) -> Found | None:
    """Poll ``find``, and end the program by an error if a child ends meanwhile."""

    def find_while_all_run() -> Found | None:
        if ended := stack.ended():
            raise ended.ended_error()
        return find()

    return poll(find_while_all_run, seconds=seconds, interval=_WATCH_INTERVAL_SECONDS)


def _present_hour() -> Hour:
    return Hour.containing(datetime.now(UTC))
