"""What a restore would bring back now."""

import dagster as dg

from budget_recovery_dagster.domain.recovery_point import MAX_POINT_AGE, age, is_too_old
from budget_recovery_dagster.presentation.metadata import (
    HOURLY_FRESHNESS,
    OWNERS,
    POINT_SCHEMA,
    Row,
    duration,
    points_metadata,
    table,
)
from budget_recovery_dagster.resources import ControlPlaneParam, shown_as_failures
from budget_recovery_dagster.services.recovery_points import (
    PointAges,
    judge_point_ages,
    survey_points,
)

# In the sentence; the table has more of them.
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
        "What a restore would bring back if the usage store were wiped now: for every tenant, "
        "budget and window that is still current, how much, from which snapshot, how old that is, "
        "and what is doubtful about it.\n\n"
        '**At night**: the table `points` below answers "what would we get back?". Its ages are '
        "of the moment of the run: materialize it again to know now. That needs PostgreSQL only, "
        "and works while the usage store is down and while captures are paused. It changes "
        "nothing. It shows the 200 oldest windows; all of them, entity by entity, are in the view "
        "`budget_recovery.recovery_point`.\n\n"
        "**The value** of each entity is the highest that any retained snapshot holds: within a "
        "window usage only grows. Whatever was spent after the newest snapshot is not in it.\n\n"
        "**Marks**: *truncated*: the source lists the largest spenders only, and there may be "
        "more. *partial*: fewer keys arrived than the store had announced. *omitted*: so many "
        "counters could not be read in the newest snapshot. *earlier*: so many of the entities are "
        "missing from it, or lower in it, and come from snapshots that are older than the age "
        "says; the view has `last_captured_at` of each. *damaged*: so many records do not match "
        "their checksum. Nothing comes from them; the view `budget_recovery.damaged_record` lists "
        "them."
    ),
)
def recovery_points(
    context: dg.AssetExecutionContext, control_plane: ControlPlaneParam
) -> dg.MaterializeResult[None]:
    """Sum up what is stored."""
    with shown_as_failures(), control_plane.opened() as plane:
        survey = survey_points(plane)
    if not survey.newest_snapshots:
        context.log.warning("No snapshot of any tenant is stored: a restore would find nothing.")
    return dg.MaterializeResult(metadata=points_metadata(survey))


@dg.asset_check(
    asset=recovery_points,
    description=(
        f"No tenant's newest snapshot of a still-current window is older than "
        f"{duration(MAX_POINT_AGE)}: captures come every hour, so an older one means that some "
        "were missed, and that a restore would give back less than it should. Nor does a tenant's "
        "capture fail for as long, whatever its windows. Not passed either when there is no "
        "snapshot at all, when the newest has a time in the future, or when a record that a "
        "restore would read is damaged (checksum mismatch)."
    ),
)
def recovery_point_age(control_plane: ControlPlaneParam) -> dg.AssetCheckResult:
    """Judge what is stored now, whenever the points were last materialized."""
    with shown_as_failures(), control_plane.opened() as plane:
        ages = judge_point_ages(plane)
    too_old = sorted((_row(ages, tenant) for tenant in ages.too_old), key=_oldest_first)
    rows = [*too_old, *(_damaged_row(ages, tenant) for tenant in sorted(ages.damaged))]
    return dg.AssetCheckResult(
        passed=ages.is_sound,
        severity=dg.AssetCheckSeverity.WARN,
        description=_verdict(ages, [str(row["tenant"]) for row in too_old]),
        metadata={
            "tenants": ages.tenants,
            "tenants_too_old": len(ages.too_old),
            "damaged_records": sum(ages.damaged.values()),
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
        "what_to_do": "see tenant_coverage and the last runs of hourly_snapshot_job for why the "
        "tenant is not captured.",
    }


def _damaged_row(ages: PointAges, tenant: str) -> Row:
    count = ages.damaged[tenant]
    return {
        "tenant": tenant,
        "newest_snapshot": "",
        "age": "",
        "what_to_do": f"{count} damaged {'record' if count == 1 else 'records'} (checksum "
        "mismatch): preview the tenant to see which windows lose usage; check the disk of the "
        "database.",
    }


def _oldest_first(row: Row) -> tuple[str, str]:
    # All in UTC, and "(none)" comes before every digit.
    return str(row["newest_snapshot"]), str(row["tenant"])


def _verdict(ages: PointAges, oldest_first: list[str]) -> str:
    if ages.newest_snapshot is None:
        return "No snapshot of any tenant is stored: a restore would find nothing."
    if ages.is_of_the_future:
        moment = f"{ages.newest_snapshot:%Y-%m-%d %H:%M:%S} UTC"
        return (
            f"The newest snapshot bears a time that has not come, {moment}: the database's clock "
            "was wrong then, or is wrong now. Until that time no age can be told, and its tenants "
            "cannot be captured."
        )
    newest = f"The newest snapshot is {duration(age(ages.newest_snapshot, ages.now))} old."
    if ages.damaged:
        count = sum(ages.damaged.values())
        newest += (
            f" {count} {'record is' if count == 1 else 'records are'} damaged (checksum mismatch),"
            f" of {_named(sorted(ages.damaged))}: a restore uses older ones, if there are any."
        )
    if not oldest_first and not is_too_old(ages.newest_snapshot, ages.now):
        return f"Nothing is older than {duration(MAX_POINT_AGE)}. {newest}"
    if not oldest_first:
        return f"No tenant has been captured for longer than {duration(MAX_POINT_AGE)}. {newest}"
    return f"Older than {duration(MAX_POINT_AGE)}: {_named(oldest_first)}. {newest}"


def _named(tenants: list[str]) -> str:
    names = ", ".join(repr(tenant) for tenant in tenants[:_NAMED])
    more = len(tenants) - _NAMED
    return f"{names} and {more} more" if more > 0 else names
