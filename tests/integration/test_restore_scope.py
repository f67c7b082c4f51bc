"""What a restore writes and what it does not touch, by bytes and revisions."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from uuid import uuid4

import dagster as dg
import psycopg
import pytest

from budget_recovery_dagster.domain import (
    Bound,
    Entity,
    LossAmounts,
    Outcome,
    Period,
    Verdict,
    Window,
)
from budget_recovery_dagster.embedded import NatsServer
from budget_recovery_dagster.errors import DatabaseUnreachableError
from budget_recovery_dagster.sandbox.gateway import Place
from tests import services
from tests.boards import board, board_key
from tests.integration.gateway_harness import contents
from tests.integration.interrupted_store import Interruptions, interrupted
from tests.integration.recovery_harness import Harness, all_stored, outcome_of
from tests.integration.recovery_runs import outcome, restored_table, run_restore, state, usages
from tests.nats_servers import Bucket, Stored
from tests.waiting import wait_until

LIFETIME = "lifetime"
USERS: dict[Entity, str] = {None: "63", "alice": "30", "bob": "20", "carol": "10", "dave": "3"}
MAY = datetime(2026, 5, 31, 23, 50, tzinfo=UTC)
JUNE = datetime(2026, 6, 1, 0, 5, tzinfo=UTC)


@pytest.fixture
def other_bucket(nats_server: NatsServer) -> Iterator[Bucket]:
    """Create another gateway's bucket with counters of the same names."""
    with Bucket.connected(nats_server.url, f"other-{uuid4().hex[:12]}") as bucket:
        bucket.create()
        bucket.spend("acme", "users", LIFETIME, {"alice": "1"})
        bucket.rank("acme", "users", LIFETIME, {"alice": "1"})
        yield bucket
        bucket.destroy()


def stored(bucket: Bucket, key: str) -> Stored:
    found = bucket.stored(key)
    assert found is not None
    return found


def test_a_restore_writes_only_lower_and_missing_counters(
    harness: Harness, other_bucket: Bucket
) -> None:
    bucket = harness.bucket
    bucket.spend("acme", "users", LIFETIME, USERS)
    bucket.spend("acme", "users", "2026-05", USERS)
    bucket.spend("globex", "total", LIFETIME, {None: "5"})
    bucket.rank("acme", "users", LIFETIME, USERS)
    # Otherwise its marker in the new bucket would show another store.
    bucket.put("__guard.another", b"{}")
    harness.capture(MAY)
    harness.lose()
    # Counted since and lower: raised, without changing other bytes of the value.
    alice = b'{"by":"g","usage":"2","x":[1.0e5,{"usage":9}],"updated_at":"2026-06-01T00:01:00Z"}'
    bucket.put("usage.acme.users.lifetime.alice", alice)
    # Counted since and higher: kept.
    bucket.spend("acme", "users", LIFETIME, {"bob": "25"})
    # Unreadable: skipped.
    bucket.put("usage.acme.users.lifetime.dave", b'{"usage":"NaN"}')
    # A closed window, a tenant without a loss, and a tenant without a snapshot.
    bucket.spend("acme", "users", "2026-05", {"alice": "1"})
    bucket.rank("acme", "users", "2026-05", {"alice": "1"})
    bucket.spend("globex", "total", LIFETIME, {None: "5.00"})
    bucket.rank("globex", "total", LIFETIME, {None: "5"})
    bucket.spend("initech", "total", LIFETIME, {None: "1"})
    # Keys of other programs.
    for key in (
        "blocked.acme.users.lifetime.alice",
        "blocked.acme.users.2026-05.carol",
        "ratelimit.acme.users.alice",
        "usage.acme.not.a.counter.at.all",
        "leaderboard.acme.users.of.them",
        "__guard.another",
    ):
        bucket.put(key, b'{"usage":"1"}', {"Nats-TTL": "1h"})
    before, other = all_stored(bucket), all_stored(other_bucket)

    harness.find_loss(JUNE)
    incident = harness.recover()

    assert outcome_of(incident) is Outcome.RESTORED
    after = all_stored(bucket)
    changed = {key for key in after if after[key] != before.get(key)}
    deployment_id = harness.plane.registry.claim().deployment_id
    assert changed == {
        "usage.acme.users.lifetime.=",
        "usage.acme.users.lifetime.alice",
        "usage.acme.users.lifetime.carol",
        "leaderboard.acme.users.lifetime",
        f"__guard.{deployment_id}",
    }
    assert before.keys() <= after.keys()
    assert all_stored(other_bucket) == other
    raised = after["usage.acme.users.lifetime.alice"].data
    start, end = alice.split(b'"usage":"2"')
    assert raised.startswith(start + b'"usage":"30"' + end.split(b'"2026-06-01')[0])
    entries = harness.entries(incident)
    users = entries["acme", "users", LIFETIME]
    assert (users.entries, users.raised, users.kept, users.skipped) == (5, 3, 1, 1)
    (note,) = users.notes
    assert "1 counter skipped: the live value is unreadable: 'dave'" in note
    assert "NaN" in note
    assert entries["acme", "users", "2026-05"].notes == ("skipped, the window has closed",)
    # Of a tenant without a loss, only what it may have cost is reported: its counter was kept.
    assert {tenant for tenant, _, _ in entries} == {"acme", "globex"}
    globex = entries["globex", "total", LIFETIME]
    assert (globex.raised, globex.kept) == (0, 1)
    # Another installation's marker: who knows who wrote the counters.
    assert globex.amounts == LossAmounts(Decimal(0), Decimal(5), Bound.AT_MOST)


def test_leaderboards_match_the_counters_after_a_restore(harness: Harness) -> None:
    bucket = harness.bucket
    many: dict[Entity, str] = {f"u{number}": str(number) for number in range(1, 601)}
    bucket.spend("acme", "users", LIFETIME, many)
    bucket.spend("acme", "total", LIFETIME, {None: "180300"})
    bucket.rank("acme", "users", LIFETIME, many)
    bucket.rank("acme", "total", LIFETIME, {None: "180300"})
    harness.capture()
    harness.lose()
    # Traffic after the loss: a new entity, and one with more usage than before.
    bucket.spend("acme", "users", LIFETIME, {"new": "1000", "u600": "700", "u1": "0.5"})
    bucket.rank("acme", "users", LIFETIME, {"new": "1000", "u600": "700", "u1": "0.5"})
    harness.find_loss()
    harness.recover()
    found = contents(place_of(harness))
    assert found.boards == found.boards_of_the_counters
    listed = found.boards["acme.users.lifetime"]
    assert [entry["entity"] for entry in listed[:3]] == ["new", "u600", "u599"]
    assert [entry["usage"] for entry in listed[:3]] == ["1000", "700", "599"]
    assert len(listed) == 500
    assert found.boards["acme.total.lifetime"] == [{"entity": None, "usage": "180300"}]


def test_an_incident_that_ends_with_nothing_lost_writes_only_the_marker(harness: Harness) -> None:
    bucket = harness.bucket
    bucket.spend("acme", "users", LIFETIME, USERS)
    bucket.spend("acme", "total", LIFETIME, {None: "63"})
    # Behind the counters, with numbers, other fields and another order of equal usages.
    behind = (
        b'{"entries":[{"entity":"bob","usage":9.50,"team":"x"},{"entity":"alice","usage":9.5}]}'
    )
    bucket.put(board_key("acme", "users", LIFETIME), behind, {"Team": "blue"})
    harness.capture()
    harness.check()
    before = all_stored(bucket)
    bucket.purge("__guard.")
    assert harness.find_loss() is Verdict.LOST

    incident = harness.recover()

    assert outcome_of(incident) is Outcome.NOTHING_LOST
    after = all_stored(bucket)
    # No leaderboard of the budget `total` appears either.
    assert after.keys() == before.keys()
    assert {key for key in after if after[key] != before[key]} == {
        f"__guard.{harness.plane.registry.claim().deployment_id}"
    }


def test_only_leaderboards_of_raised_windows_are_written(harness: Harness) -> None:
    bucket = harness.bucket
    lower: dict[Entity, str] = {"alice": "1"}
    for budget in ("lost", "whole", "unranked"):
        bucket.spend("acme", budget, LIFETIME, USERS)
        bucket.spend("acme", budget, "2026-05", USERS)
    # The gateway keeps leaderboards of two budgets, and lags behind with all of them.
    for budget in ("lost", "whole"):
        bucket.rank("acme", budget, LIFETIME, lower)
        bucket.rank("acme", budget, "2026-05", lower)
    harness.capture(MAY)
    harness.check()
    bucket.purge("usage.acme.lost.lifetime.")
    bucket.purge("usage.acme.unranked.lifetime.")
    bucket.purge("__guard.")
    before = all_stored(bucket)

    harness.find_loss(MAY)
    harness.recover()

    after = all_stored(bucket)
    changed = {key for key in after if after[key] != before.get(key)}
    assert {key for key in changed if key.startswith("leaderboard.")} == {
        board_key("acme", "lost", LIFETIME)
    }
    assert len({key for key in changed if key.startswith("usage.")}) == 2 * len(USERS)


def test_a_leaderboard_is_recreated_only_where_the_snapshots_had_one(harness: Harness) -> None:
    bucket = harness.bucket
    for budget in ("kept", "never"):
        bucket.spend("acme", budget, LIFETIME, USERS)
    bucket.rank("acme", "kept", "2026-05", USERS)
    bucket.spend("acme", "kept", "2026-05", USERS)
    harness.capture(MAY)
    harness.lose()
    harness.find_loss(MAY)
    incident = harness.recover()
    found = {key for key in all_stored(bucket) if key.startswith("leaderboard.")}
    # The other window of the same budget had none.
    assert found == {board_key("acme", "kept", "2026-05")}
    assert all(entry.notes == () for entry in harness.entries(incident).values())
    assert incident.ended is not None
    assert incident.ended.restored.boards == 1


def test_a_gateway_that_has_removed_its_leaderboards_gets_none(harness: Harness) -> None:
    bucket = harness.bucket
    bucket.spend("acme", "users", LIFETIME, USERS)
    bucket.rank("acme", "users", LIFETIME, USERS)
    # The names of the stream still list it.
    bucket.remove(board_key("acme", "users", LIFETIME))
    harness.capture()
    harness.lose()
    harness.find_loss()
    incident = harness.recover()
    assert usages(bucket, "acme", "users", LIFETIME) == USERS
    assert bucket.stored(board_key("acme", "users", LIFETIME)) is None
    assert incident.ended is not None
    assert incident.ended.restored.boards == 0


def test_snapshots_that_do_not_know_leaderboards_create_none_and_a_note_says_so(
    harness: Harness, database: psycopg.Connection
) -> None:
    bucket = harness.bucket
    for budget in ("live", "missing"):
        bucket.spend("acme", budget, LIFETIME, USERS)
        bucket.rank("acme", budget, LIFETIME, USERS)
    harness.capture()
    # As in snapshots of version 1.
    database.execute("update budget_recovery.budget_record set has_board = null")
    harness.lose()
    bucket.rank("acme", "live", LIFETIME, {"alice": "1"})
    harness.find_loss()
    incident = harness.recover()
    assert bucket.stored(board_key("acme", "missing", LIFETIME)) is None
    found = contents(place_of(harness))
    assert found.boards["acme.live.lifetime"] == found.boards_of_the_counters["acme.live.lifetime"]
    entries = harness.entries(incident)
    assert entries["acme", "live", LIFETIME].notes == ()
    assert entries["acme", "missing", LIFETIME].notes == (
        (
            "leaderboard not rebuilt: it is missing, and no snapshot shows whether the gateway"
            " keeps one"
        ),
    )


def test_a_restore_that_takes_over_updates_the_leaderboards_of_what_was_raised_before(
    harness: Harness,
) -> None:
    bucket = harness.bucket
    for budget in ("raised", "whole"):
        bucket.spend("acme", budget, LIFETIME, USERS)
        bucket.rank("acme", budget, LIFETIME, {"alice": "1"})
    harness.capture()
    harness.check()
    bucket.purge("usage.acme.raised.")
    bucket.purge("__guard.")
    harness.find_loss()
    whole = bucket.stored(board_key("acme", "whole", LIFETIME))

    def die() -> None:
        raise DatabaseUnreachableError("The worker dies here.", "a hint")

    with pytest.raises(DatabaseUnreachableError):
        harness.run(interrupted(Interruptions(after_raising=die)), run_id="the first")
    assert usages(bucket, "acme", "raised", LIFETIME) == USERS
    behind = bucket.stored(board_key("acme", "raised", LIFETIME))
    assert behind is not None
    assert b"carol" not in behind.data

    harness.clock.time += timedelta(minutes=10)
    harness.recover(run_id="the second")

    found = contents(place_of(harness))
    assert (
        found.boards["acme.raised.lifetime"] == found.boards_of_the_counters["acme.raised.lifetime"]
    )
    assert bucket.stored(board_key("acme", "whole", LIFETIME)) == whole


def place_of(harness: Harness) -> Place:
    return Place(services.present_settings().require_nats_url(), harness.bucket.name)


def expires_at(found: Stored, written_at: datetime) -> datetime:
    assert found.ttl is not None
    return written_at + timedelta(seconds=int(found.ttl.removesuffix("s")))


def test_keys_keep_or_regain_their_shape_and_expiry(harness: Harness) -> None:
    bucket = harness.bucket
    now = harness.clock.time
    quarter = Window.containing(Period.QUARTER, now)
    assert quarter.end is not None
    until = quarter.end + timedelta(days=1)
    ttl = {"Nats-TTL": f"{int((until - datetime.now(UTC)).total_seconds())}s"}
    text = b'{"usage":"5","updated_at":"2026-11-29T14:00:00Z"}'
    for entity in ("new", "live"):
        bucket.put(f"usage.acme.text.{quarter.token}.{entity}", text, ttl)
        bucket.put(f"usage.acme.number.lifetime.{entity}", b'{"usage":5}', {"Nats-TTL": "2h"})
        bucket.put(f"usage.acme.bare.lifetime.{entity}", b"5")
    harness.capture()
    harness.lose()
    bucket.put(f"usage.acme.text.{quarter.token}.live", b'{"usage":"1"}', {"Nats-TTL": "1h"})
    bucket.put("usage.acme.number.lifetime.live", b'{"usage":1,"n":1.10}')
    bucket.put("usage.acme.bare.lifetime.live", b"1", {"Nats-TTL": "never"})
    harness.find_loss()
    harness.recover()

    written_at = datetime.now(UTC)
    new = stored(bucket, f"usage.acme.text.{quarter.token}.new")
    assert json.loads(new.data)["usage"] == "5"
    assert abs(expires_at(new, written_at) - until) < timedelta(seconds=60)
    live = stored(bucket, f"usage.acme.text.{quarter.token}.live")
    assert live.data == b'{"usage":"5"}'
    left = expires_at(live, written_at) - written_at
    assert timedelta(minutes=58) < left <= timedelta(hours=1)
    number = stored(bucket, "usage.acme.number.lifetime.new")
    assert json.loads(number.data)["usage"] == 5
    assert number.ttl == "7200"
    number = stored(bucket, "usage.acme.number.lifetime.live")
    assert (number.data, number.ttl) == (b'{"usage":5,"n":1.10}', None)
    bare = stored(bucket, "usage.acme.bare.lifetime.new")
    assert (bare.data, bare.ttl) == (b"5", None)
    bare = stored(bucket, "usage.acme.bare.lifetime.live")
    assert (bare.data, bare.ttl) == (b"5", "never")


def expiring(harness: Harness, after: timedelta) -> tuple[str, dict[str, str]]:
    """Return the token of the present quarter, and headers to expire so long after its end."""
    quarter = Window.containing(Period.QUARTER, harness.clock.time)
    assert quarter.end is not None
    seconds = (quarter.end + after - datetime.now(UTC)).total_seconds()
    return quarter.token, {"Nats-TTL": f"{int(seconds)}s"}


def assert_expires(bucket: Bucket, key: str, after: timedelta | None) -> None:
    """Require that a key of a quarter expires so long after its end; None: never."""
    found = stored(bucket, key)
    end = Window.parse(key.split(".")[3]).end
    assert end is not None
    if after is None:
        assert found.ttl is None
    else:
        assert abs(expires_at(found, datetime.now(UTC)) - (end + after)) < timedelta(seconds=60)


def test_each_key_of_a_window_regains_its_own_expiry(harness: Harness) -> None:
    bucket, expiries = harness.bucket, {"a": 1, "b": 30, "c": None, "d": 0}
    for entity, days in expiries.items():
        token, headers = expiring(harness, timedelta(days=days or 0))
        key = f"usage.acme.mixed.{token}.{entity}"
        bucket.put(key, b'{"usage":"5"}', None if days is None else headers)
    harness.capture()
    harness.lose()
    harness.find_loss()
    incident = harness.recover()
    for entity, days in expiries.items():
        key = f"usage.acme.mixed.{token}.{entity}"
        assert_expires(bucket, key, None if days is None else timedelta(days=days))
    assert harness.entries(incident)["acme", "mixed", token].notes == ()


def test_keys_that_were_protected_from_a_maximum_age_are_protected_again(
    harness: Harness,
) -> None:
    bucket, kept = harness.bucket, {"Nats-TTL": "never"}
    keys = {
        name: f"usage.acme.{name.replace('-', '.lifetime.')}"
        for name in ("mixed-kept", "mixed-aging", "kept-one", "aging-one")
    }
    for name, key in keys.items():
        bucket.put(key, b'{"usage":"5"}', kept if "kept" in name else None)
    bucket.rank("acme", "kept", LIFETIME, {"one": "5"})
    harness.capture()
    bucket.destroy()
    bucket.create_with(allow_msg_ttl=True, max_age=2)
    bucket.put(keys["aging-one"], b'{"usage":"1"}', kept)
    harness.find_loss()
    incident = harness.recover()
    # Only the unprotected keys are dropped; a live key kept the gateway's header.
    wait_until(lambda: bucket.stored(keys["mixed-aging"]) is None)
    protected = [keys["mixed-kept"], keys["kept-one"], keys["aging-one"]]
    for key in (*protected, board_key("acme", "kept", LIFETIME)):
        assert stored(bucket, key).ttl == "never"
    assert all(b'{"usage":"5"' in stored(bucket, key).data for key in protected)
    entries = harness.entries(incident)
    assert entries["acme", "kept", LIFETIME].notes == ()
    assert any("1 counter dropped" in note for note in entries["acme", "mixed", LIFETIME].notes)


def test_counters_with_an_unknown_expiry_expire_a_day_after_their_window(
    harness: Harness,
) -> None:
    bucket = harness.bucket
    token, _ = expiring(harness, timedelta(0))
    ranked: dict[Entity, str] = {"alice": "12.5", "bob": "3", None: "15.5"}
    for window in (token, LIFETIME):
        bucket.rank("acme", "users", window, ranked)
    harness.capture_boards()
    harness.lose()
    bucket.spend("acme", "users", token, {"bob": "1"})
    harness.find_loss()
    incident = harness.recover()
    for name in ("alice", "="):
        assert_expires(bucket, f"usage.acme.users.{token}.{name}", timedelta(days=1))
        assert stored(bucket, f"usage.acme.users.{LIFETIME}.{name}").ttl is None
    assert_expires(bucket, board_key("acme", "users", token), timedelta(days=1))
    # The gateway itself wrote this one meanwhile, without an expiry.
    assert_expires(bucket, f"usage.acme.users.{token}.bob", None)
    entries = harness.entries(incident)
    assert entries["acme", "users", token].notes == (
        "expiry unknown: 2 counters expire one day after the window ends",
    )
    assert entries["acme", "users", LIFETIME].notes == ()


def test_an_unknown_expiry_is_not_before_the_known_ones_of_its_window(
    harness: Harness, database: psycopg.Connection
) -> None:
    bucket = harness.bucket
    token, headers = expiring(harness, timedelta(days=30))
    bucket.put(f"usage.acme.users.{token}.known", b'{"usage":"5"}', headers)
    harness.capture()
    bucket.put(f"usage.acme.users.{token}.new", b'{"usage":"5"}')
    harness.capture()
    # As version 1 recorded a window in which one of two keys has no expiry.
    newest = "captured_at = (select max(captured_at) from budget_recovery.capture)"
    database.execute(
        f"update budget_recovery.budget_record set expiry_kind = null where {newest}".encode()
    )
    harness.lose()
    harness.find_loss()
    incident = harness.recover()
    for name in ("known", "new"):
        assert_expires(bucket, f"usage.acme.users.{token}.{name}", timedelta(days=30))
    assert harness.entries(incident)["acme", "users", token].notes == (
        "expiry unknown: 1 counter expires 30.0 days after the window ends",
    )


def test_a_bucket_without_times_to_live_gets_none_and_no_note_about_unknown_ones(
    harness: Harness,
) -> None:
    bucket = harness.bucket
    token, _ = expiring(harness, timedelta(0))
    bucket.rank("acme", "users", token, {"alice": "12.5"})
    harness.capture_boards()
    bucket.destroy()
    bucket.create_with(allow_msg_ttl=False)
    harness.find_loss()
    incident = harness.recover()
    assert_expires(bucket, f"usage.acme.users.{token}.alice", None)
    assert harness.entries(incident)["acme", "users", token].notes == ()


def test_a_key_removed_during_a_restore_is_reported_and_the_others_are_restored(
    harness: Harness,
) -> None:
    harness.bucket.spend("acme", "users", LIFETIME, USERS)
    harness.bucket.spend("globex", "total", LIFETIME, {None: "5"})
    harness.bucket.rank("acme", "users", LIFETIME, USERS)
    harness.bucket.rank("globex", "total", LIFETIME, {None: "5"})
    harness.capture()
    harness.lose()
    harness.find_loss()
    removed: list[str] = []

    def remove() -> None:
        if not removed:
            removed.append("usage.acme.users.lifetime.alice")
            harness.bucket.remove(removed[0])

    incident = harness.recover(interrupted(Interruptions(after_raising=remove)))

    assert outcome_of(incident) is Outcome.RESTORED
    rest = {entity: usage for entity, usage in USERS.items() if entity != "alice"}
    assert usages(harness.bucket, "acme", "users", LIFETIME) == rest
    assert usages(harness.bucket, "globex", "total", LIFETIME) == {None: "5"}
    (note,) = harness.entries(incident)["acme", "users", LIFETIME].notes
    assert "missing from the store after the write" in note
    assert "'alice'" in note
    assert any(
        "'alice'" in line and "missing from the store after the write" in line
        for line in harness.messages
    )
    # It is not on the leaderboard either.
    found = contents(place_of(harness))
    assert found.boards == found.boards_of_the_counters


def test_a_corrupt_newest_record_is_replaced_by_older_ones_and_reported(
    harness: Harness, instance: dg.DagsterInstance, database: psycopg.Connection
) -> None:
    for total, alice in (("60", "40"), ("70", "30"), ("90", "50")):
        harness.bucket.spend("acme", "users", LIFETIME, {None: total, "alice": alice})
        harness.bucket.spend("acme", "total", LIFETIME, {None: total})
        harness.capture()
    # Damage the newest record of one budget.
    changed = database.execute(
        "update budget_recovery.budget_content set usages = '{999,999}' where content_id = ("
        " select content_id from budget_recovery.budget_record where budget_id = 'users'"
        " order by captured_at desc limit 1)"
    )
    assert changed.rowcount == 1
    harness.lose()
    harness.find_loss()

    result = run_restore(instance)

    assert outcome(instance, result) == "restored"
    assert state(database) == "healthy"
    assert usages(harness.bucket, "acme", "users", LIFETIME) == {None: "70", "alice": "40"}
    assert usages(harness.bucket, "acme", "total", LIFETIME) == {None: "90"}
    notes = {row["budget"]: row["notes"] for row in restored_table(result)}
    assert "1 record damaged (checksum mismatch) and not used" in notes["users"]
    assert notes["total"] == ""


def test_snapshots_of_leaderboards_can_be_restored(harness: Harness) -> None:
    bucket = harness.bucket
    ranked: dict[Entity, str] = {"alice": "12.5", "bob": "3"}
    bucket.rank("acme", "users", LIFETIME, ranked)
    bucket.rank("acme", "total", LIFETIME, {None: "15.5"})
    harness.capture_boards()
    harness.lose()
    bucket.spend("acme", "users", LIFETIME, {"bob": "4"})
    harness.find_loss()
    harness.recover()
    assert usages(bucket, "acme", "users", LIFETIME) == {"alice": "12.5", "bob": "4"}
    assert usages(bucket, "acme", "total", LIFETIME) == {None: "15.5"}
    # Leaderboards contain neither the shape nor the expiry of a value.
    alice = stored(bucket, "usage.acme.users.lifetime.alice")
    assert alice.data.startswith(b'{"usage":"12.5","updated_at":"')
    assert alice.ttl is None
    found = contents(place_of(harness))
    assert found.boards == found.boards_of_the_counters
    listed = json.loads(stored(bucket, board_key("acme", "users", LIFETIME)).data)["entries"]
    assert listed == json.loads(board({"alice": "12.5", "bob": "4"}))["entries"]
