"""A gateway's bucket in a cluster, and the services on it, with the real clock."""

import json
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from decimal import Decimal
from typing import Self, TypeVar

import nats
from anyio.from_thread import start_blocking_portal
from nats.js.api import Placement, StorageType
from pydantic import SecretStr

from budget_recovery_dagster.adapters.nats import (
    CounterKey,
    NatsUsageStore,
    Timeouts,
    encode_key,
    open_usage_store,
)
from budget_recovery_dagster.domain import (
    BudgetWindow,
    Entity,
    Hour,
    Incident,
    RecoveryState,
    Verdict,
    Window,
)
from budget_recovery_dagster.embedded import NatsServer
from budget_recovery_dagster.ports import ControlPlane
from budget_recovery_dagster.services import Captured, Checked
from budget_recovery_dagster.services.restore import RecoveryResult, recover_store
from budget_recovery_dagster.settings import Settings, load_settings
from budget_recovery_dagster.wiring import opened_control_plane
from tests import services
from tests.cluster.disturbed_store import Disturbances, disturbed
from tests.nats_cluster import Cluster
from tests.nats_servers import Bucket
from tests.postgres_servers import skip_pause
from tests.waiting import wait_until

TENANTS = ("acme", "globex")
BUDGET = "users"
LIFETIME = "lifetime"
USERS = BudgetWindow(BUDGET, Window.parse(LIFETIME))
FIRST = "n0"
"""The server to which we are connected while it responds."""

POINT: dict[Entity, str] = {f"u{number}": str(1_000_000 + number) for number in range(50)}
KEYS = [encode_key(CounterKey(tenant, USERS, name)) for tenant in TENANTS for name in POINT]

_ANSWER_SECONDS = 2.0
# The timeouts of a check; longer ones would only slow the tests.
_SHORT_TIMEOUTS = Timeouts(connect=_ANSWER_SECONDS, answer=_ANSWER_SECONDS)
_FORMING_SECONDS = 60
# Within these, a cluster that is asked for another leader has one.
_ELECTION_SECONDS = 5.0
_UNDISTURBED = Disturbances()

Result = TypeVar("Result")


@dataclass(frozen=True)
class Kind:
    """The number of replicas of a bucket, their storage, and the host of a single one."""

    replicas: int
    storage: StorageType
    host: str | None = None

    def __str__(self) -> str:
        return f"r{self.replicas}-{self.storage.value}"


THREE_ON_FILE = Kind(3, StorageType.FILE)
THREE_IN_MEMORY = Kind(3, StorageType.MEMORY)
ONE_ON_FILE = Kind(1, StorageType.FILE, host="n2")
ONE_IN_MEMORY = Kind(1, StorageType.MEMORY, host="n2")


@dataclass
class GuardedBucket:
    """A bucket as its gateway sees it, the services on it, and their messages."""

    kind: Kind
    bucket: Bucket
    plane: ControlPlane
    settings: Settings
    messages: list[str] = field(default_factory=list)

    @classmethod
    @contextmanager
    def opened(cls, cluster: Cluster, kind: Kind, postgres_url: str) -> Iterator[Self]:
        """Create a bucket with a gateway that knows all servers."""
        name = f"{kind}-{uuid.uuid4().hex[:8]}"
        settings = load_settings().model_copy(
            update={"bucket": name, "nats_url": SecretStr(",".join(cluster.urls))}
            | {"postgres_url": SecretStr(postgres_url)}
        )
        with start_blocking_portal() as portal, opened_control_plane(settings) as plane:
            client = portal.call(
                lambda: nats.connect(
                    cluster.urls,
                    inbox_prefix="_INBOX_gateway",
                    max_reconnect_attempts=-1,
                    reconnect_time_wait=0.1,
                    ping_interval=1,
                    error_cb=_keep_quiet,
                )
            )
            bucket = Bucket(portal, client, name)
            bucket._js = client.jetstream(timeout=_ANSWER_SECONDS)
            try:
                yield cls(kind, bucket, plane, settings)
            finally:
                succeeds(bucket.destroy)
                # Closing raises the error of a broken connection.
                succeeds(lambda: portal.call(client.close))

    @contextmanager
    def seen_from(self, server: NatsServer) -> Iterator[Self]:
        """Return the same bucket as seen by a gateway and services that know only one server."""
        settings = self.settings.model_copy(update={"nats_url": SecretStr(server.url)})
        with Bucket.connected(server.url, self.bucket.name) as bucket:
            bucket._js = bucket._client.jetstream(timeout=_ANSWER_SECONDS)
            yield replace(self, bucket=bucket, settings=settings)

    def prepare(self) -> None:
        """Create and fill the bucket, then check and capture it."""
        self.create()
        self.fill()
        self.become_intact()

    def become_intact(self) -> None:
        """Wait until a check finds the bucket intact, and it is captured."""
        wait_until(self.is_found_intact, seconds=_FORMING_SECONDS)
        wait_until(self.is_captured, seconds=_FORMING_SECONDS)

    def create(self) -> None:
        """Create the bucket as soon as the cluster can, and wait until it accepts writes."""
        wait_until(lambda: succeeds(self._create), seconds=_FORMING_SECONDS)
        # The gateway's server may not know the leader at once.
        wait_until(lambda: succeeds(lambda: self.bucket.put("other", b"")))

    def fill(self) -> None:
        """Write the counters that must be restored after a loss."""
        for tenant in TENANTS:
            self.bucket.spend(tenant, BUDGET, LIFETIME, POINT)

    def _create(self) -> None:
        host = self.kind.host
        self.bucket.create_with(
            num_replicas=self.kind.replicas,
            storage=self.kind.storage,
            placement=None if host is None else Placement(tags=[host]),
            max_msgs_per_subject=-1,
            allow_msg_ttl=True,
        )

    @property
    def leader(self) -> str:
        """Wait for a leader of the bucket's stream and return it."""
        found: list[str] = []

        def has_leader() -> bool:
            leader = self.bucket.info().cluster.leader
            found.extend([leader] if leader else [])
            return bool(found)

        wait_until(lambda: succeeds_with(has_leader), seconds=_FORMING_SECONDS)
        return found[0]

    def be_led_by(self, server: str) -> None:
        """Make a server the leader of the bucket's stream, which must have replicas."""
        subject = f"$JS.API.STREAM.LEADER.STEPDOWN.{self.bucket.stream}"
        request = json.dumps({"placement": {"preferred": server}}).encode()

        # An election takes a while, and a further request would begin another one.
        asked_at = float("-inf")

        def is_led() -> bool:
            nonlocal asked_at
            if self.leader == server:
                return True
            if time.monotonic() - asked_at >= _ELECTION_SECONDS:
                asked_at = time.monotonic()
                client = self.bucket._client
                self.bucket._portal.call(
                    lambda: client.request(subject, request, timeout=_ANSWER_SECONDS)
                )
            return False

        wait_until(lambda: succeeds_with(is_led), seconds=_FORMING_SECONDS, every=0.3)

    def capture(self, disturbances: Disturbances = _UNDISTURBED) -> Captured:
        """Take a snapshot of the current hour."""
        opening = disturbed(self._open_store, disturbances)
        captured = services.capture(
            self.plane,
            Hour.containing(self.plane.clock.now()),
            open_store=opening,
            settings=self.settings,
            run_id="a capture",
        )
        assert isinstance(captured, Captured)
        # Stored snapshots are complete, whatever happened meanwhile.
        assert not any(stored.is_partial or stored.drops for stored in captured.stored)
        return captured

    def check(self, disturbances: Disturbances = _UNDISTURBED) -> Checked:
        opening = disturbed(self._open_store, disturbances)
        return services.check(self.plane, open_store=opening)

    def recover(
        self, disturbances: Disturbances = _UNDISTURBED, *, patience: timedelta
    ) -> RecoveryResult:
        """Run one recovery now; wait this long for the store to converge."""
        skip_pause(self.settings.require_postgres_url())
        opening = disturbed(self._open_store, disturbances)
        return recover_store(
            self.plane,
            opening,
            run_id="a run",
            holder="a run",
            convergence_timeout=patience,
            on_progress=self.messages.append,
        )

    def _open_store(self) -> AbstractContextManager[NatsUsageStore]:
        return open_usage_store(
            self.settings.require_nats_url(), self.settings.bucket, timeouts=_SHORT_TIMEOUTS
        )

    def is_captured(self) -> bool:
        """Capture again; return whether every tenant is stored."""
        captured = self.capture()
        return captured.stopped_by is None and not captured.failed

    def is_found_intact(self) -> bool:
        """Check again; return whether the check is good and the marker is renewed."""
        checked = self.check()
        assert not checked.check.verdict.is_alarm
        return checked.check.is_good and not checked.hint

    def is_found_lost(self) -> bool:
        """Check again; return whether an incident is open."""
        return self.check().recovery.state is RecoveryState.RECOVERING

    def assert_never_lost(self) -> None:
        """Require that no check found a loss, and that no incident was opened."""
        assert self.plane.incidents.recovery().state is RecoveryState.HEALTHY
        assert not self.plane.incidents.recent(1)
        assert not any(verdict.is_alarm for verdict in self.verdicts)

    @property
    def verdicts(self) -> list[Verdict]:
        """Return the verdicts of all checks, newest first."""
        return [check.verdict for check in self.plane.registry.newest_checks(10_000)]

    @property
    def incident(self) -> Incident:
        """Return the only incident."""
        (incident,) = self.plane.incidents.recent(2)
        return incident

    @property
    def first_marker_revision(self) -> int:
        """Return the revision of our first marker in the bucket."""
        subject = self.bucket.subject("__guard.>")
        first = self.bucket._do(
            lambda js: js.get_msg(self.bucket.stream, 1, subject, next=True, direct=False)
        )
        return int(first.seq)

    @property
    def filled(self) -> dict[str, Decimal]:
        """Return the usages written by ``fill``, by key."""
        return dict(zip(KEYS, map(Decimal, list(POINT.values()) * len(TENANTS)), strict=True))

    @property
    def restorable(self) -> dict[str, Decimal]:
        """Return what a restore would bring back now, by key."""
        usages = {}
        for tenant in TENANTS:
            point = self.plane.points.point_of(tenant, self.plane.clock.now())
            assert point is not None
            for window in point.windows:
                for entity, usage in window.usages.items():
                    usages[encode_key(CounterKey(tenant, window.of, entity))] = usage
        return usages


def together(
    buckets: Sequence[GuardedBucket], work: Callable[[GuardedBucket], Result]
) -> list[Result]:
    """Do the same with several buckets concurrently."""
    with ThreadPoolExecutor(len(buckets)) as pool:
        return list(pool.map(work, buckets))


def succeeds(call: Callable[[], object]) -> bool:
    """Return whether a call succeeds: a disturbed cluster fails in many ways."""
    try:
        call()
    except Exception:  # noqa: BLE001 - as it says
        return False
    return True


def succeeds_with(call: Callable[[], bool]) -> bool:
    """Return whether a call succeeds and returns true."""
    try:
        return call()
    except Exception:  # noqa: BLE001 - as above
        return False


async def _keep_quiet(_: Exception) -> None:
    """Ignore reconnections of the driver."""
