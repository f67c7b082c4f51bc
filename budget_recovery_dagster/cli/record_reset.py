"""``budget-recovery record-reset``: record that counters were lowered on purpose."""

from datetime import datetime
from pathlib import Path

import click
from rich.text import Text

from budget_recovery_dagster.cli.console import answers
from budget_recovery_dagster.cli.options import (
    current_user,
    data_dir_option,
    json_option,
    optional_store,
    settings_with_database,
)
from budget_recovery_dagster.domain.counters import Entity
from budget_recovery_dagster.domain.plan import OF_THAT_NAME
from budget_recovery_dagster.domain.recovery_point import EVERYONE, Everyone
from budget_recovery_dagster.domain.windows import parse_time
from budget_recovery_dagster.presentation.documents import reset_json
from budget_recovery_dagster.presentation.text import escape_unprintable, reset_report
from budget_recovery_dagster.services.resets import ResetRequest, record_reset
from budget_recovery_dagster.services.restore.manual import require_reason
from budget_recovery_dagster.wiring import opened_control_plane


def _time(_context: click.Context, _option: click.Parameter, text: str | None) -> datetime | None:
    try:
        return None if text is None else parse_time(text)
    except ValueError as error:
        raise click.BadParameter(f"{error}.") from error


@click.command("record-reset", short_help="Record that counters were lowered on purpose.")
@click.option("--tenant", required=True, help=f"Tenant of the budget. {OF_THAT_NAME}")
@click.option("--budget", required=True, help="Budget whose counters were reset.")
@click.option("--entity", help="Entity that was reset.  [default: all, and the aggregate]")
@click.option("--aggregate", is_flag=True, help="Only the aggregate (total) of the budget.")
@click.option("--window", help="Window that was reset, such as 2026-11.  [default: all]")
@click.option(
    "--at",
    metavar="TIME",
    callback=_time,
    help="Time of the reset in UTC, such as 2026-11-29T14:00.  [default: now]",
)
@click.option("--reason", required=True, help="Reason, stored with the reset.")
@json_option
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
    """Record that you lowered or cleared counters of a budget in the gateway.

    This command lowers no counter. Lower the counters in the gateway FIRST, then record the reset.
    In the other order, a snapshot taken in between holds the old value, and a restore uses it.

    Without a recorded reset, a restore brings back the highest usage in all snapshots. With it,
    restores ignore usage of these counters in snapshots up to the time of the reset. To include
    that usage, run `budget-recovery restore` with --despite-resets.

    The marker in the store is renewed, so that an older copy of the database is recognized. If NATS
    is away, the reset is recorded all the same, with a warning.

    Uses the database of BUDGET_RECOVERY_POSTGRES_URL, or that of the running `budget-recovery dev`.
    """
    require_reason(reason)
    if aggregate and entity is not None:
        raise click.UsageError("--entity and --aggregate are mutually exclusive.")
    who: Entity | Everyone = entity if entity is not None or aggregate else EVERYONE
    request = ResetRequest(tenant, budget, window, who, at, current_user(), reason)
    with opened_control_plane(settings_with_database(data_dir)) as plane:
        recorded = record_reset(plane, request, optional_store(data_dir))
    if as_json:
        click.echo(reset_json(recorded))
        return
    console = answers()
    for paragraph in reset_report(recorded):
        console.print(Text(escape_unprintable(console, paragraph)))
