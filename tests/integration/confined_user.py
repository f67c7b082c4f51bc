"""A NATS server whose user may read some keys of the bucket, and nothing else."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from budget_recovery_dagster.sandbox.nats_server import NatsServer
from tests.nats_servers import PASSWORD, Bucket, users, with_user

_BUCKET = "budget-usage"
_USER = "recovery"


@contextmanager
def confined_to(
    *keys: str, data_dir: Path, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Bucket]:
    """Let the settings name such a user; give the bucket in the hand of the gateway."""
    read = f"$JS.API.CONSUMER.CREATE.KV_{_BUCKET}.*.$KV.{_BUCKET}"
    config = users(
        {"user": "gateway", "password": PASSWORD},
        {
            "user": _USER,
            "password": PASSWORD,
            "permissions": {
                "publish": [
                    f"$JS.API.STREAM.INFO.KV_{_BUCKET}",
                    *(f"{read}.{each}" for each in keys),
                    f"$JS.API.CONSUMER.MSG.NEXT.KV_{_BUCKET}.*",
                    f"$JS.API.CONSUMER.DELETE.KV_{_BUCKET}.*",
                ],
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
