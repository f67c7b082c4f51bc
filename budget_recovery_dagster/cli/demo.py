"""``budget-recovery demo``: a store is lost and brought back, in a minute and with figures."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
from pydantic import SecretStr
from rich.text import Text

from budget_recovery_dagster.cli.console import answers
from budget_recovery_dagster.cli.demo_page import Page
from budget_recovery_dagster.cli.demo_protection import Services
from budget_recovery_dagster.cli.starting import starting
from budget_recovery_dagster.cli.stop_signals import (
    StoppedBySignal,
    ignore_stop_signals,
    stop_signals_interrupt,
)
from budget_recovery_dagster.errors import BudgetRecoveryError
from budget_recovery_dagster.sandbox.demo.cast import is_of_the_budget
from budget_recovery_dagster.sandbox.demo.stage import Stage, data_dir, running_stage
from budget_recovery_dagster.sandbox.demo.story import Story
from budget_recovery_dagster.sandbox.demo.verdict import Evidence, account, judge
from budget_recovery_dagster.settings import Settings
from budget_recovery_dagster.wiring import opened_control_plane

NOT_ALL = 1

_console = answers()


@click.command(short_help="Lose a store and see it recovered, in a minute.")
@click.option("--keep", is_flag=True, help="Keep the data and logs, and say where they are.")
@click.pass_context
def demo(context: click.Context, *, keep: bool) -> None:
    """Show how a store is lost and brought back, with the figures, in about a minute.

    PostgreSQL, NATS and a simulated gateway run for that time in a directory of their own; no
    setting and no running `budget-recovery dev` is touched. Exits with 0 only if everything that
    the newest snapshot knew came back, with 1 if anything did not.
    """
    begun = time.monotonic()
    try:
        with stop_signals_interrupt():
            is_whole = _tell(begun, keep=keep)
    except StoppedBySignal as stopped:
        _console.print("Stopped." if keep else "Stopped; nothing is left.")
        context.exit(stopped.exit_code)
    context.exit(0 if is_whole else NOT_ALL)


def _tell(begun: float, *, keep: bool) -> bool:
    """Tell the whole story; return whether everything came back."""
    with (
        _told_data_dir(keep=keep) as directory,
        _log_in(directory / "gateway.log"),
        running_stage(directory, starting(_console)) as stage,
    ):
        page = Page(_console)
        try:
            evidence = _evidence(stage, page)
        except BudgetRecoveryError as error:
            # What was asked of a server that has died only says that it does not answer.
            if ended := stage.ended():
                raise ended.ended_error() from error
            raise
        promises = judge(evidence)
        page.show_figures(evidence)
        page.show_account(account(evidence, is_of_the_budget))
        page.show_verdict(promises, time.monotonic() - begun)
        # All is said; stopping the servers must not be cut short.
        ignore_stop_signals()
    return all(promise.is_kept for promise in promises)


@contextmanager
def _told_data_dir(*, keep: bool) -> Iterator[Path]:
    """Provide the directory, and say where it is and what becomes of it."""
    _console.print("An AI gateway loses the counters of its budgets, and gets them back.")
    with data_dir(keep=keep) as directory:
        what_then = "kept" if keep else "removed in the end"
        _console.print(f"All of it runs on this machine, in a directory that is {what_then}:")
        _say(f"{directory}\n")
        try:
            yield directory
        finally:
            if keep:
                _say(f"\nData and logs are in {directory}")


def _evidence(stage: Stage, page: Page) -> Evidence:
    # No setting of the environment is heeded: it may name servers of somebody's.
    settings = Settings.model_construct(
        nats_url=SecretStr(stage.gateway.place.url),
        postgres_url=SecretStr(stage.database_url),
        bucket=stage.gateway.place.bucket,
    )
    with opened_control_plane(settings) as plane:
        return Story(stage.gateway, Services(plane, settings), stage.database_url, page).tell()


def _say(text: str) -> None:
    _console.print(Text(text), soft_wrap=True)


@contextmanager
def _log_in(file: Path) -> Iterator[None]:
    """Write what the gateway's parts log into a file: at a wipe they have much to say."""
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
