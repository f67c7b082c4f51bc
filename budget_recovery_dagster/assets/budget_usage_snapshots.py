"""The hourly snapshots of all budget counters."""

from collections.abc import Callable, Iterator

import dagster as dg

from budget_recovery_dagster.domain.windows import Hour
from budget_recovery_dagster.errors import CapturesPausedError
from budget_recovery_dagster.presentation.metadata import (
    ENTRY_SCHEMA,
    HOURLY_FRESHNESS,
    OWNERS,
    capture_metadata,
    verified_metadata,
)
from budget_recovery_dagster.resources import (
    ControlPlaneParam,
    failure,
    holder_of,
    shown_as_failures,
)
from budget_recovery_dagster.services.capture import (
    Captured,
    Paused,
    TenantFailed,
    TenantOutcome,
    Verified,
    capture_hour,
)

_DESCRIPTION = (
    "Every tenant's budget counters, copied from the gateway's usage store to PostgreSQL once "
    "an hour. A restore brings them back after a loss.\n\n"
    "**Partition**: the UTC hour in which the snapshot was taken. Materialize the current hour "
    "for one more snapshot, or run hourly_snapshot_job to include its tables and recovery "
    "points. A past hour that is stored is verified. One that is not stored fails: the store "
    "holds only the present, which must not be stored as the past.\n\n"
    "**Retention** removes snapshots older than the setting, except what a current recovery "
    "point needs, and nothing of a tenant that failed in the run. An old green partition may be "
    "empty: PostgreSQL shows what can be restored.\n\n"
    "**A tenant that cannot be read** is named in the run's table, and the check "
    "tenant_coverage warns; the other tenants are stored.\n\n"
    "**captured_usage** is the sum of all counters. It should rise, and fall only when a window "
    "ends or the source changes. It is not a bill: one request counts in every budget and "
    "window that it belongs to."
)


def budget_usage_snapshots(hours: dg.HourlyPartitionsDefinition) -> dg.AssetsDefinition:
    """Return the asset, partitioned by these hours of capture."""
    return dg.asset(
        name="budget_usage_snapshots",
        partitions_def=hours,
        deps=["gateway_usage_store"],
        group_name="snapshots",
        kinds={"postgres"},
        owners=OWNERS,
        tags={"data": "tenant-usage", "for": "recovery"},
        freshness_policy=HOURLY_FRESHNESS,
        metadata={
            "dagster/column_schema": ENTRY_SCHEMA,
            "dagster/storage_kind": "postgres",
            "dagster/table_name": "budget_recovery.budget_entry",
        },
        # Orders captures; a lease in the database ensures that only one writes at a time.
        pool="usage_store",
        # A paused capture ends without output, so that Dagster does not show its hour as captured.
        output_required=False,
        description=_DESCRIPTION,
    )(_budget_usage_snapshots)


def _budget_usage_snapshots(
    context: dg.AssetExecutionContext, control_plane: ControlPlaneParam
) -> Iterator[dg.MaterializeResult[None]]:
    """Capture the hour, or verify a past one; yield nothing while captures are paused."""
    hour = Hour.parse(context.partition_key)
    with shown_as_failures(), control_plane.opened() as plane:
        result = capture_hour(
            plane,
            control_plane.store_opener(),
            hour,
            source=control_plane.settings.capture_source,
            retention=control_plane.settings.retention,
            run_id=context.run.run_id,
            holder=holder_of(context.run.run_id),
            on_outcome=_failures_logged(context.log),
        )
    match result:
        case Paused():
            context.log.warning(
                f"No snapshot: captures are paused while the usage store is {result.state.name}. "
                "They resume once it is HEALTHY again."
            )
        case Verified():
            yield _verified(context.log, result)
        case Captured() if not result.outcomes:
            context.log.warning("No snapshot: neither the store nor a snapshot has a tenant.")
        case Captured():
            yield from _captured(context.log, result)


def _failures_logged(log: dg.DagsterLogManager) -> Callable[[TenantOutcome], None]:
    # Successes are in the run's table: an event for each tenant and hour would be too many.
    def log_failure(outcome: TenantOutcome) -> None:
        if isinstance(outcome, TenantFailed):
            log.error(
                f"Tenant {outcome.tenant!r} is not in this snapshot: {outcome.reason} "
                f"Try: {outcome.hint}",
                exc_info=outcome.error,
            )

    return log_failure


def _verified(log: dg.DagsterLogManager, verified: Verified) -> dg.MaterializeResult[None]:
    if verified.damage:
        raise failure(
            f"The stored snapshots of {verified.hour} are damaged: {' '.join(verified.damage)}",
            "restore the database from its own backup, or exclude this hour from restores.",
            verified_metadata(verified.snapshots),
        )
    log.info(f"The snapshots of {verified.hour} are stored and intact; nothing was rewritten.")
    return dg.MaterializeResult(metadata=verified_metadata(verified.snapshots))


def _captured(
    log: dg.DagsterLogManager, captured: Captured
) -> Iterator[dg.MaterializeResult[None]]:
    metadata = capture_metadata(captured)
    stopped_by = captured.stopped_by
    if isinstance(stopped_by, CapturesPausedError):
        log.warning(f"Captures were paused during this one. {stopped_by}")
    elif stopped_by:
        raise failure(
            f"{stopped_by.message} {len(captured.stored)} tenants are stored, "
            f"{len(captured.failed)} are not.",
            stopped_by.hint,
            metadata,
        )
    elif captured.failed and not captured.stored:
        first = captured.failed[0]
        raise failure(
            f"None of {len(captured.failed)} tenants could be captured. The first, "
            f"{first.tenant!r}: {first.reason}",
            first.hint,
            metadata,
        )
    if captured.prune_failure:
        log.error(f"Snapshots past retention were not removed: {captured.prune_failure}")
    if captured.stored:
        log.info(
            f"{len(captured.stored)} tenants are stored: "
            f"{sum(tenant.entries for tenant in captured.stored)} counters."
        )
        yield dg.MaterializeResult(metadata=metadata)
    else:
        log.warning("No snapshot: no tenant has a counter in the usage store now.")
