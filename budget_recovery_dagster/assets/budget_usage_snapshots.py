"""The hourly snapshots of all budget counters, and the checks of those that a run stored.

The checks warn; the snapshots stay valid.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from shlex import quote
from typing import NoReturn

import dagster as dg

from budget_recovery_dagster.domain.counters import format_usage
from budget_recovery_dagster.domain.incident import RecoveryState
from budget_recovery_dagster.domain.plan import tenant_text
from budget_recovery_dagster.domain.snapshots import CaptureSummary, NamedOmission, Uncaptured
from budget_recovery_dagster.domain.windows import Hour
from budget_recovery_dagster.errors import (
    BaselineMovedError,
    BudgetRecoveryError,
    CapturesPausedError,
    ClockSkewError,
    DatabaseBusyError,
    DatabaseUnreachableError,
    LeaseHeldError,
    LeaseLostError,
    PossibleLossError,
    StoreChangedError,
    StoreLostError,
    StoreNoQuorumError,
    StoreReadError,
    StoreUnreachableError,
    error_code,
)
from budget_recovery_dagster.ports import ControlPlane
from budget_recovery_dagster.presentation.metadata import (
    ENTRY_SCHEMA,
    HOURLY_FRESHNESS,
    MOST_ROWS,
    OWNERS,
    Row,
    capture_metadata,
    table,
    verified_metadata,
)
from budget_recovery_dagster.presentation.text import known_usage
from budget_recovery_dagster.resources import (
    OUTCOME_TAG,
    RETRY_AFTER,
    ControlPlaneParam,
    each_minute,
    fail_step,
    failure,
    holder_of,
    never_failing,
)
from budget_recovery_dagster.services.capture import (
    Captured,
    Paused,
    TenantFailed,
    TenantOutcome,
    Verified,
    capture_hour,
)
from budget_recovery_dagster.wiring import store_opener

_DESCRIPTION = (
    "Every tenant's budget counters, copied from the gateway's usage store to PostgreSQL once "
    "an hour. A restore brings them back after a loss.\n\n"
    "**Partition**: the UTC hour in which the snapshot was taken. Materialize the current hour "
    "for one more snapshot, or run hourly_snapshot_job, which also refreshes the recovery points, "
    "and whose tables follow. A past hour that is stored is verified. One that is not stored "
    "fails: the store holds only the present, which must not be stored as the past.\n\n"
    "**Retention** removes snapshots older than the setting, except what a current recovery "
    "point needs, and nothing of a tenant that failed in the run. An old green partition may be "
    "empty: PostgreSQL shows what can be restored.\n\n"
    "**Observations** are runs that took no snapshot, because captures were paused. The tag "
    "`budget_recovery/outcome` of such a run is `skipped`.\n\n"
    "**A tenant that cannot be read** is named in the run's table, and the check "
    "tenant_coverage warns; the other tenants are stored.\n\n"
    "**captured_usage** is the usage of the open budget and window that used most. It should rise, "
    "and fall only when a window ends or the source changes. No usage is added up over budgets and "
    "windows: one request counts in each that it belongs to. Keys of closed windows are captured "
    "as well: *closed_windows* counts these windows."
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
    try:
        with control_plane.opened() as plane:
            result = capture_hour(
                plane,
                store_opener(control_plane.settings),
                hour,
                source=control_plane.settings.capture_source,
                retention=control_plane.settings.retention,
                run_id=context.run.run_id,
                holder=holder_of(context.run.run_id),
                on_outcome=_failures_logged(context.log),
                on_progress=each_minute(plane.clock, context.log.info),
            )
    except BudgetRecoveryError as error:
        _fail(context, hour, error, failure(error.message, error.hint))
    match result:
        case Paused():
            _show_skipped(context, hour, result)
        case Verified():
            yield _verified(context.log, result)
        case Captured() if not result.outcomes:
            context.log.warning("No snapshot: neither the store nor a snapshot has a tenant.")
        case Captured():
            yield from _captured(context, result)


CAPTURE_MINUTES = (0, 2, 5, 10, 20, 30, 40, 50)
"""The minutes of an hour at which its snapshot is requested, if it has none yet."""

_HEALING = (
    BaselineMovedError,
    CapturesPausedError,
    ClockSkewError,
    DatabaseBusyError,
    DatabaseUnreachableError,
    LeaseHeldError,
    LeaseLostError,
    PossibleLossError,
    StoreChangedError,
    StoreLostError,
    StoreNoQuorumError,
    StoreReadError,
    StoreUnreachableError,
)
HEALING_CODES = frozenset(error.code for error in _HEALING)
"""After a capture that failed with one of these, another is requested in the same hour.

After others, such as a missing permission, a person has to act: it would only fail again.
"""


def _fail(
    context: dg.AssetExecutionContext,
    hour: Hour,
    error: Exception,
    failed: dg.Failure,
) -> NoReturn:
    """Fail the capture; try it again if the error may pass and the hour does not close before.

    Raises:
        dagster.RetryRequested, dagster.Failure: as by ``fail_step``.
    """
    now = datetime.now(UTC)
    if error_code(error) in HEALING_CODES and hour == Hour.containing(now):
        failed.description = f"{failed.description} {_next_request(hour, now)}"
    if now + timedelta(seconds=max(RETRY_AFTER)) >= hour.end:
        raise failed from error
    fail_step(context, error, failed)


def _next_request(hour: Hour, now: datetime) -> str:
    due = (hour.start + timedelta(minutes=minute) for minute in CAPTURE_MINUTES)
    at = next((each for each in due if each > now), None)
    if at is None:
        return f"No other capture is requested before the hour closes at {hour.end:%H:%M} UTC."
    return f"hourly_snapshot_schedule requests the hour's capture again at {at:%H:%M} UTC."


# The others are in the run's table and in the check tenant_coverage.
_LOGGED_TENANTS = 10


def _show_skipped(context: dg.AssetExecutionContext, hour: Hour, paused: Paused) -> None:
    """Show on the run and on the asset that a run without an error took no snapshot."""
    reason = (
        f"No snapshot: captures are paused while the usage store is {paused.state.name}. "
        "They resume once it is HEALTHY again."
    )
    context.log.warning(reason)
    context.log_event(
        dg.AssetObservation(
            "budget_usage_snapshots",
            partition=hour.key,
            metadata={"outcome": "skipped", "state": paused.state.value, "reason": reason},
        )
    )
    # The list of runs shows it as a success.
    context.instance.add_run_tags(context.run.run_id, {OUTCOME_TAG: "skipped"})


def _failures_logged(log: dg.DagsterLogManager) -> Callable[[TenantOutcome], None]:
    # Successes are in the run's table: an event for each tenant and hour would be too many.
    show = never_failing(log.error)
    logged = 0

    def log_failure(outcome: TenantOutcome) -> None:
        nonlocal logged
        if isinstance(outcome, TenantFailed) and logged < _LOGGED_TENANTS:
            logged += 1
            show(
                f"Tenant {outcome.tenant!r} is not in this snapshot: {outcome.reason} "
                f"Try: {outcome.hint}",
                exc_info=outcome.error,
            )

    return log_failure


def _verified(log: dg.DagsterLogManager, verified: Verified) -> dg.MaterializeResult[None]:
    if verified.damage:
        raise failure(
            f"The stored snapshots of {verified.hour} are damaged: {' '.join(verified.damage)}",
            "capture the current hour; restores ignore damaged records; see the runbook.",
            verified_metadata(verified.snapshots),
        )
    log.info(f"The snapshots of {verified.hour} are stored and intact; nothing was rewritten.")
    return dg.MaterializeResult(metadata=verified_metadata(verified.snapshots))


def _captured(
    context: dg.AssetExecutionContext, captured: Captured
) -> Iterator[dg.MaterializeResult[None]]:
    """Materialize the hour if a tenant is stored; without any counter it is not materialized."""
    log = context.log
    metadata = capture_metadata(captured)
    stored, failed, stopped_by = captured.stored, captured.failed, captured.stopped_by
    if stopped_by is None and len(failed) > _LOGGED_TENANTS:
        log.error(f"{len(failed)} tenants failed in all; the run's table lists the reasons.")
    if isinstance(stopped_by, CapturesPausedError):
        log.warning(f"Captures were paused during this one. {stopped_by}")
        if not stored:
            _show_skipped(context, captured.hour, Paused(RecoveryState.RECOVERING))
            return
    elif stopped_by:
        extent = f"{len(stored)} tenants are stored, {len(failed)} are not."
        ended = failure(f"{stopped_by.message} {extent}", stopped_by.hint, metadata)
        _fail(context, captured.hour, stopped_by, ended)
    elif failed and not stored:
        first = failed[0]
        none = f"None of {len(failed)} tenants could be captured. The first, {first.tenant!r}:"
        ended = failure(f"{none} {first.reason}", first.hint, metadata)
        _fail(context, captured.hour, first.error, ended)
    if captured.prune_failure:
        log.error(f"Snapshots past retention were not removed: {captured.prune_failure}")
    if captured.pruned and captured.pruned.awaited_captures:
        log.warning(
            f"Snapshots past retention were not removed: {captured.pruned.awaited_captures} more "
            "captures must follow. There was a gap of more than 24 hours between two captures, or "
            "the database's clock was set forward or back."
        )
    if captured.stored:
        log.info(
            f"{len(captured.stored)} tenants are stored: "
            f"{sum(tenant.entries for tenant in captured.stored)} counters."
        )
        _warn_of_drops(log, captured)
        yield dg.MaterializeResult(metadata=metadata)
    else:
        log.warning("No snapshot: no tenant has a counter in the usage store now.")


def _warn_of_drops(log: dg.DagsterLogManager, captured: Captured) -> None:
    """Name the tenant that lacks the most usage; the check usage_never_drops has the counters."""
    tenants = [tenant for tenant in captured.stored if tenant.drops]
    if tenants:
        worst = max(tenants, key=lambda tenant: tenant.most_missing)
        log.warning(
            f"{sum(tenant.drops for tenant in tenants)} counters of {len(tenants)} tenants are"
            f" missing or lower in the store. Tenant {worst.tenant!r} lacks the most in one budget"
            f" and window: {format_usage(worst.most_missing)}. Preview what a restore would bring"
            f" back: budget-recovery preview --tenant {quote(tenant_text(worst.tenant))}"
        )


# One faulty tenant must not fill the table and hide the others; PostgreSQL has the rest.
_NAMED_PER_TENANT = 10

PARTITION_TAG = "dagster/partition"

_NOT_CAPTURED = dg.AssetCheckResult(
    passed=False,
    severity=dg.AssetCheckSeverity.WARN,
    description="No snapshot of this hour is stored, so there is nothing to check.",
)


@dg.asset_check(
    asset="budget_usage_snapshots",
    description=(
        "Passes if the snapshot has every tenant with all its counters: no tenant failed or lost "
        "all its counters, no key or value was unreadable, and no reading was partial. Gaps are "
        "listed with their reasons. Windows with only the 500 largest entities of a full "
        "leaderboard are counted but do not warn: the setting chose that source."
    ),
)
def tenant_coverage(
    context: dg.AssetCheckExecutionContext, control_plane: ControlPlaneParam
) -> dg.AssetCheckResult:
    """Judge the newest capture of the run's hour, run alone of the current one."""
    with control_plane.opened_in_step(context) as plane:
        run_id = plane.reports.newest_run(_judged_hour(context, plane))
        if run_id is None:
            return _NOT_CAPTURED
        stored = plane.reports.captured_by(run_id)
        failures = plane.reports.failures_of(run_id)
        omissions = plane.reports.omissions_of(run_id)
    missing = [failed for failed in failures if failed.kind is Uncaptured.TENANT]
    unreadable = len(failures) - len(missing) + sum(each.unreadable_count for each in stored)
    truncated = sum(each.truncated_count for each in stored)
    figures = {
        "tenants_captured": len(stored),
        "tenants_not_captured": len(missing),
        "unreadable_values": sum(each.omitted_count for each in stored),
        "unreadable_keys": unreadable,
        "partial_tenants": sum(each.is_partial for each in stored),
        "truncated_windows": truncated,
    }
    return _result(
        run_id,
        [
            *(_row(failed.name, "not captured", failed.reason, failed.hint) for failed in missing),
            *(row for snapshot in stored for row in _gaps_of(snapshot)),
            *_named_values(omissions, stored),
            *(row for snapshot in stored for row in _named_keys(snapshot)),
            *(
                _row("(none)", f"key {failed.name}", failed.reason, failed.hint)
                for failed in failures
                if failed.kind is Uncaptured.KEY
            ),
        ],
        figures,
        good=f"All tenants are captured{'' if truncated else ' in full'}: {len(stored)}."
        + (f" Windows with only the 500 largest: {truncated}." if truncated else ""),
        bad="; ".join(f"{name.replace('_', ' ')}: {n}" for name, n in figures.items() if n) + ".",
    )


@dg.asset_check(
    asset="budget_usage_snapshots",
    description=(
        "Within a window, usage only grows. Warns if a counter of the recovery point is missing "
        "or lower in the store: single keys can be purged while the store keeps its identity. The "
        "recovery point keeps the higher value. If the counter was lowered on purpose, run "
        "record_reset_job."
    ),
)
def usage_never_drops(
    context: dg.AssetCheckExecutionContext, control_plane: ControlPlaneParam
) -> dg.AssetCheckResult:
    """Judge the newest capture of the run's hour, run alone of the current one."""
    with control_plane.opened_in_step(context) as plane:
        run_id = plane.reports.newest_run(_judged_hour(context, plane))
        if run_id is None:
            return _NOT_CAPTURED
        stored = plane.reports.captured_by(run_id)
        drops = plane.reports.drops_of(run_id)
    count = sum(snapshot.drop_count for snapshot in stored)
    known = [each.most_missing for each in stored if each.most_missing is not None]
    most = known_usage(max(known, default=Decimal(0)) if len(known) == len(stored) else None)
    return _result(
        run_id,
        [
            {
                "tenant": drop.tenant,
                "budget": drop.budget,
                "window": drop.window,
                "entity": drop.entity or "(aggregate)",
                "before": drop.before,
                "now": drop.after or "missing",
            }
            for drop in drops
        ],
        {
            "missing_or_lower": count,
            "most_missing": most,
            "not_shown": count - min(len(drops), MOST_ROWS),
        },
        good="No counter of a recovery point is missing or lower.",
        bad=(
            f"{count} counters of recovery points are missing or lower in the store. The budget and"
            f" window that lacks most lacks {most}. The largest come first."
        ),
    )


def _judged_hour(context: dg.AssetCheckExecutionContext, plane: ControlPlane) -> Hour:
    # Checks have no partition of their own; the run has. (Partitioned checks are a preview.)
    partition = context.run.tags.get(PARTITION_TAG)
    return Hour.parse(partition) if partition else Hour.containing(plane.clock.now())


def _row(tenant: str, finding: str, detail: str, action: str = "") -> Row:
    return {"tenant": tenant, "finding": finding, "detail": detail, "action": action}


def _gaps_of(snapshot: CaptureSummary) -> Iterator[Row]:
    if snapshot.drop_count and not snapshot.entry_count and not snapshot.omitted_count:
        yield _row(
            snapshot.tenant,
            "no counter in the store any more",
            "the recovery point still holds its counters",
            "see usage_never_drops, and find out what purged them.",
        )
    if snapshot.is_partial:
        yield _row(
            snapshot.tenant,
            "partial",
            "fewer keys arrived than the store announced, twice",
            "capture the hour again once nothing is being purged.",
        )


def _named_values(
    omissions: Iterable[NamedOmission], stored: Iterable[CaptureSummary]
) -> Iterator[Row]:
    by_tenant: defaultdict[str, list[NamedOmission]] = defaultdict(list)
    for omission in omissions:
        by_tenant[omission.tenant].append(omission)
    for snapshot in stored:
        named = by_tenant[snapshot.tenant][:_NAMED_PER_TENANT]
        for omission in named:
            yield _row(snapshot.tenant, f"unreadable value {omission.key}", omission.reason)
        if rest := snapshot.omitted_count - len(named):
            yield _row(snapshot.tenant, f"{rest} more unreadable values", "")


def _named_keys(snapshot: CaptureSummary) -> Iterator[Row]:
    named = snapshot.unreadable[:_NAMED_PER_TENANT]
    for bad in named:
        yield _row(snapshot.tenant, f"unreadable key {bad.key}", bad.reason)
    if rest := snapshot.unreadable_count - len(named):
        yield _row(snapshot.tenant, f"{rest} more unreadable keys", "")


def _result(
    run_id: str, rows: list[Row], figures: Mapping[str, int | str], *, good: str, bad: str
) -> dg.AssetCheckResult:
    return dg.AssetCheckResult(
        passed=not rows,
        severity=dg.AssetCheckSeverity.WARN,
        description=bad if rows else good,
        metadata={
            "judged_run": run_id,
            **figures,
            **({"details": table(rows)} if rows else {}),
        },
    )
