"""The verdict of the demo on the figures it has read."""

from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal

import pytest

from budget_recovery_dagster.adapters.nats import CounterKey
from budget_recovery_dagster.domain import BudgetWindow, Window
from budget_recovery_dagster.sandbox.demo import Account, Evidence, Figures, Usages, account, judge

BEFORE_MIDNIGHT = datetime(2026, 11, 29, 23, 59, tzinfo=UTC)
AFTER_MIDNIGHT = datetime(2026, 11, 30, 0, 1, tzinfo=UTC)


def counter(entity: str, window: str = "lifetime") -> CounterKey:
    return CounterKey("acme", BudgetWindow("agents", Window.parse(window)), entity)


ALICE, BOB, CAROL = map(counter, ("alice", "bob", "carol"))
BOB_NAMED = "budget 'agents' of 'acme' for 'bob', lifetime"
TODAY = counter("alice", "2026-11-29")


def figures(
    at: datetime = BEFORE_MIDNIGHT,
    counters: dict[CounterKey, str] | None = None,
    blocked: tuple[CounterKey, ...] = (),
    spent: dict[CounterKey, str] | None = None,
) -> Figures:
    return Figures(at, usages(counters or {}), frozenset(blocked), usages(spent or {}))


def usages(of: dict[CounterKey, str]) -> Usages:
    return {key: Decimal(usage) for key, usage in of.items()}


# Alice has used up her budget, spends 1 between snapshot and wipe, and 2 after it. Bob, with 3 in
# the snapshot, spends 1 after the wipe. Carol first spends after the wipe.
WHOLE = Evidence(
    snapshot=usages({ALICE: "10", BOB: "3", TODAY: "4"}),
    before_wipe=figures(
        counters={ALICE: "11", BOB: "3", TODAY: "4"},
        blocked=(ALICE, TODAY),
        spent={ALICE: "11", BOB: "3", TODAY: "4"},
    ),
    after_wipe=figures(
        counters={ALICE: "2", BOB: "1", CAROL: "5"},
        spent={ALICE: "13", BOB: "4", CAROL: "5", TODAY: "4"},
    ),
    at_the_end=figures(
        counters={ALICE: "10", BOB: "3", CAROL: "5", TODAY: "4"},
        blocked=(ALICE, TODAY),
        spent={ALICE: "13", BOB: "4", CAROL: "5", TODAY: "4"},
    ),
    is_refused=True,
)


def broken(evidence: Evidence) -> list[str]:
    return [each for promise in judge(evidence) for each in promise.broken]


def at_the_end(**changes: object) -> Evidence:
    return replace(WHOLE, at_the_end=replace(WHOLE.at_the_end, **changes))  # type: ignore[arg-type]


def with_counters(of: dict[CounterKey, str]) -> Evidence:
    return at_the_end(counters={**WHOLE.at_the_end.counters, **usages(of)})


def test_a_complete_recovery_keeps_every_promise_and_counts_them() -> None:
    assert broken(WHOLE) == []
    assert [promise.text for promise in judge(WHOLE)] == [
        "3 counters are at least as high as in the snapshot",
        "3 counters are at least as high as after the wipe",
        "2 blocks from before the wipe are back",
        "4 counters are no higher than the true spend",
        "the request that was refused before the wipe is refused again",
    ]


def test_a_counter_lower_than_in_the_snapshot_is_named() -> None:
    assert broken(with_counters({BOB: "2.999999999999999999"})) == [
        f"{BOB_NAMED} was 3 in the snapshot and is 2.999999999999999999"
    ]


def test_a_missing_counter_is_named() -> None:
    rest = {key: usage for key, usage in WHOLE.at_the_end.counters.items() if key != TODAY}
    assert broken(at_the_end(counters=rest)) == [
        "budget 'agents' of 'acme' for 'alice', 2026-11-29 was 4 in the snapshot and is missing"
    ]


def test_spend_after_the_wipe_must_not_be_lowered() -> None:
    assert broken(with_counters({CAROL: "4"})) == [
        "budget 'agents' of 'acme' for 'carol', lifetime was 5 after the wipe and is 4"
    ]


def test_a_missing_block_is_named() -> None:
    assert broken(at_the_end(blocked=frozenset({TODAY}))) == [
        "budget 'agents' of 'acme' for 'alice', lifetime is not blocked"
    ]


def test_an_allowed_request_breaks_a_promise() -> None:
    assert broken(replace(WHOLE, is_refused=False)) == ["it is allowed"]


def test_a_sum_of_snapshot_and_live_counts_money_twice() -> None:
    # 3 before the wipe and 1 after it are 4; the other 2 were never spent.
    assert broken(with_counters({BOB: "4"})) == []
    assert broken(with_counters({BOB: "6"})) == [f"{BOB_NAMED} is 6, but the true spend is 4"]


def test_windows_that_close_meanwhile_do_not_count() -> None:
    # The gateway has removed counters and blocks of the day that ended.
    end = figures(
        AFTER_MIDNIGHT,
        counters={ALICE: "10", BOB: "3", CAROL: "5"},
        blocked=(ALICE,),
        spent={ALICE: "13", BOB: "4", CAROL: "5"},
    )
    assert broken(replace(WHOLE, at_the_end=end)) == []
    assert judge(replace(WHOLE, at_the_end=end))[0].text.startswith("2 counters")
    # If it has not yet removed them, they still do not count.
    late = replace(end, counters={**end.counters, TODAY: Decimal(99)})
    assert broken(replace(WHOLE, at_the_end=late)) == []


def test_windows_that_begin_meanwhile_are_compared_with_true_spend_only() -> None:
    tomorrow = counter("alice", "2026-11-30")
    end = replace(
        WHOLE.at_the_end,
        at=AFTER_MIDNIGHT,
        counters={**WHOLE.at_the_end.counters, tomorrow: Decimal(2)},
        spent={**WHOLE.at_the_end.spent, tomorrow: Decimal(1)},
    )
    assert broken(replace(WHOLE, at_the_end=end)) == [
        "budget 'agents' of 'acme' for 'alice', 2026-11-30 is 2, but the true spend is 1"
    ]


@pytest.mark.parametrize(
    ("evidence", "without"),
    [
        (replace(WHOLE, snapshot={}), 0),
        (replace(WHOLE, after_wipe=figures()), 1),
        (replace(WHOLE, before_wipe=figures()), 2),
    ],
)
def test_a_promise_without_anything_to_compare_is_broken(evidence: Evidence, without: int) -> None:
    promises = judge(evidence)
    assert [number for number, each in enumerate(promises) if not each.is_kept] == [without]
    assert promises[without].broken == ("there was nothing to compare",)


def test_an_empty_store_at_the_end_breaks_every_promise_about_counters() -> None:
    end = figures(spent={ALICE: "13"})
    promises = judge(replace(WHOLE, at_the_end=end, is_refused=False))
    assert not any(promise.is_kept for promise in promises)


def test_the_account_covers_all_spend() -> None:
    def is_lifetime(key: CounterKey) -> bool:
        return key.of.window.token == "lifetime"

    found = account(WHOLE, is_lifetime)
    # Alice's 1 before the wipe; her 2 and Bob's 1 after it, below their values in the snapshot.
    assert found == Account(between=Decimal(1), since=Decimal(8), not_added=Decimal(3))
    # Carol's.
    assert found.kept == 5
