"""A NATS server whose user has only some permissions on the bucket."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from budget_recovery_dagster.embedded import NatsServer
from tests.documentation import block
from tests.nats_servers import PASSWORD, Bucket, users, with_user

_BUCKET = "budget-usage"
_USER = "recovery"


def documented_permissions() -> list[str]:
    """Return the documented publish permissions of the user."""
    users = block("docs/operations.md", "conf", "authorization")
    allowed = re.search(r"user: budget_recovery,.*?allow: \[(.*?)\]", users, re.DOTALL)
    assert allowed is not None
    return re.findall(r'"(.*?)"', allowed[1])


@contextmanager
def confined_to(
    *keys: str, data_dir: Path, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Bucket]:
    """Set the settings to a user who may read these keys; yield the gateway's bucket."""
    read = f"$JS.API.CONSUMER.CREATE.KV_{_BUCKET}.*.$KV.{_BUCKET}"
    publish = [
        f"$JS.API.STREAM.INFO.KV_{_BUCKET}",
        f"$JS.API.STREAM.MSG.GET.KV_{_BUCKET}",
        *(f"{read}.{each}" for each in keys),
        f"$JS.API.CONSUMER.MSG.NEXT.KV_{_BUCKET}.*",
        f"$JS.API.CONSUMER.DELETE.KV_{_BUCKET}.*",
    ]
    with confined(publish, data_dir, database_url, monkeypatch) as bucket:
        yield bucket


@contextmanager
def confined(
    publish: Sequence[str], data_dir: Path, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Bucket]:
    """Set the settings to a user who may publish this; yield the gateway's bucket."""
    config = users(
        {"user": "gateway", "password": PASSWORD},
        {
            "user": _USER,
            "password": PASSWORD,
            "permissions": {
                "publish": list(publish),
                "subscribe": ["_INBOX_budget_recovery.>"],
            },
        },
    )
    with (
        NatsServer(data_dir, config=config) as server,
        Bucket.connected(with_user(server.url, "gateway", PASSWORD), _BUCKET) as bucket,
    ):
        bucket.create()
        monkeypatch.setenv("BUDGET_RECOVERY_NATS_URL", with_user(server.url, _USER, PASSWORD))
        monkeypatch.setenv("BUDGET_RECOVERY_BUCKET", _BUCKET)
        monkeypatch.setenv("BUDGET_RECOVERY_POSTGRES_URL", database_url)
        yield bucket
        bucket.destroy()
