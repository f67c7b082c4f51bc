"""What detection and recovery need from the outside world; as in ``ports``, with promises.

Whoever moves the state of recovery names what it was judged against: the baseline, the ground of an
incident, or a lease. If that has moved meanwhile, nothing is changed and the error says so.
"""

from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from budget_recovery_dagster.domain.identity import Baseline, StoreIdentity, Verdict
from budget_recovery_dagster.domain.incident import (
    FailureReason,
    Incident,
    Loss,
    Outcome,
    Recovery,
    Restored,
)
from budget_recovery_dagster.ports import Lease


@dataclass(frozen=True, slots=True)
class Check:
    """One comparison of the store with what was accepted, as it is kept."""

    checked_at: datetime
    checked_by: str
    verdict: Verdict
    reason: str
    identity: StoreIdentity | None
    incident_id: str | None = None

    @property
    def is_good(self) -> bool:
        """Whether the store was found whole: while an incident is open, it is not, for all else."""
        return self.verdict.is_good and self.incident_id is None


class StoreChecks(Protocol):
    """The checks of the store, newest first; those of the last 30 days are kept."""

    def record(self, check: Check) -> None:
        """Keep a check, and drop what is older than is kept, but not the newest good one."""
        ...

    def newest(self, count: int) -> tuple[Check, ...]:
        """Return the newest checks."""
        ...

    def newest_good(self) -> Check | None:
        """Return the newest check that found the store whole."""
        ...


class Baselines(Protocol):
    """The accepted identity of the store. It moves only while the store is HEALTHY."""

    def intend_marker(self, nonce: str, *, judged: Baseline) -> Baseline:
        """Note that a marker with this nonce may be written from now on; a new version.

        Raises:
            BaselineMovedError: the baseline is not the ``judged`` one any more.
            CapturesPausedError: the store is not HEALTHY.
        """
        ...

    def accept(self, baseline: Baseline, *, judged: Baseline | None) -> Baseline:
        """Replace the baseline; its version is one above that of the judged one.

        Raises:
            BaselineMovedError, CapturesPausedError: as ``intend_marker``.
        """
        ...


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try at restoring after one loss; ``outcome`` is None while it runs, or if it died."""

    incident_id: str
    loss: int
    number: int
    run_id: str
    holder: str
    started_at: datetime
    ended_at: datetime | None
    outcome: str | None


@dataclass(frozen=True, slots=True)
class Closing:
    """How an incident is to be closed, and the store that is accepted with it."""

    outcome: Outcome
    detail: str
    restored: Restored
    baseline: Baseline


class Incidents(Protocol):
    """The incidents of the store; at most one is open, exactly while it is not HEALTHY."""

    def recovery(self) -> Recovery:
        """Return the state, and the open incident."""
        ...

    def recent(self, count: int) -> tuple[Incident, ...]:
        """Return the newest incidents, newest first."""
        ...

    def open(self, loss: Loss, *, ground: Baseline | None, judged: Baseline | None) -> Incident:
        """Open an incident for a loss: the store is RECOVERING, and captures are paused.

        Newest point and last good check are noted as they are then.

        Raises:
            BaselineMovedError: the baseline is not the ``judged`` one any more.
            IncidentMovedError: an incident is open already.
        """
        ...

    def join(self, loss: Loss, *, ground: Baseline | None, judged: Incident) -> Incident:
        """Add a further loss to the open incident; its attempts begin again, and it waits no more.

        Raises:
            IncidentMovedError: its ground is not that of ``judged`` any more, or it is closed.
        """
        ...

    def stand_on(self, ground: Baseline, *, judged: Incident) -> Incident:
        """Let the recovery stand on this store from now on.

        Raises:
            IncidentMovedError: as ``join``.
        """
        ...

    def claim_launch(self, *, judged: Incident) -> Incident | None:
        """Count one more launch of a restore; None if somebody else has, or it is not RECOVERING.

        The time of the next launch is put off by the backoff for as many launches as there were
        since the last attempt was claimed.
        """
        ...

    def wait(self, reason: str, *, judged: Incident, lease: Lease) -> Incident:
        """Note that a restore waits for the store, and put the next launch off by the backoff.

        Raises:
            IncidentMovedError: as ``join``.
            LeaseLostError: the lease is no longer held.
        """
        ...

    def claim_attempt(
        self, *, judged: Incident, run_id: str, holder: str, lease: Lease
    ) -> Incident:
        """Count one more attempt, before its work begins; the incident waits no more.

        Raises:
            IncidentHeldError: it is on hold.
            AttemptsUsedUpError: the loss has had all its attempts.
            IncidentMovedError, LeaseLostError: as ``wait``; also where it is not RECOVERING.
        """
        ...

    def end_attempt(self, outcome: str, *, judged: Incident, lease: Lease) -> None:
        """Say how the newest attempt ended.

        Raises:
            LeaseLostError: the lease is no longer held.
        """
        ...

    def give_up(
        self, reason: FailureReason, detail: str, *, judged: Incident, lease: Lease
    ) -> Incident:
        """Put the store to FAILED: a person has to look.

        Raises:
            IncidentMovedError, LeaseLostError: as ``wait``; also where it is not RECOVERING.
        """
        ...

    def close(self, closing: Closing, *, judged: Incident, lease: Lease) -> Incident:
        """Accept a new baseline, close the incident and put the store to HEALTHY, all or nothing.

        The baseline's version becomes one above the present one.

        Raises:
            IncidentMovedError, LeaseLostError: as ``wait``; also where it is not
                RECOVERING, unless a person ends it.
        """
        ...

    def hold(self, reason: str, by: str, *, judged: Incident) -> Incident:
        """Keep the restore from being launched and from going on; held already: nothing changes.

        Raises:
            IncidentMovedError: it is closed, or not RECOVERING.
        """
        ...

    def release(self, by: str, *, judged: Incident) -> Incident:
        """Let the restore go on, at once and with all its attempts; not held: nothing changes.

        Raises:
            IncidentMovedError: as ``hold``.
        """
        ...

    def attempts_of(self, incident_id: str) -> tuple[Attempt, ...]:
        """Return the attempts of an incident, oldest first."""
        ...
