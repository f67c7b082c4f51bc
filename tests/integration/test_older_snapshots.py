"""A restore from an older snapshot reports what other snapshots hold more."""

from datetime import timedelta

from tests.integration.commands import answer, page
from tests.integration.recovery_harness import Harness
from tests.integration.recovery_runs import usages

LIFETIME = "lifetime"


def spend(harness: Harness, alice: str, total: str) -> None:
    harness.bucket.spend("acme", "users", LIFETIME, {"alice": alice, "bob": "1"})
    harness.bucket.spend("acme", "total", LIFETIME, {None: total})
    harness.bucket.spend("globex", "total", LIFETIME, {None: total})


def test_what_newer_snapshots_hold_more_is_reported_by_budget_and_window(harness: Harness) -> None:
    now = harness.plane.clock.now()
    spend(harness, "5", "6")
    harness.capture(now - timedelta(minutes=2))
    spend(harness, "7.5", "8")
    harness.capture(now - timedelta(minutes=1))
    harness.lose()
    harness.find_loss(now)
    newest, older = answer("snapshots")["snapshots"]
    chosen = ("restore", "--reason", "a test", "--yes", "--snapshot")

    text = " ".join(page(*chosen, older["captured_at"]))

    assert "DONE" in text
    assert "Other snapshots hold more: 3 counters in 3 windows still lower." in text
    assert "acme, users lifetime: 1 counter, 2.5 more" in text
    assert usages(harness.bucket, "acme", "users", LIFETIME) == {"alice": "5", "bob": "1"}
    # Only of what was chosen.
    document = answer(*chosen, older["captured_at"], "--tenant", "acme")
    others = document["other_snapshots"]
    assert (others["windows"], others["counters"], others["unread"]) == (2, 2, [])
    assert others["largest"][0] == {
        "tenant": "acme",
        "budget": "users",
        "window": LIFETIME,
        "counters": 1,
        "usage": "2.5",
    }
    # The newest one holds the highest usage of all.
    document = answer(*chosen, newest["captured_at"])
    assert document["other_snapshots"]["counters"] == 0
    assert "Other snapshots" not in " ".join(page(*chosen, newest["captured_at"]))
    assert answer("restore", "--reason", "a test", "--yes")["other_snapshots"] is None
