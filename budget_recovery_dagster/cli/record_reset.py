"""``budget-recovery record-reset``: note that counters were lowered on purpose."""

from datetime import datetime
from pathlib import Path

import click
from rich.text import Text

from budget_recovery_dagster.cli.console import answers
from budget_recovery_dagster.cli.options import (
    current_user,
    data_dir_option,
    settings_with_database,
)
from budget_recovery_dagster.domain.counters import Entity
from budget_recovery_dagster.domain.resets import EVERYONE, Everyone
from budget_recovery_dagster.domain.windows import parse_moment
from budget_recovery_dagster.presentation.documents import errors_in_json, reset_json
from budget_recovery_dagster.presentation.text import escape_unprintable, told
from budget_recovery_dagster.services.resets import ResetRequest, record_reset
from budget_recovery_dagster.wiring import opened_control_plane


def _moment(_context: click.Context, _option: click.Parameter, text: str | None) -> datetime | None:
    try:
        return None if text is None else parse_moment(text)
    except ValueError as error:
        raise click.BadParameter(f"{error}.") from error


@click.command("record-reset", short_help="Note that counters were lowered on purpose.")
@click.option("--tenant", required=True, help="Whose budget it is.")
@click.option("--budget", required=True, help="Which budget was reset.")
@click.option("--entity", help="Whose counter; without it, those of all, and the aggregate.")
@click.option("--aggregate", is_flag=True, help="Only the aggregate of the budget.")
@click.option("--window", help="Which window, such as 2026-11; without it, all of them.")
@click.option(
    "--at",
    metavar="TIME",
    callback=_moment,
    help="When, in UTC, as 2026-11-29T14:00; without it, now.",
)
@click.option("--reason", required=True, help="Why; kept with it.")
@click.option("--json", "as_json", is_flag=True, help="Write JSON, for programs.")
@data_dir_option
def record_reset_command(  # noqa: PLR0913 - click passes every option by name
    *,
    tenant: str,
    budget: str,
    entity: str | None,
    aggregate: bool,
    window: str | None,
    at: datetime | None,
    reason: str,
    as_json: bool,
    data_dir: Path | None,
) -> None:
    """Note that you have lowered or cleared counters of a budget in the gateway.

    A restore takes the highest usage that any snapshot holds. What snapshots of the time of the
    reset or before hold of these counters is then not used any more, neither by a recovery nor by
    you, unless you restore with --despite-resets. Nothing else changes: this lowers no counter.

    Lower the counters in the gateway FIRST, then record it. A snapshot that is taken in between,
    were it the other way round, would hold the old value and be used.

    The database is that of BUDGET_RECOVERY_POSTGRES_URL or else of the running
    `budget-recovery dev`.
    """
    if not reason.strip():
        raise click.BadParameter("it is empty.", param_hint="--reason")
    if aggregate and entity is not None:
        raise click.UsageError("--entity and --aggregate exclude each other.")
    who: Entity | Everyone = entity if entity is not None or aggregate else EVERYONE
    request = ResetRequest(tenant, budget, window, who, at, current_user(), reason)
    with (
        errors_in_json(wanted=as_json),
        opened_control_plane(settings_with_database(data_dir)) as plane,
    ):
        recorded = record_reset(plane, request)
    if as_json:
        click.echo(reset_json(recorded))
        return
    console = answers()
    for paragraph in told(recorded):
        console.print(Text(escape_unprintable(console, paragraph)))
