"""The options by which a person chooses what is restored, and from what."""

from collections.abc import Callable, Mapping
from typing import Any

import click

from budget_recovery_dagster.domain.restore_choice import EVERY_TENANT, LATEST
from budget_recovery_dagster.services.chosen_points import RestoreRequest

_Command = Callable[..., Any]

_OPTIONS = (
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
    for option in reversed(_OPTIONS):
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
