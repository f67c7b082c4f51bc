"""The incidents of the store, in memory."""

import logging
from dataclasses import replace
from datetime import datetime
from uuid import uuid4

from budget_recovery_dagster.adapters.memory.control_plane import ControlPlane
from budget_recovery_dagster.adapters.memory.leases import require_lease
from budget_recovery_dagster.adapters.memory.restore_points import newest_point_at
from budget_recovery_dagster.adapters.memory.store_checks import MemoryStoreChecks
from budget_recovery_dagster.adapters.stored_forms import storable
from budget_recovery_dagster.adapters.stored_recovery import (
    attempt_after,
    ended_by,
    held_by,
    storable_loss,
)
from budget_recovery_dagster.domain import holds, moves
from budget_recovery_dagster.domain.admission import RESTORE_LEASE
from budget_recovery_dagster.domain.identity import Baseline
from budget_recovery_dagster.domain.incident import FailureReason, Incident, Loss, Recovery
from budget_recovery_dagster.domain.moves import Opening
from budget_recovery_dagster.domain.standing import Move, Standing
from budget_recovery_dagster.ports import Lease
from budget_recovery_dagster.recovery_ports import Attempt, Closing

_log = logging.getLogger(__name__)


class MemoryIncidents:
    """Incidents that are forgotten with their control plane, and the state of the store."""

    def __init__(self, control_plane: ControlPlane) -> None:
        self._plane = control_plane
        self._checks = MemoryStoreChecks(control_plane)

    def recovery(self) -> Recovery:
        """Return the state, and the open incident."""
        with self._plane.lock:
            standing = self._standing()
            return Recovery(standing.state, standing.incident)

    def recent(self, count: int) -> tuple[Incident, ...]:
        """Return the newest incidents, newest first."""
        with self._plane.lock:
            oldest_first = sorted(
                self._plane.incidents.values(), key=lambda incident: incident.opened_at
            )
            return tuple(oldest_first[::-1][:count])

    def open(self, loss: Loss, *, ground: Baseline | None, judged: Baseline | None) -> Incident:
        """Open an incident for a loss: the store is RECOVERING, and captures are paused.

        Raises:
            BaselineMovedError: the baseline is not the ``judged`` one any more.
            IncidentMovedError: an incident is open already.
        """
        with self._plane.lock:
            good = self._checks.newest_good()
            opening = Opening(
                incident_id=str(uuid4()),
                at=self._now(),
                newest_point_at=newest_point_at(self._plane),
                newest_good_check_at=good.checked_at if good else None,
            )
            kept = storable_loss(loss)
            return self._keep(
                moves.open_incident(
                    self._standing(), kept, ground=ground, judged=judged, opening=opening
                )
            )

    def join(self, loss: Loss, *, ground: Baseline | None, judged: Incident) -> Incident:
        """Add a further loss to the open incident; its attempts begin again, and it waits no more.

        Raises:
            IncidentMovedError: its ground is not that of ``judged`` any more, or it is closed.
        """
        with self._plane.lock:
            kept = storable_loss(loss)
            return self._keep(moves.join(self._standing(), kept, ground=ground, judged=judged))

    def stand_on(self, ground: Baseline, *, judged: Incident) -> Incident:
        """Let the recovery stand on this store from now on.

        Raises:
            IncidentMovedError: as ``join``.
        """
        with self._plane.lock:
            return self._keep(moves.stand_on(self._standing(), ground, judged=judged))

    def claim_launch(self, *, judged: Incident) -> Incident | None:
        """Count one more launch of a restore; None if somebody else has, or it is not time."""
        with self._plane.lock:
            move = moves.claim_launch(self._standing(), judged=judged, now=self._now())
            return None if move is None else self._keep(move)

    def wait(self, reason: str, *, judged: Incident, lease: Lease) -> Incident:
        """Note that a restore waits for the store, and put the next launch off by the backoff.

        Raises:
            IncidentMovedError: as ``join``.
            LeaseLostError: the lease is no longer held.
        """
        with self._plane.lock:
            standing = self._leased(lease)
            return self._keep(
                moves.wait(standing, storable(reason), judged=judged, now=self._now())
            )

    def claim_attempt(
        self, *, judged: Incident, run_id: str, holder: str, lease: Lease
    ) -> Incident:
        """Count one more attempt, before its work begins; the incident waits no more.

        Raises:
            IncidentHeldError: it is on hold.
            AttemptsUsedUpError: the loss has had all its attempts.
            IncidentMovedError, LeaseLostError: as ``wait``; also where it is not RECOVERING.
        """
        with self._plane.lock:
            incident = self._keep(moves.claim_attempt(self._leased(lease), judged=judged))
            attempts = self._plane.attempts.setdefault(incident.incident_id, [])
            earlier = [each.number for each in attempts if each.loss == len(incident.losses)]
            attempts.append(
                attempt_after(
                    incident,
                    number=max(earlier, default=0) + 1,
                    run_id=run_id,
                    holder=holder,
                    started_at=self._now(),
                )
            )
            return incident

    def end_attempt(self, outcome: str, *, judged: Incident, lease: Lease) -> None:
        """Say how the newest attempt ended.

        Raises:
            LeaseLostError: the lease is no longer held.
        """
        with self._plane.lock:
            require_lease(self._plane, lease, name=RESTORE_LEASE)
            attempts = self._plane.attempts.get(judged.incident_id, [])
            if attempts and attempts[-1].ended_at is None:
                attempts[-1] = replace(
                    attempts[-1], ended_at=self._now(), outcome=storable(outcome)
                )

    def give_up(
        self, reason: FailureReason, detail: str, *, judged: Incident, lease: Lease
    ) -> Incident:
        """Put the store to FAILED: a person has to look.

        Raises:
            IncidentMovedError, LeaseLostError: as ``wait``; also where it is not RECOVERING.
        """
        with self._plane.lock:
            standing, kept = self._leased(lease), storable(detail)
            return self._keep(moves.give_up(standing, reason, kept, judged=judged, now=self._now()))

    def close(self, closing: Closing, *, judged: Incident, lease: Lease) -> Incident:
        """Accept a new baseline, close the incident and put the store to HEALTHY, all or nothing.

        Raises:
            IncidentMovedError, LeaseLostError: as ``wait``; also where it is not
                RECOVERING, unless a person ends it.
        """
        with self._plane.lock:
            standing, ended = self._leased(lease), ended_by(closing, self._now())
            return self._keep(
                moves.close(standing, ended, baseline=closing.baseline, judged=judged)
            )

    def hold(self, reason: str, by: str, *, judged: Incident) -> Incident:
        """Keep the restore from being launched and from going on; held already: nothing changes.

        Raises:
            IncidentMovedError: it is closed, or not RECOVERING.
        """
        with self._plane.lock:
            held = held_by(by, reason, self._now())
            return self._keep(holds.hold(self._standing(), held, judged=judged))

    def release(self, by: str, *, judged: Incident) -> Incident:
        """Let the restore go on, at once and with all its attempts; not held: nothing changes.

        Raises:
            IncidentMovedError: as ``hold``.
        """
        with self._plane.lock:
            standing = self._standing()
            released = self._keep(holds.release(standing, judged=judged, now=self._now()))
            if released != standing.incident:
                _log.info("Incident %s is released by %s.", released.short_id, by)
            return released

    def attempts_of(self, incident_id: str) -> tuple[Attempt, ...]:
        """Return the attempts of an incident, oldest first."""
        return tuple(self._plane.attempts.get(incident_id, ()))

    def _now(self) -> datetime:
        return self._plane.clock.now()

    def _leased(self, lease: Lease) -> Standing:
        require_lease(self._plane, lease, name=RESTORE_LEASE)
        return self._standing()

    def _standing(self) -> Standing:
        store = self._plane.claimed_store()
        for incident in self._plane.incidents.values():
            if incident.ended is None:
                before = self._plane.launches_before[incident.incident_id]
                return Standing(store.state, store.baseline, incident, before)
        return Standing(store.state, store.baseline)

    def _keep(self, move: Move) -> Incident:
        incident = move.incident
        self._plane.incidents[incident.incident_id] = incident
        self._plane.launches_before[incident.incident_id] = move.launches_before
        self._plane.store = replace(
            self._plane.claimed_store(), state=move.state, baseline=move.baseline
        )
        return incident
