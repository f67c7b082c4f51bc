"""The ledger of the gate: every request that it allowed, and the blocks that it knows.

It is the exact record of true spend, and the outbox of costs to report. Its charges survive the
process and a power failure: a number that was reported is never used for another charge. Its blocks
survive the process only. So never restore a ledger from an older copy: it would use numbers again
that the counters' marks already cover, and their costs would not be counted.

Other programs, such as ``sqlite3``, may read it at any time. A program that prevents writes, by a
transaction or by filling the disk, stops all requests.

It grows without limit, by about 170 bytes for each request, because lifetime spend needs all of
them. Four requests per second are 59 MB per day.
"""

import json
import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, Self
from uuid import uuid4

from budget_recovery_dagster.adapters.nats.codec import CounterKey
from budget_recovery_dagster.domain.counters import exact_sum, format_usage
from budget_recovery_dagster.sandbox.gateway.requests import Budgets, Charge, Request

# A commit takes a few milliseconds. While another program writes, the gate answers no request.
_WRITE_SECONDS = 0.25
# Another process may be creating the same ledger.
_OPENING_SECONDS = 5.0

_TABLES = """
create table if not exists charge (
    number integer primary key, moment text not null, tenant text not null, user text not null,
    model text not null, virtual_account text, agent text, metadata text not null,
    cost text not null
);
create table if not exists blocked (suffix text primary key) without rowid;
create table if not exists fact (name text primary key, value not null) without rowid;
"""
_ID, _REPORTED, _UNCOUNTED = "ledger", "reported", "history to count"

_COLUMNS = "moment, tenant, user, model, virtual_account, agent, metadata, cost"
_INSERT = f"insert into charge ({_COLUMNS}) values (?, ?, ?, ?, ?, ?, ?, ?)"  # noqa: S608
_CHARGES = f"select number, {_COLUMNS} from charge"  # noqa: S608
_SET = "insert into fact values (?, ?) on conflict do update set value = excluded.value"


class LedgerError(OSError):
    """The ledger cannot be read or written now; the message names its file and the reason."""


class Ledger:
    """The ledger in a file, created if it is missing; a context manager that closes it.

    Several processes may open one file; only one of them may record. Every method raises
    LedgerError if the file cannot be used, and then has changed nothing; a later call may succeed.

    Raises:
        LedgerError: it cannot be opened or created.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        with self._errors_translated():
            # One thread at a time uses it, not necessarily the one that opened it.
            self._connection = sqlite3.connect(
                file, _OPENING_SECONDS, isolation_level=None, check_same_thread=False
            )
            try:
                self._open()
            except BaseException:
                self._connection.close()
                raise
        self.id = str(self._fact(_ID))

    def _open(self) -> None:
        self._connection.execute("pragma journal_mode = wal")
        # The charge is on disk before the answer is sent: if a power failure removed it, the next
        # charge would get its number, which counters may already include.
        self._connection.execute("pragma synchronous = full")
        # Opening an existing ledger to read it writes nothing.
        if not self._connection.execute(
            "select 1 from sqlite_master where name = 'fact'"
        ).fetchone():
            self._connection.executescript(_TABLES)
        if not self._connection.execute("select 1 from fact where name = ?", (_ID,)).fetchone():
            self._connection.execute(
                "insert into fact values (?, ?) on conflict do nothing", (_ID, uuid4().hex)
            )
        self._connection.execute(f"pragma busy_timeout = {int(_WRITE_SECONDS * 1000)}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._connection.close()

    def record(self, at: datetime, request: Request) -> int:
        """Record a request, allowed at the time ``at`` (aware); return its number."""
        number = self._execute(_INSERT, _row(at, request)).lastrowid
        if number is None:
            raise AssertionError("every insert has a row id")
        return number

    def record_history(self, past: Iterable[tuple[datetime, Request]]) -> bool:
        """Start with past requests, in one transaction; return False if the ledger has begun.

        They count as reported: their usage is added to the counters directly, for as long as
        ``uncounted_history`` asks for it.
        """
        with self._transaction():
            if self.has_begun():
                return False
            self._connection.executemany(_INSERT, (_row(at, each) for at, each in past))
            last = self._last_number()
            self._connection.execute(_SET, (_REPORTED, last))
            self._connection.execute(_SET, (_UNCOUNTED, last))
        return True

    def has_begun(self) -> bool:
        """Whether it has a charge, or was started without a history."""
        return self._fact(_UNCOUNTED) is not None or self._last_number() > 0

    def begin_without_history(self) -> None:
        """Start empty; from then on no history is recorded."""
        self.mark_history_counted()

    def uncounted_history(self) -> int:
        """Return the number of the last charge to add to the counters directly; 0 for none."""
        return int(self._fact(_UNCOUNTED) or 0)

    def mark_history_counted(self) -> None:
        """Record that the counters include the history, so a store that is wiped stays at zero."""
        self._execute(_SET, (_UNCOUNTED, 0))

    def unreported(self, at_most: int) -> list[Charge]:
        """Return the first charges that are not reported yet, in order."""
        with self._errors_translated():
            rows = self._connection.execute(
                f"{_CHARGES} where number > ? order by number limit ?",
                (self._fact(_REPORTED) or 0, at_most),
            ).fetchall()
        return [self._charge(row) for row in rows]

    def mark_reported(self, number: int) -> None:
        """Record that all charges up to this one are reported."""
        self._execute(_SET, (_REPORTED, number))

    def charges(self) -> Iterator[Charge]:
        """Iterate over all charges, in order."""
        return map(self._charge, self._execute(f"{_CHARGES} order by number"))

    def true_spend(
        self, budgets: Budgets, now: datetime, *, up_to: int | None = None
    ) -> dict[CounterKey, Decimal]:
        """Return the exact usage of each counter whose window is current at ``now`` (aware).

        With ``up_to`` only charges up to this number count.
        """
        costs: defaultdict[CounterKey, list[Decimal]] = defaultdict(list)
        for charge in self.charges():
            if up_to is not None and charge.number > up_to:
                break
            for _, counter in budgets.raised_by(charge.request, charge.at):
                costs[counter].append(charge.request.cost)
        return {
            counter: exact_sum(summands)
            for counter, summands in costs.items()
            if counter.of.window.is_current(now)
        }

    def blocked(self) -> frozenset[str]:
        """Return the blocks that the gate last knew."""
        with self._errors_translated():
            rows = self._connection.execute("select suffix from blocked").fetchall()
        return frozenset(suffix for (suffix,) in rows)

    def block(self, suffixes: Iterable[str]) -> None:
        """Record that these are blocked."""
        with self._without_sync(), self._transaction():
            self._connection.executemany(
                "insert into blocked values (?) on conflict do nothing",
                [(each,) for each in suffixes],
            )

    def unblock(self, suffixes: Iterable[str]) -> None:
        """Record that these are not blocked."""
        with self._without_sync(), self._transaction():
            self._connection.executemany(
                "delete from blocked where suffix = ?", [(each,) for each in suffixes]
            )

    def _fact(self, name: str) -> Any:
        row = self._execute("select value from fact where name = ?", (name,)).fetchone()
        return None if row is None else row[0]

    def _last_number(self) -> int:
        [(number,)] = self._execute("select coalesce(max(number), 0) from charge")
        return int(number)

    def _charge(self, row: tuple[Any, ...]) -> Charge:
        number, at, tenant, user, model, virtual_account, agent, metadata, cost = row
        request = Request(
            tenant=tenant,
            user=user,
            model=model,
            cost=Decimal(cost),
            virtual_account=virtual_account,
            agent=agent,
            metadata=json.loads(metadata),
        )
        return Charge(self.id, number, datetime.fromisoformat(at), request)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._errors_translated():
            self._connection.execute("begin immediate")
            try:
                yield
                self._connection.execute("commit")
            except BaseException:
                # If the disk is full, SQLite has already rolled back.
                if self._connection.in_transaction:
                    self._connection.execute("rollback")
                raise

    @contextmanager
    def _without_sync(self) -> Iterator[None]:
        # A lower limit may block thousands at once. After a power failure the bucket reports the
        # blocks again.
        self._connection.execute("pragma synchronous = normal")
        try:
            yield
        finally:
            self._connection.execute("pragma synchronous = full")

    def _execute(self, statement: str, values: tuple[Any, ...] = ()) -> sqlite3.Cursor:
        with self._errors_translated():
            return self._connection.execute(statement, values)

    @contextmanager
    def _errors_translated(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.OperationalError as error:
            raise LedgerError(f"the ledger {self._file} cannot be used: {error}") from error


def _row(at: datetime, request: Request) -> tuple[str | None, ...]:
    return (
        at.isoformat(),
        request.tenant,
        request.user,
        request.model,
        request.virtual_account,
        request.agent,
        json.dumps(dict(request.metadata), ensure_ascii=False),
        format_usage(request.cost),
    )
