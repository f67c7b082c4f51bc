"""The scenes: events of a store, and the recorded documents."""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from tests.scenes.dagster_records import definitions_record
from tests.scenes.gateway import Entity
from tests.scenes.stage import Stage

LIFETIME = "lifetime"
CLOSED_DAY = "2020-01-01"
ODD = "Åcme & Söhne"
RESOLVE = ("resolve", "--keep-snapshots", "--yes", "--reason")
KEEP = {"usage_in_snapshots": "keep_snapshots"}
COMMANDS = (
    *("demo", "dev", "discard-future", "doctor", "hold", "migrate", "preview", "record-reset"),
    *("release", "resolve", "restore", "snapshots", "status", "wipe"),
)


@dataclass(frozen=True)
class Scene:
    """A scene, and its settings that differ from the defaults."""

    play: Callable[[Stage], None]
    settings: Mapping[str, str] = field(default_factory=dict)


def definitions(on: Stage) -> None:
    """The definitions of Dagster and the help of the command, without servers."""
    for name, content in definitions_record(on.definitions).items():
        on.record_fixed(name, content)
    with ThreadPoolExecutor(3) as pool:
        on.record_fixed("help", on.command("--help"))
        pages = pool.map(lambda command: on.command(command, "--help"), COMMANDS)
        for command, page in zip(COMMANDS, pages, strict=True):
            on.record_fixed(f"help of {command}", page)


def snapshots(on: Stage) -> None:
    """From an empty database to two snapshots; the second one finds usage missing."""
    on.run("status without a schema", "status", "--json")
    on.run("migrate", "migrate")
    on.run("migrate again", "migrate")
    on.run_both("status of nothing", "status")
    on.run_both("snapshots of nothing", "snapshots")
    on.run("preview of nothing", "preview", "--json")
    on.check("first check")
    on.schedule_tick("schedule", "hourly_snapshot_schedule")
    _spend(on)
    on.capture("first capture")
    on.tables("tables after the first capture")
    on.files("usage tables")
    on.store("store after the first capture")
    on.check("check")
    on.tick("supervisor", "restore_supervisor_sensor")
    on.run_both("healthy status", "status")
    on.run_both("doctor", "doctor")
    on.gateway.purge(on.gateway.counter("acme", "team", LIFETIME, "user:bob@example.com"))
    on.gateway.spend("acme", "team", on.month, {"user:alice@example.com": "9"})
    on.gateway.spend("globex", "total", on.month, {None: "6.5"})
    on.capture("second capture")
    on.job("recovery points", "recovery_points_job")
    on.tables("tables after the second capture")
    on.run_both("status after a drop", "status")
    on.run_both("snapshots", "snapshots")
    on.run_both("snapshots of a tenant", "snapshots", "--tenant", "acme")


def recovery(on: Stage) -> None:
    """A store is lost; its restore is held, released and completed."""
    _captured(on)
    on.gateway.recreate()
    on.gateway.spend("acme", "team", LIFETIME, {"user:alice@example.com": "1", "user:eve": "3"})
    on.check("check that finds the loss")
    # Before the next launch, which is due after 30 seconds.
    on.run_both("status while recovering", "status")
    on.tables("tables of an open incident")
    on.schedule_tick("schedule while recovering", "hourly_snapshot_schedule")
    on.job("paused capture", "hourly_snapshot_job")
    on.run_both("preview of the recovery", "preview")
    on.run("hold", "hold", "--reason", "the disk is looked at")
    on.run("hold again", "hold", "--reason", "another reason", "--json")
    on.run_both("status on hold", "status")
    on.check("check on hold")
    on.tick("supervisor on hold", "restore_supervisor_sensor")
    on.job("restore on hold", "restore_job")
    on.run("release", "release")
    on.run("release again", "release", "--json")
    on.tick("supervisor after the release", "restore_supervisor_sensor")
    on.restore("restore")
    on.store("store after the restore")
    on.tables("tables after the restore")
    on.run_both("status after the restore", "status")
    on.check("check after the restore")
    on.job("nothing to restore", "restore_job")
    on.run("hold without an incident", "hold", "--reason", "none", "--json")
    on.run("resolve without an incident", *RESOLVE, "none", "--json")
    on.capture("capture after the restore")


def missing_store(on: Stage) -> None:
    """A store is missing; its restore waits until it exists again."""
    _captured(on)
    on.gateway.destroy()
    on.run("status before the check", "status", "--json")
    on.check("check that finds the loss")
    on.restore("restore that waits")
    # The backoff grows to minutes, so that it lasts until the status is recorded.
    on.job("restore that waits again", "restore_job")
    on.job("restore that waits once more", "restore_job")
    on.run_both("status while waiting", "status")
    on.run_both("doctor without a bucket", "doctor")
    on.run("preview without a bucket", "preview", "--json")
    on.gateway.create()
    on.job("hold by a job", "hold_restore_job", {"reason": "a test of the job"})
    on.job("release by a job", "release_restore_job")
    on.tick("supervisor", "restore_supervisor_sensor")
    on.restore("restore")
    on.tables("tables after the restore")
    on.run_both("status after the restore", "status")


def manual_restores(on: Stage) -> None:
    """Manual previews and restores of a healthy store, and a reset."""
    _captured(on)
    on.gateway.spend("acme", "team", LIFETIME, {"user:alice@example.com": "33.25"})
    on.capture("second capture")
    on.gateway.purge(on.gateway.counter("acme", "team", LIFETIME, "user:alice@example.com"))
    on.gateway.spend("globex", "total", on.month, {None: "2"})
    on.run_both("preview of all", "preview")
    on.run_both("preview of a tenant", "preview", "--tenant", "acme")
    on.run_both("preview of a budget", "preview", "--tenant", "acme", "--budget", "team")
    first = ("--snapshot", on.snapshot(1))
    on.run_both("preview of a snapshot", "preview", "--tenant", "acme", *first)
    on.run_both("preview of an odd name", "preview", "--tenant", ODD)
    on.job("preview by the job", "manual_restore_job", {})
    on.job("preview of a tenant by the job", "manual_restore_job", {"tenant": "acme"})
    on.gateway.spend("acme", "team", on.month, {"user:carol": "4"})
    globex = ("--tenant", "globex", "--reason", "globex called", "--yes")
    on.run("restore of a tenant", "restore", *globex, "--json")
    on.run("restore of nothing", "restore", *globex)
    chosen = {"tenant": "acme", "mode": "apply", "reason": "acme called"}
    on.job("restore by the job", "manual_restore_job", chosen)
    on.store("store after the restores")
    on.gateway.spend("acme", "team", LIFETIME, {"user:alice@example.com": "0"})
    whose = ("--tenant", "acme", "--budget", "team", "--reason", "a new contract")
    entity = ("--entity", "user:alice@example.com", "--window", LIFETIME)
    on.run("reset", "record-reset", *whose, *entity)
    on.run("reset, json", "record-reset", *whose, "--aggregate", "--json")
    on.job(
        "reset by the job",
        "record_reset_job",
        {"tenant": "globex", "budget": "total", "reason": "a new year"},
    )
    on.run_both("preview after the reset", "preview", "--tenant", "acme")
    on.run_both("preview despite resets", "preview", "--tenant", "acme", "--despite-resets")
    on.tables("tables")


def failed_restore(on: Stage) -> None:
    """A full bucket refuses writes: the restore is given up and completed manually."""
    _captured(on)
    on.gateway.recreate()
    on.check("check that finds the loss")
    on.gateway.limit(64)
    on.restore("failed restore")
    on.run_both("status after the failure", "status")
    on.tables("tables after the failure")
    on.run("doctor with a full bucket", "doctor")
    full = ("--reason", "a try", "--yes")
    on.run("restore into a full bucket, json", "restore", *full, "--json")
    on.run("restore into a full bucket, text", "restore", *full)
    on.gateway.limit(-1)
    on.check("check of a failed store")
    on.run("preview", "preview")
    on.run("restore of a tenant", "restore", "--tenant", "acme", *full)
    on.run("restore of all", "restore", "--reason", "the disk has room again", "--yes", "--json")
    on.run_both("status after the restore", "status")
    on.tables("tables after the restore")
    on.check("check after the restore")


def no_snapshots(on: Stage) -> None:
    """A store is lost before anything was captured; the incident is resolved."""
    on.command("migrate")
    on.gateway.spend("acme", "team", LIFETIME, {None: "80"})
    on.check("first check")
    on.gateway.recreate()
    on.check("check that finds the loss")
    on.restore("failed restore")
    on.run_both("status after the failure", "status")
    on.run("resolve without a reason", *RESOLVE, " ", "--json")
    on.run("resolve without a person", "resolve", "--reason", "a new store")
    on.run("resolve", *RESOLVE, "a new store")
    on.run_both("status after it was resolved", "status")
    on.tables("tables")


def resolved(on: Stage) -> None:
    """Two incidents are resolved although snapshots contain more: by command and by job."""
    _captured(on)
    on.gateway.recreate()
    on.check("first loss")
    on.run("resolve", *RESOLVE, "emptied on purpose", "--json")
    on.run_both("status after it was resolved", "status")
    on.gateway.recreate()
    on.check("second loss")
    on.job("refused by the job", "resolve_incident_job", {"reason": "", **KEEP})
    on.job("resolved by the job", "resolve_incident_job", {"reason": "emptied again", **KEEP})
    on.job("nothing to resolve", "resolve_incident_job", {"reason": "again", **KEEP})
    on.tables("tables")


def refusals(on: Stage) -> None:
    """Refused commands and their errors."""
    _captured(on)
    commands = {
        f"{command} with {name}": (command, changed)
        for name, changed in _wrong_settings().items()
        for command in ("status", "preview", "doctor")
    }
    # Some wait long for a server that does not respond.
    with ThreadPoolExecutor(4) as pool:
        ended = pool.map(lambda each: on.command(each[0], "--json", **each[1]), commands.values())
        for name, record in zip(commands, ended, strict=True):
            on.record(name, record)
    for name, arguments in {
        "unknown command": ("restor",),
        "unknown option": ("preview", "--tennant", "acme"),
        "unknown tenant": ("preview", "--tenant", "acmee"),
        "unknown tenant of snapshots": ("snapshots", "--tenant", "acmee"),
        "unknown budget": ("preview", "--tenant", "acme", "--budget", "teem"),
        "budget without a tenant": ("preview", "--budget", "team"),
        "no time": ("preview", "--snapshot", "yesterday"),
        "unknown snapshot": ("preview", "--snapshot", "2020-01-01"),
        "empty reason": ("restore", "--reason", " ", "--yes"),
        "reset of an unknown tenant": (
            *("record-reset", "--tenant", "acmee", "--budget", "team", "--reason", "none"),
        ),
        "reset to come": (
            *("record-reset", "--tenant", "acme", "--budget", "team", "--reason", "none"),
            *("--at", "2999-01-01T00:00"),
        ),
        "reset of an unknown window": (
            *("record-reset", "--tenant", "acme", "--budget", "team", "--reason", "none"),
            *("--window", "2020-Q9"),
        ),
        "release without an incident": ("release",),
    }.items():
        # The sentence is also among the errors.
        on.run(name, *arguments, "--json")
    on.run("no reason", "restore", "--yes")
    on.run("no confirmation", "restore", "--reason", "none")
    on.run("json without yes", "restore", "--reason", "none", "--json")
    on.run("wipe of a store that is named", "wipe", "--yes")
    for job, config in {
        "manual_restore_job": {"tenant": "acmee"},
        "record_reset_job": {"tenant": "acme", "budget": "teem", "reason": "none"},
        "hold_restore_job": {"reason": "none"},
    }.items():
        on.job(f"refusal of {job}", job, config)
    on.job("apply without a reason", "manual_restore_job", {"mode": "apply"})


def leaderboards(on: Stage) -> None:
    """Snapshots of leaderboards, and a restore that rebuilds them."""
    on.command("migrate")
    many: dict[Entity, str] = {f"user:{number:03}": f"{1000 - number}.5" for number in range(500)}
    on.gateway.rank("acme", "team", on.month, {"user:alice@example.com": "12.34", "user:bob": "3"})
    on.gateway.rank("acme", "total", LIFETIME, {None: "99.5"})
    on.gateway.rank("globex", "full", on.month, many)
    on.gateway.spend("acme", "team", on.month, {"user:alice@example.com": "12.34", "user:bob": "3"})
    on.gateway.spend("acme", "total", LIFETIME, {None: "99.5"})
    on.capture("capture")
    on.run_both("status", "status")
    on.check("check")
    on.gateway.recreate()
    on.gateway.spend("acme", "team", on.month, {"user:eve": "5"})
    on.check("check that finds the loss")
    on.run_both("preview of a tenant", "preview", "--tenant", "acme")
    on.restore("restore")
    on.run_both("status after the restore", "status")
    on.tables("tables")
    store = on.gateway.contents()
    on.record("store", {key: each for key, each in store.items() if ".globex." not in key})


def _wrong_settings() -> dict[str, dict[str, str | None]]:
    return {
        "a wrong retention": {"RETENTION_DAYS": "0"},
        "a wrong bucket": {"BUCKET": "a.b"},
        "another bucket": {"BUCKET": "another"},
        "a wrong source": {"CAPTURE_SOURCE": "boards"},
        "no database": {"POSTGRES_URL": None},
        "no store": {"NATS_URL": None},
        "a database that does not answer": {"POSTGRES_URL": "postgresql://x@127.0.0.1:9/x"},
        "a store that does not answer": {"NATS_URL": "nats://127.0.0.1:9"},
    }


def _captured(on: Stage) -> None:
    """Capture and check a store with several tenants."""
    on.command("migrate")
    _spend(on)
    with on.database() as connection:
        connection.execute(
            "insert into budget_recovery.budget"
            " (tenant, budget_id, period, limit_amount, split_by, enforcement) values"
            " ('acme', 'team', 'lifetime', 20, 'user', 'enforce'),"
            " ('globex', 'total', 'month', 5, 'nothing', 'audit')"
        )
    on.capture("capture")
    on.check("check after the capture")


def _spend(on: Stage) -> None:
    """Write counters of three tenants, some of them unusual or unreadable."""
    gateway = on.gateway
    gateway.spend(
        *("acme", "team", LIFETIME),
        {"user:alice@example.com": "30.000000000000000001", "user:bob@example.com": "12.5"},
    )
    gateway.spend("acme", "team", on.month, {"user:alice@example.com": "10", None: "10"})
    gateway.spend("acme", "team", on.day, {"user:alice@example.com": "2.25"})
    gateway.spend("acme", "team", CLOSED_DAY, {"user:alice@example.com": "7"})
    gateway.spend("acme", "kept", LIFETIME, {None: "1"}, ttl="2592000")
    gateway.put(gateway.counter("acme", "bare", on.week, "model:a"), "4.5")
    gateway.put(gateway.counter("acme", "bare", on.week, "model:b"), '{"usage": 5, "note": "x"}')
    gateway.put(gateway.counter("acme", "bare", on.week, "model:c"), '{"usage": "much"}')
    gateway.put(gateway.counter("acme", "bare", on.week, "model:d"), "NaN")
    gateway.put("usage.acme.no_counter", "1")
    gateway.spend("globex", "total", on.month, {None: "5"})
    gateway.spend(ODD, "a.b *", on.quarter, {"line\nbreak \x1b[31m": "0.000001"})
    gateway.spend(ODD, "a.b *", on.quarter, {"=": "8", "user:ü": "99999999999999999999"})
    gateway.put("blocked.acme.team.lifetime.=", "{}")
    gateway.put("ratelimit.acme", "1")


SCENES: Mapping[str, Scene] = {
    "definitions": Scene(definitions),
    "snapshots": Scene(snapshots),
    "recovery": Scene(recovery),
    "missing_store": Scene(missing_store),
    "manual_restores": Scene(manual_restores),
    "failed_restore": Scene(failed_restore),
    "no_snapshots": Scene(no_snapshots),
    "resolved": Scene(resolved),
    "refusals": Scene(refusals),
    "leaderboards": Scene(leaderboards, {"CAPTURE_SOURCE": "leaderboards"}),
}
