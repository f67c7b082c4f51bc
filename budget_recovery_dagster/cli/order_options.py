"""The options of what a person orders to be done to the store."""

from collections.abc import Callable, Mapping
from typing import Any
from uuid import uuid4

import click

from budget_recovery_dagster.cli.person import this_person
from budget_recovery_dagster.services.orders import Order

_Command = Callable[..., Any]

_OPTIONS = (
    click.option("--reason", required=True, help="Why; it is kept with what is done."),
    click.option(
        "--accept-unconverged",
        is_flag=True,
        help="Take the store as it is, though its servers have not converged.",
    ),
)


def order_options(command: _Command) -> _Command:
    """Give a command the options; see ``order_of``."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def order_of(options: Mapping[str, Any], tell: Callable[[str], None]) -> Order:
    """Return what the options of a command order, in a run of its own."""
    return Order(
        by=this_person(),
        reason=options["reason"],
        run_id=f"command {uuid4()}",
        tell=tell,
        accept_unconverged=options["accept_unconverged"],
    )
