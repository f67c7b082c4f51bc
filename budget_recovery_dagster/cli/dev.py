"""``budget-recovery dev``: all services on this machine, as children of one command."""

import math
import shlex
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import click
from rich.text import Text

from budget_recovery_dagster.cli.console import answers, shown_steps, stop_signals_interrupt
from budget_recovery_dagster.cli.options import data_dir_option
from budget_recovery_dagster.domain.windows import Hour
from budget_recovery_dagster.embedded import poll
from budget_recovery_dagster.sandbox import RunningDev, announced, held_data_dir
from budget_recovery_dagster.sandbox.dagster_services import (
    ASSET,
    DagsterUi,
    DagsterUiError,
    SnapshotRun,
    request_snapshot,
    snapshot_run,
)
from budget_recovery_dagster.sandbox.dev import CONTROL_DATABASE, Stack, running_stack
from budget_recovery_dagster.settings import PREFIX, Settings, load_settings

_FIRST_RUN_SECONDS = 300
_POLL_SECONDS = 0.2

# Our own output is ASCII, so that it works with the encoding of every terminal.
_console = answers(soft_wrap=True)


@click.command(short_help="Run all services on this machine, with simulated traffic.")
@click.option(
    "--port",
    default=3000,
    show_default=True,
    type=click.IntRange(1, 65535),
    help="Port of the web UI.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address of the web UI.")
@data_dir_option
def dev(port: int, host: str, data_dir: Path | None) -> None:
    """Run all services on this machine, with simulated traffic, until Ctrl-C.

    PostgreSQL and NATS come from the Python wheels of the extra `sandbox`. To use your own, set
    BUDGET_RECOVERY_POSTGRES_URL and BUDGET_RECOVERY_NATS_URL. With your own NATS, there is no
    simulated traffic.
    """
    settings = load_settings()
    ui = DagsterUi(host, port)
    data_dir = data_dir or settings.data_place
    try:
        with (
            stop_signals_interrupt(),
            held_data_dir(data_dir) as held,
            running_stack(settings, held, ui, shown_steps(_console), _show_wait) as stack,
            announced(held, _running(stack, settings, ui)),
        ):
            _show_addresses(stack, settings, ui, held)
            try:
                _take_first_snapshot(stack, ui)
            except DagsterUiError as error:
                # The webserver only reports that it cannot reach the code server.
                if ended := stack.ended():
                    raise ended.ended_error() from error
                raise
            _console.print("[dim]Ctrl-C stops everything; the data are kept.[/]")
            _watch(stack, lambda: False, seconds=math.inf)
    except KeyboardInterrupt:
        _console.print(Text(f"Stopped. The data are kept in {data_dir.absolute()}"))


def _show_wait(sentence: str) -> None:
    _console.print(Text(sentence))


def _running(stack: Stack, settings: Settings, ui: DagsterUi) -> RunningDev:
    postgres = stack.postgres if settings.postgres_url is None else None
    return RunningDev(
        ui_url=ui.url,
        bucket=settings.bucket,
        check_interval_seconds=settings.check_interval_seconds,
        nats_url=stack.nats.url if stack.nats else None,
        postgres_url=postgres.url(CONTROL_DATABASE) if postgres else None,
    )


def _show_addresses(stack: Stack, settings: Settings, ui: DagsterUi, data_dir: Path) -> None:
    nats = stack.nats.url if stack.nats else f"the server of {PREFIX}NATS_URL"
    places = {
        "Dagster UI": ui.url,
        "Snapshots": f"{ui.url}/assets/{ASSET}",
        "NATS": f"{nats}, bucket {settings.bucket}",
        "PostgreSQL": f"the server of {PREFIX}POSTGRES_URL",
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
    """Capture the current hour unless that is done, and show the result."""
    hour = _current_hour()
    run = request_snapshot(ui, hour)
    # Only now: at its start the scheduler repeats a missed tick, which may be that of this hour.
    stack.dagster.start_daemon()
    while run is not None:
        run = _follow(stack, ui, run)
        if run.has_stored or hour == _current_hour():
            break
        # The hour closed before its snapshot was stored.
        hour = _current_hour()
        run = request_snapshot(ui, hour)
    if run is None:
        _console.print(f"Snapshot of {hour}: already stored.")
        return
    outcome = "stored" if run.has_stored else f"not stored, the run ended as {run.status}"
    _console.print(Text(f"Snapshot of {hour}: {outcome}."))
    _console.print(Text(f"{ui.url}/runs/{run.run_id}", "cyan"))
    if run.failure:
        _console.print(Text(run.failure))


def _follow(stack: Stack, ui: DagsterUi, run: SnapshotRun) -> SnapshotRun:
    """Show the status of a run until it ends or takes too long."""
    with _console.status("", spinner="line") as status:

        def is_over() -> bool:
            nonlocal run
            run = snapshot_run(ui, run.run_id)
            status.update(f"First snapshot: {run.status.lower()} ...")
            return run.is_over

        _watch(stack, is_over, seconds=_FIRST_RUN_SECONDS)
    return run


def _watch(stack: Stack, is_over: Callable[[], bool], *, seconds: float) -> None:
    """Wait until ``is_over`` or the timeout; raise if a child process ends meanwhile."""

    def is_over_while_all_run() -> bool:
        if ended := stack.ended():
            raise ended.ended_error()
        return is_over()

    poll(is_over_while_all_run, seconds=seconds, interval=_POLL_SECONDS)


def _current_hour() -> Hour:
    return Hour.containing(datetime.now(UTC))
