from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from uuid import uuid4

import pytest

from budget_recovery_dagster.adapters.postgres import Database, PostgresBudgets, PostgresPreviews
from budget_recovery_dagster.domain import (
    Action,
    BudgetDefinition,
    Enforcement,
    KeptPreview,
    Period,
    PlannedEntry,
    RestoreChoice,
    SplitBy,
    StoreIdentity,
)
from budget_recovery_dagster.ports import Previews
from tests.contract.control_planes import BORN, NOON, of
from tests.fakes.control_plane import ManualClock, MemoryBudgets, MemoryPreviews

DAY = timedelta(days=1)
CHOICE = RestoreChoice()
ENTRIES = (
    PlannedEntry(of("cards", "2026-11"), None, Decimal(4), None, Action.RAISE),
    PlannedEntry(
        of("team a / 東京", "lifetime"),
        "alice",
        Decimal("99999999999999999999.123456789012345678"),
        Decimal(0),
        Action.RAISE,
    ),
    PlannedEntry(of("team a / 東京", "lifetime"), "bob", Decimal(2), Decimal(3), Action.KEEP),
    PlannedEntry(of("team a / 東京", "lifetime"), "eve", Decimal(2), None, Action.SKIP_UNREADABLE),
    PlannedEntry(of("users", "2026-10"), "bob", Decimal(1), None, Action.SKIP_CLOSED),
)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(NOON)


@pytest.fixture(params=["memory", "postgres"])
def previews(request: pytest.FixtureRequest, clock: ManualClock) -> Iterator[Previews]:
    """Return previews, once in memory and once in PostgreSQL."""
    if request.param == "memory":
        yield MemoryPreviews(clock)
    else:
        url = request.getfixturevalue("database_url")
        with Database(url, clock=lambda _: clock.now()) as database:
            yield PostgresPreviews(database)


def preview(clock: ManualClock, choice: RestoreChoice = CHOICE) -> KeptPreview:
    return KeptPreview(
        str(uuid4()), clock.now(), "ann@host", choice, StoreIdentity(BORN, 9007199254740993)
    )


def keep(previews: Previews, kept: KeptPreview) -> KeptPreview:
    previews.begin(kept)
    previews.add(kept.preview_id, "acme", ENTRIES)
    previews.complete(kept.preview_id)
    return kept


def test_a_preview_is_stored_exactly(previews: Previews, clock: ManualClock) -> None:
    kept = keep(previews, preview(clock))
    assert previews.newest(CHOICE) == kept
    assert previews.entries_of(kept.preview_id, "acme") == ENTRIES
    assert previews.entries_of(kept.preview_id, "globex") == ()


@pytest.mark.parametrize(
    "choice",
    [
        RestoreChoice("acme"),
        RestoreChoice("acme", "cards"),
        RestoreChoice("acme", "cards", NOON - DAY),
        RestoreChoice(snapshot=NOON - DAY),
        RestoreChoice(despite_resets=True),
    ],
)
def test_a_preview_is_found_only_by_its_own_options(
    previews: Previews, clock: ManualClock, choice: RestoreChoice
) -> None:
    kept = keep(previews, preview(clock, choice))
    assert previews.newest(choice) == kept
    assert previews.newest(CHOICE) is None
    keep(previews, preview(clock))
    assert previews.newest(choice) == kept


def test_the_newest_preview_is_returned(previews: Previews, clock: ManualClock) -> None:
    keep(previews, preview(clock))
    clock.advance(timedelta(seconds=1))
    second = keep(previews, preview(clock))
    assert previews.newest(CHOICE) == second


def test_an_incomplete_preview_is_ignored(previews: Previews, clock: ManualClock) -> None:
    kept = keep(previews, preview(clock))
    clock.advance(timedelta(seconds=1))
    begun = preview(clock)
    previews.begin(begun)
    previews.add(begun.preview_id, "acme", ENTRIES)
    assert previews.newest(CHOICE) == kept


def test_previews_are_kept_for_a_day(previews: Previews, clock: ManualClock) -> None:
    kept = keep(previews, preview(clock))
    clock.advance(DAY)
    assert previews.newest(CHOICE) == kept
    clock.advance(timedelta(seconds=1))
    assert previews.newest(CHOICE) is None
    keep(previews, preview(clock, RestoreChoice("acme")))
    assert previews.entries_of(kept.preview_id, "acme") == ()


@pytest.fixture(params=["memory", "postgres"])
def budgets(request: pytest.FixtureRequest) -> Iterator[MemoryBudgets | PostgresBudgets]:
    """Return definitions, once in memory and once in PostgreSQL."""
    if request.param == "memory":
        yield MemoryBudgets()
    else:
        with Database(request.getfixturevalue("database_url")) as database:
            yield PostgresBudgets(database)


def test_definitions_are_listed_by_tenant(budgets: MemoryBudgets | PostgresBudgets) -> None:
    month = BudgetDefinition(
        "acme", "users", Period.MONTH, Decimal("0.1"), SplitBy.USER, Enforcement.ENFORCE
    )
    centres = BudgetDefinition(
        "acme", "a", Period.DAY, Decimal(5), SplitBy.METADATA, Enforcement.AUDIT, "cost_centre"
    )
    budgets.define([month, replace(month, tenant="globex"), centres])
    assert budgets.of_tenant("acme") == (centres, month)
    assert budgets.of_tenant("nobody") == ()
    budgets.define([replace(month, limit=Decimal(7))])
    assert budgets.of_tenant("acme") == (centres, replace(month, limit=Decimal(7)))
