"""``budget-recovery doctor`` on who is let in to NATS, and to what."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from budget_recovery_dagster.sandbox.nats_server import NatsServer
from tests.contract.nats_credentials import Operator
from tests.free_ports import unused_port
from tests.integration.confined_user import documented_permissions
from tests.integration.doctor_command import (
    CONNECTION,
    NATS_URL,
    doctor,
    page,
    require_unseen,
    untouched,
)
from tests.nats_servers import PASSWORD, Bucket, users, with_user

BUCKET = "budget-usage"
PERMISSIONS = documented_permissions()
ASK = f"$JS.API.STREAM.INFO.KV_{BUCKET}"
# Without any of these no reading can be tried.
FOR_READING = (ASK, ".usage.>", "MSG.NEXT", "CONSUMER.DELETE")


def user(
    name: str, publish: list[str], subscribe: str = "_INBOX_budget_recovery.>"
) -> dict[str, object]:
    permissions = {"publish": publish, "subscribe": [subscribe]}
    return {"user": name, "password": PASSWORD, "permissions": permissions}


@pytest.fixture(scope="module")
def guarded(server_dir: Path) -> Iterator[NatsServer]:
    """A server with a user for each permission that lacks only this one."""
    config = users(
        {"user": "gateway", "password": PASSWORD},
        user("recovery", PERMISSIONS),
        user("deaf", PERMISSIONS, "_INBOX_of_another.>"),
        *(
            user(f"without-{number}", [each for each in PERMISSIONS if each != denied])
            for number, denied in enumerate(PERMISSIONS)
        ),
    )
    with NatsServer(server_dir / "doctor", config=config) as server:
        yield server


@pytest.fixture
def guarded_bucket(
    guarded: NatsServer, configured: Bucket, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Bucket]:
    """A bucket on that server, with a counter; the settings name its recovery."""
    with Bucket.connected(with_user(guarded.url, "gateway", PASSWORD), BUCKET) as bucket:
        bucket.create()
        bucket.spend("acme", "total", "lifetime", {None: "80"})
        monkeypatch.setenv("BUDGET_RECOVERY_BUCKET", BUCKET)
        monkeypatch.setenv(NATS_URL, with_user(guarded.url, "recovery", PASSWORD))
        yield bucket
        bucket.destroy()


def test_it_needs_no_more_permissions_than_the_readme_lists(guarded_bucket: Bucket) -> None:
    with untouched(guarded_bucket):
        told = doctor()
    assert told.wrong == set()
    assert told["bucket", "a reading"]["state"] == "ok"


@pytest.mark.parametrize("number", range(len(PERMISSIONS)), ids=PERMISSIONS)
def test_each_missing_permission_is_named(
    guarded: NatsServer, guarded_bucket: Bucket, number: int
) -> None:
    denied = PERMISSIONS[number]
    with untouched(guarded_bucket):
        told = doctor(**{NATS_URL: with_user(guarded.url, f"without-{number}", PASSWORD)})
    assert told.exit_code == 1
    ((topic, name),) = told.wrong
    assert topic == "permissions"
    assert told[topic, name]["found"] == f"The NATS user may not publish to {denied}"
    assert "grant it" in told[topic, name]["to_do"]
    can_read = told["bucket", "a reading"]["state"] == "ok"
    is_for_reading = denied == ASK or (
        "API" in denied and any(part in denied for part in FOR_READING[1:])
    )
    assert can_read is not is_for_reading
    assert told["bucket", "kind"]["state"] == ("not_looked_at" if denied == ASK else "ok")


def test_a_user_who_may_not_receive_answers_is_told_so(
    guarded: NatsServer, guarded_bucket: Bucket
) -> None:
    told = doctor(**{NATS_URL: with_user(guarded.url, "deaf", PASSWORD)})
    assert told.wrong == {("permissions", "receiving answers")}
    assert "_INBOX_budget_recovery.>" in told["permissions", "receiving answers"]["found"]
    assert told["permissions", "raising counters"]["state"] == "not_looked_at"
    assert told["bucket", "kind"]["found"] == "No answer can be received."


def test_a_wrong_password_of_nats_is_named_and_not_shown(
    guarded: NatsServer, guarded_bucket: Bucket
) -> None:
    environment = {NATS_URL: with_user(guarded.url, "recovery", "wr0ng")}
    told, said = doctor(**environment), page(**environment)
    assert told.wrong == {CONNECTION}
    assert (
        f"{guarded.url} refuses the NATS user: Authorization Violation."
        in (told[CONNECTION]["found"])
    )
    assert NATS_URL in told[CONNECTION]["to_do"]
    assert "wr0ng" not in said
    assert "not looked at: receiving answers, looking at the bucket" in said
    require_unseen(told, "servers", "version")
    require_unseen(told, "bucket", *(name for topic, name in told.findings if topic == "bucket"))


def test_expired_credentials_are_named_with_the_time(
    configured: Bucket, server_dir: Path, tmp_path: Path
) -> None:
    operator = Operator()
    file = tmp_path / "recovery.creds"
    with NatsServer(server_dir / "doctor-operated", config=operator.config) as server:
        environment = {NATS_URL: server.url, "BUDGET_RECOVERY_NATS_CREDS": str(file)}
        file.write_text(operator.credentials(expires_in=-3600))
        expired = doctor(**environment)
        assert expired.wrong == {("servers", "credentials"), CONNECTION}
        day = f"{datetime.now(UTC) - timedelta(hours=1):%Y-%m-%d}"
        for of in expired.wrong:
            assert f"{file} expired at {day}" in expired[of]["found"]
            assert "renew" in expired[of]["to_do"]

        file.write_text(operator.credentials(expires_in=3600))
        soon = doctor(**environment)
        assert soon["servers", "credentials"]["state"] == "advice"
        # The operator's account has no JetStream.
        assert "JetStream" in soon["bucket", "existence"]["found"]


def test_nats_that_is_down_is_named_and_the_rest_is_looked_at(configured: Bucket) -> None:
    url = f"nats://127.0.0.1:{unused_port()}"
    told = doctor(**{NATS_URL: url})
    assert told.wrong == {CONNECTION}
    assert f"{url} cannot be reached" in told[CONNECTION]["found"]
    require_unseen(told, "clocks", "of the store")
    assert told["database", "schema"]["state"] == "ok"
    assert told["clocks", "of this host"]["state"] == "ok"


def test_one_server_of_several_that_is_down_is_advice(
    configured: Bucket, nats_server: NatsServer
) -> None:
    down = f"nats://127.0.0.1:{unused_port()}"
    told = doctor(**{NATS_URL: f"{down},{nats_server.url}"})
    assert told.wrong == set()
    assert told[CONNECTION]["state"] == "advice"
    assert down in told[CONNECTION]["found"]
    assert told[CONNECTION]["found"].endswith(f"In use: {nats_server.url}.")
