"""What an incident cost, through jobs and commands on real servers, worked out by hand."""

from collections.abc import Callable, Mapping
from typing import Any

import dagster as dg
import psycopg
import pytest

from budget_recovery_dagster.domain import Hour
from tests.integration.commands import answer, page, run
from tests.integration.manual_runs import run_manual_restore
from tests.integration.recovery_runs import (
    check,
    outcome,
    requested,
    restored_table,
    run_restore,
    state,
    supervise,
    usages,
    verdict,
)
from tests.integration.restore_worker import killed
from tests.integration.snapshot_job import run_job
from tests.nats_servers import Bucket
from tests.postgres_servers import expire_leases

LIFETIME = "lifetime"
Rows = dict[tuple[str, str], tuple[str, str | None, str]]
"""Restored, counted and bound by tenant and budget."""


@pytest.fixture
def captured(configured: Bucket, instance: dg.DagsterInstance, current_hour: Hour) -> Bucket:
    """Return a store with a snapshot, in which three budgets are counted in different ways.

    The first has an aggregate and entities, the second only entities, the third only an aggregate.
    """
    configured.spend("acme", "team", LIFETIME, {None: "1000", "alice": "600", "bob": "400"})
    configured.spend("acme", "users", LIFETIME, {"alice": "600", "bob": "400", "carol": "10"})
    configured.spend("globex", "team", LIFETIME, {None: "5"})
    assert run_job(instance, current_hour).success
    assert verdict(check(instance)) == "same"
    return configured


def spend_after_the_loss(bucket: Bucket) -> None:
    """Count $318 of acme's, of which $7 are carol's and newcomer's, and more than all of globex."""
    bucket.spend("acme", "team", LIFETIME, {None: "318", "alice": "300", "bob": "11"})
    users: dict[str | None, str] = {"alice": "300", "bob": "11", "carol": "3", "newcomer": "4"}
    bucket.spend("acme", "users", LIFETIME, users)
    bucket.spend("globex", "team", LIFETIME, {None: "9.5"})


WORKED_OUT: Mapping[tuple[str, str], tuple[str, str]] = {
    ("acme", "team"): ("682", "318"),
    # 600 - 300, 400 - 11 and 10 - 3 are restored; the newcomer's 4 are in the counter.
    ("acme", "users"): ("696", "314"),
    # The store has 9.5, without the 5 of the snapshot.
    ("globex", "team"): ("0", "5"),
}


def worked_out(bound: str) -> Rows:
    return {where: (*amounts, bound) for where, amounts in WORKED_OUT.items()}


def rows(database: psycopg.Connection) -> Rows:
    """Return the amounts of the newest incident, as the table has them at last."""
    found = database.execute(
        "select distinct on (tenant, budget_id) tenant, budget_id, usage_restored::text,"
        " usage_counted::text, counted_bound from budget_recovery.restore_audit"
        " where counted_bound is not null"
        " order by tenant, budget_id, at desc"
    ).fetchall()
    return {(tenant, budget): tuple(amounts) for tenant, budget, *amounts in found}


def reported(document: Mapping[str, Any]) -> Rows:
    """Return the amounts of an incident in a JSON document."""
    amounts = document["amounts"]
    assert amounts["windows_unknown"] == 0
    assert amounts["windows_restored"] == len(amounts["largest_restored"])
    assert amounts["windows_counted"] == len(amounts["largest_counted"])
    return {
        (each["tenant"], each["budget"]): (
            each["restored"],
            each["counted_after_loss"],
            each["bound"],
        )
        for each in (*amounts["largest_restored"], *amounts["largest_counted"])
    }


def recreate(bucket: Bucket) -> None:
    bucket.destroy()
    bucket.create()


def restore_a_backup(bucket: Bucket) -> None:
    backup = bucket.back_up()
    bucket.destroy()
    bucket.restore(backup)


def purge(bucket: Bucket) -> None:
    bucket.purge("")


def test_a_wipe_is_reported_in_money_everywhere(
    captured: Bucket, database: psycopg.Connection, instance: dg.DagsterInstance
) -> None:
    recreate(captured)
    spend_after_the_loss(captured)
    (request,) = requested(check(instance))
    result = run_restore(instance, request.tags)

    assert outcome(instance, result) == "restored"
    assert usages(captured, "acme", "team", LIFETIME) == {
        None: "1000",
        "alice": "600",
        "bob": "400",
    }
    assert usages(captured, "globex", "team", LIFETIME) == {None: "9.5"}
    assert rows(database) == worked_out("exact")
    incident = answer("status", code=0)["last_closed_incident"]
    assert incident["began_empty"]
    assert reported(incident) == worked_out("exact")
    largest = [each["budget"] for each in incident["amounts"]["largest_counted"]]
    assert largest == ["team", "users", "team"]
    restored = "acme, users lifetime: 696; acme, team lifetime: 682"
    counted = "acme, team lifetime: 318; acme, users lifetime: 314; globex, team lifetime: 5"
    shown = " ".join(" ".join(page("status")).split())
    assert (
        f"Restored: {restored}. Counted after the loss and not added, because the higher value"
        f" counts: {counted}. Usage between the newest snapshot" in shown
    )
    table = {(row["tenant"], row["budget"]): row for row in restored_table(result)}
    assert {where: row["counted_after_loss"] for where, row in table.items()} == {
        where: amounts[1] for where, amounts in WORKED_OUT.items()
    }
    (event,) = [each for each in result.all_events if each.is_step_materialization]
    metadata = event.step_materialization_data.materialization.metadata
    assert metadata["restored"].value == restored
    assert metadata["counted_after_loss_and_not_added"].value == counted
    assert str(metadata["not_covered"].value).startswith("Usage between the newest snapshot")


@pytest.mark.parametrize("lose", [purge, restore_a_backup])
def test_a_store_that_did_not_begin_empty_says_at_most(
    captured: Bucket,
    database: psycopg.Connection,
    instance: dg.DagsterInstance,
    lose: Callable[[Bucket], None],
) -> None:
    lose(captured)
    # After the backup, these overwrite usage from before the loss: a backup has them as well.
    spend_after_the_loss(captured)
    (request,) = requested(check(instance))
    assert run_restore(instance, request.tags).success
    assert rows(database) == worked_out("at_most")
    incident = answer("status")["last_closed_incident"]
    assert not incident["began_empty"]
    assert (
        "not added, because the higher value counts: acme, team lifetime: at most 318; "
        in (incident["ended"]["detail"])
    )


def test_a_store_that_was_gone_when_the_loss_was_found_began_empty(
    captured: Bucket, database: psycopg.Connection, instance: dg.DagsterInstance
) -> None:
    captured.destroy()
    (request,) = requested(check(instance))
    assert outcome(instance, run_restore(instance, request.tags)) == "waiting"
    assert not answer("status", code=1)["incident"]["began_empty"]
    captured.create()
    spend_after_the_loss(captured)
    assert outcome(instance, run_restore(instance, request.tags)) == "restored"
    assert rows(database) == worked_out("exact")


def test_a_backup_that_is_restored_after_the_loss_was_found_did_not_begin_empty(
    captured: Bucket, database: psycopg.Connection, instance: dg.DagsterInstance
) -> None:
    backup = captured.back_up()
    captured.destroy()
    (request,) = requested(check(instance))
    captured.restore(backup)
    spend_after_the_loss(captured)
    assert outcome(instance, run_restore(instance, request.tags)) == "restored"
    assert rows(database) == worked_out("at_most")


def test_an_unreadable_counter_makes_it_at_least(
    captured: Bucket, database: psycopg.Connection, instance: dg.DagsterInstance
) -> None:
    recreate(captured)
    spend_after_the_loss(captured)
    captured.put("usage.acme.users.lifetime.alice", b"not a number")
    captured.put("usage.globex.team.lifetime.=", b"not a number")
    (request,) = requested(check(instance))
    assert run_restore(instance, request.tags).success
    assert rows(database) == {
        ("acme", "team"): ("682", "318", "exact"),
        ("acme", "users"): ("396", "14", "at_least"),
        ("globex", "team"): ("0", None, "unknown"),
    }
    incident = answer("status")["last_closed_incident"]
    assert incident["amounts"]["windows_unknown"] == 1
    assert (
        "acme, team lifetime: 318; acme, users lifetime: at least 14; unknown in 1 window."
        in incident["ended"]["detail"]
    )


def test_a_worker_killed_while_it_writes_leaves_what_it_read(
    configured: Bucket,
    database: psycopg.Connection,
    instance: dg.DagsterInstance,
    current_hour: Hour,
) -> None:
    # More than are in flight at once, so that the first are written before the last are sent.
    values = {f"usage.acme.users.lifetime.user{n:04}": b'{"usage":"1.5"}' for n in range(2_500)}
    configured.put_many(values)
    configured.spend("globex", "team", LIFETIME, {None: "5"})
    assert run_job(instance, current_hour).success
    assert verdict(check(instance)) == "same"
    recreate(configured)
    # 100 entities spend $0.50 each before the first attempt: $50.
    spent = dict.fromkeys(list(values)[:100], b'{"usage":"0.5"}')
    configured.put_many(spent)
    configured.spend("globex", "team", LIFETIME, {None: "2"})
    check(instance)
    killed("the first", 2_300)
    expire_leases(database)
    is_open = answer("status", code=1)["incident"]
    assert reported(is_open) == {("acme", "users"): ("3700", "50", "at_least")}
    assert "Counted after the loss and not added, because the higher value counts: acme, " in (
        " ".join(" ".join(page("status", code=1)).split())
    )
    # The last entities were not written yet: $0.25 of one of them counts, too.
    last = "usage.acme.users.lifetime.user2499"
    assert configured.stored(last) is None
    configured.put(last, b'{"usage":"0.25"}')
    # One that is restored by now spends $1 more, on top of that: it is in the counter.
    configured.put("usage.acme.users.lifetime.user0000", b'{"usage":"2.5"}')
    database.execute("update budget_recovery.incident set next_attempt_at = null")
    assert outcome(instance, run_restore(instance)) == "restored"

    assert usages(configured, "acme", "users", LIFETIME)["user0000"] == "2.5"
    assert rows(database) == {
        # 2,500 times 1.5 are 3,750, less what the counters had.
        ("acme", "users"): ("3699.75", "50.25", "at_least"),
        ("globex", "team"): ("3", "2", "exact"),
    }


def test_manual_restores_of_a_held_incident_add_up_in_it(
    captured: Bucket, database: psycopg.Connection, instance: dg.DagsterInstance
) -> None:
    recreate(captured)
    check(instance)
    run("hold", "--reason", "the gateway is being moved")
    spend_after_the_loss(captured)
    options = ("--tenant", "acme", "--budget", "team", "--reason", "acme called", "--yes")
    document = answer("restore", *options)
    assert not document["incident"]["is_closed"]
    assert reported(document["incident"]) == {("acme", "team"): ("682", "318", "exact")}
    [window] = document["tenants"][0]["windows"]
    assert (window["restored"], window["counted_after_loss"], window["bound"]) == (
        "682",
        "318",
        "exact",
    )
    # The team goes on above its restored usage; users go on from what they had.
    captured.spend("acme", "team", LIFETIME, {None: "1020"})
    captured.spend("acme", "users", LIFETIME, {"bob": "31"})

    result = run_manual_restore(instance, mode="apply", reason="the move is over")

    assert result.success
    assert state(database) == "healthy"
    assert rows(database) == {
        **worked_out("exact"),
        # Of bob's users counter, 31 are replaced by now.
        ("acme", "users"): ("676", "334", "exact"),
    }
    [event] = result.asset_materializations_for_node("manual_restore")
    assert event.metadata["counted_after_loss_and_not_added"].value == (
        "acme, users lifetime: 334; acme, team lifetime: 318; globex, team lifetime: 5"
    )
    assert "Restored: acme, team lifetime: 682; acme, users lifetime: 676. Counted after" in str(
        event.metadata["incident"].value
    )


def test_a_restore_of_an_intact_store_has_no_amounts(
    captured: Bucket, database: psycopg.Connection, instance: dg.DagsterInstance
) -> None:
    captured.spend("acme", "team", LIFETIME, {None: "10"})
    assert run_manual_restore(instance, mode="apply", reason="a test").success
    [(restored, counted, bound)] = database.execute(
        "select usage_restored, usage_counted, counted_bound from budget_recovery.restore_audit"
    ).fetchall()
    assert (restored, counted, bound) == (None, None, None)
    assert supervise(instance) is not None
