"""A running ``budget-recovery dev`` on a test's servers, with a FAILED store."""

import json
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import dagster as dg
import psycopg
import pytest

from budget_recovery_dagster.adapters.nats import CounterKey, encode_key
from budget_recovery_dagster.adapters.postgres import Database, PostgresBudgets, migrate
from budget_recovery_dagster.domain import (
    BudgetDefinition,
    BudgetWindow,
    Enforcement,
    Hour,
    Period,
    SplitBy,
    Window,
)
from budget_recovery_dagster.embedded import NatsServer, PostgresServer
from budget_recovery_dagster.errors import AttemptFailedError
from budget_recovery_dagster.services.restore import GaveUp
from budget_recovery_dagster.settings import PREFIX, load_settings
from budget_recovery_dagster.wiring import opened_control_plane
from tests import services
from tests.integration.dev_command import Dev, started, wait_for_an_hour_with
from tests.integration.interrupted_store import Interruptions, interrupted
from tests.integration.live_capture import capture_now
from tests.integration.recovery_runs import check, state
from tests.nats_servers import Bucket

TOTAL = BudgetWindow("total", Window.parse("lifetime"))

_LIMIT = BudgetDefinition(
    "acme", "total", Period.LIFETIME, Decimal(25), SplitBy.USER, Enforcement.ENFORCE
)

# The snapshot before the loss and the next one belong to the same hour.
_LONGEST = timedelta(minutes=3)


@dataclass(frozen=True)
class GivenUp:
    """The command, its store, and its control-plane database."""

    dev: Dev
    bucket: Bucket
    database: psycopg.Connection

    @property
    def state(self) -> str:
        return state(self.database)

    @property
    def usage_of_alice(self) -> str:
        """Return alice's live usage as plain digits."""
        stored = self.bucket.stored(encode_key(CounterKey("acme", TOTAL, "alice")))
        assert stored is not None
        usage: str = json.loads(stored.data)["usage"]
        return usage

    @property
    def captures(self) -> int:
        """Return the number of snapshots."""
        ((count,),) = self.database.execute(
            "select count(distinct captured_at) from budget_recovery.capture"
        ).fetchall()
        return int(count)


@contextmanager
def given_up(place: Path, nats: NatsServer, postgres: PostgresServer) -> Iterator[GivenUp]:
    """Start the command on a store that is FAILED because it was full; it has room again.

    Two tenants were captured before the loss, and alice has spent again since.
    """
    control, dagster = (f"{of}_{uuid.uuid4().hex[:12]}" for of in ("control", "dagster"))
    postgres.create_missing_databases(control, dagster)
    migrate(postgres.url(control))
    _, _, rest = postgres.url(dagster).partition("://")
    name = f"b-{uuid.uuid4().hex[:12]}"
    environment: dict[str, Any] = {
        f"{PREFIX}NATS_URL": nats.url,
        f"{PREFIX}BUCKET": name,
        f"{PREFIX}POSTGRES_URL": postgres.url(control),
        f"{PREFIX}DAGSTER_POSTGRES_URL": f"postgresql+psycopg2://{rest}",
    }
    with (
        Bucket.connected(nats.url, name) as bucket,
        psycopg.connect(postgres.url(control), autocommit=True) as database,
    ):
        _give_up(bucket, environment)
        assert state(database) == "failed"
        with started(place / "data", place / "output.txt", **environment) as dev:
            yield GivenUp(dev, bucket, database)


def _give_up(bucket: Bucket, environment: Mapping[str, str]) -> None:
    """Capture two tenants, lose them, and let three attempts fail on a store that is purged."""
    with pytest.MonkeyPatch.context() as patch, dg.DagsterInstance.ephemeral() as instance:
        for setting, value in environment.items():
            patch.setenv(setting, value)
        with Database(load_settings().require_postgres_url()) as database:
            PostgresBudgets(database).define([_LIMIT])
        bucket.create()
        bucket.spend("acme", "total", "lifetime", {None: "80", "alice": "30", "bob": "12.5"})
        bucket.spend("globex", "total", "lifetime", {None: "5"})
        wait_for_an_hour_with(_LONGEST)
        capture_now(Hour.containing(datetime.now(UTC)))
        check(instance)
        bucket.destroy()
        bucket.create()
        check(instance)
        _use_up_all_attempts(bucket)
    bucket.spend("acme", "total", "lifetime", {"alice": "10"})


def _use_up_all_attempts(bucket: Bucket) -> None:
    purging = interrupted(Interruptions(after_raising=lambda: bucket.purge("usage.")))
    with opened_control_plane(load_settings()) as plane:
        for _ in range(2):
            with pytest.raises(AttemptFailedError):
                services.recover(plane, open_store=purging, holder="a test")
        last = services.recover(plane, open_store=purging, holder="a test")
        assert isinstance(last, GaveUp)
