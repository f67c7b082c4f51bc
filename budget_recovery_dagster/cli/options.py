"""Options that several commands share, and what they give."""

import getpass
import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

import click
from pydantic import SecretStr

from budget_recovery_dagster.domain.plan import EVERY_TENANT, LATEST
from budget_recovery_dagster.errors import SettingsError
from budget_recovery_dagster.sandbox import find_running_dev
from budget_recovery_dagster.services.restore.choice import Order, RestoreRequest
from budget_recovery_dagster.settings import PREFIX, Settings, load_settings


def current_user() -> str:
    """Return the name of the account and of the host."""
    try:
        account = getpass.getuser()
    except (KeyError, OSError):
        # An account without a name, as in a container.
        account = f"uid {os.geteuid()}"
    return f"{account}@{socket.gethostname()}"


_Command = Callable[..., Any]
_CHOICE_OPTIONS = (
    click.option(
        "--tenant",
        default=EVERY_TENANT,
        show_default=True,
        help=f"Whose counters; {EVERY_TENANT} is every tenant.",
    ),
    click.option("--budget", default="", help="Only this budget of the tenant.  [default: all]"),
    click.option(
        "--snapshot",
        default=LATEST,
        show_default=True,
        help="From the snapshot of this moment (UTC, its beginning is enough, see"
        f" `budget-recovery snapshots`); {LATEST} takes the highest of all.",
    ),
    click.option(
        "--despite-resets", is_flag=True, help="Also bring back what was reset on purpose."
    ),
)


def choice_options(command: _Command) -> _Command:
    """Give a command the options; it gets them as ``tenant``, ``budget``, and so on."""
    for option in reversed(_CHOICE_OPTIONS):
        command = option(command)
    return command


def request_of(options: Mapping[str, Any]) -> RestoreRequest:
    """Return what the options of a command ask for."""
    return RestoreRequest(
        tenant=options["tenant"],
        budget=options["budget"],
        snapshot=options["snapshot"],
        despite_resets=options["despite_resets"],
    )


_ORDER_OPTIONS = (
    click.option("--reason", required=True, help="Why; it is kept with what is done."),
    click.option(
        "--accept-unconverged",
        is_flag=True,
        help="Take the store as it is, though its servers have not converged.",
    ),
)


def order_options(command: _Command) -> _Command:
    """Give a command the options; see ``order_of``."""
    for option in reversed(_ORDER_OPTIONS):
        command = option(command)
    return command


def order_of(options: Mapping[str, Any], on_progress: Callable[[str], None]) -> Order:
    """Return what the options of a command order, in a run of its own."""
    return Order(
        by=current_user(),
        reason=options["reason"],
        run_id=f"command {uuid4()}",
        on_progress=on_progress,
        accept_unconverged=options["accept_unconverged"],
    )


def settings_with_database(data_dir: Path | None) -> Settings:
    """Return the settings, with database and check interval of the running dev where none is set.

    Raises:
        SettingsError: a setting is wrong, or names no database where one is needed.
        NoRunningDevError: none is set, and no dev runs there.
    """
    settings = load_settings()
    if settings.postgres_url is not None:
        return settings
    running = find_running_dev(data_dir or settings.data_place)
    if running.postgres_url is None:
        raise SettingsError(
            f"The running dev uses the database that its {PREFIX}POSTGRES_URL names.",
            f"set {PREFIX}POSTGRES_URL here, too.",
        )
    return settings.model_copy(
        update={
            "postgres_url": SecretStr(running.postgres_url),
            "check_interval_seconds": running.check_interval_seconds,
        }
    )


def settings_with_servers(data_dir: Path | None) -> Settings:
    """Return the settings, with both servers of the running dev where none is set.

    Raises:
        SettingsError: a setting is wrong, or names no server where one is needed.
        NoRunningDevError: none is set, and no dev runs there.
    """
    settings = settings_with_database(data_dir)
    if settings.nats_url is not None:
        return settings
    running = find_running_dev(data_dir or settings.data_place)
    if running.nats_url is None:
        raise SettingsError(
            f"The running dev uses the store that its {PREFIX}NATS_URL names.",
            f"set {PREFIX}NATS_URL here, too.",
        )
    told = {"nats_url": SecretStr(running.nats_url), "bucket": running.bucket}
    return settings.model_copy(update=told)


data_dir_option = click.option(
    "--data-dir",
    type=click.Path(path_type=Path),
    help="Where all data and logs lie.  [default: /var/lib/budget-recovery as root, else"
    " ~/.local/state/budget-recovery]",
)
