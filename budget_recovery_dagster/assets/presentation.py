"""What all assets show alike: whose they are, how fresh they must be, and their columns."""

from datetime import timedelta

import dagster as dg

from budget_recovery_dagster.domain.usage_columns import USAGE_COLUMNS

OWNERS = ["team:budget-recovery"]
GATEWAY_OWNERS = ["team:ai-gateway"]

HOURLY_FRESHNESS = dg.FreshnessPolicy.time_window(
    # The next capture is due an hour after the last; one that was missed is not made up for.
    warn_window=timedelta(minutes=75),
    fail_window=timedelta(hours=2),
)


def required(name: str, kind: str, description: str) -> dg.TableColumn:
    """Describe a column without nulls."""
    constraints = dg.TableColumnConstraints(nullable=False)
    return dg.TableColumn(name, kind, description, constraints=constraints)


ENTRY_SCHEMA = dg.TableSchema(
    columns=[
        required("tenant", "text", "The customer of the gateway whose counter it is"),
        required(
            "captured_at",
            "timestamptz",
            "The moment that the snapshot stands for, by the database's clock: what the store had "
            "been told until then is in it. All tenants of a run share it",
        ),
        required("budget_id", "text", "The budget"),
        required(
            "window_token",
            "text",
            "The window, in UTC: a day 2026-11-29, an ISO week 2026-W48, a month 2026-11, a "
            "quarter 2026-Q4, or lifetime",
        ),
        dg.TableColumn(
            "entity",
            "text",
            "Who spent: a user, model, account, agent or metadata value; null is the aggregate "
            "of the whole budget",
        ),
        required(
            "usage",
            "numeric",
            "What it had spent in the window by then: exact, at most 20 integer digits and 18 "
            "decimals",
        ),
    ]
)
"""Of the view ``budget_recovery.budget_entry``."""

USAGE_SCHEMA = dg.TableSchema(
    columns=[
        (dg.TableColumn if column.is_nullable else required)(
            column.name, column.kind.value, column.description
        )
        for column in USAGE_COLUMNS
    ]
)
"""Of every tenant's Parquet table."""
