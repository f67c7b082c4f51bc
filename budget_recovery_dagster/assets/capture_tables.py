"""Captures as the tables and figures that Dagster shows of a run."""

from collections.abc import Sequence
from typing import Any

import dagster as dg

from budget_recovery_dagster.domain.counters import format_usage
from budget_recovery_dagster.domain.usage_sums import exact_sum
from budget_recovery_dagster.ports import CaptureSummary
from budget_recovery_dagster.services.capture_outcome import (
    Captured,
    TenantAbsent,
    TenantFailed,
    TenantOutcome,
    TenantStored,
)

# A table stands in one event of Dagster's log; PostgreSQL has the rest.
MAX_ROWS = 200

Row = dict[str, str | int | float | bool | None]


def table(rows: Sequence[Row]) -> dg.TableMetadataValue:
    """Show rows of equal columns: the first 200 of them, and how many more there are."""
    shown = [*rows[:MAX_ROWS]]
    if len(rows) > MAX_ROWS:
        rest: Row = dict.fromkeys(rows[0], "")
        rest[next(iter(rest))] = f"and {len(rows) - MAX_ROWS} more"
        shown.append(rest)
    return dg.MetadataValue.table([dg.TableRecord(row) for row in shown])


def capture_metadata(captured: Captured) -> dict[str, Any]:
    """Show a capture: figures that plot over time, and one row a tenant, the worst first."""
    stored = captured.stored
    metadata: dict[str, Any] = {
        "captured_at": dg.MetadataValue.timestamp(captured.captured_at),
        "tenants_stored": len(stored),
        "tenants_failed": len(captured.failed),
        # The rows of budget_entry, whose columns the asset shows.
        "dagster/row_count": sum(tenant.entries for tenant in stored),
        "budget_windows": sum(tenant.records for tenant in stored),
        "counters": sum(tenant.entries for tenant in stored),
        # A float, so that it plots; the exact usages are in the database.
        "captured_usage": float(exact_sum(tenant.usage for tenant in stored)),
        "source": captured.source.value,
        "truncated_windows": captured.truncated,
        "omitted": sum(tenant.omitted for tenant in stored),
        "missing_or_lower": sum(tenant.drops for tenant in stored),
        "unreadable_keys": len(captured.unreadable) + sum(t.unreadable for t in stored),
        "duration_seconds": round(sum(outcome.seconds for outcome in captured.outcomes), 3),
        "recovery_points": dg.MetadataValue.asset(dg.AssetKey("recovery_points")),
    }
    if captured.identity:
        metadata["store_created_at"] = dg.MetadataValue.timestamp(captured.identity.created_at)
        # As text: the UI's numbers end at 2**53.
        metadata["store_sequence"] = str(captured.identity.last_sequence)
    if captured.pruned:
        metadata["pruned_records"] = captured.pruned.records
        metadata["pruned_snapshots"] = captured.pruned.captures
    if captured.prune_failure:
        metadata["prune_failure"] = str(captured.prune_failure)
    if captured.outcomes:
        metadata["tenants"] = table([_row(o) for o in sorted(captured.outcomes, key=_worst_first)])
    if captured.unreadable:
        metadata["keys_of_no_tenant"] = table(
            [{"key": bad.key, "reason": bad.reason} for bad in captured.unreadable]
        )
    return metadata


def verified_metadata(snapshots: Sequence[CaptureSummary]) -> dict[str, Any]:
    """Show the stored snapshots of a past hour."""
    return {
        "tenants_stored": len({snapshot.tenant for snapshot in snapshots}),
        "dagster/row_count": sum(snapshot.entry_count for snapshot in snapshots),
        "budget_windows": sum(snapshot.record_count for snapshot in snapshots),
        "counters": sum(snapshot.entry_count for snapshot in snapshots),
        "verified": True,
        "tenants": table(
            [
                {
                    "tenant": snapshot.tenant,
                    "captured_at": snapshot.captured_at.isoformat(timespec="seconds"),
                    "budget_windows": snapshot.record_count,
                    "counters": snapshot.entry_count,
                    "source": snapshot.source.value,
                    "omitted": snapshot.omitted_count,
                    "missing_or_lower": snapshot.drop_count,
                    "partial": snapshot.is_partial,
                }
                for snapshot in snapshots
            ]
        ),
    }


def _worst_first(outcome: TenantOutcome) -> tuple[int, str]:
    if isinstance(outcome, TenantFailed):
        return 0, outcome.tenant
    if isinstance(outcome, TenantStored) and (
        outcome.is_partial or outcome.drops or outcome.omitted or outcome.unreadable
    ):
        return 1, outcome.tenant
    return 2, outcome.tenant


def _row(outcome: TenantOutcome) -> Row:
    row: Row = {
        "tenant": outcome.tenant,
        "outcome": "stored",
        "detail": "",
        "budget_windows": 0,
        "counters": 0,
        "usage": "0",
        "omitted": 0,
        "missing_or_lower": 0,
        "seconds": round(outcome.seconds, 3),
    }
    match outcome:
        case TenantStored():
            row["budget_windows"] = outcome.records
            row["counters"] = outcome.entries
            row["usage"] = format_usage(outcome.usage)
            row["omitted"] = outcome.omitted
            row["missing_or_lower"] = outcome.drops
            row["detail"] = "; ".join(_remarks(outcome))
        case TenantAbsent():
            row["outcome"] = "nothing in the store"
        case TenantFailed():
            row["outcome"] = "FAILED"
            row["detail"] = f"{outcome.reason} Try: {outcome.hint}"
    return row


def _remarks(stored: TenantStored) -> list[str]:
    remarks = []
    if stored.drops and not stored.entries and not stored.omitted:
        remarks.append("nothing of it is left in the store")
    if stored.is_partial:
        remarks.append("partial: fewer keys arrived than the store announced")
    if stored.truncated:
        remarks.append(f"windows with only the 500 largest: {stored.truncated}")
    if stored.unreadable:
        remarks.append(f"{stored.unreadable} keys name no counter")
    return remarks
