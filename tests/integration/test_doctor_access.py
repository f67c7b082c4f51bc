"""``budget-recovery doctor`` on authentication and permissions in NATS."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from budget_recovery_dagster.embedded import NatsServer
from tests.contract.nats_credentials import Operator
from tests.free_ports import unused_port
from tests.integration.confined_user import documented_permissions
from tests.integration.doctor_command import (
    CONNECTION,
    NATS_URL,
    doctor,
    page,
    require_skipped,
    untouched,
)
from tests.nats_servers import PASSWORD, Bucket, users, with_user

BUCKET = "budget-usage"
PERMISSIONS = documented_permissions()
ASK = f"$JS.API.STREAM.INFO.KV_{BUCKET}"
# Without any of these no read can be tried.
FOR_READING = (ASK, ".usage.>", "MSG.NEXT", "CONSUMER.DELETE")


def user(
    name: str, publish: list[str], subscribe: str = "_INBOX_budget_recovery.>"
) -> dict[str, object]:
    permissions = {"publish": publish, "subscribe": [subscribe]}
    return {"user": name, "password": PASSWORD, "permissions": permissions}


@pytest.fixture(scope="module")
def guarded(server_dir: Path) -> Iterator[NatsServer]:
    """Start a server with a user for each permission who lacks only this one."""
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
    """Create a bucket with a counter on that server; set the settings to its recovery user."""
    with Bucket.connected(with_user(guarded.url, "gateway", PASSWORD), BUCKET) as bucket:
        bucket.create()
        bucket.spend("acme", "total", "lifetime", {None: "80"})
        monkeypatch.setenv("BUDGET_RECOVERY_BUCKET", BUCKET)
        monkeypatch.setenv(NATS_URL, with_user(guarded.url, "recovery", PASSWORD))
        yield bucket
        bucket.destroy()


def test_the_permissions_in_the_readme_suffice(guarded_bucket: Bucket) -> None:
    with untouched(guarded_bucket):
        checked = doctor()
    assert checked.failed == set()
    assert checked["bucket_read"]["outcome"] == "ok"


@pytest.mark.parametrize("number", range(len(PERMISSIONS)), ids=PERMISSIONS)
def test_each_missing_permission_is_reported(
    guarded: NatsServer, guarded_bucket: Bucket, number: int
) -> None:
    denied = PERMISSIONS[number]
    with untouched(guarded_bucket):
        checked = doctor(**{NATS_URL: with_user(guarded.url, f"without-{number}", PASSWORD)})
    assert checked.exit_code == 1
    (check,) = checked.failed
    assert check.startswith("permission_")
    assert checked[check]["code"] == "permission_denied"
    assert checked[check]["facts"] == {"subject": denied}
    assert checked[check]["message"] == f"The NATS user may not publish to {denied}."
    assert "grant it" in checked[check]["hint"]
    can_read = checked["bucket_read"]["outcome"] == "ok"
    is_for_reading = denied == ASK or (
        "API" in denied and any(part in denied for part in FOR_READING[1:])
    )
    assert can_read is not is_for_reading
    assert checked["bucket_kind"]["outcome"] == ("skipped" if denied == ASK else "ok")


def test_a_user_who_may_not_receive_responses_is_reported(
    guarded: NatsServer, guarded_bucket: Bucket
) -> None:
    checked = doctor(**{NATS_URL: with_user(guarded.url, "deaf", PASSWORD)})
    assert checked.failed == {"permission_receive_answers"}
    assert "_INBOX_budget_recovery.>" in checked["permission_receive_answers"]["message"]
    assert checked["permission_raise_counters"]["outcome"] == "skipped"
    assert checked["bucket_kind"]["facts"] == {"requires": ["permission_receive_answers"]}


def test_a_wrong_nats_password_is_reported_and_not_shown(
    guarded: NatsServer, guarded_bucket: Bucket
) -> None:
    environment = {NATS_URL: with_user(guarded.url, "recovery", "wr0ng")}
    checked, text = doctor(**environment), page(**environment)
    assert checked.failed == {CONNECTION}
    assert (
        f"{guarded.url} rejected the NATS user: Authorization Violation."
        in (checked[CONNECTION]["message"])
    )
    assert NATS_URL in checked[CONNECTION]["hint"]
    assert "wr0ng" not in text
    assert "SKIPPED permission_receive_answers      Requires nats_connection.\n" in text
    require_skipped(checked, "nats_version")
    require_skipped(checked, *(check for check in checked.checks if check.startswith("bucket_")))


def test_expired_credentials_are_reported_with_their_time(
    configured: Bucket, server_dir: Path, tmp_path: Path
) -> None:
    operator = Operator()
    file = tmp_path / "recovery.creds"
    with NatsServer(server_dir / "doctor-operated", config=operator.config) as server:
        environment = {NATS_URL: server.url, "BUDGET_RECOVERY_NATS_CREDS": str(file)}
        file.write_text(operator.credentials(expires_in=-3600))
        expired = doctor(**environment)
        assert expired.failed == {"nats_credentials", CONNECTION}
        day = f"{datetime.now(UTC) - timedelta(hours=1):%Y-%m-%d}"
        for of in expired.failed:
            assert f"{file} expired at {day}" in expired[of]["message"]
            assert "renew" in expired[of]["hint"]

        file.write_text(operator.credentials(expires_in=3600))
        soon = doctor(**environment)
        assert soon["nats_credentials"]["outcome"] == "warn"
        # The operator's account has no JetStream.
        assert "JetStream" in soon["bucket_exists"]["message"]


def test_an_unreachable_nats_is_reported_and_the_rest_is_checked(configured: Bucket) -> None:
    url = f"nats://127.0.0.1:{unused_port()}"
    checked = doctor(**{NATS_URL: url})
    assert checked.failed == {CONNECTION}
    assert f"Cannot connect to NATS at {url}" in checked[CONNECTION]["message"]
    require_skipped(checked, "store_clock")
    assert checked["database_schema"]["outcome"] == "ok"
    assert checked["host_clock"]["outcome"] == "ok"


def test_one_unreachable_server_of_several_is_a_warning(
    configured: Bucket, nats_server: NatsServer
) -> None:
    down = f"nats://127.0.0.1:{unused_port()}"
    checked = doctor(**{NATS_URL: f"{down},{nats_server.url}"})
    assert checked.failed == set()
    assert checked[CONNECTION]["outcome"] == "warn"
    assert down in checked[CONNECTION]["message"]
    assert checked[CONNECTION]["message"].endswith(f"In use: {nats_server.url}.")
