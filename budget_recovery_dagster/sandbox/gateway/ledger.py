"""The gate's own book: every request that it let through, and what it must remember of blocks.

It is the exact record of true spend, and the outbox of costs to report. What is written outlives
the process and, but for the blocks, a power failure: a number that was reported is never given to
another charge. So a ledger must not be restored from an older copy: numbers would be used again,
and as the counters' marks cover them, their costs would not be counted.

Whoever reads it, with ``sqlite3`` for example, does no harm. Whoever keeps it from being written
to, by a transaction of their own or because the disk is full, stops all requests.

It grows for ever, by about 170 bytes for a request: the true spend of a lifetime is made of all of
them. Four requests a second are 59 MB a day.
"""

import json
import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from uuid import uuid4

from budget_recovery_dagster.adapters.nats.codec import CounterKey
from budget_recovery_dagster.domain.counters import exact_sum, format_usage
from budget_recovery_dagster.sandbox.gateway.budgets import Budgets
from budget_recovery_dagster.sandbox.gateway.requests import Charge, Request

# A commit takes a few milliseconds; the gate stands still for as long as somebody else writes.
_PATIENCE_SECONDS = 0.25
# Another one that is just making the same ledger.
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
    """The ledger cannot be read or written now; the message names its file and says why."""


class Ledger:
    """The ledger in a file, made if it is not there; a context manager that closes it.

    Several may be open on one file, also in other processes; only one of them may record. Every
    method raises LedgerError where the file does not let it, and has changed nothing then; once the
    file does again, the next call works.

    Raises:
        LedgerError: it cannot be opened or made.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        with self._told():
            # Used by one thread at a time, which need not be the one that opened it.
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
        # The disk has it before the answer goes out: a charge that a power failure took back would
        # leave its number, which may stand in counters by then, to another.
        self._connection.execute("pragma synchronous = full")
        # Who opens it to read writes nothing.
        if not self._connection.execute(
            "select 1 from sqlite_master where name = 'fact'"
        ).fetchone():
            self._connection.executescript(_TABLES)
        if not self._connection.execute("select 1 from fact where name = ?", (_ID,)).fetchone():
            self._connection.execute(
                "insert into fact values (?, ?) on conflict do nothing", (_ID, uuid4().hex)
            )
        self._connection.execute(f"pragma busy_timeout = {int(_PATIENCE_SECONDS * 1000)}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._connection.close()

    def record(self, moment: datetime, request: Request) -> int:
        """Write down a request that is let through at ``moment`` (aware); return its number."""
        number = self._execute(_INSERT, _row(moment, request)).lastrowid
        if number is None:
            raise AssertionError("an insertion has a number")
        return number

    def record_history(self, past: Iterable[tuple[datetime, Request]]) -> bool:
        """Begin with requests of the past, in one transaction; return False if it has begun.

        They count as reported: their usage is written straight into the counters, which
        ``uncounted_history`` asks for until ``history_is_counted``.
        """
        with self._transaction():
            if self.has_begun():
                return False
            self._connection.executemany(_INSERT, (_row(moment, each) for moment, each in past))
            last = self._last_number()
            self._connection.execute(_SET, (_REPORTED, last))
            self._connection.execute(_SET, (_UNCOUNTED, last))
        return True

    def has_begun(self) -> bool:
        """Whether it holds a charge, or was begun without a history."""
        return self._fact(_UNCOUNTED) is not None or self._last_number() > 0

    def begin_without_history(self) -> None:
        """Begin with nothing, for good: no history is recorded any more."""
        self.history_is_counted()

    def uncounted_history(self) -> int:
        """Return the number of the last charge that must be written into counters; 0 for none."""
        return int(self._fact(_UNCOUNTED) or 0)

    def history_is_counted(self) -> None:
        """Remember that the past stands in the counters: a store that is wiped stays at zero."""
        self._execute(_SET, (_UNCOUNTED, 0))

    def unreported(self, at_most: int) -> list[Charge]:
        """Return the first charges that are not reported yet, by their numbers."""
        with self._told():
            rows = self._connection.execute(
                f"{_CHARGES} where number > ? order by number limit ?",
                (self._fact(_REPORTED) or 0, at_most),
            ).fetchall()
        return [self._charge(row) for row in rows]

    def reported(self, number: int) -> None:
        """Remember that all charges up to this one are reported."""
        self._execute(_SET, (_REPORTED, number))

    def charges(self) -> Iterator[Charge]:
        """Go through all charges, by their numbers."""
        return map(self._charge, self._execute(f"{_CHARGES} order by number"))

    def true_spend(
        self, budgets: Budgets, now: datetime, *, up_to: int | None = None
    ) -> dict[CounterKey, Decimal]:
        """Return what each counter of a window that is current at ``now`` (aware) must say.

        Only charges up to the number ``up_to`` are counted, if it is given.
        """
        spend: defaultdict[CounterKey, Decimal] = defaultdict(Decimal)
        for charge in self.charges():
            if up_to is not None and charge.number > up_to:
                break
            for _, counter in budgets.raised_by(charge.request, charge.moment):
                if counter.of.window.is_current(now):
                    spend[counter] = exact_sum((spend[counter], charge.request.cost))
        return dict(spend)

    def blocked(self) -> frozenset[str]:
        """Return what was blocked when the gate last heard of it."""
        with self._told():
            rows = self._connection.execute("select suffix from blocked").fetchall()
        return frozenset(suffix for (suffix,) in rows)

    def block(self, suffixes: Iterable[str]) -> None:
        """Remember that these are blocked."""
        with self._without_waiting_for_the_disk(), self._transaction():
            self._connection.executemany(
                "insert into blocked values (?) on conflict do nothing",
                [(each,) for each in suffixes],
            )

    def unblock(self, suffixes: Iterable[str]) -> None:
        """Remember that these are not blocked."""
        with self._without_waiting_for_the_disk(), self._transaction():
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
        number, moment, tenant, user, model, virtual_account, agent, metadata, cost = row
        request = Request(
            tenant=tenant,
            user=user,
            model=model,
            cost=Decimal(cost),
            virtual_account=virtual_account,
            agent=agent,
            metadata=json.loads(metadata),
        )
        return Charge(self.id, number, datetime.fromisoformat(moment), request)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._told():
            self._connection.execute("begin immediate")
            try:
                yield
                self._connection.execute("commit")
            except BaseException:
                if self._connection.in_transaction:  # a full disk has rolled it back itself
                    self._connection.execute("rollback")
                raise

    @contextmanager
    def _without_waiting_for_the_disk(self) -> Iterator[None]:
        # They come by the thousand when a limit is lowered, and whom a power failure makes the gate
        # forget, the bucket tells it of again.
        self._connection.execute("pragma synchronous = normal")
        try:
            yield
        finally:
            self._connection.execute("pragma synchronous = full")

    def _execute(self, statement: str, values: tuple[Any, ...] = ()) -> sqlite3.Cursor:
        with self._told():
            return self._connection.execute(statement, values)

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.OperationalError as error:
            raise LedgerError(f"the ledger {self._file} cannot be used: {error}") from error


def _row(moment: datetime, request: Request) -> tuple[str | None, ...]:
    return (
        moment.isoformat(),
        request.tenant,
        request.user,
        request.model,
        request.virtual_account,
        request.agent,
        json.dumps(dict(request.metadata), ensure_ascii=False),
        format_usage(request.cost),
    )
