"""How long a large store takes: ``python -m benchmarks.large_store --counters 100000``.

Everything runs on this machine, so servers and client share its processors: compare the figures of
one run with each other, and runs only on a machine at rest.
"""

import argparse
import asyncio
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import nats
import psycopg
from nats.js.api import KeyValueConfig
from pydantic import SecretStr

from budget_recovery_dagster.adapters.nats_codec import CounterKey, encode_key
from budget_recovery_dagster.adapters.postgres_schema import migrate
from budget_recovery_dagster.bootstrap import OpenedDatabase, opened_database
from budget_recovery_dagster.domain.counters import BudgetWindow
from budget_recovery_dagster.domain.moments import Hour
from budget_recovery_dagster.domain.windows import Period, Window
from budget_recovery_dagster.sandbox.nats_server import NatsServer
from budget_recovery_dagster.sandbox.postgres_server import PostgresServer
from budget_recovery_dagster.services.by_hand import Order
from budget_recovery_dagster.services.chosen_points import RestoreRequest
from budget_recovery_dagster.settings import Settings

_BUDGETS = 10
_ACKNOWLEDGED_EVERY = 5000


def main() -> None:
    """Fill a store, capture it, lose it, and bring it back by hand."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--counters", type=int, default=100_000, help="how many there are")
    parser.add_argument("--tenants", type=int, default=10, help="of how many tenants")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="budget-recovery benchmark ") as directory:
        place = Path(directory)
        # The database's server may run as another account.
        place.chmod(0o711)
        with NatsServer(place / "nats") as store, PostgresServer(place / "postgres") as postgres:
            migrate(postgres.url())
            settings = Settings(
                nats_url=SecretStr(store.url), postgres_url=SecretStr(postgres.url())
            )
            with opened_database(settings) as plane:
                _measure(plane, store.url, arguments.counters, arguments.tenants)
            _told("database", _size(postgres.url()))
    _told("peak memory", f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MB")


def _measure(plane: OpenedDatabase, url: str, counters: int, tenants: int) -> None:
    keys = list(_keys(counters, tenants))
    _fill(url, plane.settings.bucket, keys)
    with _timed("first capture", counters):
        _capture(plane)
    with _timed("capture of the same", counters):
        _capture(plane)
    _check(plane)
    _fill(url, plane.settings.bucket, [])
    with _timed("check that finds the loss", counters):
        _check(plane)
    request = RestoreRequest()
    with _timed("preview of everything", counters):
        plane.preview_service().preview(request, by="benchmark", tell=_ignore)
    with _timed("restore of everything", counters):
        order = Order("benchmark", "a benchmark", "benchmark", _ignore)
        applied = plane.manual_restore_service().apply(request, order)
    if applied.raised != counters or not applied.has_ended_incident:
        raise SystemExit(f"Raised {applied.raised} of {counters} counters.")


def _keys(counters: int, tenants: int) -> Iterator[str]:
    window = Window.containing(Period.MONTH, datetime.now(UTC))
    for number in range(counters):
        of = BudgetWindow(f"budget {number // tenants % _BUDGETS}", window)
        yield encode_key(CounterKey(f"tenant {number % tenants}", of, f"user:{number}@example.com"))


def _fill(url: str, bucket: str, keys: list[str]) -> None:
    """Make the bucket anew, with a counter under each key."""

    async def fill() -> None:
        client = await nats.connect(url)
        stream = client.jetstream()
        if any(name == f"KV_{bucket}" for name in await _stream_names(stream)):
            await stream.delete_key_value(bucket)
        await stream.create_key_value(KeyValueConfig(bucket=bucket))
        for number, key in enumerate(keys):
            value = b'{"usage":"%d.25","updated_at":"2026-11-30T12:00:00Z"}' % (number % 1000)
            # What is sent ahead of the stream for too long is dropped by the server.
            if number % _ACKNOWLEDGED_EVERY == 0 or key is keys[-1]:
                await stream.publish(f"$KV.{bucket}.{key}", value)
            else:
                await client.publish(f"$KV.{bucket}.{key}", value)
        await client.close()

    asyncio.run(fill())


async def _stream_names(stream: nats.js.JetStreamContext) -> list[str]:
    return [str(info.config.name) for info in await stream.streams_info()]


def _capture(plane: OpenedDatabase) -> None:
    plane.capture_service().capture(
        Hour.containing(plane.clock.now()),
        run_id="benchmark",
        holder="benchmark",
        on_outcome=_ignore,
    )


def _check(plane: OpenedDatabase) -> None:
    plane.detection_service().check(checked_by="benchmark")


def _ignore(_: object) -> None:
    pass


_Tell = Callable[[str], None]


@contextmanager
def _timed(what: str, counters: int) -> Iterator[None]:
    begun = time.perf_counter()
    yield
    seconds = time.perf_counter() - begun
    _told(what, f"{seconds:8.2f} s {counters / seconds:10,.0f} counters/s")


def _size(url: str) -> str:
    with psycopg.connect(url) as connection:
        [(size,)] = connection.execute(
            "select sum(pg_total_relation_size(c.oid)) from pg_class c"
            " join pg_namespace n on n.oid = c.relnamespace"
            " where n.nspname = 'budget_recovery' and c.relkind = 'r'"
        ).fetchall()
    return f"{size / 2**20:.1f} MB in all tables"


def _told(what: str, figure: str) -> None:
    print(f"{what:<26} {figure}", flush=True)  # noqa: T201 - it is what the benchmark is for


if __name__ == "__main__":
    main()
