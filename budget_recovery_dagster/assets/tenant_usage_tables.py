"""A Parquet table of usages for each tenant and hour."""

import dagster as dg

from budget_recovery_dagster.assets.budget_usage_snapshots import budget_usage_snapshots
from budget_recovery_dagster.domain.windows import Hour
from budget_recovery_dagster.errors import TablesError
from budget_recovery_dagster.partitions import capture_hours
from budget_recovery_dagster.presentation.metadata import (
    HOURLY_FRESHNESS,
    OWNERS,
    USAGE_SCHEMA,
    tables_metadata,
)
from budget_recovery_dagster.resources import ControlPlaneResource, failure, shown_as_failures
from budget_recovery_dagster.services.tables import TableFailed, TablesBuilt


@dg.asset(
    partitions_def=capture_hours,
    deps=[budget_usage_snapshots],
    group_name="snapshots",
    kinds={"parquet"},
    owners=OWNERS,
    tags={"data": "tenant-usage", "for": "analysis"},
    freshness_policy=HOURLY_FRESHNESS,
    metadata={"dagster/column_schema": USAGE_SCHEMA, "dagster/storage_kind": "parquet"},
    description=(
        "What every tenant had spent, as one Parquet file for each tenant and hour, to be read "
        "with pandas, DuckDB or anything else. Nothing depends on these files: they are made from "
        "the snapshots in PostgreSQL, and a restore does not use them.\n\n"
        "**Where**: below the directory of the setting BUDGET_RECOVERY_TABLES_DIR, as "
        "`<tenant>-<digest>/<2026-11-29T14Z>.parquet`. Names of directories are made safe for "
        "files; the tenant's real name is in the column `tenant`.\n\n"
        "**Lost or damaged?** Materialize the hour again, or backfill a range: within retention "
        "every table can be made anew, with the same rows. A file stands whole under its name, or "
        "not at all.\n\n"
        "**Retention**: a table is removed with its snapshot. An hour that is past retention, or "
        "was never captured, fails and says so.\n\n"
        "**A failed run** costs no snapshot and no restore: either the directory cannot be used, "
        "or the run names the tenants whose tables are missing, and the others are written."
    ),
)
def tenant_usage_tables(
    context: dg.AssetExecutionContext, control_plane: ControlPlaneResource
) -> dg.MaterializeResult[None]:
    """Write the tables of the hour anew; fail at the end if one could not be written."""
    hour = Hour.parse(context.partition_key)
    with shown_as_failures(), control_plane.opened() as plane:
        try:
            built = plane.usage_tables_service().build(
                hour, on_failure=lambda failed: _log(context.log, failed)
            )
        except TablesError as error:
            message = f"{error.message} No table was written; the snapshots are not affected."
            raise failure(message, error.hint) from error
    _require_whole(built)
    context.log.info(f"{len(built.written)} tables with {built.rows} rows are in {built.place}.")
    return dg.MaterializeResult(metadata=tables_metadata(built))


def _log(log: dg.DagsterLogManager, failed: TableFailed) -> None:
    log.error(
        f"Tenant {failed.tenant!r} has no table of this hour: {failed.reason} Try: {failed.hint}",
        exc_info=failed.error,
    )


def _require_whole(built: TablesBuilt) -> None:
    """Fail if a table is not written, or one past retention is still there."""
    if built.failed:
        first = built.failed[0]
        raise failure(
            f"{len(built.failed)} tenants have no new table of this hour, {len(built.written)} "
            f"have; the snapshots are not affected. The first, {first.tenant!r}: {first.reason}",
            f"{first.hint} Then materialize this hour again.",
            tables_metadata(built),
        )
    if built.pruned.failures:
        raise failure(
            f"The tables are written, but those past retention cannot be removed from "
            f"{len(built.pruned.failures)} directories. The first: {built.pruned.failures[0]}",
            "remove them by hand; every run tries again.",
            tables_metadata(built),
        )
