"""What restores have written back into the gateway's store."""

from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Any

import dagster as dg

from budget_recovery_dagster.assets.gateway_usage_store import gateway_usage_store
from budget_recovery_dagster.assets.presentation import OWNERS
from budget_recovery_dagster.assets.recovery_points import recovery_points
from budget_recovery_dagster.domain.counters import format_usage
from budget_recovery_dagster.restore_ports import AuditEntry

# Dagster keeps each table whole in its event log; PostgreSQL has all rows.
_MOST_ROWS = 200

_COLUMNS = [
    dg.TableColumn("tenant", "string"),
    dg.TableColumn("budget", "string"),
    dg.TableColumn("window", "string"),
    dg.TableColumn("counters", "int", "In the snapshots"),
    dg.TableColumn("raised", "int", "Counters that were lower in the store"),
    dg.TableColumn("before", "string", "Sum of these counters in the store before"),
    dg.TableColumn("after", "string", "The same after the restore"),
    dg.TableColumn("from_snapshot", "string", "The newest snapshot that it comes from, UTC"),
    dg.TableColumn("notes", "string", "What was left, and why"),
]

restored_usage = dg.AssetSpec(
    "restored_usage",
    deps=[recovery_points, gateway_usage_store],
    group_name="recovery",
    kinds={"nats"},
    owners=OWNERS,
    tags={"data": "tenant-usage", "for": "recovery"},
    description=(
        "The counters that a restore has raised in the gateway's store after a loss, each to the "
        "highest that any retained snapshot knows. **Materialized** by every recovery that raised "
        "something, with what each budget's counters were before and after; observed by one that "
        "found nothing to raise. The table budget_recovery.restore_audit has all of it."
    ),
)


def restored_metadata(entries: Iterable[AuditEntry]) -> Mapping[str, Any]:
    """Show what was restored, those that rose most first."""
    ranked = sorted(entries, key=lambda entry: (entry.before - entry.after, entry.tenant))
    shown = [entry for entry in ranked if entry.raised or entry.notes][:_MOST_ROWS]
    return {
        "counters_raised": sum(entry.raised for entry in ranked),
        "windows_raised": sum(1 for entry in ranked if entry.raised),
        "tenants_raised": len({entry.tenant for entry in ranked if entry.raised}),
        "usage_before": format_usage(sum((entry.before for entry in ranked), Decimal(0))),
        "usage_after": format_usage(sum((entry.after for entry in ranked), Decimal(0))),
        "before_and_after": dg.MetadataValue.table(
            records=[_row(entry) for entry in shown], schema=dg.TableSchema(columns=_COLUMNS)
        ),
        "windows_not_shown": len(ranked) - len(shown),
    }


def _row(entry: AuditEntry) -> dg.TableRecord:
    return dg.TableRecord(
        {
            "tenant": entry.tenant,
            "budget": entry.of.budget,
            "window": entry.of.window.token,
            "counters": entry.entries,
            "raised": entry.raised,
            "before": format_usage(entry.before),
            "after": format_usage(entry.after),
            "from_snapshot": f"{entry.point_at:%Y-%m-%d %H:%M:%S}",
            "notes": "; ".join(entry.notes),
        }
    )
