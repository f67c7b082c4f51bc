"""Checks of the snapshots that a run stored. They warn; the snapshots stand."""

import dagster as dg

from budget_recovery_dagster.assets.budget_usage_snapshots import budget_usage_snapshots
from budget_recovery_dagster.assets.capture_tables import Row, table
from budget_recovery_dagster.failures import shown_as_failures
from budget_recovery_dagster.ports import CaptureSummary, Snapshots
from budget_recovery_dagster.resources import ControlPlaneResource


@dg.asset_check(
    asset=budget_usage_snapshots,
    description=(
        "Every tenant is in the snapshot, whole: none failed, no key or value was unreadable, no "
        "reading stayed partial. What is not covered is named with its reason."
    ),
)
def tenant_coverage(
    context: dg.AssetCheckExecutionContext, control_plane: ControlPlaneResource
) -> dg.AssetCheckResult:
    """Judge this run's snapshots; a run that stored none judges the newest run's."""
    with shown_as_failures(), control_plane.opened() as plane:
        run_id = _judged_run(context.run.run_id, plane.snapshots)
        stored = plane.snapshots.captured_by(run_id)
        failures = plane.snapshots.failures_of(run_id)
        omissions = plane.snapshots.omissions_of(run_id)
    gaps: list[Row] = [
        {"tenant": failed.tenant, "what": "not captured", "detail": failed.reason}
        for failed in failures
    ]
    for snapshot in stored:
        gaps.extend(_gaps_within(snapshot))
    gaps.extend(
        {
            "tenant": omitted.tenant,
            "what": f"unreadable value {omitted.key}",
            "detail": omitted.reason,
        }
        for omitted in omissions
    )
    return _result(
        run_id,
        gaps,
        {"tenants_captured": len(stored), "tenants_not_captured": len(failures)},
        good=f"All {len(stored)} tenants are captured in full.",
        bad=f"{len(stored)} tenants are captured, {len(failures)} are not; of the captured ones "
        f"{sum(snapshot.omitted_count for snapshot in stored)} values and "
        f"{sum(snapshot.unreadable_count for snapshot in stored)} keys are unreadable.",
    )


@dg.asset_check(
    asset=budget_usage_snapshots,
    description=(
        "Within a window usage only grows. Warns when a counter of the recovery point is missing "
        "from the store, or lower in it: single keys can be purged without the store's identity "
        "changing. The recovery point keeps the higher value."
    ),
)
def usage_never_drops(
    context: dg.AssetCheckExecutionContext, control_plane: ControlPlaneResource
) -> dg.AssetCheckResult:
    """Judge this run's snapshots; a run that stored none judges the newest run's."""
    with shown_as_failures(), control_plane.opened() as plane:
        run_id = _judged_run(context.run.run_id, plane.snapshots)
        count = sum(snapshot.drop_count for snapshot in plane.snapshots.captured_by(run_id))
        drops = plane.snapshots.drops_of(run_id)
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
        {"missing_or_lower": count},
        good="No counter of a recovery point is missing or lower.",
        bad=f"{count} counters of recovery points are missing from the store or lower in it.",
    )


def _judged_run(run_id: str, snapshots: Snapshots) -> str:
    if snapshots.captured_by(run_id) or snapshots.failures_of(run_id):
        return run_id
    return snapshots.newest_run() or run_id


def _gaps_within(snapshot: CaptureSummary) -> list[Row]:
    gaps: list[Row] = [
        {"tenant": snapshot.tenant, "what": f"unreadable key {bad.key}", "detail": bad.reason}
        for bad in snapshot.unreadable
    ]
    unnamed = snapshot.unreadable_count - len(snapshot.unreadable)
    if unnamed:
        gaps.append({"tenant": snapshot.tenant, "what": f"{unnamed} more keys", "detail": ""})
    if snapshot.is_partial:
        detail = "fewer keys arrived than the store announced, twice"
        gaps.append({"tenant": snapshot.tenant, "what": "partial", "detail": detail})
    return gaps


def _result(
    run_id: str, rows: list[Row], figures: dict[str, int], *, good: str, bad: str
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
