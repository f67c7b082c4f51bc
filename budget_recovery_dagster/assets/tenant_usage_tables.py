"""A Parquet table of usages for each tenant and hour."""

import dagster as dg

from budget_recovery_dagster.domain.windows import Hour
from budget_recovery_dagster.errors import TablesError
from budget_recovery_dagster.presentation.metadata import (
    HOURLY_FRESHNESS,
    OWNERS,
    USAGE_SCHEMA,
    tables_metadata,
)
from budget_recovery_dagster.resources import ControlPlaneParam, failure
from budget_recovery_dagster.services.tables import TableFailed, TablesBuilt, build_tables
from budget_recovery_dagster.wiring import usage_tables

_DESCRIPTION = (
    "Every tenant's usage, one Parquet file per tenant and hour, for pandas, DuckDB or other "
    "tools. Nothing depends on these files: they are built from the snapshots in PostgreSQL, "
    "and restores do not use them.\n\n"
    "**Location**: in the directory of the setting BUDGET_RECOVERY_TABLES_DIR, as "
    "`<tenant>-<digest>/<2026-11-29T14Z>.parquet`. Directory names are made safe for file "
    "systems; the column `tenant` has the real name.\n\n"
    "**Lost or damaged files**: materialize the hour again, or backfill a range. Within "
    "retention every table can be rebuilt with the same rows. Files are written atomically.\n\n"
    "**Retention**: a table is removed with its snapshot. An hour that is past retention or was "
    "never captured fails with the reason.\n\n"
    "**A failed run** affects no snapshot and no restore. Either the directory cannot be used, "
    "or the run names the tenants whose tables are missing; the others are written."
)


def tenant_usage_tables(hours: dg.HourlyPartitionsDefinition) -> dg.AssetsDefinition:
    """Return the asset, partitioned by these hours of capture."""
    return dg.asset(
        name="tenant_usage_tables",
        partitions_def=hours,
        deps=["budget_usage_snapshots"],
        group_name="snapshots",
        kinds={"parquet"},
        owners=OWNERS,
        tags={"data": "tenant-usage", "for": "analysis"},
        freshness_policy=HOURLY_FRESHNESS,
        metadata={"dagster/column_schema": USAGE_SCHEMA, "dagster/storage_kind": "parquet"},
        description=_DESCRIPTION,
    )(_tenant_usage_tables)


def _tenant_usage_tables(
    context: dg.AssetExecutionContext, control_plane: ControlPlaneParam
) -> dg.MaterializeResult[None]:
    """Rewrite the tables of the hour; fail at the end if one could not be written."""
    hour = Hour.parse(context.partition_key)
    with control_plane.opened_in_step() as plane:
        try:
            built = build_tables(
                plane,
                usage_tables(control_plane.settings),
                hour,
                on_failure=lambda failed: _log(context.log, failed),
            )
        except TablesError as error:
            message = f"{error.message} No table was written; the snapshots are not affected."
            raise failure(message, error.hint) from error
    _require_complete(built)
    context.log.info(f"{len(built.written)} tables with {built.rows} rows are in {built.place}.")
    return dg.MaterializeResult(metadata=tables_metadata(built))


def _log(log: dg.DagsterLogManager, failed: TableFailed) -> None:
    log.error(
        f"Tenant {failed.tenant!r} has no table of this hour: {failed.reason} Try: {failed.hint}",
        exc_info=failed.error,
    )


def _require_complete(built: TablesBuilt) -> None:
    """Fail if a table was not written, or one past retention was not removed."""
    if built.failed:
        first = built.failed[0]
        raise failure(
            f"{len(built.failed)} tables of this hour failed, {len(built.written)} are written; "
            f"the snapshots are not affected. The first, {first.tenant!r}: {first.reason}",
            f"{first.hint} Then materialize this hour again.",
            tables_metadata(built),
        )
    if built.pruned.failures:
        raise failure(
            f"The tables are written, but those past retention cannot be removed from "
            f"{len(built.pruned.failures)} directories. The first: {built.pruned.failures[0]}",
            "remove them manually; every run tries again.",
            tables_metadata(built),
        )
