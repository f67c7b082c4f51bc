"""The NATS users of docs/operations.md have exactly the permissions that they need.

The tests start a server with the code block of that page.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import nats
import pytest
from anyio.from_thread import start_blocking_portal

from budget_recovery_dagster.domain import RecoveryState, Verdict
from budget_recovery_dagster.embedded import NatsServer
from budget_recovery_dagster.errors import BudgetRecoveryError
from budget_recovery_dagster.services.restore import Recovered
from tests.boards import board_key
from tests.documentation import block, code, rows
from tests.integration.commands import run
from tests.integration.confined_user import documented_permissions
from tests.integration.doctor_command import doctor
from tests.integration.recovery_harness import Harness, opened_harness
from tests.integration.recovery_runs import usages
from tests.integration.timeless_store import capture
from tests.nats_servers import Bucket, with_user

PAGE = "docs/operations.md"
BUCKET = "budget-usage"
LIFETIME = "lifetime"
NATS_URL, POSTGRES_URL = "BUDGET_RECOVERY_NATS_URL", "BUDGET_RECOVERY_POSTGRES_URL"


CONFIG = block(PAGE, "conf", "authorization")
PASSWORDS = dict(re.findall(r'user: (\w+), password: "([^"]+)"', CONFIG))


def allowed(name: str, what: str) -> list[str]:
    """Return the subjects that a user of the page may publish or subscribe to."""
    (of_user,) = re.findall(rf"user: {name}, .*?\n    \}} \}}", CONFIG, re.DOTALL)
    (listed,) = re.findall(rf"{what}: \{{ allow: \[(.*?)\]", of_user, re.DOTALL)
    return re.findall(r'"([^"]+)"', listed)


FULL = documented_permissions()
CAPTURING = allowed("budget_recovery_capture", "publish")
FAILING = {code(subject): cells for subject, _, *cells in rows(PAGE, "publish to", "for")}


def test_all_documented_forms_list_the_same_subjects() -> None:
    assert list(FAILING) == FULL
    nsc = block(PAGE, "sh", "nsc add user")
    assert re.findall(r"--allow-pub '(.+)'", nsc) == FULL
    inbox = allowed("budget_recovery", "subscribe")
    assert re.findall(r"--allow-sub '(.+)'", nsc) == inbox
    assert allowed("budget_recovery_capture", "subscribe") == inbox
    assert set(CAPTURING) < set(FULL)


def without(number: int) -> str:
    """Return the name of the user who lacks this subject."""
    return f"without_{number}"


def confined(name: str, publish: list[str], subscribe: str = "_INBOX_budget_recovery.>") -> str:
    permissions = {"publish": {"allow": publish}, "subscribe": {"allow": [subscribe]}}
    return json.dumps({"user": name, "password": "s3cret", "permissions": permissions})


@pytest.fixture(scope="module")
def guarded(server_dir: Path) -> Iterator[NatsServer]:
    """Start a server with the users of the page, and users who lack one permission each."""
    others = [
        *(
            confined(without(number), [each for each in FULL if each != denied])
            for number, denied in enumerate(FULL)
        ),
        confined("deaf", FULL, "_INBOX_of_another.>"),
    ]
    users, end = CONFIG.rsplit("]", 1)
    config = "\n".join([users, *others, "]", end])
    with NatsServer(server_dir / "least-privilege", config=config) as server:
        yield server


@dataclass(frozen=True)
class Guarded:
    """A harness that connects to the store as one of the users."""

    harness: Harness
    server: NatsServer
    monkeypatch: pytest.MonkeyPatch

    def url(self, user: str) -> str:
        return with_user(self.server.url, user, PASSWORDS.get(user, "s3cret"))

    def enter_as(self, user: str) -> None:
        self.monkeypatch.setenv(NATS_URL, self.url(user))


@pytest.fixture
def guarded_harness(
    guarded: NatsServer, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Guarded]:
    """Create a bucket with a tenant; connect as the documented user."""
    monkeypatch.setenv("BUDGET_RECOVERY_BUCKET", BUCKET)
    monkeypatch.setenv("BUDGET_RECOVERY_CONVERGENCE_TIMEOUT_SECONDS", "0")
    monkeypatch.setenv(POSTGRES_URL, database_url)
    gateway = with_user(guarded.url, "gateway", PASSWORDS["gateway"])
    monkeypatch.setenv(NATS_URL, gateway)
    with Bucket.connected(gateway, BUCKET) as bucket:
        bucket.create()
        spend(bucket)
        with opened_harness(bucket, database_url) as harness:
            entered = Guarded(harness, guarded, monkeypatch)
            entered.enter_as("budget_recovery")
            yield entered
        bucket.destroy()


def spend(bucket: Bucket) -> None:
    spent = {None: "9", "alice": "7.5"}
    bucket.spend("acme", "team", LIFETIME, spent)
    bucket.rank("acme", "team", LIFETIME, spent)


def test_the_documented_user_can_capture_check_preview_and_restore(
    guarded_harness: Guarded,
) -> None:
    harness = guarded_harness.harness
    assert harness.check().check.verdict is Verdict.FIRST_SEEN
    marker = f"__guard.{harness.plane.registry.claim().deployment_id}"
    first = harness.bucket.stored(marker)
    harness.capture()
    harness.capture_boards()
    checked = harness.check()
    assert (checked.check.verdict, checked.hint) == (Verdict.SAME, "")
    assert first is not None
    assert harness.bucket.stored(marker) != first

    harness.lose()
    harness.find_loss()
    harness.recover()
    guarded_harness.enter_as("gateway")
    assert usages(harness.bucket, "acme", "team", LIFETIME) == {None: "9", "alice": "7.5"}
    guarded_harness.enter_as("budget_recovery")
    rebuilt = harness.bucket.stored(board_key("acme", "team", LIFETIME))
    assert rebuilt is not None
    assert [each["usage"] for each in json.loads(rebuilt.data)["entries"]] == ["9", "7.5"]

    harness.lose()
    harness.find_loss()
    assert json.loads(run("preview", "--json"))["raised"] == 2
    document = json.loads(run("restore", "--reason", "a test", "--yes", "--json"))
    assert (document["raised"], document["incident"]["is_closed"]) == (2, True)
    assert doctor().ended("fail") == set()


def test_the_capture_user_can_capture_check_and_preview_but_not_restore(
    guarded_harness: Guarded,
) -> None:
    harness = guarded_harness.harness
    guarded_harness.enter_as("budget_recovery_capture")
    harness.check()
    harness.capture()
    checked = harness.check()
    assert (checked.check.verdict, checked.hint) == (Verdict.SAME, "")
    assert doctor().ended("fail") == {
        "permission_read_leaderboards",
        "permission_raise_counters",
        "permission_rebuild_leaderboards",
    }
    harness.lose()
    harness.find_loss()
    assert json.loads(run("preview", "--json"))["raised"] == 2
    # The restore is repeated until a user may write: a definite refusal uses no attempt.
    for _ in range(4):
        assert f"$KV.{BUCKET}.usage.acme" in trouble_in_restore(harness)
    recovery = harness.plane.incidents.recovery()
    assert recovery.state is RecoveryState.RECOVERING
    assert recovery.incident is not None
    assert recovery.incident.attempts == 0
    guarded_harness.enter_as("budget_recovery")
    document = json.loads(run("restore", "--reason", "a test", "--yes", "--json"))
    assert (document["raised"], document["incident"]["is_closed"]) == (2, True)


def trouble_in_check(harness: Harness) -> str:
    try:
        checked = harness.check()
    except BudgetRecoveryError as error:
        return error.message
    if checked.check.verdict is Verdict.UNKNOWN:
        return checked.check.reason
    # A good check reports why the marker was not renewed.
    return f"warns: {checked.check.reason}" if checked.hint else ""


def trouble_in_capture(harness: Harness) -> str:
    try:
        captured = capture(harness.plane, harness.clock)
    except BudgetRecoveryError as error:
        return error.message
    return " ".join([*(each.reason for each in captured.failed), str(captured.stopped_by or "")])


def trouble_in_restore(harness: Harness) -> str:
    harness.messages.clear()
    try:
        result = harness.run()
    except BudgetRecoveryError as error:
        return " ".join([*harness.messages, error.message])
    return "" if isinstance(result, Recovered) else " ".join([*harness.messages, str(result)])


@pytest.mark.parametrize("number", range(len(FULL)), ids=FULL)
def test_a_missing_subject_is_reported_by_the_documented_operations(
    guarded_harness: Guarded, number: int
) -> None:
    harness, denied = guarded_harness.harness, FULL[number]
    harness.check()
    harness.capture()
    guarded_harness.enter_as(without(number))
    trouble = [trouble_in_check(harness), trouble_in_capture(harness).strip()]
    guarded_harness.enter_as("budget_recovery")
    harness.lose()
    harness.find_loss()
    guarded_harness.enter_as(without(number))
    trouble.append(trouble_in_restore(harness))

    named = re.escape(denied).replace(r"\*", r"[^.\s]+").replace(">", r"\S+")
    for expected, problem in zip(FAILING[denied], trouble, strict=True):
        if not expected:
            assert problem == ""
        else:
            assert re.search(named, problem), problem
            assert problem.startswith("warns: ") is (expected == "warns")


def test_a_user_without_the_inbox_gets_a_clear_error(guarded_harness: Guarded) -> None:
    harness = guarded_harness.harness
    guarded_harness.enter_as("deaf")
    for trouble in (trouble_in_check, trouble_in_capture):
        assert "_INBOX_budget_recovery.>" in trouble(harness)


FOREIGN = [
    *(f"$KV.{BUCKET}.{key}" for key in ("blocked.a.b.lifetime.=", "ratelimit.a", "other")),
    "$KV.other.usage.a.b.lifetime.=",
    "anything",
    *(
        f"$JS.API.{call}"
        for call in (
            "INFO",
            "STREAM.NAMES",
            "STREAM.LIST",
            f"STREAM.PURGE.KV_{BUCKET}",
            f"STREAM.DELETE.KV_{BUCKET}",
            f"STREAM.UPDATE.KV_{BUCKET}",
            f"STREAM.CREATE.KV_{BUCKET}",
            f"STREAM.SNAPSHOT.KV_{BUCKET}",
            f"STREAM.RESTORE.KV_{BUCKET}",
            f"STREAM.MSG.DELETE.KV_{BUCKET}",
            f"STREAM.LEADER.STEPDOWN.KV_{BUCKET}",
            "STREAM.INFO.KV_other",
            "STREAM.MSG.GET.KV_other",
            f"DIRECT.GET.KV_{BUCKET}",
            f"CONSUMER.CREATE.KV_{BUCKET}",
            f"CONSUMER.CREATE.KV_{BUCKET}.c",
            f"CONSUMER.CREATE.KV_{BUCKET}.c.$KV.{BUCKET}.>",
            f"CONSUMER.CREATE.KV_{BUCKET}.c.$KV.{BUCKET}.blocked.>",
            f"CONSUMER.DURABLE.CREATE.KV_{BUCKET}.c",
            f"CONSUMER.LIST.KV_{BUCKET}",
            "CONSUMER.MSG.NEXT.KV_other.c",
        )
    ),
]


def refused_publishes(url: str, subjects: list[str]) -> set[str]:
    """Publish to each subject; return those that the server denies, in lower case."""
    refused: set[str] = set()

    async def on_error(error: Exception) -> None:
        refused.update(re.findall(r'for publish to "([^"]+)"', str(error), re.IGNORECASE))

    async def publish() -> None:
        client = await nats.connect(url, error_cb=on_error, inbox_prefix="_INBOX_budget_recovery")
        for subject in subjects:
            await client.publish(subject, b"")
        # The driver's first ping may precede buffered messages.
        await client.flush()
        await client.flush()
        await client.close()

    with start_blocking_portal() as portal:
        portal.call(publish)
    return refused


@pytest.mark.parametrize("user", ["budget_recovery", "budget_recovery_capture"])
def test_the_documented_users_can_publish_to_no_other_subject(
    guarded_harness: Guarded, user: str
) -> None:
    bucket = guarded_harness.harness.bucket
    bucket.put("blocked.a.b.lifetime.=", b"{}")
    before = bucket.info()
    writing = [each for each in FULL if each not in CAPTURING] if "capture" in user else []
    own = [each.replace("*", "c").replace(">", "x.x") for each in writing]
    subjects = [*FOREIGN, *own]
    refused = refused_publishes(guarded_harness.url(user), subjects)
    assert refused == {subject.lower() for subject in subjects}
    after = bucket.info()
    assert (after.created, after.config, after.state) == (
        before.created,
        before.config,
        before.state,
    )
