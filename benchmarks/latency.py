"""How long the gateway's writes take beside our work: the figures of docs/operations.md.

    python -m benchmarks.latency 1000 10 100

takes 1,000 tenants with 10 budgets of 100 entities each, on servers of its own. A process writes
counters as a gateway does, and measures how long each write takes. Rounds without other work and
rounds with it alternate, so that other load on the machine affects both.
"""

import asyncio
import itertools
import math
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import TextIO

import click
import nats

from benchmarks.sizing import load, measured_work, value_of
from budget_recovery_dagster.adapters.postgres import migrate
from budget_recovery_dagster.embedded import NatsServer, PostgresServer
from budget_recovery_dagster.settings import load_settings
from tests.nats_servers import Bucket

_ENTITY = "user=3A{:06d}=40example=2Ecom"
_QUIET_SECONDS = 30.0
# Between rounds, so that what a round leaves to the servers does not count for the next one.
_PAUSE_SECONDS = 2.0
_WORK = ("list", "capture", "check")


@click.command()
@click.argument("tenants", type=int)
@click.argument("budgets", type=int)
@click.argument("entities", type=int)
@click.option("--rounds", default=3, show_default=True, help="Rounds of each kind.")
@click.option("--writes", default=200, show_default=True, help="Writes per second of the gateway.")
def main(tenants: int, budgets: int, entities: int, rounds: int, writes: int) -> None:
    """Measure with so many TENANTS, BUDGETS of each and ENTITIES of each.

    For five million counters: 5000 10 100, with BUDGET_RECOVERY_ANSWER_TIMEOUT_SECONDS=60 and
    BUDGET_RECOVERY_READ_TIMEOUT_SECONDS=1800.
    """
    number = tenants * budgets * entities
    click.echo(f"{number:,} counters of {tenants:,} tenants; {writes} writes/s; load {load()}")
    with tempfile.TemporaryDirectory(prefix="budget-recovery benchmark ") as directory:
        place = Path(directory)
        place.chmod(0o711)
        with NatsServer(place / "nats") as nats_server, PostgresServer(place / "pg") as postgres:
            os.environ["BUDGET_RECOVERY_NATS_URL"] = nats_server.url
            os.environ["BUDGET_RECOVERY_POSTGRES_URL"] = postgres.url()
            migrate(postgres.url())
            name = load_settings().bucket
            with Bucket.connected(nats_server.url, name) as bucket:
                bucket.create()
                for budget in range(budgets):
                    bucket.put_many(dict(_values(tenants, budget, entities)))
            samples = place / "samples"
            keys = _written(tenants, budgets, entities)
            with _Gateway(nats_server.url, name, keys, writes, samples).writing():
                _measure(samples, rounds)


def _values(tenants: int, budget: int, entities: int) -> Iterator[tuple[str, bytes]]:
    for tenant, entity in itertools.product(range(tenants), range(entities)):
        key = f"usage.t{tenant}.b{budget}.lifetime.{_ENTITY.format(entity)}"
        yield key, value_of(entity)


def _written(tenants: int, budgets: int, entities: int) -> list[str]:
    """Return some of the keys, of all tenants."""
    tenth = max(entities // 10, 1)
    return [
        f"usage.t{tenant}.b{tenant % budgets}.lifetime.{_ENTITY.format(entity)}"
        for entity, tenant in itertools.product(range(0, entities, tenth), range(tenants))
    ]


def _measure(samples: Path, rounds: int) -> None:
    # The first capture stores everything, and the first check has nothing to compare with.
    longest = max(measured_work(work) for work in _WORK)
    found: dict[str, list[float]] = {kind: [] for kind in ("nothing", *_WORK)}
    for _ in range(rounds):
        for kind in found:
            time.sleep(_PAUSE_SECONDS)
            _await_hour_with(2 * longest)
            began = time.monotonic()
            if kind == "nothing":
                time.sleep(_QUIET_SECONDS)
            else:
                measured_work(kind)
            taken = _between(samples, began, time.monotonic())
            found[kind] += taken
            click.echo(f"  {kind}: {_summary(taken)}; load {load()}")
    click.echo("all rounds:")
    for kind, taken in found.items():
        click.echo(f"  {kind}: {_summary(taken)}")


def _await_hour_with(seconds: float) -> None:
    """Wait for the next hour unless so much of this one is left: a capture ends with its hour."""
    left = 3600 - time.time() % 3600
    if left < seconds < 3600:
        click.echo(f"  waiting {left:.0f} s for the next hour")
        time.sleep(left)


def _summary(taken: Sequence[float]) -> str:
    ordered = sorted(taken)
    quantiles = (ordered[math.ceil(len(ordered) * each) - 1] for each in (0.5, 0.99, 0.999, 1))
    figures = zip(("p50", "p99", "p99.9", "max"), quantiles, strict=True)
    return f"{len(ordered):,} writes, " + ", ".join(
        f"{name} {seconds * 1000:.1f} ms" for name, seconds in figures
    )


def _between(samples: Path, start: float, end: float) -> list[float]:
    """Return how long the writes took that were under way in this time."""
    lines = (line.split() for line in samples.read_text(encoding="ascii").splitlines())
    return [
        float(line[1])
        for line in lines
        if len(line) == 2 and float(line[0]) < end and float(line[0]) + float(line[1]) > start
    ]


@dataclass(frozen=True)
class _Gateway:
    """Writes ``keys`` in turn, so many ``writes`` per second, and notes how long each takes."""

    url: str
    bucket: str
    keys: Sequence[str]
    writes: int
    samples: Path

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Write from a process of its own."""
        context = multiprocessing.get_context("spawn")
        stop = context.Event()
        process = context.Process(target=self.write, args=(stop,))
        process.start()
        try:
            yield
        finally:
            stop.set()
            process.join()

    def write(self, stop: Event) -> None:
        """Write until ``stop`` is set."""
        with self.samples.open("a", buffering=1, encoding="ascii") as file:
            asyncio.run(self._write(file, stop))

    async def _write(self, file: TextIO, stop: Event) -> None:
        """Begin each write at its time, even if earlier ones are still waiting."""
        client = await nats.connect(self.url)
        stream = client.jetstream(timeout=60)

        async def write(number: int, key: str) -> None:
            began = time.monotonic()
            await stream.publish(f"$KV.{self.bucket}.{key}", value_of(number))
            file.write(f"{began} {time.monotonic() - began}\n")

        started = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            for number, key in enumerate(itertools.cycle(self.keys)):
                if stop.is_set():
                    break
                await asyncio.sleep(started + number / self.writes - time.monotonic())
                tasks.create_task(write(number, key))
        await client.close()


if __name__ == "__main__":
    main()
