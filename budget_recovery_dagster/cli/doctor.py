"""``budget-recovery doctor``: looks at all that is needed, and says what to do about the rest."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import click
from pydantic import SecretStr

from budget_recovery_dagster.cli.console import answers, show_failure
from budget_recovery_dagster.cli.doctor_json import examination_json, refusal_json
from budget_recovery_dagster.cli.doctor_page import print_examination
from budget_recovery_dagster.cli.options import data_dir_option
from budget_recovery_dagster.doctor_bootstrap import doctor_service
from budget_recovery_dagster.errors import BudgetRecoveryError, SettingsError
from budget_recovery_dagster.sandbox.errors import NoRunningDevError
from budget_recovery_dagster.sandbox.running_dev import RunningDev, find_running_dev
from budget_recovery_dagster.settings import Settings, read_settings

WELL = 0
WRONG = 1
REFUSED = 2


@dataclass(frozen=True, slots=True)
class _Examined:
    """What is to be examined; ``dagster_environment`` is None where a running dev has its own."""

    settings: Settings
    wrong: Mapping[str, SettingsError]
    dagster_environment: Mapping[str, str] | None


@click.command(short_help="Check settings, servers, permissions and bucket.")
@click.option("--json", "as_json", is_flag=True, help="Write JSON, for programs.")
@data_dir_option
@click.pass_context
def doctor(context: click.Context, data_dir: Path | None, *, as_json: bool) -> None:
    """Check all that is needed, and say what to do about what is wrong. It changes nothing.

    Exits with 0: nothing is wrong, though there may be advice; 1: something is wrong; 2: it was not
    told where to look. Servers that no setting names are those of the running
    `budget-recovery dev`.
    """
    try:
        examined = _find(data_dir)
    except BudgetRecoveryError as error:
        show_failure(error.message, error.hint)
        if as_json:
            click.echo(refusal_json(error.message, error.hint, REFUSED))
        context.exit(REFUSED)
    examination = doctor_service(
        examined.settings, examined.wrong, examined.dagster_environment
    ).examine()
    exit_code = WELL if examination.is_well else WRONG
    try:
        if as_json:
            click.echo(examination_json(examination, exit_code))
        else:
            print_examination(answers(), examination)
        sys.stdout.flush()
    except OSError as error:
        show_failure(f"The answer could not be written: {error.strerror}.", "see where it goes.")
        exit_code = REFUSED
    context.exit(exit_code)


def _find(data_dir: Path | None) -> _Examined:
    """Find what to examine: what the settings name, and the servers of the running dev.

    Raises:
        NoRunningDevError: no server is named, and no dev runs there.
        SettingsError: no server is named, and where a dev would be is not told rightly.
    """
    settings, wrong = read_settings()
    has_nats, has_postgres = settings.nats_url is not None, settings.postgres_url is not None
    if has_nats and has_postgres:
        return _Examined(settings, wrong, os.environ)
    try:
        if data_dir is None and "data_dir" in wrong:
            raise wrong["data_dir"]
        running = find_running_dev(data_dir or settings.data_place)
    except (NoRunningDevError, SettingsError):
        if not has_nats and not has_postgres:
            raise
        # The one that is not set is a finding.
        return _Examined(settings, wrong, os.environ)
    return _of_running(running, _in_place(settings, data_dir), wrong)


def _in_place(settings: Settings, data_dir: Path | None) -> Settings:
    """Let the tables lie where the dev writes them."""
    if data_dir is None:
        return settings
    return settings.model_copy(update={"data_dir": data_dir.expanduser().absolute()})


def _of_running(
    running: RunningDev, settings: Settings, wrong: Mapping[str, SettingsError]
) -> _Examined:
    """Take the servers that the dev brings; those that were given to it, the settings name."""
    told: dict[str, object] = {}
    # A dev that has a server of its own does not use one that is named here.
    if settings.nats_url is None and (settings.postgres_url is None or not running.postgres_url):
        told |= _told("nats_url", running.nats_url) | {"bucket": running.bucket}
    if settings.postgres_url is None and (settings.nats_url is None or not running.nats_url):
        told |= _told("postgres_url", running.postgres_url)
    if not told:
        return _Examined(settings, wrong, os.environ)
    environment = os.environ if os.environ.get("DAGSTER_HOME") else None
    return _Examined(settings.model_copy(update=told), wrong, environment)


def _told(field: str, url: str | None) -> dict[str, object]:
    return {} if url is None else {field: SecretStr(url)}
