"""Options that several commands share, and the values that follow from them."""

import getpass
import os
import socket
from collections.abc import Callable, Mapping
from functools import reduce
from pathlib import Path
from typing import Any
from uuid import uuid4

import click
from pydantic import SecretStr

from budget_recovery_dagster.domain.plan import EVERY_TENANT, LATEST, OF_THAT_NAME
from budget_recovery_dagster.errors import SettingsError
from budget_recovery_dagster.ports import OpenStore
from budget_recovery_dagster.sandbox import NoRunningDevError, find_running_dev
from budget_recovery_dagster.services.restore.manual import Order
from budget_recovery_dagster.services.restore.preview import RestoreRequest
from budget_recovery_dagster.settings import PREFIX, Settings, load_settings
from budget_recovery_dagster.wiring import store_opener


def current_user() -> str:
    """Return the account and the host, as ``account@host``."""
    try:
        account = getpass.getuser()
    except (KeyError, OSError):
        # An account without a name, as in a container.
        account = f"uid {os.geteuid()}"
    return f"{account}@{socket.gethostname()}"


_Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def _together(*options: _Decorator) -> _Decorator:
    """Return the decorator that adds these options to a command, in this order."""
    return lambda command: reduce(lambda done, option: option(done), reversed(options), command)


choice_options = _together(
    click.option(
        "--tenant",
        default=EVERY_TENANT,
        show_default=True,
        help=f"Tenant to restore, or {EVERY_TENANT} for every tenant. {OF_THAT_NAME}",
    ),
    click.option("--budget", default="", help="Budget of that tenant.  [default: all]"),
    click.option(
        "--snapshot",
        default=LATEST,
        show_default=True,
        help="Timestamp of a snapshot in UTC, or a unique prefix, from `budget-recovery snapshots`."
        f" {LATEST}: the highest usage in all snapshots.",
    ),
    click.option(
        "--despite-resets", is_flag=True, help="Ignore recorded resets: also restore older usage."
    ),
)
"""The options of a choice; see ``request_of``."""


def request_of(options: Mapping[str, Any]) -> RestoreRequest:
    """Return the request that the options of a command describe."""
    return RestoreRequest(
        tenant=options["tenant"],
        budget=options["budget"],
        snapshot=options["snapshot"],
        despite_resets=options["despite_resets"],
    )


order_options = _together(
    click.option("--reason", required=True, help="Reason, stored with the result."),
    click.option(
        "--accept-unconverged",
        is_flag=True,
        help="Continue although replicas of the store are missing or behind. Only if they will not"
        " come back: they may hold the only copy of recent usage.",
    ),
)
"""The options of an order; see ``order_of``."""


def order_of(options: Mapping[str, Any], on_progress: Callable[[str], None]) -> Order:
    """Return the order that the options of a command describe, with a run id of its own."""
    return Order(
        by=current_user(),
        reason=options["reason"],
        run_id=f"command {uuid4()}",
        on_progress=on_progress,
        accept_unconverged=options["accept_unconverged"],
    )


def settings_with_database(data_dir: Path | None) -> Settings:
    """Return the settings; without a database, those of the running dev, with its check interval.

    Raises:
        SettingsError: a setting is invalid, or the running dev has no database of its own.
        NoRunningDevError: no database is configured, and no dev runs in the data directory.
    """
    settings = load_settings()
    if settings.postgres_url is not None:
        return settings
    running = find_running_dev(data_dir or settings.data_place)
    return settings.model_copy(
        update={
            "postgres_url": _own(running.postgres_url, "database", "POSTGRES_URL"),
            "check_interval_seconds": running.check_interval_seconds,
        }
    )


def settings_with_servers(data_dir: Path | None) -> Settings:
    """Return the settings; a server that is not configured is that of the running dev.

    Raises:
        SettingsError: a setting is invalid, or the running dev has no such server of its own.
        NoRunningDevError: a server is not configured, and no dev runs in the data directory.
    """
    settings = settings_with_database(data_dir)
    if settings.nats_url is not None:
        return settings
    running = find_running_dev(data_dir or settings.data_place)
    url = _own(running.nats_url, "store", "NATS_URL")
    return settings.model_copy(update={"nats_url": url, "bucket": running.bucket})


def optional_store(data_dir: Path | None) -> OpenStore | None:
    """Return what opens the store; None if no NATS server is configured or running."""
    try:
        return store_opener(settings_with_servers(data_dir))
    except (NoRunningDevError, SettingsError):
        return None


def _own(url: str | None, what: str, setting: str) -> SecretStr:
    """Return the URL of a server that the running dev started itself."""
    if url is None:
        raise SettingsError(
            f"The running dev uses the {what} that its {PREFIX}{setting} names.",
            f"set {PREFIX}{setting} for this command, too.",
        )
    return SecretStr(url)


json_option = click.option("--json", "as_json", is_flag=True, help="Write JSON, for programs.")
data_dir_option = click.option(
    "--data-dir",
    type=click.Path(path_type=Path),
    help="Data directory of `budget-recovery dev`.  [default: /var/lib/budget-recovery as root,"
    " else ~/.local/state/budget-recovery]",
)
