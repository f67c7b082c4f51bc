"""Tables of usages as the figures and one-liners that Dagster shows of a run."""

from pathlib import Path
from typing import Any

import dagster as dg

from budget_recovery_dagster.assets.budget_usage_snapshots import budget_usage_snapshots
from budget_recovery_dagster.assets.capture_tables import Row, table
from budget_recovery_dagster.services.usage_tables import TablesBuilt


def tables_metadata(built: TablesBuilt) -> dict[str, Any]:
    """Show the tables of an hour: figures that plot over time, and one row a tenant."""
    rows: list[Row] = [
        {
            "tenant": failed.tenant,
            "outcome": "FAILED",
            "rows": 0,
            "bytes": 0,
            "file": f"{failed.reason} Try: {failed.hint}",
        }
        for failed in built.failed
    ]
    rows.extend(
        {
            "tenant": written.tenant,
            "outcome": "written",
            "rows": written.file.rows,
            "bytes": written.file.size,
            "file": str(Path(written.file.path).relative_to(built.place)),
        }
        for written in built.written
    )
    return {
        "directory": dg.MetadataValue.path(built.place),
        "files": len(built.written),
        "dagster/row_count": built.rows,
        "bytes": built.size,
        "tenants_failed": len(built.failed),
        "removed_files": built.pruned.removed,
        "duration_seconds": round(built.seconds, 3),
        "tenants": table(rows),
        "how_to_read": dg.MetadataValue.md(_how_to_read(built)),
        "made_from": dg.MetadataValue.asset(budget_usage_snapshots.key),
    }


def _how_to_read(built: TablesBuilt) -> str:
    of_tenant = f"{built.place}/<tenant>-<digest>"
    if built.written:
        of_tenant = str(Path(built.written[0].file.path).parent)
    everything = f"{built.place}/*/*.parquet".replace("'", "''")
    return f"""All retained hours of a tenant with pandas; usages are exact `Decimal`s:

```python
pandas.read_parquet({of_tenant!r})
```

All tenants with DuckDB, in Python `duckdb.sql("…")`:

```sql
from '{everything}' order by captured_at desc, usage desc
```
"""
