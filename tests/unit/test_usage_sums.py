"""One amount for each budget and window: its aggregate, or else the sum of its entities."""

import re
from datetime import timedelta
from decimal import Decimal
from pathlib import Path

import pytest

import budget_recovery_dagster
from budget_recovery_dagster.domain import (
    BudgetDefinition,
    Enforcement,
    Period,
    SplitBy,
    budget_usage,
    exact_sum,
    format_usage,
)
from budget_recovery_dagster.domain.counters import exact_difference
from budget_recovery_dagster.presentation import figures, window_lines
from budget_recovery_dagster.presentation.text import acceptance_lines, change_figures
from budget_recovery_dagster.services.restore import Acceptance
from tests.unit.manual_harness import OF_A, ManualHarness, captured_manual_harness


def test_sums_are_exact_beyond_the_digits_of_one_usage() -> None:
    largest = Decimal("99999999999999999999.999999999999999999")
    total = exact_sum([largest] * 11)
    assert format_usage(total) == "1099999999999999999999.999999999999999989"
    assert exact_sum([]) == 0


@pytest.mark.parametrize(
    ("usages", "total", "difference"),
    [
        (("0.5", "0.10"), "0.6", "0.4"),
        (("0.893611", "0.000000"), "0.893611", "0.893611"),
        (("99.5", "0.5"), "100", "99"),
        (("100", "0"), "100", "100"),
        (("1E+2", "1E+2"), "200", "0"),
        (("2.50", "2.5"), "5", "0"),
        (
            ("99999999999999999999.000000000000000001", "1"),
            "100000000000000000000.000000000000000001",
            "99999999999999999998.000000000000000001",
        ),
    ],
)
def test_sums_and_differences_are_written_with_the_digits_that_they_need(
    usages: tuple[str, str], total: str, difference: str
) -> None:
    first, second = map(Decimal, usages)
    assert str(exact_sum((first, second))) == total
    assert str(exact_difference(first, second)) == difference


def test_the_usage_of_a_budget_is_its_aggregate_or_the_sum_of_its_entities() -> None:
    assert budget_usage({"alice": Decimal("1.5"), "bo": Decimal("0.25")}) == Decimal("1.75")
    assert budget_usage({"alice": Decimal("1.5"), None: Decimal("1.75")}) == Decimal("1.75")
    assert budget_usage({None: Decimal(0), "alice": Decimal(0)}) == 0
    assert budget_usage({}) == 0


def test_nothing_else_adds_up_usages() -> None:
    """The gateway of the sandbox adds up costs; everything else asks for the usage of a budget."""
    package = Path(budget_recovery_dagster.__file__).parent
    gateway = package / "sandbox" / "gateway"
    adding = {
        str(file.relative_to(package))
        for file in package.rglob("*.py")
        if gateway not in file.parents and re.search(r"\bexact_sum\b", file.read_text())
    }
    assert adding == {"domain/__init__.py", "domain/counters.py"}


@pytest.fixture
def harness() -> ManualHarness:
    """Return a wiped store of two tenants: a had used 80, of it alice 30, and b 5."""
    harness = captured_manual_harness()
    harness.wipe()
    return harness


def test_a_preview_shows_the_aggregate_and_not_its_entities_as_well(harness: ManualHarness) -> None:
    harness.spend("a", "2")
    harness.spend("a", "2", "alice")
    (window,) = harness.preview(OF_A).windows
    assert figures(window) == "2 -> 80"
    assert next(window_lines(window, harness.clock.now())).endswith(": 2 -> 80 (+78)")


def test_a_preview_of_a_budget_without_aggregate_adds_up_its_entities() -> None:
    harness = ManualHarness()
    for entity, usage in (("alice", "30"), ("bo", "12.5")):
        harness.spend("a", usage, entity)
    harness.capture()
    harness.check()
    harness.wipe()
    harness.spend("a", "1", "alice")
    (window,) = harness.preview(OF_A).windows
    assert figures(window) == "1 -> 42.5"


def test_an_unreadable_entity_leaves_the_usage_exact_and_an_unreadable_aggregate_does_not(
    harness: ManualHarness,
) -> None:
    harness.store.put("usage.a.spend.lifetime.alice", b"rubbish")
    (window,) = harness.preview(OF_A).windows
    assert figures(window) == "0 -> 80"
    harness.store.put("usage.a.spend.lifetime.=", b"rubbish")
    harness.store.put("usage.a.spend.lifetime.alice", b'{"usage":"3"}')
    (window,) = harness.preview(OF_A).windows
    assert figures(window) == "at least 3 -> 30"


def test_an_audit_has_the_aggregate_before_and_after(harness: ManualHarness) -> None:
    harness.spend("a", "2")
    harness.spend("a", "1", "alice")
    applied = harness.apply(OF_A)
    (entry,) = applied.tenants[0].entries
    assert (entry.raised, entry.before, entry.after) == (2, Decimal(2), Decimal(80))


def test_what_an_intact_store_lacks_is_one_amount_for_each_budget_and_window() -> None:
    harness = captured_manual_harness()
    harness.store.put_usage("a", "cards", "lifetime", None, "7")
    harness.capture()
    harness.clock.advance(timedelta(minutes=10))
    harness.store.purge("usage.a.")
    harness.capture()
    lacks = {str(fall.at.of): (fall.counters, fall.usage) for fall in harness.plane.falls.open()}
    assert lacks == {"spend lifetime": (2, Decimal(80)), "cards lifetime": (1, Decimal(7))}
    newest = harness.plane.snapshots.listed("a")[0]
    assert (newest.drops, newest.most_missing) == (3, Decimal(80))


def test_no_amount_is_a_total_over_budgets(harness: ManualHarness) -> None:
    text = " ".join(acceptance_lines(harness.preview(), None))
    assert "The largest: a, spend lifetime: 80; b, spend lifetime: 5." in text
    resolved = harness.resolve("on purpose", Acceptance.KEEP_SNAPSHOTS)
    assert resolved.incident.ended is not None
    text += resolved.incident.ended.detail
    for total in ("85", "110", "115"):
        assert total not in text


def test_many_amounts_are_cut_and_counted() -> None:
    harness = captured_manual_harness()
    for number in range(7):
        harness.store.put_usage("a", f"budget {number}", "lifetime", None, str(number + 1))
    harness.capture()
    harness.check()
    harness.wipe()
    text = " ".join(acceptance_lines(harness.preview(), None))
    assert (
        "a, spend lifetime: 80; a, budget 6 lifetime: 7; a, budget 5 lifetime: 6; and 6 sma" in text
    )


@pytest.mark.parametrize(
    ("split_by", "blocked"), [(SplitBy.USER, "alice"), (SplitBy.NOTHING, None)]
)
def test_a_limit_judges_only_what_the_budget_is_split_by(
    harness: ManualHarness, split_by: SplitBy, blocked: str | None
) -> None:
    limit = BudgetDefinition(
        "a", "spend", Period.LIFETIME, Decimal(30), split_by, Enforcement.ENFORCE
    )
    harness.plane.budgets.define([limit])
    preview = harness.preview(OF_A)
    (window,) = preview.windows
    assert (window.blocked_before, window.blocked_after) == (0, 1)
    for change in preview.changes:
        assert change.blocks is (change.entity == blocked)
        assert ("would be blocked" in change_figures(change)) is (change.entity == blocked)
