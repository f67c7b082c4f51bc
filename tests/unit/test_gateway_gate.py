"""The gate: what it says of blocks and requests, and what it does without its ledger."""

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
from budget_recovery_dagster.sandbox.gateway import serve
from budget_recovery_dagster.sandbox.gateway.budgets import Budgets
from budget_recovery_dagster.sandbox.gateway.gate import Answer, Gate
from budget_recovery_dagster.sandbox.gateway.ledger import Ledger, LedgerError
from budget_recovery_dagster.sandbox.gateway.requests import Request
from budget_recovery_dagster.sandbox.gateway.store import NOTHING, Seen
from budget_recovery_dagster.sandbox.gateway.tally import Tally, tell_every_minute

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


def test_it_says_whether_a_block_refuses_or_is_only_noted(
    ledger: Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    gate = made(ledger)
    gate.replace({"blocked.t.agents.2026-11-29.a": Seen(1, b"{}")})
    gate.change("blocked.t.audited.2026-11-29.a", Seen(2, b"{}"))
    gate.change("blocked.x", Seen(3, b"{}"))
    gate.change("blocked.t.agents.2026-11-29.a", NOTHING)
    assert [record.message for record in caplog.records] == [
        "Blocked: budget 'agents' of 't' for 'a', 2026-11-29.",
        "Over its limit, only noted: budget 'audited' of 't' for 'a', 2026-11-29.",
        "Blocked, but no request can be meant: x.",
        "No longer over its limit: budget 'agents' of 't' for 'a', 2026-11-29.",
    ]


def test_it_says_what_is_blocked_at_the_start(
    ledger: Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    made(ledger).tell_of_blocks()
    day, before = "2026-11-29", "2026-11-28"
    ledger.block(["x", f"t.agents.{before}.a", f"t.audited.{day}.a", f"t.agents.{day}.b"])
    made(ledger).tell_of_blocks()
    ledger.block(f"t.agents.{day}.b{number:02}" for number in range(22))
    made(ledger).tell_of_blocks()
    nobody, one, many = (record.message for record in caplog.records)
    assert nobody == "Blocked at the start, 0: nobody."
    assert one == "Blocked at the start, 1: budget 'agents' of 't' for 'b', 2026-11-29."
    assert many.startswith("Blocked at the start, 23: budget 'agents' of 't' for 'b', 2026-11-29; ")
    assert many.endswith(" for 'b18', 2026-11-29; and 3 more.")


def test_without_room_in_its_ledger_it_refuses_and_goes_on_by_itself(
    tmp_path: Path, ledger: Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    gate = made(ledger)
    assert gate.answer(request()).number == 1
    # What SQLite says is the same as for a disk that is full.
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
        "Requests are let through again: the ledger takes them.",
    ]


def test_while_somebody_else_writes_into_its_ledger_it_refuses_soon(
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


def test_a_ledger_that_cannot_be_opened_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["serve", str(tmp_path)])
    monkeypatch.setenv("BUDGET_RECOVERY_NATS_URL", "nats://127.0.0.1:1")
    with pytest.raises(SystemExit) as ended:
        serve.main()
    assert ended.value.code == (
        f"Error: the ledger {tmp_path} cannot be used: unable to open database file."
    )


def test_each_minute_it_says_what_became_of_the_requests(caplog: pytest.LogCaptureFixture) -> None:
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
        asyncio.run(tell_every_minute(tally, minute))
    assert minutes == [60, 60, 60]
    first, second = (record.message for record in caplog.records)
    assert first == (
        "Last minute: acme 2 allowed, 2 refused (agents, company); globex 1 allowed;"
        " only refused 1 refused (no ledger)."
    )
    assert second == "Last minute: no requests."
