"""Previews and manual restores on real servers: what they read and write."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from uuid import uuid4

import pytest

from budget_recovery_dagster.adapters.postgres import Database, PostgresBudgets
from budget_recovery_dagster.domain import (
    RESTORE_LEASE,
    BudgetDefinition,
    BudgetWindow,
    Change,
    Enforcement,
    Entity,
    Period,
    RecoveryState,
    SplitBy,
)
from budget_recovery_dagster.errors import LeaseHeldError, PreviewOutdatedError
from budget_recovery_dagster.presentation import window_notes
from budget_recovery_dagster.services import Preview
from budget_recovery_dagster.services.restore import Applied, RestoreRequest
from tests.integration.manual_runs import Operator
from tests.integration.recovery_harness import Harness, all_stored
from tests.integration.recovery_runs import usages
from tests.nats_servers import Bucket
from tests.unit.manual_harness import closes_incident

LIFETIME = "lifetime"
USERS: dict[Entity, str] = {None: "63.5", "alice": "30.000000000000000001", "bob": "20"}
NOON = datetime(2026, 5, 20, 12, 10, tzinfo=UTC)
OF_ACME = RestoreRequest(tenant="acme")
EVERYTHING = RestoreRequest()

Figures = dict[tuple[str, BudgetWindow, Entity], Decimal | None]


@pytest.fixture
def operator(harness: Harness) -> Operator:
    return Operator(harness.plane)


def live(bucket: Bucket, tenant: str) -> dict[tuple[str, str, Entity], str]:
    return {
        (budget, window, entity): usage
        for budget, window in (("users", LIFETIME), ("users", "2026-05"), ("cards", LIFETIME))
        for entity, usage in usages(bucket, tenant, budget, window).items()
    }


def fill(harness: Harness) -> None:
    harness.bucket.spend("acme", "users", LIFETIME, USERS)
    harness.bucket.spend("acme", "users", "2026-05", {"alice": "7.25"})
    harness.bucket.spend("acme", "cards", LIFETIME, {None: "4"})
    harness.bucket.spend("globex", "users", LIFETIME, {"bob": "1"})
    harness.bucket.rank("acme", "users", LIFETIME, USERS)
    harness.bucket.rank("globex", "users", LIFETIME, {"bob": "1"})
    harness.capture(NOON)


def expected_of(preview: Preview) -> dict[tuple[str, str, Entity], Decimal | None]:
    return {
        (entry.of.budget, entry.of.window.token, entry.entity): entry.result
        for tenant in preview.tenants
        for entry in tenant.entries
    }


def test_a_restore_without_traffic_applies_each_entry_of_the_preview(
    harness: Harness, operator: Operator
) -> None:
    fill(harness)
    harness.lose()
    harness.bucket.spend("acme", "users", LIFETIME, {"alice": "2.5", "bob": "25"})
    harness.find_loss()
    before = harness.bucket.info().state.last_seq

    preview = operator.preview(OF_ACME)

    assert harness.bucket.info().state.last_seq == before
    assert harness.bucket.consumers() == 0
    assert (preview.raised, len(preview.windows)) == (4, 3)
    applied = operator.apply(OF_ACME)
    assert applied.differences == ()
    assert applied.preview is not None
    after = {name: Decimal(usage) for name, usage in live(harness.bucket, "acme").items()}
    assert after == expected_of(preview)
    assert after == {
        ("users", LIFETIME, None): Decimal("63.5"),
        ("users", LIFETIME, "alice"): Decimal("30.000000000000000001"),
        ("users", LIFETIME, "bob"): Decimal(25),
        ("users", "2026-05", "alice"): Decimal("7.25"),
        ("cards", LIFETIME, None): Decimal(4),
    }


def test_a_restore_of_one_budget_writes_no_other_key(harness: Harness, operator: Operator) -> None:
    fill(harness)
    harness.lose()
    harness.bucket.spend("acme", "cards", LIFETIME, {None: "1"})
    harness.bucket.rank("acme", "cards", LIFETIME, {None: "1"})
    harness.bucket.spend("globex", "users", LIFETIME, {"bob": "0.5"})
    harness.bucket.put("blocked.acme.users.lifetime.alice", b"{}")
    harness.find_loss()
    before = all_stored(harness.bucket)

    applied = operator.apply(RestoreRequest(tenant="acme", budget="users"))

    assert applied.raised == 4
    after = all_stored(harness.bucket)
    marker = f"__guard.{harness.plane.registry.claim().deployment_id}"
    changed = {key for key in after if after[key] != before.get(key)} - {marker}
    assert changed == {
        "usage.acme.users.lifetime.=",
        "usage.acme.users.lifetime.alice",
        "usage.acme.users.lifetime.bob",
        "usage.acme.users.2026-05.alice",
        # The gateway keeps none of the month.
        "leaderboard.acme.users.lifetime",
    }
    assert before.keys() <= after.keys()
    assert harness.plane.incidents.recovery().state is RecoveryState.RECOVERING


def test_a_restore_from_an_old_snapshot_skips_closed_windows(
    harness: Harness, operator: Operator
) -> None:
    harness.bucket.spend("acme", "users", "2026-05-18", {"alice": "3"})
    harness.bucket.spend("acme", "users", "2026-05", {"alice": "5"})
    harness.capture(datetime(2026, 5, 18, 12, 10, tzinfo=UTC))
    harness.bucket.spend("acme", "users", "2026-05-20", {"alice": "9"})
    harness.bucket.spend("acme", "users", "2026-05", {"alice": "14"})
    harness.capture(NOON)
    harness.lose()
    harness.find_loss()
    request = RestoreRequest(snapshot="2026-05-18 12:10")

    month, day = operator.preview(request).windows

    assert (day.of.window.token, day.raised, next(window_notes(day))) == (
        "2026-05-18",
        0,
        "skipped, the window has closed",
    )
    assert (month.raised, month.amounts.result) == (1, Decimal(5))
    applied = operator.apply(request)
    assert applied.raised == 1
    assert usages(harness.bucket, "acme", "users", "2026-05") == {"alice": "5"}
    assert usages(harness.bucket, "acme", "users", "2026-05-18") == {}
    # Nothing from the newest snapshot is restored, so the incident stays open.
    assert usages(harness.bucket, "acme", "users", "2026-05-20") == {}
    assert applied.remainder is not None
    assert applied.remainder.counters == 2
    notes = [note for tenant in applied.tenants for each in tenant.entries for note in each.notes]
    assert notes == ["skipped, the window has closed"]


def test_a_restore_with_traffic_lowers_nothing_and_reports_differences(
    harness: Harness, operator: Operator
) -> None:
    fill(harness)
    harness.lose()
    harness.find_loss()
    operator.preview(OF_ACME)
    harness.bucket.spend("acme", "users", LIFETIME, {"alice": "31", "bob": "0.5"})

    applied = operator.apply(OF_ACME)

    assert [
        (each.entity, each.change, each.previewed, each.found) for each in applied.differences
    ] == [
        ("alice", Change.LIVE, None, Decimal(31)),
        ("bob", Change.LIVE, None, Decimal("0.5")),
    ]
    assert usages(harness.bucket, "acme", "users", LIFETIME) == {
        None: "63.5",
        "alice": "31",
        "bob": "20",
    }


def test_only_one_of_two_concurrent_restores_runs(harness: Harness, operator: Operator) -> None:
    fill(harness)
    harness.lose()
    harness.find_loss()
    go = threading.Barrier(2)

    def restore(by: str) -> Applied | LeaseHeldError:
        go.wait()
        try:
            return Operator(harness.plane).apply(EVERYTHING, by=by)
        except LeaseHeldError as error:
            return error

    # The later of the two may find the lease held, or nothing left to raise.
    with ThreadPoolExecutor(2) as pool:
        outcomes = dict(zip(("ann", "bob"), pool.map(restore, ("ann", "bob")), strict=True))
    refused = {by: each for by, each in outcomes.items() if isinstance(each, LeaseHeldError)}
    done = {by: each for by, each in outcomes.items() if isinstance(each, Applied)}
    assert sum(each.raised for each in done.values()) == 6
    for error in refused.values():
        (winner,) = done
        assert f"Another restore is running: {winner}, since 2026-05-20 12:1" in error.message
    assert usages(harness.bucket, "acme", "users", LIFETIME)["alice"] == USERS["alice"]


def test_a_second_restore_writes_nothing_while_one_runs(
    harness: Harness, operator: Operator
) -> None:
    fill(harness)
    harness.lose()
    harness.find_loss()
    before = all_stored(harness.bucket)
    with harness.plane.leases.hold(RESTORE_LEASE, "bob@night"):
        with pytest.raises(LeaseHeldError, match="bob@night, since 2026-05-20 12:1"):
            operator.apply(EVERYTHING)
        assert all_stored(harness.bucket) == before
    assert closes_incident(operator.apply(EVERYTHING))


def test_a_store_replaced_since_the_preview_is_not_written(
    harness: Harness, operator: Operator
) -> None:
    fill(harness)
    harness.lose()
    # Stores that are made within five seconds of each other differ only by their sequence.
    harness.bucket.put("ratelimit.acme", b"1")
    harness.find_loss()
    operator.preview(EVERYTHING)
    harness.lose()
    before = all_stored(harness.bucket)
    with pytest.raises(PreviewOutdatedError, match="preview again"):
        operator.apply(EVERYTHING)
    assert all_stored(harness.bucket) == before
    operator.preview(EVERYTHING)
    applied = operator.apply(EVERYTHING)
    assert closes_incident(applied)
    # The further loss was detected and joined the incident.
    assert applied.incident is not None
    assert len(applied.incident.losses) == 2


def test_checks_are_good_and_snapshots_are_stored_after_a_manual_restore(
    harness: Harness, operator: Operator
) -> None:
    fill(harness)
    harness.lose()
    harness.find_loss()
    assert closes_incident(operator.apply(EVERYTHING))
    assert harness.check(NOON + timedelta(minutes=20)).check.is_good
    captured = harness.capture(NOON + timedelta(hours=1))
    assert len(captured.outcomes) == 2


def test_resulting_blocks_follow_the_budget_definitions(
    harness: Harness, operator: Operator, database_url: str
) -> None:
    with Database(database_url) as database:
        PostgresBudgets(database).define(
            [
                BudgetDefinition(
                    "acme", "users", Period.LIFETIME, Decimal(30), SplitBy.USER, Enforcement.ENFORCE
                )
            ]
        )
    fill(harness)
    harness.lose()
    harness.find_loss()
    lifetime = next(
        each
        for each in operator.preview(OF_ACME).windows
        if (each.of.budget, each.of.window.token) == ("users", LIFETIME)
    )
    # Alice's 30.000000000000000001 exceeds the limit of each user; the aggregate's 63.5 has none.
    assert (lifetime.blocked_before, lifetime.blocked_after) == (0, 1)


def test_a_preview_from_leaderboards_notes_that_they_are_truncated(
    harness: Harness, operator: Operator
) -> None:
    many: dict[Entity, str] = {f"user {number:03d}": str(number + 1) for number in range(500)}
    harness.bucket.rank("acme", "users", LIFETIME, many)
    harness.clock.time = NOON
    harness.capture_boards()
    harness.lose()
    harness.find_loss()
    (window,) = operator.preview(OF_ACME).windows
    assert window.counters == 500
    assert "the newest snapshot lists only the largest spenders" in window_notes(window)


def test_keys_unreadable_in_the_snapshots_are_reported(
    harness: Harness, operator: Operator
) -> None:
    fill(harness)
    harness.bucket.put("usage.acme.users.lifetime.eve", b'{"usage":"NaN"}')
    harness.bucket.put("usage.acme.not.a.counter.at.all", b"1")
    harness.capture(NOON + timedelta(minutes=5))
    harness.lose()
    harness.find_loss()
    (tenant,) = operator.preview(OF_ACME).tenants
    assert tenant.unreadable_count == 1
    assert tenant.unreadable[0].key == "usage.acme.not.a.counter.at.all"
    (window,) = (w for w in tenant.windows if str(w.of) == "users lifetime")
    (note,) = (note for note in window_notes(window) if "unreadable in the newest snapshot" in note)
    assert note.startswith("1 counter unreadable in the newest snapshot: 'eve' (")


def test_each_entry_has_the_time_of_its_source_snapshot(
    harness: Harness, operator: Operator
) -> None:
    fill(harness)
    # Lowered within its window: the higher usage comes from the earlier snapshot.
    harness.bucket.spend("acme", "users", LIFETIME, {"alice": "1", "bob": "21"})
    later = NOON + timedelta(minutes=30)
    harness.capture(later)
    entries = {
        (str(each.of), each.entity): (each.recorded, each.source)
        for each in operator.preview(OF_ACME).tenants[0].entries
    }
    alice, alice_at = entries["users lifetime", "alice"]
    bob, bob_at = entries["users lifetime", "bob"]
    assert (alice, alice_at.replace(microsecond=0)) == (Decimal("30.000000000000000001"), NOON)
    assert (bob, bob_at.replace(microsecond=0)) == (Decimal(21), later)


def test_an_incomplete_preview_is_not_compared(harness: Harness, operator: Operator) -> None:
    fill(harness)
    preview = operator.preview(OF_ACME)
    choice = preview.choice
    kept = harness.plane.previews.newest(choice)
    assert kept is not None
    harness.plane.previews.begin(replace(kept, preview_id=str(uuid4())))
    newest = harness.plane.previews.newest(choice)
    assert newest is not None
    assert newest.preview_id == kept.preview_id
