"""What many counters need, in bytes, memory and time: the figures of docs/operations.md.

    python -m benchmarks.sizing 100 10 100

takes 100 tenants with 10 budgets of 100 entities each, on servers of its own. Each piece of work is
done by a process of its own, as Dagster does it; it reports what it took.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path

import click
import psycopg

from budget_recovery_dagster.adapters.postgres import migrate
from budget_recovery_dagster.domain import Hour
from budget_recovery_dagster.embedded import NatsServer, PostgresServer
from budget_recovery_dagster.ports import ControlPlane
from budget_recovery_dagster.services import capture_hour, check_store
from budget_recovery_dagster.services.restore import Recovered, recover_store
from budget_recovery_dagster.settings import Settings, load_settings
from budget_recovery_dagster.wiring import opened_control_plane, store_opener
from tests.nats_servers import Bucket

_MIB = 2**20
_UNCHANGED = 3
_SIZE = """
select sum(pg_total_relation_size(c.oid))::bigint
from pg_class c join pg_namespace n on n.oid = c.relnamespace
where n.nspname = 'budget_recovery' and c.relkind = 'r'
"""


@click.command()
@click.argument("tenants", type=int)
@click.argument("budgets", type=int)
@click.argument("entities", type=int)
def main(tenants: int, budgets: int, entities: int) -> None:
    """Measure with so many TENANTS, BUDGETS of each and ENTITIES of each."""
    keys = [
        f"usage.t{tenant}.b{budget}.lifetime.user=3A{entity:06d}=40example=2Ecom"
        for tenant in range(tenants)
        for budget in range(budgets)
        for entity in range(entities)
    ]
    third = [key for n, key in enumerate(keys) if n // entities % 3 == 0]
    click.echo(f"{len(keys):,} counters in {tenants * budgets:,} budgets; load {load()}")
    with tempfile.TemporaryDirectory(prefix="budget-recovery benchmark ") as directory:
        place = Path(directory)
        place.chmod(0o711)
        with NatsServer(place / "nats") as nats, PostgresServer(place / "postgres") as postgres:
            os.environ["BUDGET_RECOVERY_NATS_URL"] = nats.url
            os.environ["BUDGET_RECOVERY_POSTGRES_URL"] = postgres.url()
            migrate(postgres.url())
            with Bucket.connected(nats.url, load_settings().bucket) as bucket:
                _measure(bucket, postgres.url(), keys, third, tenants * budgets)


def _measure(bucket: Bucket, url: str, keys: list[str], third: list[str], records: int) -> None:
    bucket.create()
    bucket.put_many({key: value_of(n) for n, key in enumerate(keys)})
    click.echo(f"in NATS {bucket.info().state.bytes / len(keys):.0f} bytes a counter")
    measured_work("check")
    grown = _growth(url, lambda: measured_work("capture"))
    click.echo(f"  the first capture: {grown / len(keys):.1f} bytes a counter")
    grown = sum(_growth(url, lambda: measured_work("capture")) for _ in range(_UNCHANGED))
    click.echo(f"  nothing changed: {grown / _UNCHANGED / records:.0f} bytes a budget")
    measured_work("check")
    bucket.put_many({key: value_of(n + len(keys)) for n, key in enumerate(third)})
    # It also reads which of these changes are deletions.
    measured_work("check")
    grown = _growth(url, lambda: measured_work("capture"))
    changed = f"{len(third) / len(keys):.0%} of the counters changed"
    click.echo(f"  {changed}: {grown / len(third):.1f} bytes for each")
    bucket.destroy()
    bucket.create()
    measured_work("check")
    measured_work("restore")
    bucket.destroy()


def value_of(number: int) -> bytes:
    """Return the value of a counter."""
    return b'{"usage":"%d.%06d","updated_at":"2026-11-29T14:00:00Z"}' % (number % 977, number)


def _growth(url: str, work: Callable[[], object]) -> int:
    before = _size(url)
    work()
    return _size(url) - before


def _size(url: str) -> int:
    with psycopg.connect(url, autocommit=True) as connection:
        [(size,)] = connection.execute(_SIZE).fetchall()
        return int(size)


def measured_work(what: str) -> float:
    """Do a piece of work in a process of its own; return how many seconds it took."""
    module = [sys.executable, "-m", "benchmarks.sizing"]
    ended = subprocess.run([*module, "--only", what], check=True, stdout=subprocess.PIPE)
    took = json.loads(ended.stdout)
    click.echo(
        f"{what}: {took['seconds']:.1f} s, of it {took['processor']:.1f} s of a processor,"
        f" {took['peak'] / _MIB:.0f} MiB at most; load {load()}"
    )
    return float(took["seconds"])


def _only(what: str) -> None:
    began, used = time.monotonic(), time.process_time()
    settings = load_settings()
    with opened_control_plane(settings) as plane:
        _WORK[what](plane, settings)
    took = {
        "seconds": time.monotonic() - began,
        "processor": time.process_time() - used,
        "peak": _peak(),
    }
    click.echo(json.dumps(took))


def _peak() -> int:
    """Return the most memory that this process ever had, in bytes."""
    # Not that of getrusage, which counts what the parent had when it made this process.
    status = Path("/proc/self/status").read_text(encoding="ascii")
    [kilobytes] = re.findall(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
    return int(kilobytes) * 1024


def _check(plane: ControlPlane, settings: Settings) -> None:
    check_store(plane, store_opener(settings), checked_by="a benchmark")


def _capture(plane: ControlPlane, settings: Settings) -> None:
    captured = capture_hour(
        plane,
        store_opener(settings),
        Hour.containing(datetime.now(UTC)),
        source=settings.capture_source,
        retention=settings.retention,
        run_id=f"benchmark {time.time_ns()}",
        holder="a benchmark",
        on_outcome=lambda _: None,
    )
    if getattr(captured, "failed", True):
        raise click.ClickException("The capture failed; is a full hour about to begin?")


def _list(_: ControlPlane, settings: Settings) -> None:
    with store_opener(settings)() as store:
        store.reader(settings.capture_source).list_tenants()


def _restore(plane: ControlPlane, settings: Settings) -> None:
    result = recover_store(
        plane,
        store_opener(settings),
        run_id="benchmark",
        holder="a benchmark",
        convergence_timeout=settings.convergence_timeout,
        on_progress=lambda _: None,
    )
    if not isinstance(result, Recovered):
        raise click.ClickException(f"It was not restored: {result}")


_WORK: Mapping[str, Callable[[ControlPlane, Settings], None]] = {
    "check": _check,
    "list": _list,
    "capture": _capture,
    "restore": _restore,
}


def load() -> str:
    """Return the load of the machine in the last minute."""
    return f"{os.getloadavg()[0]:.1f}"


if __name__ == "__main__":
    if sys.argv[1:2] == ["--only"]:
        _only(sys.argv[2])
    else:
        main()
