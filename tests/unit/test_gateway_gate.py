"""The gate: its log of blocks and answers, and its behaviour without a writable ledger."""

import asyncio
import sqlite3
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path

import pytest

from budget_recovery_dagster.domain import BudgetDefinition, Enforcement, Period, SplitBy
from budget_recovery_dagster.sandbox.gateway import (
    NOTHING,
    Answer,
    Budgets,
    Gate,
    Ledger,
    LedgerError,
    Request,
    Seen,
    Tally,
    log_every_minute,
)
from budget_recovery_dagster.sandbox.gateway.__main__ import main

NOON = datetime(2026, 11, 29, 12, tzinfo=UTC)


def definition(budget: str, enforcement: Enforcement) -> BudgetDefinition:
    return BudgetDefinition("t", budget, Period.DAY, Decimal(1), SplitBy.USER, enforcement)


AGENTS = definition("agents", Enforcement.ENFORCE)
COMPANY = definition("company", Enforcement.ENFORCE)
AUDITED = definition("audited", Enforcement.AUDIT)
BUDGETS = Budgets([AGENTS, AUDITED])


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with Ledger(tmp_path / "ledger") as ledger:
        yield ledger


@pytest.fixture(autouse=True)
def _all_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")


def made(ledger: Ledger) -> Gate:
    return Gate(ledger, BUDGETS, lambda: NOON)


def request(user: str = "a", note: str = "") -> Request:
    return Request("t", user, "m", Decimal("0.5"), metadata={"note": note})


def test_the_log_distinguishes_enforced_blocks_from_audited_ones(
    ledger: Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    gate = made(ledger)
    gate.replace({"blocked.t.agents.2026-11-29.a": Seen(1, b"{}")})
    gate.change({"blocked.t.audited.2026-11-29.a": Seen(2, b"{}")})
    gate.change({"blocked.x": Seen(3, b"{}")})
    gate.change({"blocked.t.agents.2026-11-29.a": NOTHING})
    assert [record.message for record in caplog.records] == [
        "Blocked: budget 'agents' of 't' for 'a', 2026-11-29.",
        "Over its limit, audit only: budget 'audited' of 't' for 'a', 2026-11-29.",
        "Blocked, but matches no request: x.",
        "No longer over its limit: budget 'agents' of 't' for 'a', 2026-11-29.",
    ]


def test_blocks_that_change_together_are_taken_together(ledger: Ledger) -> None:
    ledger.block(["t.agents.2026-11-29.a", "t.agents.2026-11-29.b"])
    gate = made(ledger)
    gate.change(
        {
            "blocked.t.agents.2026-11-29.a": NOTHING,
            "blocked.t.agents.2026-11-29.b": Seen(2, b"{}"),
            "blocked.t.agents.2026-11-29.c": Seen(3, b"{}"),
            "blocked.t.agents.2026-11-29.d": NOTHING,
        }
    )
    assert ledger.blocked() == {"t.agents.2026-11-29.b", "t.agents.2026-11-29.c"}
    allowed = {user for user in "abcd" if gate.answer(request(user)).is_allowed}
    assert allowed == {"a", "d"}


def test_the_log_lists_the_blocks_at_the_start(
    ledger: Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    made(ledger).log_blocks()
    day, before = "2026-11-29", "2026-11-28"
    ledger.block(["x", f"t.agents.{before}.a", f"t.audited.{day}.a", f"t.agents.{day}.b"])
    made(ledger).log_blocks()
    ledger.block(f"t.agents.{day}.b{number:02}" for number in range(22))
    made(ledger).log_blocks()
    none, one, many = (record.message for record in caplog.records)
    assert none == "Blocked at the start, 0: none."
    assert one == "Blocked at the start, 1: budget 'agents' of 't' for 'b', 2026-11-29."
    assert many.startswith("Blocked at the start, 23: budget 'agents' of 't' for 'b', 2026-11-29; ")
    assert many.endswith(" for 'b18', 2026-11-29; and 3 more.")


def test_a_full_disk_refuses_requests_until_there_is_space(
    tmp_path: Path, ledger: Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    gate = made(ledger)
    assert gate.answer(request()).number == 1
    # SQLite reports the same error as for a full disk.
    connection = ledger._connection
    [(pages,)] = connection.execute("pragma page_count")
    connection.execute(f"pragma max_page_count = {pages}")
    big = request(note="x" * 50_000)
    answers = [gate.answer(big) for _ in range(3)]
    assert not any(answer.is_allowed or answer.blocked_by for answer in answers)
    with pytest.raises(LedgerError, match="is full"):
        ledger.block(f"{number:0100}" for number in range(1000))
    connection.execute("pragma max_page_count = 1000000")
    assert gate.answer(big).number == 2
    assert [charge.number for charge in ledger.charges()] == [1, 2]
    assert ledger.blocked() == set()
    file = tmp_path / "ledger"
    assert [record.message for record in caplog.records] == [
        f"Requests are refused: the ledger {file} cannot be used: database or disk is full.",
        "Requests are allowed again: the ledger can be written.",
    ]


def test_a_locked_ledger_refuses_requests_soon(
    tmp_path: Path, ledger: Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    gate = made(ledger)
    foreign = sqlite3.connect(tmp_path / "ledger", isolation_level=None)
    foreign.execute("begin immediate")
    asked = time.monotonic()
    assert not gate.answer(request()).is_allowed
    assert time.monotonic() - asked < 1
    assert "cannot be used: database is locked" in caplog.text
    with Ledger(tmp_path / "ledger") as reading:  # opening it writes nothing
        assert list(reading.charges()) == []
    foreign.execute("rollback")
    foreign.execute("begin")
    foreign.execute("select * from charge").fetchall()
    assert gate.answer(request()).is_allowed
    foreign.close()


def test_a_ledger_that_cannot_be_opened_is_reported_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["gateway", "serve", str(tmp_path)])
    monkeypatch.setenv("BUDGET_RECOVERY_NATS_URL", "nats://127.0.0.1:1")
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == (
        f"Error: the ledger {tmp_path} cannot be used: unable to open database file."
    )


def test_each_minute_the_log_counts_the_answers(caplog: pytest.LogCaptureFixture) -> None:
    tally = Tally()
    minutes: list[float] = []

    async def minute(seconds: float) -> None:
        minutes.append(seconds)
        match len(minutes):
            case 1:
                for tenant in ("globex", "acme", "acme"):
                    tally.add(tenant, Answer((), (AUDITED,), 1))
                tally.add("acme", Answer((AGENTS,), (), None))
                tally.add("acme", Answer((COMPANY, AGENTS), (), None))
                tally.add("only refused", Answer((), (), None))
            case 3:
                raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(log_every_minute(tally, minute))
    assert minutes == [60, 60, 60]
    first, second = (record.message for record in caplog.records)
    assert first == (
        "Last minute: acme 2 allowed, 2 refused (agents, company); globex 1 allowed;"
        " only refused 1 refused (no ledger)."
    )
    assert second == "Last minute: no requests."
