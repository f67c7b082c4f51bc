"""``budget-recovery snapshots``: the snapshots that a restore can use."""

from pathlib import Path

import click

from budget_recovery_dagster.cli.console import answers
from budget_recovery_dagster.cli.options import data_dir_option, settings_with_database
from budget_recovery_dagster.domain.plan import EVERY_TENANT, OF_THAT_NAME, choose_tenant
from budget_recovery_dagster.presentation.documents import snapshots_json
from budget_recovery_dagster.presentation.terminal import print_row, print_snapshots
from budget_recovery_dagster.presentation.text import unverified_line
from budget_recovery_dagster.services.recovery_points import VERIFY_WITHIN, verify_within
from budget_recovery_dagster.services.restore.report import counted, listed
from budget_recovery_dagster.wiring import opened_control_plane

_SHOWN = 24


@click.command(short_help="List the retained snapshots.")
@click.option(
    "--tenant",
    default=EVERY_TENANT,
    show_default=True,
    help=f"Tenant, or {EVERY_TENANT} for all. {OF_THAT_NAME}",
)
@click.option("--all", "show_all", is_flag=True, help=f"List all, not only the newest {_SHOWN}.")
@click.option("--json", "as_json", is_flag=True, help="Write JSON, for programs; implies --all.")
@data_dir_option
def snapshots(data_dir: Path | None, tenant: str, *, show_all: bool, as_json: bool) -> None:
    """List the retained snapshots, newest first.

    The first column is the timestamp for `budget-recovery restore --snapshot`. A snapshot with the
    remark "pruned" cannot be chosen, because retention has removed some of its records. The counts
    are from the time of the capture. To verify the stored records, run `budget-recovery preview`.

    Uses the database of BUDGET_RECOVERY_POSTGRES_URL, or that of the running `budget-recovery dev`.
    """
    with opened_control_plane(settings_with_database(data_dir)) as plane:
        tenants = plane.points.tenants()
        chosen = choose_tenant(tenant, tenants)
        found = plane.snapshots.listed(chosen)
        budgets = plane.snapshots.budgets_of(chosen) if chosen is not None else ()
        now = plane.clock.now()
        damage = verify_within(plane, VERIFY_WITHIN, now, tenants, tenant=chosen)
    if as_json:
        click.echo(snapshots_json(found, budgets, damage))
        return
    console = answers()
    if not found:
        print_row(console, "No snapshot is retained.")
        return
    shown = found if show_all else found[:_SHOWN]
    print_snapshots(console, shown)
    if len(found) > len(shown):
        print_row(console, f"{len(found) - len(shown):,} older; --all lists them.")
    if damage.records:
        records = counted(sum(damage.records.values()), "record")
        print_row(
            console,
            f"{records} in open windows damaged (checksum mismatch):"
            f" {listed(sorted(damage.records))}. A restore does not use them.",
        )
    if damage.unverified:
        print_row(console, unverified_line(damage))
    if budgets:
        print_row(console, f"Budgets of the tenant: {', '.join(budgets)}")
