"""What restores have written back into the gateway's store."""

from collections.abc import Iterable, Mapping
from typing import Any

import dagster as dg

from budget_recovery_dagster.assets.gateway_usage_store import gateway_usage_store
from budget_recovery_dagster.assets.presentation import OWNERS
from budget_recovery_dagster.assets.recovery_points import recovery_points
from budget_recovery_dagster.audit_ports import (
    AuditEntry,
    MergedAudits,
)
from budget_recovery_dagster.domain.counters import format_usage
from budget_recovery_dagster.domain.incident import Restored

MOST_ROWS = 200
"""So many windows are shown: Dagster keeps a table whole in its event log; PostgreSQL has all."""

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
        "something, and by every restore by hand that did, with what each budget's counters were "
        "before and after; observed by one that found nothing to raise, and by every preview, "
        "which its Events show. The table budget_recovery.restore_audit has all of it."
    ),
)


def restored_metadata(restored: Restored, audits: MergedAudits) -> Mapping[str, Any]:
    """Show what was restored: of all windows the sums, of the largest that have something each."""
    shown = [entry for entry in audits.largest if entry.raised or entry.notes]
    return {
        "counters_raised": restored.counters,
        "windows_raised": restored.windows,
        "tenants_raised": restored.tenants,
        "usage_before": format_usage(audits.before),
        "usage_after": format_usage(audits.after),
        "before_and_after": audit_table(shown),
        "windows_not_shown": audits.windows - len(shown),
    }


def audit_table(entries: Iterable[AuditEntry]) -> dg.TableMetadataValue:
    """Show what became of each budget and window."""
    return dg.MetadataValue.table(
        records=[_row(entry) for entry in entries], schema=dg.TableSchema(columns=_COLUMNS)
    )


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
