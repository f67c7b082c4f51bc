"""A harness for the services on a real store and database, without Dagster."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from budget_recovery_dagster.domain import (
    AuditEntry,
    CaptureSource,
    Incident,
    Outcome,
    RecoveryState,
    RetentionPolicy,
    Verdict,
)
from budget_recovery_dagster.ports import ControlPlane, OpenStore
from budget_recovery_dagster.services import Captured, Checked
from budget_recovery_dagster.services.restore import (
    Acceptance,
    Guards,
    Order,
    Recovered,
    RecoveryResult,
    TenantRestored,
    resolve_incident,
    restore_tenant,
)
from budget_recovery_dagster.services.restore.tenants import RunningClock
from tests import services
from tests.integration.timeless_store import SteppedClock, capture, opened_at, opened_store
from tests.nats_servers import Bucket, Stored

ORDER = Order("alice@ops", "ticket 7", "a run", lambda _: None)
"""A person's order of a manual restore."""


@dataclass
class Harness:
    """The services on a bucket, with the test's clock and the progress messages of restores."""

    bucket: Bucket
    plane: ControlPlane
    clock: SteppedClock
    messages: list[str] = field(default_factory=list)

    def capture(self, at: datetime | None = None) -> Captured:
        """Take a snapshot in which no tenant fails, now or at a time to which the clock is set."""
        self._set(at)
        captured = capture(self.plane, self.clock)
        assert captured.stopped_by is None
        assert not captured.failed
        return captured

    def capture_boards(self) -> None:
        """Take a snapshot of the leaderboards instead of the counters."""
        settings = services.present_settings().model_copy(
            update={"capture_source": CaptureSource.LEADERBOARDS}
        )
        captured = capture(self.plane, self.clock, settings=settings)
        assert captured.source is CaptureSource.LEADERBOARDS
        assert not captured.failed

    def check(self, at: datetime | None = None) -> Checked:
        self._set(at)
        return services.check(self.plane, open_store=opened_store)

    def lose(self) -> None:
        """Replace the store by an empty one."""
        self.bucket.destroy()
        self.bucket.create()

    def find_loss(self, at: datetime | None = None) -> Verdict:
        """Check the store; require that the verdict is a loss."""
        checked = self.check(at)
        assert checked.recovery.state is RecoveryState.RECOVERING
        return checked.check.verdict

    def find_held(self, verdict: Verdict, *offered: str) -> Incident:
        """Check; require an incident that a person has to decide about, and return it.

        What ends its hold has each of the ``offered`` texts.
        """
        assert self.find_loss() is verdict
        incident = self.open_incident
        assert incident.on_hold is not None
        assert [text for text in offered if text not in incident.hold_ends] == []
        return incident

    @property
    def open_incident(self) -> Incident:
        incident = self.plane.incidents.recovery().incident
        assert incident is not None
        return incident

    def resolve(self) -> Incident:
        """Accept the store as it is; return the incident, closed."""
        resolved = resolve_incident(
            self.plane,
            opened_store,
            ORDER,
            acceptance=Acceptance.KEEP_SNAPSHOTS,
            retention=RetentionPolicy(7),
            convergence_timeout=timedelta(0),
        )
        assert outcome_of(resolved.incident) is Outcome.ACCEPTED
        return resolved.incident

    def run(self, open_store: OpenStore = opened_store, run_id: str = "a run") -> RecoveryResult:
        """Run one recovery."""
        return services.recover(
            self.plane, open_store=open_store, run_id=run_id, on_progress=self.messages.append
        )

    def recover(self, open_store: OpenStore = opened_store, run_id: str = "a run") -> Incident:
        """Recover; require success."""
        result = self.run(open_store, run_id)
        assert isinstance(result, Recovered)
        assert self.plane.incidents.recovery().state is RecoveryState.HEALTHY
        return result.incident

    def restore(self, tenant: str, open_store: OpenStore = opened_store) -> TenantRestored:
        """Raise a tenant's counters in any state and without a lease."""
        point = self.plane.points.point_of(tenant, self.plane.clock.now())
        assert point is not None
        with open_store() as store:
            return restore_tenant(
                store, point, RunningClock(self.plane.clock), Guards(lambda: None, lambda _: None)
            )

    def entries(self, incident: Incident) -> Mapping[tuple[str, str, str], AuditEntry]:
        """Return the merged audits of an incident, by tenant, budget and window."""
        audits = self.plane.audits.largest(incident.incident_id, 10_000)
        assert len(audits.largest) == audits.windows
        return {
            (entry.tenant, entry.of.budget, entry.of.window.token): entry
            for entry in audits.largest
        }

    def _set(self, at: datetime | None) -> None:
        if at is not None:
            self.clock.time = at


@contextmanager
def opened_harness(
    bucket: Bucket, database_url: str, now: datetime | None = None
) -> Iterator[Harness]:
    """Open a harness whose clock starts at ``now``, by default the present time."""
    clock = SteppedClock(now or datetime.now(UTC))
    with opened_at(database_url, clock) as plane:
        yield Harness(bucket, plane, clock)


def spend_total(bucket: Bucket, usage: str) -> None:
    """Set the one counter of acme's budget "total", and its leaderboard."""
    bucket.spend("acme", "total", "lifetime", {None: usage})
    bucket.rank("acme", "total", "lifetime", {None: usage})


def total_in(bucket: Bucket) -> str | None:
    """Return that counter as the bucket's gateway sees it, whatever address the settings have."""
    stored = bucket.stored("usage.acme.total.lifetime.=")
    return None if stored is None else str(json.loads(stored.data)["usage"])


def outcome_of(incident: Incident) -> Outcome:
    assert incident.ended is not None
    return incident.ended.outcome


def all_stored(bucket: Bucket) -> dict[str, Stored]:
    """Return all messages of a bucket's stream by key: bytes, headers and revisions."""

    async def read() -> dict[str, Stored]:
        info = await bucket._js.stream_info(bucket.stream, subjects_filter=">")
        found = {}
        for subject in info.state.subjects or {}:
            message = await bucket._js.get_msg(bucket.stream, subject=subject, direct=False)
            key = subject.removeprefix(bucket.subject(""))
            found[key] = Stored(message.seq or 0, message.data or b"", dict(message.headers or {}))
        return found

    return bucket._portal.call(read)
