"""A Parquet table of usages for each tenant and hour."""

from collections.abc import Callable, Iterator, Sequence

import dagster as dg

from budget_recovery_dagster.domain.windows import Hour
from budget_recovery_dagster.errors import HourNotCapturedError, TablesError
from budget_recovery_dagster.ports import ControlPlane, UsageTables
from budget_recovery_dagster.presentation.metadata import (
    HOURLY_FRESHNESS,
    OWNERS,
    USAGE_SCHEMA,
    tables_metadata,
)
from budget_recovery_dagster.resources import ControlPlaneParam, each_minute, failure
from budget_recovery_dagster.services.tables import TableFailed, TablesBuilt, build_tables
from budget_recovery_dagster.wiring import usage_tables

_DESCRIPTION = (
    "Every tenant's usage, one Parquet file per tenant and hour, for pandas, DuckDB or other "
    "tools. Nothing depends on these files: they are built from the snapshots in PostgreSQL, "
    "and restores do not use them.\n\n"
    "**Location**: in the directory of the setting BUDGET_RECOVERY_TABLES_DIR, as "
    "`<tenant>-<digest>/<2026-11-29T14Z>.parquet`. Directory names are made safe for file "
    "systems; the column `tenant` has the real name.\n\n"
    "**Lost or damaged files**: materialize the hour again, or backfill a range, which is one "
    "run. Within retention every table can be rebuilt with the same rows. Files are written "
    "atomically.\n\n"
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
        # A run that waits for another one stays in Dagster's queue, where it holds no run slot.
        pool="usage_tables",
        # One run for all hours of a backfill: with a run for each, they would fill the queue.
        backfill_policy=dg.BackfillPolicy.single_run(),
        # A backfill materializes each hour by an event of its own, and only those that are written.
        output_required=False,
        description=_DESCRIPTION,
    )(_tenant_usage_tables)


def _tenant_usage_tables(
    context: dg.AssetExecutionContext, control_plane: ControlPlaneParam
) -> Iterator[dg.MaterializeResult[None] | dg.AssetMaterialization]:
    """Rewrite the tables of each hour; fail at the end if one could not be written."""
    hours = [Hour.parse(key) for key in context.partition_keys]
    on_failure = _failures_logged(context.log)
    failures: list[dg.Failure] = []
    with control_plane.opened_in_step(context) as plane:
        tables = usage_tables(control_plane.settings)
        progress = each_minute(plane.clock, context.log.info)
        for hour in hours:
            try:
                built = _build(plane, tables, hour, on_failure, progress)
            except dg.Failure as failed:
                failures.append(failed)
                continue
            context.log.info(
                f"{hour}: {len(built.written)} tables with {built.rows} rows are in {built.place}."
            )
            metadata = tables_metadata(built)
            if len(hours) == 1:
                yield dg.MaterializeResult(metadata=metadata)
            else:
                yield dg.AssetMaterialization(
                    context.asset_key, partition=hour.key, metadata=metadata
                )
    if failures:
        raise _first_of(failures, len(hours))


def _build(
    plane: ControlPlane,
    tables: UsageTables,
    hour: Hour,
    on_failure: Callable[[TableFailed], None],
    on_progress: Callable[[str], None],
) -> TablesBuilt:
    """Rewrite the tables of an hour.

    Raises:
        TablesError: the directory cannot be used, for this hour or any other.
        dagster.Failure: a table of this hour is missing.
    """
    try:
        built = build_tables(plane, tables, hour, on_failure=on_failure, on_progress=on_progress)
    except TablesError as error:
        error.message = f"{error.message} No table was written; the snapshots are not affected."
        raise
    except HourNotCapturedError as error:
        raise failure(error.message, error.hint) from error
    _require_complete(built)
    return built


def _first_of(failures: Sequence[dg.Failure], hours: int) -> dg.Failure:
    """Return the failure of a run: the only one, or the first with the number of the others."""
    first = failures[0]
    if hours > 1:
        first.description = (
            f"{len(failures)} of {hours} hours are incomplete; the others are written. The first: "
            f"{first.description}"
        )
    return first


# The others are in the run's table.
_LOGGED_TENANTS = 10


def _failures_logged(log: dg.DagsterLogManager) -> Callable[[TableFailed], None]:
    logged = 0

    def log_failure(failed: TableFailed) -> None:
        nonlocal logged
        logged += 1
        if logged <= _LOGGED_TENANTS:
            log.error(
                f"Tenant {failed.tenant!r} has no table of this hour: {failed.reason} "
                f"Try: {failed.hint}",
                exc_info=failed.error,
            )

    return log_failure


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
