"""What a preview reports."""

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pytest

from budget_recovery_dagster.domain import (
    EVERYONE,
    Action,
    BudgetDefinition,
    ClusterView,
    Enforcement,
    Period,
    RecoveryState,
    Reset,
    RestoreChoice,
    SplitBy,
    StoreIdentity,
    format_usage,
)
from budget_recovery_dagster.errors import (
    ChoiceError,
    PreviewOutdatedError,
    StoreReadError,
    StoreUnreachableError,
)
from budget_recovery_dagster.presentation import figures as figures_in
from budget_recovery_dagster.presentation import (
    headline,
    limit_words,
    preview_json,
    warnings,
    window_lines,
    window_notes,
)
from budget_recovery_dagster.services import Preview
from budget_recovery_dagster.services.restore import RestoreRequest
from tests.unit.capture_harness import LIFETIME, NOW, REBORN
from tests.unit.manual_harness import OF_A, ManualHarness, captured_manual_harness


@pytest.fixture
def harness() -> ManualHarness:
    """Return a wiped store of two tenants: a had used 80, alice 30 of it, and b 5."""
    harness = captured_manual_harness()
    harness.wipe()
    return harness


def figures(preview: Preview) -> dict[tuple[str, str | None], tuple[str, ...]]:
    return {
        (entry.tenant, entry.entity): (
            *(
                "none" if usage is None else format_usage(usage)
                for usage in (entry.live, entry.recorded, entry.result)
            ),
            entry.action.name,
        )
        for tenant in preview.tenants
        for entry in tenant.entries
    }


def test_each_counter_of_a_tenant_is_shown_with_its_result(harness: ManualHarness) -> None:
    harness.spend("a", "95")
    harness.spend("a", "1", "alice")
    preview = harness.preview(OF_A)
    assert figures(preview) == {
        ("a", None): ("95", "80", "95", "KEEP"),
        ("a", "alice"): ("1", "30", "30", "RAISE"),
    }
    (window,) = preview.windows
    assert (window.counters, window.raised, window.kept, window.skipped) == (2, 1, 1, 0)
    # The usage of the budget is its aggregate; only an entity is raised.
    amounts = window.amounts
    figures_of = (amounts.live, amounts.recorded, amounts.result, amounts.rise)
    assert figures_of == tuple(map(Decimal, (95, 80, 95, 29)))
    assert next(window_lines(window, preview.at)) == (
        "raises 1 of 2 counters: 95 -> 95 (entities +29)"
    )
    assert [(change.entity, change.rise) for change in preview.changes] == [("alice", Decimal(29))]
    assert preview.recovery.state is RecoveryState.RECOVERING
    assert preview.identity.created_at == REBORN


def test_the_whole_store_is_summarized_by_window_and_largest_changes(
    harness: ManualHarness,
) -> None:
    preview = harness.preview()
    assert [(each.tenant, each.raised, each.rise) for each in preview.windows] == [
        ("a", 2, Decimal(80)),
        ("b", 1, Decimal(5)),
    ]
    assert [(each.tenant, each.entity, each.rise) for each in preview.changes] == [
        ("a", None, Decimal(80)),
        ("a", "alice", Decimal(30)),
        ("b", None, Decimal(5)),
    ]
    # A preview of many tenants does not list every counter: there may be millions.
    assert all(tenant.entries == () for tenant in preview.tenants)
    assert "Tenant 'b', 2 of 2" in harness.messages


def test_a_preview_writes_nothing(harness: ManualHarness) -> None:
    before = harness.store.stream
    harness.preview()
    harness.preview(OF_A)
    assert harness.store.stream == before
    assert harness.usage("a") is None


def test_missing_counters_are_noted_as_restored_without_other_fields(
    harness: ManualHarness,
) -> None:
    harness.spend("a", "3")
    (window,) = harness.preview(OF_A).windows
    assert window.missing == 1
    assert tuple(window_notes(window)) == (
        "1 counter missing from the store: a restore brings back only the usage field",
    )


def test_resulting_blocks_are_shown_if_a_limit_is_known(harness: ManualHarness) -> None:
    limit = BudgetDefinition(
        "a", "spend", Period.LIFETIME, Decimal(30), SplitBy.USER, Enforcement.ENFORCE
    )
    harness.plane.budgets.define([limit])
    harness.spend("a", "40")
    preview = harness.preview()
    of_a, of_b = preview.windows
    # The limit is that of each user, not of the aggregate.
    assert (of_a.limit, of_a.is_enforced, of_a.blocked_before, of_a.blocked_after) == (
        Decimal(30),
        True,
        0,
        1,
    )
    assert (of_b.limit, of_b.blocked_after) == (None, 0)
    assert {(each.tenant, each.entity): each.blocks for each in preview.changes} == {
        ("a", None): False,
        ("a", "alice"): True,
        ("b", None): None,
    }
    harness.plane.budgets.define([replace(limit, enforcement=Enforcement.AUDIT)])
    (window,) = harness.preview(OF_A).windows
    assert (window.is_enforced, window.blocked_after) == (False, 0)


def test_a_preview_of_a_snapshot_uses_only_that_snapshot(harness: ManualHarness) -> None:
    captured = datetime(2026, 11, 25, 12, 5, tzinfo=UTC)
    assert captured == NOW
    harness.clock.set(NOW - timedelta(minutes=1))
    preview = harness.preview(RestoreRequest(tenant="a", snapshot="2026-11-25 12:05"))
    assert preview.choice.snapshot == captured
    assert {entry.source for entry in preview.tenants[0].entries} == {captured}
    with pytest.raises(ChoiceError, match="No retained snapshot matches") as refusal:
        harness.preview(RestoreRequest(snapshot="2026-11-24"))
    assert refusal.value.hint == ("choose the snapshot from: latest, 2026-11-25T12:05:00.000000Z.")


def test_closed_windows_are_shown_as_skipped(harness: ManualHarness) -> None:
    harness = captured_manual_harness()
    harness.store.put_usage("a", "spend", "2026-11-25", None, "7")
    harness.capture()
    harness.wipe()
    harness.clock.set(datetime(2026, 11, 26, 0, 0, 30, tzinfo=UTC))
    day, lifetime = harness.preview(OF_A).windows
    assert (day.of.window.token, day.raised, day.skipped) == ("2026-11-25", 0, 1)
    assert tuple(window_notes(day)) == ("skipped, the window has closed",)
    assert (day.amounts.live, day.amounts.result) == (Decimal(0), Decimal(0))
    assert (lifetime.raised, lifetime.skipped) == (2, 0)


def test_an_unreadable_live_counter_is_named(harness: ManualHarness) -> None:
    harness.store.put("usage.a.spend.lifetime.alice", b"what?")
    preview = harness.preview(OF_A)
    (window,) = preview.windows
    assert (window.raised, window.skipped) == (1, 1)
    assert next(window_notes(window)).startswith("1 live counter skipped (unreadable): 'alice' (")
    (alice,) = (each for each in preview.tenants[0].entries if each.entity == "alice")
    assert alice.action is Action.SKIP_UNREADABLE


def test_damaged_records_are_named(harness: ManualHarness) -> None:
    harness = captured_manual_harness()
    harness.spend("a", "99")
    harness.capture()
    newest = harness.clock.now()
    window_of = harness.preview(OF_A).windows[0].of
    harness.plane.points.corrupt("a", newest, window_of)
    (window,) = harness.preview(OF_A).windows
    assert window.amounts.recorded == 80
    assert tuple(window_notes(window)) == (
        "1 record damaged (checksum mismatch) and not used: 2026-11-25 12:15:00 UTC",
    )


def test_an_unreadable_tenant_does_not_hide_others(harness: ManualHarness) -> None:
    slow = harness.store.failures["a"] = StoreReadError("Reading a took too long.", "read again.")
    preview = harness.preview()
    assert [(each.tenant, each.failure) for each in preview.tenants] == [
        ("a", slow),
        ("b", None),
    ]
    assert preview.failures == [preview.tenants[0]]
    # A preview of this tenant alone fails.
    with pytest.raises(StoreReadError):
        harness.preview(OF_A)


def test_a_preview_fails_if_the_store_is_recreated_meanwhile(harness: ManualHarness) -> None:
    def created_during_read(_tenant: str) -> None:
        harness.store.during_read = None
        harness.store.recreate(REBORN + timedelta(minutes=1))

    harness.spend("a", "1")
    harness.spend("a", "1", "alice")
    harness.store.during_read = created_during_read
    with pytest.raises(PreviewOutdatedError, match="preview again"):
        harness.preview()
    assert harness.plane.previews.newest(RestoreChoice(None, None, None)) is None


def test_an_unreachable_store_is_not_an_empty_store(harness: ManualHarness) -> None:
    harness.store.observe_failure = StoreUnreachableError("Nobody answers.", "start it.")
    with pytest.raises(StoreUnreachableError):
        harness.preview()


def test_a_preview_without_snapshots_is_refused() -> None:
    harness = ManualHarness()
    harness.store.stream = StoreIdentity(REBORN, 1)
    with pytest.raises(ChoiceError, match="Nothing can be restored"):
        harness.preview()


def test_a_preview_of_one_budget_shows_no_other(harness: ManualHarness) -> None:
    harness = captured_manual_harness()
    harness.store.put_usage("a", "cards", "lifetime", None, "7")
    harness.capture()
    harness.wipe()
    preview = harness.preview(RestoreRequest(tenant="a", budget="cards"))
    assert [(each.of.budget, each.rise) for each in preview.windows] == [("cards", Decimal(7))]
    with pytest.raises(
        ChoiceError, match="No snapshot of budget 'card' of tenant 'a' is retained"
    ) as refusal:
        harness.preview(RestoreRequest(tenant="a", budget="card"))
    assert refusal.value.hint == "choose the budget from: cards, spend."


def test_a_tenant_called_like_the_text_for_all_is_previewed_and_restored_alone() -> None:
    harness = captured_manual_harness()
    harness.store.put_usage("*", "spend", "lifetime", None, "7")
    harness.capture()
    harness.wipe()
    everything = harness.preview(RestoreRequest(tenant="*"))
    assert len(everything.tenants) > 1
    of_one = harness.preview(RestoreRequest(tenant="=2A"))
    assert [each.tenant for each in of_one.tenants] == ["*"]
    assert json.loads(preview_json(of_one))["choice"]["tenant"] == "*"
    assert json.loads(preview_json(everything))["choice"]["tenant"] is None
    # A restore is compared with the preview of the same choice.
    applied = harness.apply(RestoreRequest(tenant="=2A"), preview_id=of_one.preview_id)
    assert applied.raised == 1


# Unknown is never zero


def test_a_window_without_intact_records_is_shown_as_unknown(harness: ManualHarness) -> None:
    for tenant, at in list(harness.plane.state.snapshots):
        harness.plane.points.corrupt(tenant, at, LIFETIME)
    preview = harness.preview()
    assert headline(preview) == (
        "Nothing would be raised. 2 windows have no intact record (checksum mismatch)."
    )
    assert list(window_lines(preview.windows[0], preview.at))[:2] == [
        "raises 0 of 0 counters: unknown",
        "from no snapshot",
    ]
    document = json.loads(preview_json(preview))["tenants"][0]["windows"][0]
    assert {name for name, value in document.items() if value is None} == {
        *("counters", "raised", "missing_in_store", "kept", "skipped", "unreadable"),
        *("live", "recorded", "result", "rise", "blocked_before", "blocked_after"),
        *("newest_source", "oldest_source", "limit"),
    }


def test_it_is_unknown_how_many_entities_a_limit_blocks_without_intact_records(
    harness: ManualHarness,
) -> None:
    harness.plane.budgets.define(
        [
            BudgetDefinition(
                "a", "spend", Period.LIFETIME, Decimal(3), SplitBy.USER, Enforcement.ENFORCE
            )
        ]
    )
    for tenant, at in list(harness.plane.state.snapshots):
        harness.plane.points.corrupt(tenant, at, LIFETIME)
    (window,) = harness.preview(OF_A).windows
    assert limit_words(window) == "limit 3: unknown how many entities are blocked"


def test_a_window_that_was_reset_is_not_unknown_although_a_record_is_damaged() -> None:
    harness = captured_manual_harness()
    harness.spend("a", "99")
    harness.capture()
    now = harness.clock.now()
    harness.plane.points.corrupt("a", now, LIFETIME)
    harness.plane.resets.record(Reset("a", "spend", None, EVERYONE, now, "ann", "pardoned", now))
    preview = harness.preview(OF_A)
    assert headline(preview) == "Nothing would be raised."
    (window,) = preview.windows
    assert figures_in(window) == "0 -> 0"
    assert window.point.corrupt == (now,)


def test_an_unreadable_live_counter_is_unknown_and_not_zero(harness: ManualHarness) -> None:
    limit = BudgetDefinition(
        "b", "spend", Period.LIFETIME, Decimal(3), SplitBy.USER, Enforcement.ENFORCE
    )
    harness.plane.budgets.define([limit])
    harness.store.put("usage.b.spend.lifetime.=", b"rubbish")
    preview = harness.preview(RestoreRequest(tenant="b"))
    assert headline(preview) == "Nothing would be raised. 1 live counter skipped (unreadable)."
    (window,) = preview.windows
    assert figures_in(window) == "unknown"
    assert limit_words(window) == "limit 3: at least 0 blocked now, 0 after the restore"
    document = json.loads(preview_json(preview))["tenants"][0]["windows"][0]
    assert (document["counters"], document["unreadable"]) == (1, 1)
    assert (document["live"], document["result"], document["rise"]) == (None, None, None)
    assert preview.tenants[0].entries[0].blocks is None


def test_a_closed_window_shows_no_blocks() -> None:
    harness = captured_manual_harness()
    harness.plane.budgets.define(
        [BudgetDefinition("a", "spend", Period.DAY, Decimal(5), SplitBy.USER, Enforcement.ENFORCE)]
    )
    harness.store.put_usage("a", "spend", "2026-11-25", None, "7")
    harness.capture()
    harness.clock.set(datetime(2026, 11, 26, 0, 0, 30, tzinfo=UTC))
    day, _ = harness.preview(OF_A).windows
    assert (day.is_closed, day.blocked_before, day.blocked_after) == (True, 0, 0)
    assert not any("limit" in line for line in window_lines(day, NOW))


def test_a_preview_warns_if_a_restore_would_be_refused_or_wait() -> None:
    harness = captured_manual_harness()
    assert warnings(harness.preview()) == {}
    harness.store.recreate(REBORN)
    ((code, warning),) = warnings(harness.preview()).items()
    assert code == "would_be_refused"
    assert warning.startswith("A restore would be refused now. The store was recreated;")
    harness.check()
    assert warnings(harness.preview()) == {}
    harness.store.cluster = lambda seen_at: ClusterView(seen_at, "c", None, None, 3, ())
    assert warnings(harness.preview()) == {
        "would_wait": "A restore would wait for the store: the stream has no leader."
    }


def test_a_rise_of_38_digits_is_exact() -> None:
    harness = ManualHarness()
    harness.spend("a", "99999999999999999999.999999999999999999", "alice")
    harness.capture()
    harness.check()
    harness.wipe()
    harness.spend("a", "0.000000000000000001", "alice")
    preview = harness.preview(OF_A)
    rise = Decimal("99999999999999999999.999999999999999998")
    assert preview.windows[0].rise == preview.changes[0].rise == rise
