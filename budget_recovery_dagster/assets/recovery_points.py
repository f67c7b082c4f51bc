"""What a restore would bring back now."""

import dagster as dg

from budget_recovery_dagster.domain.recovery_point import MAX_POINT_AGE, age
from budget_recovery_dagster.presentation.metadata import (
    HOURLY_FRESHNESS,
    OWNERS,
    POINT_SCHEMA,
    Row,
    duration,
    points_metadata,
    table,
)
from budget_recovery_dagster.presentation.text import full_time, named
from budget_recovery_dagster.resources import ControlPlaneParam, each_minute
from budget_recovery_dagster.services.recovery_points import (
    PointAges,
    judge_point_ages,
    survey_points,
)
from budget_recovery_dagster.services.restore.report import counted

# How many tenants the sentence names; the table has more.
_NAMED = 10


@dg.asset(
    deps=["budget_usage_snapshots"],
    group_name="recovery",
    kinds={"postgres"},
    owners=OWNERS,
    tags={"data": "tenant-usage", "for": "recovery"},
    freshness_policy=HOURLY_FRESHNESS,
    metadata={"dagster/column_schema": POINT_SCHEMA},
    description=(
        "What a restore would bring back if the usage store were wiped now. For every tenant, "
        "budget and open window: the usage, its source snapshot, its age, and any doubts.\n\n"
        "**On call**: table `points` shows what a restore would bring back. Ages are as of this "
        "run; materialize again to refresh. That needs only PostgreSQL: it works while the usage "
        "store is down or captures are paused. It is read-only. The table has the 200 oldest "
        "windows; the view `budget_recovery.recovery_point` has all, entity by entity.\n\n"
        "**The value** of each entity is the highest in all retained snapshots: within a window, "
        "usage only grows. Usage after the newest snapshot is not in it.\n\n"
        "**Marks**: *truncated*: the source lists only the largest spenders, and there may be "
        "more. *partial*: fewer keys arrived than the store announced. *omitted(n)*: n counters "
        "could not be read in the newest snapshot. *earlier(n)*: n entities are missing or lower "
        "in the newest snapshot and come from older ones; the view has `last_captured_at` of "
        "each. *gone*: the tenant was read since, and holds nothing of this window. "
        "*damaged(n)*: n records do not match their checksum. A restore does not use them; "
        "the view `budget_recovery.damaged_record` lists them."
    ),
)
def recovery_points(
    context: dg.AssetExecutionContext, control_plane: ControlPlaneParam
) -> dg.MaterializeResult[None]:
    """Show the recovery point of every tenant."""
    with control_plane.opened_in_step(context) as plane:
        progress = each_minute(plane.clock, context.log.info)
        survey = survey_points(plane, on_progress=progress)
    if not survey.newest_snapshots:
        context.log.warning("No snapshot is stored: a restore would bring back nothing.")
    return dg.MaterializeResult(metadata=points_metadata(survey))


@dg.asset_check(
    asset=recovery_points,
    description=(
        f"Passes if every tenant's newest snapshot of an open window is at most "
        f"{duration(MAX_POINT_AGE)} old. Captures run every hour: an older snapshot means missed "
        "captures, and a restore would bring back less. Fails as well if a tenant's captures "
        "fail for that long, if the newest snapshot of a tenant holds nothing of what a restore "
        "would bring back, if no snapshot exists, if the newest has a time in the future, or "
        "if a record that a restore would read is damaged (checksum mismatch)."
    ),
)
def recovery_point_age(
    context: dg.AssetCheckExecutionContext, control_plane: ControlPlaneParam
) -> dg.AssetCheckResult:
    """Check the snapshots that are stored now, not those of the last materialization."""
    with control_plane.opened_in_step(context) as plane:
        progress = each_minute(plane.clock, context.log.info)
        ages = judge_point_ages(plane, on_progress=progress)
    too_old = sorted((_row(ages, tenant) for tenant in ages.too_old), key=_oldest_first)
    emptied = [
        _emptied_row(ages, each) for each in sorted(ages.emptied) if each not in ages.too_old
    ]
    damaged = [_damaged_row(ages, tenant) for tenant in sorted(ages.damage.records)]
    rows = [*too_old, *emptied, *damaged]
    return dg.AssetCheckResult(
        passed=ages.is_sound,
        severity=dg.AssetCheckSeverity.WARN,
        description=_verdict(ages, [str(row["tenant"]) for row in too_old]),
        metadata={
            "tenants": len(ages.watched),
            "tenants_too_old": len(ages.too_old),
            "tenants_emptied": len(ages.emptied),
            "damaged_records": sum(ages.damage.records.values()),
            **({"details": table(rows)} if rows else {}),
        },
    )


def _row(ages: PointAges, tenant: str) -> Row:
    newest, old = "(none)", "never captured"
    if captured_at := ages.too_old[tenant]:
        newest = captured_at.isoformat(timespec="seconds")
        old = duration(age(captured_at, ages.now))
    return {
        "tenant": tenant,
        "newest_snapshot": newest,
        "age": old,
        "action": "see tenant_coverage and the last runs of hourly_snapshot_job for the reason "
        "why the tenant is not captured.",
    }


def _emptied_row(ages: PointAges, tenant: str) -> Row:
    read = duration(age(ages.read[tenant], ages.now))
    return {
        "tenant": tenant,
        "newest_snapshot": ages.newest_points[tenant].isoformat(timespec="seconds"),
        "age": duration(age(ages.newest_points[tenant], ages.now)),
        "action": f"Read {read} ago, holds nothing: its counters were deleted. If that was on "
        "purpose, run record_reset_job; otherwise preview the tenant, and restore it.",
    }


def _damaged_row(ages: PointAges, tenant: str) -> Row:
    return {
        "tenant": tenant,
        "newest_snapshot": "",
        "age": "",
        "action": f"{counted(ages.damage.records[tenant], 'damaged record')} (checksum mismatch): "
        "preview the tenant to see which windows lose usage; check the disk of the database.",
    }


def _oldest_first(row: Row) -> tuple[str, str]:
    # All in UTC, and "(none)" comes before every digit.
    return str(row["newest_snapshot"]), str(row["tenant"])


def _verdict(ages: PointAges, oldest_first: list[str]) -> str:
    if ages.newest_snapshot is None:
        return "No snapshot is stored: a restore would bring back nothing."
    if ages.future is not None:
        return (
            f"A snapshot has a time in the future, {full_time(ages.future)}: the database's clock "
            "was wrong then, or is wrong now. If it is right now, run "
            "`budget-recovery discard-future`."
        )
    newest = f"The newest snapshot is {duration(age(ages.newest_snapshot, ages.now))} old."
    if damaged := ages.damage.records:
        count = sum(damaged.values())
        newest += (
            f" {count} {'record is' if count == 1 else 'records are'} damaged (checksum mismatch),"
            f" of {named(sorted(damaged), _NAMED)}: a restore uses older records, if any "
            "exist."
        )
    if ages.emptied:
        read = duration(age(min(ages.read[each] for each in ages.emptied), ages.now))
        newest += f" Read {read} ago, holds nothing: {named(sorted(ages.emptied), _NAMED)}."
    if not oldest_first and not ages.is_behind:
        return f"Nothing is older than {duration(MAX_POINT_AGE)}. {newest}"
    if not oldest_first:
        return f"No tenant was captured in the last {duration(MAX_POINT_AGE)}. {newest}"
    return f"Older than {duration(MAX_POINT_AGE)}: {named(oldest_first, _NAMED)}. {newest}"
