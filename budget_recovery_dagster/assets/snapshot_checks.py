"""Checks of the snapshots that a run stored. They warn; the snapshots stay valid."""

from collections import defaultdict
from collections.abc import Iterable, Iterator

import dagster as dg

from budget_recovery_dagster.domain.snapshots import CaptureSummary, NamedOmission, Uncaptured
from budget_recovery_dagster.domain.windows import Hour
from budget_recovery_dagster.ports import ControlPlane
from budget_recovery_dagster.presentation.metadata import Row, table
from budget_recovery_dagster.resources import ControlPlaneParam, shown_as_failures

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
    with shown_as_failures(), control_plane.opened() as plane:
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
    with shown_as_failures(), control_plane.opened() as plane:
        run_id = plane.reports.newest_run(_judged_hour(context, plane))
        if run_id is None:
            return _NOT_CAPTURED
        count = sum(snapshot.drop_count for snapshot in plane.reports.captured_by(run_id))
        drops = plane.reports.drops_of(run_id)
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
        bad=f"{count} counters of recovery points are missing or lower in the store.",
    )


def _judged_hour(context: dg.AssetCheckExecutionContext, plane: ControlPlane) -> Hour:
    # Checks have no partition of their own; the run has. (Partitioned checks are a preview.)
    partition = context.run.tags.get(PARTITION_TAG)
    return Hour.parse(partition) if partition else Hour.containing(plane.clock.now())


def _row(tenant: str, what: str, detail: str, what_to_do: str = "") -> Row:
    return {"tenant": tenant, "what": what, "detail": detail, "what_to_do": what_to_do}


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
