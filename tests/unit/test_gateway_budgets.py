"""Which counters a request raises, and the messages of charges."""

from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal

import pytest

from budget_recovery_dagster.adapters.nats import encode_key
from budget_recovery_dagster.domain import (
    BudgetDefinition,
    Enforcement,
    Period,
    SplitBy,
    UnreadableUsageError,
    UnusableNameError,
)
from budget_recovery_dagster.sandbox.gateway import (
    Applied,
    Budgets,
    Charge,
    Request,
    UnreadableChargeError,
    Watermark,
)

# A Sunday, the last day of its ISO week, and the first of a month and quarter.
AT = datetime(2023, 10, 1, 23, 59, 59, 999999, tzinfo=UTC)


def definition(
    budget: str, split_by: SplitBy, period: Period, *, tenant: str = "t", key: str | None = None
) -> BudgetDefinition:
    limit = Decimal(1)
    return BudgetDefinition(tenant, budget, period, limit, split_by, Enforcement.ENFORCE, key)


FULL = Request(
    tenant="t",
    user="user:alice@example.com",
    model="openai-main/gpt-4o",
    cost=Decimal("0.000000000000000001"),
    virtual_account="team a / 東京",
    agent="agent",
    metadata={"cost_centre": "4711", "end_user": "e"},
)


def raised(request: Request, at: datetime, *definitions: BudgetDefinition) -> list[str]:
    return [encode_key(counter) for _, counter in Budgets(definitions).raised_by(request, at)]


def test_each_split_counts_for_the_entity_that_the_request_names() -> None:
    keys = raised(
        FULL,
        AT,
        definition("n", SplitBy.NOTHING, Period.LIFETIME),
        definition("u", SplitBy.USER, Period.LIFETIME),
        definition("m", SplitBy.MODEL, Period.LIFETIME),
        definition("v", SplitBy.VIRTUAL_ACCOUNT, Period.LIFETIME),
        definition("a", SplitBy.AGENT, Period.LIFETIME),
        definition("c", SplitBy.METADATA, Period.LIFETIME, key="cost_centre"),
        definition("other", SplitBy.NOTHING, Period.LIFETIME, tenant="another"),
    )
    assert keys == [
        "usage.t.n.lifetime.=",
        "usage.t.u.lifetime.user=3Aalice=40example=2Ecom",
        "usage.t.m.lifetime.openai-main/gpt-4o",
        "usage.t.v.lifetime.team=20a=20/=20=E6=9D=B1=E4=BA=AC",
        "usage.t.a.lifetime.agent",
        "usage.t.c.lifetime.4711",
    ]


def test_each_period_counts_in_the_window_of_the_request() -> None:
    definitions = [definition(period.value, SplitBy.NOTHING, period) for period in Period]
    assert raised(FULL, AT, *definitions) == [
        "usage.t.day.2023-10-01.=",
        "usage.t.week.2023-W39.=",
        "usage.t.month.2023-10.=",
        "usage.t.quarter.2023-Q4.=",
        "usage.t.lifetime.lifetime.=",
    ]


def test_a_time_in_another_zone_counts_in_the_utc_window() -> None:
    at = datetime.fromisoformat("2023-10-02T01:30:00+02:00")
    assert raised(FULL, at, definition("b", SplitBy.NOTHING, Period.DAY)) == [
        "usage.t.b.2023-10-01.="
    ]


def test_an_entity_that_is_not_named_counts_in_no_split_budget() -> None:
    request = Request("t", "u", "m", Decimal(1), metadata={"end_user": ""})
    keys = raised(
        request,
        AT,
        definition("v", SplitBy.VIRTUAL_ACCOUNT, Period.DAY),
        definition("a", SplitBy.AGENT, Period.DAY),
        definition("c", SplitBy.METADATA, Period.DAY, key="cost_centre"),
        definition("e", SplitBy.METADATA, Period.DAY, key="end_user"),
    )
    assert keys == []


@pytest.mark.parametrize("cost", ["-1", "NaN", "0.0000000000000000001", "1e20"])
def test_a_cost_that_no_counter_can_hold_is_refused(cost: str) -> None:
    with pytest.raises(UnreadableUsageError):
        Request("t", "u", "m", Decimal(cost))


def test_a_charge_survives_its_message_unchanged() -> None:
    charge = Charge("ledger", 7, AT, FULL)
    assert Charge.from_json(charge.to_json()) == charge


def test_a_time_in_another_zone_is_read_as_utc() -> None:
    charge = Charge("ledger", 7, datetime.fromisoformat("2023-10-02T01:30:00+02:00"), FULL)
    read = Charge.from_json(charge.to_json())
    assert read == charge
    assert read.at.tzinfo is UTC


@pytest.mark.parametrize("message", [b"", b"[]", b"{}", b"null", b"\xff"])
def test_any_other_message_is_not_a_charge(message: bytes) -> None:
    with pytest.raises(UnreadableChargeError):
        Charge.from_json(message)


@pytest.mark.parametrize("name", ["", "a\0b", "\ud800"])
def test_a_name_that_no_key_can_hold_is_refused(name: str) -> None:
    for names in ((name, "u", "m"), ("t", name, "m"), ("t", "u", name)):
        with pytest.raises(UnusableNameError):
            Request(*names, Decimal(1))


@pytest.mark.parametrize("name", ["a\0b", "\ud800"])
def test_an_optional_name_that_no_key_can_hold_is_refused(name: str) -> None:
    for names in ({"virtual_account": name}, {"agent": name}, {"metadata": {"k": name}}):
        with pytest.raises(UnusableNameError):
            replace(FULL, **names)
    assert replace(FULL, virtual_account="", agent="", metadata={"k": ""})


def test_a_mark_covers_the_earlier_charges_of_its_ledger() -> None:
    applied = Applied({"a": 7, "b": 2})
    assert str(applied) == "a:7 b:2"
    assert Applied.parse("a:7 b:2") == applied
    covered = [applied.covers(Watermark("a", number)) for number in (6, 7, 8)]
    assert covered == [True, True, False]
    assert [applied.covers(Watermark("b", number)) for number in (2, 3)] == [True, False]
    assert not applied.covers(Watermark("c", 1))
    assert applied.raised(Watermark("b", 9)) == Applied({"a": 7, "b": 9})


@pytest.mark.parametrize("text", [None, 7, "", "a", "a:", ":7", "a:-1", "a:0", "a:07", "a b:x"])
def test_a_charge_without_a_mark_is_not_covered(text: object) -> None:
    assert Applied.parse(text) == Applied({})
