"""Fake row of the store, checks and incidents."""

import logging
from collections.abc import Collection
from dataclasses import replace
from datetime import datetime
from uuid import uuid4

from budget_recovery_dagster.adapters.postgres import (
    attempt_after,
    ended_by,
    held_by,
    storable,
    storable_check,
    storable_loss,
    storable_reset,
)
from budget_recovery_dagster.domain import (
    CHECKS_KEPT_FOR,
    RESTORE_LEASE,
    Attempt,
    Baseline,
    Check,
    Closing,
    FailureReason,
    Incident,
    Loss,
    Move,
    Opening,
    Recovery,
    RecoveryState,
    Reset,
    Standing,
    StoreRecord,
    moves,
    require_bucket,
)
from budget_recovery_dagster.ports import Lease
from tests.fakes.control_plane import MemoryState, OnState, require_lease
from tests.fakes.snapshots import newest_point_at


class MemoryStoreRegistry:
    """The row of the store and its checks, in memory."""

    def __init__(self, state: MemoryState, bucket: str) -> None:
        self._plane = state
        self._bucket = bucket

    def claim(self) -> StoreRecord:
        with self._plane.lock:
            if self._plane.store is None:
                self._plane.store = StoreRecord(
                    self._bucket, str(uuid4()), RecoveryState.HEALTHY, baseline=None
                )
            require_bucket(self._plane.store.bucket, self._bucket)
            return self._plane.store

    def set_state(self, state: RecoveryState) -> None:
        """Set the state of the claimed store without applying the rules for moves."""
        with self._plane.lock:
            self._plane.store = replace(self._plane.claimed_store(), state=state)

    def accept(self, baseline: Baseline, *, judged: Baseline | None) -> Baseline:
        with self._plane.lock:
            return self._keep(moves.accept(self._standing(), baseline, judged=judged))

    def record_check(self, check: Check) -> None:
        with self._plane.lock:
            self._plane.checks.append(storable_check(check))
            cutoff = self._plane.clock.now() - CHECKS_KEPT_FOR
            newest_good = self.newest_good_check()
            self._plane.checks = [
                each
                for each in self._plane.checks
                if each.checked_at >= cutoff or each is newest_good
            ]

    def newest_checks(self, count: int) -> tuple[Check, ...]:
        return tuple(_newest_first(self._plane)[:count])

    def first_checked_at(self) -> datetime | None:
        return min((each.checked_at for each in self._plane.checks), default=None)

    def newest_good_check(self) -> Check | None:
        return newest_good_check(self._plane)

    def _standing(self) -> Standing:
        store = self._plane.claimed_store()
        return Standing(store.state, store.baseline)

    def _keep(self, baseline: Baseline) -> Baseline:
        self._plane.store = replace(self._plane.claimed_store(), baseline=baseline)
        return baseline


def newest_good_check(state: MemoryState) -> Check | None:
    """Return the newest check that identified the store as the accepted one."""
    return next((each for each in _newest_first(state) if each.is_good), None)


def _newest_first(state: MemoryState) -> list[Check]:
    # Of several with the same time, the last written comes first.
    return sorted(state.checks, key=lambda each: each.checked_at)[::-1]


_log = logging.getLogger(__name__)


class MemoryIncidents(OnState):
    """Incidents and the state of the store, in memory."""

    def recovery(self) -> Recovery:
        with self._plane.lock:
            standing = self._standing()
            return Recovery(standing.state, standing.incident)

    def recent(self, count: int) -> tuple[Incident, ...]:
        with self._plane.lock:
            oldest_first = sorted(
                self._plane.incidents.values(), key=lambda incident: incident.opened_at
            )
            return tuple(oldest_first[::-1][:count])

    def open(self, loss: Loss, *, target: Baseline | None, judged: Baseline | None) -> Incident:
        with self._plane.lock:
            good = newest_good_check(self._plane)
            opening = Opening(
                incident_id=str(uuid4()),
                at=self._now(),
                newest_point_at=newest_point_at(self._plane),
                newest_good_check_at=good.checked_at if good else None,
            )
            kept = storable_loss(loss)
            return self._keep(
                moves.open_incident(
                    self._standing(), kept, target=target, judged=judged, opening=opening
                )
            )

    def join(self, loss: Loss, *, target: Baseline | None, judged: Incident) -> Incident:
        with self._plane.lock:
            kept = storable_loss(loss)
            return self._keep(moves.join(self._standing(), kept, target=target, judged=judged))

    def adopt_target(self, target: Baseline, *, judged: Incident) -> Incident:
        with self._plane.lock:
            return self._keep(moves.adopt_target(self._standing(), target, judged=judged))

    def claim_launch(self, *, judged: Incident) -> Incident | None:
        with self._plane.lock:
            move = moves.claim_launch(self._standing(), judged=judged, now=self._now())
            return None if move is None else self._keep(move)

    def wait(self, reason: str, *, judged: Incident, lease: Lease) -> Incident:
        with self._plane.lock:
            standing = self._leased(lease)
            return self._keep(
                moves.wait(standing, storable(reason), judged=judged, now=self._now())
            )

    def claim_attempt(
        self, *, judged: Incident, run_id: str, holder: str, lease: Lease
    ) -> Incident:
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
        with self._plane.lock:
            standing, kept = self._leased(lease), storable(detail)
            return self._keep(moves.give_up(standing, reason, kept, judged=judged, now=self._now()))

    def close(
        self, closing: Closing, *, judged: Incident, lease: Lease, resets: Collection[Reset] = ()
    ) -> Incident:
        with self._plane.lock:
            standing, ended = self._leased(lease), ended_by(closing, self._now())
            move = moves.close(standing, ended, baseline=closing.baseline, judged=judged)
            self._plane.resets.extend(map(storable_reset, resets))
            return self._keep(move)

    def hold(self, reason: str, by: str, *, judged: Incident) -> Incident:
        with self._plane.lock:
            held = held_by(by, reason, self._now())
            return self._keep(moves.hold(self._standing(), held, judged=judged))

    def release(self, by: str, *, judged: Incident) -> Incident:
        with self._plane.lock:
            standing = self._standing()
            released = self._keep(moves.release(standing, judged=judged, now=self._now()))
            if released != standing.incident:
                _log.info("Incident %s was released by %s.", released.short_id, by)
            return released

    def attempts_of(self, incident_id: str) -> tuple[Attempt, ...]:
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
