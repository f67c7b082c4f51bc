"""``budget-recovery demo``: lose a store and restore it, in about a minute, with figures."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
from rich.text import Text

from budget_recovery_dagster.cli.console import (
    StoppedBySignal,
    answers,
    ignore_stop_signals,
    shown_steps,
    stop_signals_interrupt,
)
from budget_recovery_dagster.errors import BudgetRecoveryError
from budget_recovery_dagster.sandbox.demo import (
    Page,
    account,
    data_dir,
    is_of_the_budget,
    judge,
    run_story,
    running_stage,
)

INCOMPLETE = 1

_console = answers()


@click.command(short_help="Wipe a temporary store and restore it, in a minute.")
@click.option("--keep", is_flag=True, help="Keep the data and logs, and print their directory.")
@click.pass_context
def demo(context: click.Context, *, keep: bool) -> None:
    """Wipe a temporary store and restore it, with figures, in less than a minute.

    PostgreSQL, NATS and a simulated gateway run in a temporary directory. The demo ignores all
    settings and does not touch a running `budget-recovery dev`.

    Exit codes: 0, everything in the newest snapshot was restored; 1, something was not, or the demo
    failed; 2, it cannot start; 130, interrupted.
    """
    begun = time.monotonic()
    try:
        with stop_signals_interrupt():
            is_complete = _run(begun, keep=keep)
    except StoppedBySignal as stopped:
        _console.print("Stopped." if keep else "Stopped; all data are removed.")
        context.exit(stopped.exit_code)
    context.exit(0 if is_complete else INCOMPLETE)


def _run(begun: float, *, keep: bool) -> bool:
    """Run the whole demo; return whether everything came back."""
    with (
        _shown_data_dir(keep=keep) as directory,
        _logged_in(directory / "gateway.log"),
        running_stage(directory, shown_steps(_console)) as stage,
    ):
        page = Page(_console)
        try:
            evidence = run_story(stage, page)
        except BudgetRecoveryError as error:
            # If a server has died, its own error says more than that of the call that failed.
            if ended := stage.ended():
                raise ended.ended_error() from error
            raise
        promises = judge(evidence)
        page.show_figures(evidence)
        page.show_account(account(evidence, is_of_the_budget), evidence.reported)
        page.show_verdict(promises, time.monotonic() - begun)
        # The output is complete; a signal must not interrupt the shutdown.
        ignore_stop_signals()
    return all(promise.is_kept for promise in promises)


@contextmanager
def _shown_data_dir(*, keep: bool) -> Iterator[Path]:
    _console.print("An AI gateway loses the counters of its budgets and gets them back.")
    with data_dir(keep=keep) as directory:
        what_then = "kept" if keep else "removed at the end"
        _console.print(f"Everything runs on this machine, in a directory that is {what_then}:")
        _print_path(f"{directory}\n")
        try:
            yield directory
        finally:
            if keep:
                _print_path(f"\nData and logs are in {directory}")


def _print_path(text: str) -> None:
    _console.print(Text(text), soft_wrap=True)


@contextmanager
def _logged_in(file: Path) -> Iterator[None]:
    """Write the gateway's log to a file: it logs much when the store is wiped."""
    handler = logging.FileHandler(file, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s: %(message)s"))
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    try:
        yield
    finally:
        root.setLevel(level)
        root.removeHandler(handler)
        handler.close()
