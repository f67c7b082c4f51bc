"""A worker that restores in its own process, and sends itself a signal meanwhile.

As a program, it reads the settings from the environment and the signal from its arguments.
"""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Self

from budget_recovery_dagster.adapters.postgres import Database, PostgresLeases, server_clock
from budget_recovery_dagster.domain import IsOpen, RaiseOrder, RaiseResult, Window
from budget_recovery_dagster.ports import LiveTenant, OpenStore, UsageStore
from budget_recovery_dagster.settings import load_settings
from budget_recovery_dagster.wiring import control_plane_on, store_opener
from tests import services

LEASE_SECONDS = 3.0
_LONG_LEASE_SECONDS = 90.0
_END_SECONDS = 60


@dataclass
class Fate:
    """A signal before the numbered write, from 1; 0: after all writes."""

    before_write: int
    signal: signal.Signals
    writes: int = 0

    def meet(self, *, at_end: bool = False) -> None:
        if not at_end:
            self.writes += 1
        if self.before_write == (0 if at_end else self.writes):
            # To this thread, which so never goes on before the process has stopped.
            signal.pthread_kill(threading.get_ident(), self.signal)


class Overriding:
    """A real part with some methods overridden."""

    def __init__(self, part: Any) -> None:
        self._part = part

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)


class AgreeingClock(Overriding):
    """The clock of a database, with which that of this host agrees."""

    def host_time(self) -> datetime:
        now: datetime = self._part.now()
        return now


class _Fated(Overriding):
    """A part that sends the signal to its user."""

    def __init__(self, part: Any, fate: Fate) -> None:
        super().__init__(part)
        self._fate = fate


class FatedTenant(_Fated):
    def raise_counters(
        self, orders: Sequence[RaiseOrder], *, is_open: IsOpen
    ) -> tuple[RaiseResult, ...]:
        def asked(window: Window) -> bool:
            self._fate.meet()
            return is_open(window)

        results: tuple[RaiseResult, ...] = self._part.raise_counters(orders, is_open=asked)
        return results


class FatedStore(_Fated):
    is_timeless = False

    def now(self) -> datetime | None:
        return None if self.is_timeless else self._part.now()

    def open_tenant(self, tenant: str) -> LiveTenant:
        return FatedTenant(self._part.open_tenant(tenant), self._fate)


class FatedIncidents(_Fated):
    def close(self, *arguments: Any, **named: Any) -> Any:
        self._fate.meet(at_end=True)
        return self._part.close(*arguments, **named)


def fated(opening: OpenStore, fate: Fate, *, is_timeless: bool = False) -> OpenStore:
    """Return an opener of the store that ``opening`` opens, with this signal for its user."""

    @contextmanager
    def opened() -> Iterator[UsageStore]:
        with opening() as store:
            fated_store: Any = FatedStore(store, fate)
            # The server's time would contradict the test's clock.
            fated_store.is_timeless = is_timeless
            yield fated_store

    return opened


class Worker:
    """The program as a child process of a test."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    @classmethod
    def started(
        cls, run_id: str, before_write: int, number: signal.Signals, *, at: datetime | None = None
    ) -> Self:
        """Start it on the store and the database of the settings.

        With ``at``, the clock of the database stands still at this time, and the lease is long.
        """
        program = [sys.executable, "-m", __name__, run_id, str(before_write), number.name]
        if at is not None:
            program.append(at.isoformat())
        return cls(subprocess.Popen(program, stdout=subprocess.PIPE, text=True))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.kill()
        self._process.communicate()

    @property
    def is_stopped(self) -> bool:
        """Whether it has stopped itself."""
        found = os.waitid(
            os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOHANG | os.WNOWAIT
        )
        assert found is None or found.si_code == os.CLD_STOPPED, "it has ended"
        return found is not None

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def report(self) -> dict[str, str]:
        """Wait for its end, and return its report."""
        output, _ = self._process.communicate(timeout=_END_SECONDS)
        answer: dict[str, str] = json.loads(output)
        return answer

    def is_killed(self) -> bool:
        """Wait for its end, and return whether it was killed."""
        return self._process.wait(_END_SECONDS) == -signal.SIGKILL


def killed(run_id: str, before_write: int) -> None:
    """Run a worker that is killed before this write."""
    with Worker.started(run_id, before_write, signal.SIGKILL) as worker:
        assert worker.is_killed()


def _opened(at: datetime | None) -> AbstractContextManager[Database]:
    clock = server_clock if at is None else lambda _: at
    return Database(load_settings().require_postgres_url(), clock=clock)


def main(run_id: str, before_write: str, number: str, at: str = "") -> None:
    """Restore, and report the end."""
    fate = Fate(int(before_write), signal.Signals[number])
    with _opened(datetime.fromisoformat(at) if at else None) as database:
        leases = PostgresLeases(
            database,
            duration=timedelta(seconds=_LONG_LEASE_SECONDS if at else LEASE_SECONDS),
            renew_every=timedelta(seconds=LEASE_SECONDS / 6),
        )
        settings = load_settings()
        plane = replace(control_plane_on(database, settings.bucket), leases=leases)
        if at:
            clock: Any = AgreeingClock(plane.clock)
            plane = replace(plane, clock=clock)
        incidents: Any = FatedIncidents(plane.incidents, fate)
        try:
            ended: object = services.recover(
                replace(plane, incidents=incidents),
                open_store=fated(store_opener(settings), fate, is_timeless=bool(at)),
                run_id=run_id,
            )
            report = {"ended": type(ended).__name__}
        except Exception as error:  # noqa: BLE001 - reported to the test
            report = {"ended": type(error).__name__, "why": str(error)}
    print(json.dumps(report))  # noqa: T201 - the report to the test


if __name__ == "__main__":
    main(*sys.argv[1:])
