"""The ledger: the exact and durable record of true spend."""

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path

import pytest

from budget_recovery_dagster.adapters.nats import encode_key
from budget_recovery_dagster.domain import BudgetDefinition, Enforcement, Period, SplitBy
from budget_recovery_dagster.sandbox.gateway import Budgets, Charge, Ledger, Request

NOON = datetime(2026, 11, 29, 12, tzinfo=UTC)
BUDGETS = Budgets(
    BudgetDefinition("t", "b", period, Decimal(1), SplitBy.USER, Enforcement.ENFORCE)
    for period in (Period.DAY, Period.LIFETIME)
)


def request(user: str, cost: str) -> Request:
    return Request("t", user, "m", Decimal(cost), "va", "agent", {"k": "東京"})


def spend(ledger: Ledger, now: datetime, *, up_to: int | None = None) -> dict[str, Decimal]:
    spend = ledger.true_spend(BUDGETS, now, up_to=up_to)
    return {encode_key(counter): usage for counter, usage in spend.items()}


def test_a_charge_is_stored_unchanged(tmp_path: Path) -> None:
    with Ledger(tmp_path / "ledger") as ledger:
        assert ledger.record(NOON, request("a", "0.000000000000000001")) == 1
        identity = ledger.id
    with Ledger(tmp_path / "ledger") as ledger:
        assert ledger.id == identity
        assert list(ledger.charges()) == [
            Charge(identity, 1, NOON, request("a", "0.000000000000000001"))
        ]


def test_each_ledger_has_its_own_id(tmp_path: Path) -> None:
    with Ledger(tmp_path / "one") as one, Ledger(tmp_path / "other") as other:
        assert one.id != other.id


def test_true_spend_is_exact_and_of_current_windows(tmp_path: Path) -> None:
    with Ledger(tmp_path / "ledger") as ledger:
        ledger.record(NOON - timedelta(days=1), request("a", "5"))
        ledger.record(NOON, request("a", "99999999999999999999.000000000000000001"))
        ledger.record(NOON, request("a", "0.000000000000000009"))
        ledger.record(NOON, request("b", "1"))
        assert spend(ledger, NOON) == {
            "usage.t.b.2026-11-29.a": Decimal("99999999999999999999.000000000000000010"),
            "usage.t.b.lifetime.a": Decimal("100000000000000000004.000000000000000010"),
            "usage.t.b.2026-11-29.b": Decimal(1),
            "usage.t.b.lifetime.b": Decimal(1),
        }
        assert spend(ledger, NOON + timedelta(days=1), up_to=1) == {
            "usage.t.b.lifetime.a": Decimal(5)
        }


def test_a_reported_charge_is_not_reported_again(tmp_path: Path) -> None:
    with Ledger(tmp_path / "ledger") as ledger:
        for cost in ("1", "2", "3"):
            ledger.record(NOON, request("a", cost))
        assert [charge.number for charge in ledger.unreported(2)] == [1, 2]
        ledger.mark_reported(2)
    with Ledger(tmp_path / "ledger") as ledger:
        assert [charge.number for charge in ledger.unreported(2)] == [3]


def test_only_a_new_ledger_gets_a_history_and_it_counts_once(tmp_path: Path) -> None:
    past = [(NOON, request("a", "1")), (NOON, request("b", "2"))]
    with Ledger(tmp_path / "ledger") as ledger:
        assert ledger.uncounted_history() == 0
        assert ledger.record_history(past)
        assert not ledger.record_history(past)
    with Ledger(tmp_path / "ledger") as ledger:
        assert ledger.uncounted_history() == 2
        assert ledger.unreported(10) == []
        ledger.record(NOON, request("a", "3"))
        assert [charge.number for charge in ledger.unreported(10)] == [3]
        ledger.mark_history_counted()
        assert ledger.uncounted_history() == 0
        assert not ledger.record_history(past)
        assert len(list(ledger.charges())) == 3


def test_a_ledger_in_use_gets_no_history(tmp_path: Path) -> None:
    with Ledger(tmp_path / "ledger") as ledger:
        assert not ledger.has_begun()
        ledger.begin_without_history()
    with Ledger(tmp_path / "ledger") as ledger:
        assert ledger.has_begun()
        assert not ledger.record_history([(NOON, request("a", "1"))])
        assert ledger.uncounted_history() == 0
    with Ledger(tmp_path / "other") as other:
        other.record(NOON, request("a", "1"))
        assert other.has_begun()


def test_an_interrupted_history_leaves_nothing(tmp_path: Path) -> None:
    def broken() -> list[tuple[datetime, Request]]:
        raise OSError("no more")

    with Ledger(tmp_path / "ledger") as ledger:
        past = ((NOON, request("a", "1")) if number < 2 else broken()[0] for number in range(3))
        with pytest.raises(OSError, match="no more"):
            ledger.record_history(past)
        assert list(ledger.charges()) == []
        assert ledger.uncounted_history() == 0


def test_blocks_are_remembered(tmp_path: Path) -> None:
    with Ledger(tmp_path / "ledger") as ledger:
        ledger.block(["a", "b", "a"])
        ledger.block(["b", "c"])
        ledger.unblock(["a", "d"])
    with Ledger(tmp_path / "ledger") as ledger:
        assert ledger.blocked() == {"b", "c"}


def test_a_charge_is_on_disk_before_the_answer(tmp_path: Path) -> None:
    # No test can cut the power, so check the setting of the connection: 2 is full.
    with Ledger(tmp_path / "ledger") as ledger:
        assert ledger._connection.execute("pragma synchronous").fetchone() == (2,)
