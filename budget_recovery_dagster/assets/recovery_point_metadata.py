"""Recovery points as the table and figures that Dagster shows."""

from datetime import datetime, timedelta
from typing import Any

import dagster as dg

from budget_recovery_dagster.assets.budget_usage_snapshots import budget_usage_snapshots
from budget_recovery_dagster.assets.capture_tables import Row, table
from budget_recovery_dagster.assets.presentation import required
from budget_recovery_dagster.domain.counters import format_usage
from budget_recovery_dagster.services.recovery_points import PointSurvey, PointWindow

POINT_SCHEMA = dg.TableSchema(
    columns=[
        required("tenant", "string", "The customer of the gateway"),
        required("budget", "string", "The budget; empty where no window of the tenant is current"),
        required("window", "string", "The window that is still current, by its token, in UTC"),
        required(
            "usage",
            "decimal",
            "The whole budget's usage, in plain digits: that of its aggregate where it has one, or "
            "else the sum over its entities; unknown where no counter of it could be read",
        ),
        required("age", "string", "How old the newest snapshot with it was at the time of the run"),
        required(
            "marks", "string", "truncated, partial, omitted(n), earlier(n): see the description"
        ),
        required("entities", "int", "How many counters a restore would bring back"),
        required(
            "source",
            "string",
            "Of which keys of the store that snapshot was taken: counters (every entity) or "
            "leaderboards (only the largest)",
        ),
        required("captured_at", "timestamp", "When it was taken, in UTC"),
    ]
)
"""Of the table in the metadata."""


def points_metadata(survey: PointSurvey) -> dict[str, Any]:
    """Show what a restore would bring back: figures that plot over time, and the oldest first."""
    rows = [
        *(_row(survey, window) for window in survey.windows),
        *(_row_without_window(survey, tenant) for tenant in survey.without_window),
    ]
    moments = [window.captured_at for window in survey.windows]
    return {
        "as_of": dg.MetadataValue.timestamp(survey.now),
        # Of nothing there is no age, and no table.
        **({"newest_point_age_seconds": _seconds(survey, max(moments))} if moments else {}),
        **({"oldest_point_age_seconds": _seconds(survey, min(moments))} if moments else {}),
        "tenants": len(survey.newest_snapshots),
        "tenants_without_window": len(survey.without_window),
        "budget_windows": len(survey.windows),
        "dagster/row_count": len(survey.windows),
        "entities": sum(window.entities for window in survey.windows),
        "marked_windows": sum(bool(marks_of(window)) for window in survey.windows),
        "duration_seconds": round(survey.seconds, 3),
        "made_from": dg.MetadataValue.asset(budget_usage_snapshots.key),
        **({"points": table(rows)} if rows else {}),
    }


def marks_of(window: PointWindow) -> str:
    """Say what is doubtful about a window."""
    marks = [
        *(["truncated"] if window.is_truncated else []),
        *(["partial"] if window.is_partial else []),
        *([f"omitted({window.omitted})"] if window.omitted else []),
        *([f"earlier({window.from_earlier})"] if window.from_earlier else []),
    ]
    return ", ".join(marks)


def _row(survey: PointSurvey, window: PointWindow) -> Row:
    return {
        "tenant": window.tenant,
        "budget": window.of.budget,
        "window": window.of.window.token,
        # Nothing is known of a window of which nothing was readable, least of all that it is zero.
        "usage": format_usage(window.usage) if window.entities else "unknown",
        "age": duration(survey.age_of(window.captured_at)),
        "marks": marks_of(window),
        "entities": window.entities,
        "source": window.source.value,
        "captured_at": _moment(window.captured_at),
    }


def _row_without_window(survey: PointSurvey, tenant: str) -> Row:
    newest = survey.newest_snapshots[tenant]
    return {
        "tenant": tenant,
        "budget": "",
        "window": "none is current",
        "usage": "",
        "age": duration(survey.age_of(newest)),
        "marks": "nothing to bring back",
        "entities": 0,
        "source": "",
        "captured_at": _moment(newest),
    }


def _moment(moment: datetime) -> str:
    # Without a blank, at which the page would break it.
    return f"{moment:%Y-%m-%dT%H:%M:%SZ}"


def _seconds(survey: PointSurvey, moment: datetime) -> float:
    return round(survey.age_of(moment).total_seconds(), 3)


def duration(time: timedelta) -> str:
    """Write a time for people, in words that a narrow column does not break: ``1h 30min``."""
    minutes, seconds = divmod(int(time.total_seconds()), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours}h"
    if hours:
        return f"{hours}h {minutes}min"
    return f"{minutes}min" if minutes else f"{seconds}s"
