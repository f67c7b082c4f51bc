"""``budget-recovery doctor``: checks everything that the services need; text or JSON."""

import os
from collections.abc import Mapping
from pathlib import Path

import click
from pydantic import SecretStr
from rich.console import Console
from rich.text import Text

from budget_recovery_dagster.cli.console import answers, is_written, show_failure
from budget_recovery_dagster.cli.options import data_dir_option, json_option
from budget_recovery_dagster.doctor import run_checks
from budget_recovery_dagster.doctor.model import Installation, Outcome, Report
from budget_recovery_dagster.errors import BudgetRecoveryError, SettingsError
from budget_recovery_dagster.presentation.documents import dumped
from budget_recovery_dagster.presentation.terminal import print_row, print_wrapped
from budget_recovery_dagster.presentation.text import escape_unprintable
from budget_recovery_dagster.sandbox import NoRunningDevError, RunningDev, find_running_dev
from budget_recovery_dagster.settings import SERVER_URLS, Settings, read_settings

PASSED = 0
FAILED = 1
REFUSED = 2

_STYLES: Mapping[Outcome, str] = {
    Outcome.OK: "green",
    Outcome.WARN: "bold yellow",
    Outcome.FAIL: "bold red",
    Outcome.SKIPPED: "magenta",
}
_OUTCOME_WIDTH = 8
_CODE_WIDTH = 32


@click.command(short_help="Check settings, servers, permissions, bucket and clocks.")
@json_option
@data_dir_option
@click.pass_context
def doctor(context: click.Context, data_dir: Path | None, *, as_json: bool) -> None:
    """Check everything that the services need, and show how to fix each problem. Read-only.

    Uses the configured servers, or those of the running `budget-recovery dev`.

    Exit codes: 0, no check failed (some may warn); 1, a check failed; 2, no server is configured
    and no dev runs, or the report cannot be written.
    """
    try:
        installation = _find(data_dir)
    except BudgetRecoveryError as error:
        show_failure(error.message, error.hint)
        if as_json:
            document = _refusal_json(error)
            is_written("report", lambda: click.echo(document))
        context.exit(REFUSED)
    report = run_checks(installation)
    exit_code = FAILED if report.has_failed else PASSED

    def write() -> None:
        if as_json:
            click.echo(_report_json(report, exit_code))
        else:
            _print_report(answers(), report)

    context.exit(exit_code if is_written("report", write) else REFUSED)


def _report_json(report: Report, exit_code: int) -> str:
    return dumped(
        exit_code=exit_code,
        at=report.at,
        counts={outcome.value: report.count(outcome) for outcome in Outcome},
        checks=[
            {
                "check": check.code,
                "outcome": result.outcome.value,
                "code": result.code,
                "facts": result.facts,
                "message": result.message,
                "hint": result.hint or None,
            }
            for check, result in report.results
        ],
        error=None,
    )


def _refusal_json(error: BudgetRecoveryError) -> str:
    """Write that nothing was checked, with the same keys."""
    return dumped(
        exit_code=REFUSED,
        at=None,
        counts=None,
        checks=None,
        error=error,
    )


def _print_report(console: Console, report: Report) -> None:
    """Print a line for each check; below a warning or failure, its message and hint."""
    for check, result in report.results:
        outcome = (f"{result.outcome.upper():<{_OUTCOME_WIDTH}}", _STYLES[result.outcome])
        if result.outcome in (Outcome.WARN, Outcome.FAIL):
            print_row(console, [outcome, (check.code, "bold")])
            print_row(console, result.message, indent=_OUTCOME_WIDTH)
        else:
            margin = Text.assemble(outcome, f"{check.code:<{_CODE_WIDTH}}")
            print_wrapped(console, margin, Text(escape_unprintable(console, result.message)))
        if result.hint:
            print_row(console, f"Try: {result.hint}", indent=_OUTCOME_WIDTH)
    console.print()
    summary = ", ".join(f"{report.count(outcome)} {outcome}" for outcome in Outcome)
    print_row(console, f"{len(report.results)} checks: {summary}")


def _find(data_dir: Path | None) -> Installation:
    """Find what to check: the servers that the settings name, or those of the running dev.

    Raises:
        NoRunningDevError: no setting names a server, and no dev runs in the data directory.
        SettingsError: the URL of a server is invalid; or no setting names a server, and that of
            the data directory is invalid.
    """
    settings, invalid = read_settings()
    for url in SERVER_URLS:
        if url in invalid:
            raise invalid[url]
    has_nats, has_postgres = settings.nats_url is not None, settings.postgres_url is not None
    if has_nats and has_postgres:
        return Installation(settings, invalid, os.environ)
    try:
        if data_dir is None and "data_dir" in invalid:
            raise invalid["data_dir"]
        running = find_running_dev(data_dir or settings.data_place)
    except (NoRunningDevError, SettingsError):
        if not has_nats and not has_postgres:
            raise
        # The check of its connection reports the missing one.
        return Installation(settings, invalid, os.environ)
    return _of_running(running, _in_place(settings, data_dir), invalid)


def _in_place(settings: Settings, data_dir: Path | None) -> Settings:
    """Use the tables of the dev in this data directory."""
    if data_dir is None:
        return settings
    return settings.model_copy(update={"data_dir": data_dir.expanduser().absolute()})


def _of_running(
    running: RunningDev, settings: Settings, invalid: Mapping[str, SettingsError]
) -> Installation:
    """Use the servers that the dev started; settings name the others."""
    found: dict[str, object] = {}
    # A dev that started a server does not use one that a setting names.
    if settings.nats_url is None and (settings.postgres_url is None or not running.postgres_url):
        found |= _url("nats_url", running.nats_url) | {"bucket": running.bucket}
    if settings.postgres_url is None and (settings.nats_url is None or not running.nats_url):
        found |= _url("postgres_url", running.postgres_url)
    if not found:
        return Installation(settings, invalid, os.environ)
    environment = os.environ if os.environ.get("DAGSTER_HOME") else None
    return Installation(settings.model_copy(update=found), invalid, environment)


def _url(field: str, url: str | None) -> dict[str, object]:
    return {} if url is None else {field: SecretStr(url)}
