"""Loading the definitions with very many captures."""

import json
import os
import subprocess
import sys

import psycopg

from budget_recovery_dagster.domain import Hour
from tests.integration.live_capture import capture_now
from tests.nats_servers import Bucket

TENANTS, HOURS = 500, 168
# Far longer than loading takes, and far shorter than work that grows with the stored captures.
MOST_SECONDS = 60
DAYS = 9

_MULTIPLY = """
insert into budget_recovery.capture ({columns})
select 'tenant-' || number, captured_at - hours * interval '1 hour', {others}
from budget_recovery.capture,
    generate_series(1, {tenants}) number,
    generate_series(1, {hours}) hours
"""
_LOAD = """
import json
from tests import services

repository = services.definitions().get_repository_def()
graph = repository.asset_graph
print(json.dumps({
    key.to_user_string(): len(graph.get(key).partitions_def.get_partition_keys())
    for key in graph.materializable_asset_keys
    if graph.get(key).partitions_def
}))
"""


def test_the_number_of_partitions_does_not_depend_on_captures(
    configured: Bucket, database: psycopg.Connection, current_hour: Hour
) -> None:
    # As dagster-io/dagster#12441: too many partitions hang pages and code servers.
    configured.spend("acme", "total", "lifetime", {None: "80"})
    capture_now(current_hour)
    assert multiply(database) == TENANTS * HOURS
    loaded = subprocess.run(
        [sys.executable, "-c", _LOAD],
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=MOST_SECONDS,
        check=True,
    )
    partitions = json.loads(loaded.stdout)
    assert set(partitions) == {"budget_usage_snapshots", "tenant_usage_tables"}
    assert all(HOURS < count <= DAYS * 24 for count in partitions.values())


def multiply(database: psycopg.Connection) -> int:
    """Copy the capture of one tenant to very many tenants and hours."""
    columns = database.execute("table budget_recovery.capture limit 0").description or ()
    names = [column.name for column in columns]
    others = [name for name in names if name not in ("tenant", "captured_at", "commit_number")]
    return database.execute(
        _MULTIPLY.format(
            columns=", ".join(("tenant", "captured_at", *others)),
            others=", ".join(others),
            tenants=TENANTS,
            hours=HOURS,
        ).encode()
    ).rowcount
