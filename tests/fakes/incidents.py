"""Fake row of the store, checks and incidents."""

import logging
from collections.abc import Collection
from dataclasses import replace
from datetime import datetime
from secrets import token_hex
from uuid import uuid4

from budget_recovery_dagster.adapters.postgres import (
    attempt_after,
    ended_by,
    given_up_for,
    held_by,
    held_by_itself,
    storable,
    storable_check,
    storable_loss,
    storable_reset,
)
from budget_recovery_dagster.domain import (
    CHECKS_KEPT,
    CHECKS_KEPT_FOR,
    RESTORE_LEASE,
    Attempt,
    Baseline,
    Check,
    Closing,
    FailureReason,
    FoundMarker,
    Incident,
    IntendedMarker,
    LandmarkKind,
    Loss,
    Memory,
    Move,
    Observation,
    Opening,
    Recovery,
    RecoveryState,
    Reset,
    Standing,
    StoreRecord,
    Waiting,
    is_in_the_future,
    moves,
    require_bucket,
    same_creation,
)
from budget_recovery_dagster.ports import Lease
from tests.fakes.control_plane import MemoryState, OnState, require_lease
from tests.fakes.snapshots import add_reset, newest_point_at, oldest_failing_at


class MemoryStoreRegistry:
    """The row of the store and its checks, in memory."""

    def __init__(self, state: MemoryState, bucket: str) -> None:
        self._plane = state
        self._bucket = bucket

    def claim(self) -> StoreRecord:
        with self._plane.lock:
            if self._plane.store is None:
                newest = self._plane.landmarks[-1] if self._plane.landmarks else None
                self._plane.store = StoreRecord(
                    self._bucket,
                    newest.deployment_id if newest else str(uuid4()),
                    RecoveryState.HEALTHY,
                    baseline=None,
                )
                number = max((each.number for each in self._plane.landmarks), default=0)
                self._plane.given = (number, None)
            require_bucket(self._plane.store.bucket, self._bucket)
            return self._plane.store

    def find(self) -> StoreRecord | None:
        with self._plane.lock:
            if self._plane.store is not None:
                require_bucket(self._plane.store.bucket, self._bucket)
            return self._plane.store

    def set_state(self, state: RecoveryState) -> None:
        """Set the state of the claimed store without applying the rules for moves."""
        with self._plane.lock:
            self._plane.store = replace(self._plane.claimed_store(), state=state)

    def accept(self, baseline: Baseline, *, judged: Baseline | None) -> Baseline:
        with self._plane.lock:
            is_first = self._standing().baseline is None
            accepted = self._keep(moves.accept(self._standing(), baseline, judged=judged))
            if is_first:
                self._add_acceptance(LandmarkKind.ACCEPTANCE, accepted)
            return accepted

    def accept_renewals(
        self, baseline: Baseline, found: FoundMarker, *, judged: Baseline | None
    ) -> Baseline:
        with self._plane.lock:
            accepted = moves.accept(self._standing(), baseline, judged=judged)
            self._plane.go_above(found)
            self._keep(accepted)
            self._add_acceptance(LandmarkKind.RENEWALS_LOST, accepted)
            return accepted

    def renewals_lost_since(self, at: datetime) -> bool:
        return any(
            each.kind is LandmarkKind.RENEWALS_LOST and each.at > at
            for each in self._plane.landmarks
        )

    def acknowledge(self, found: FoundMarker) -> None:
        with self._plane.lock:
            self._plane.go_above(found)
            known = {each.landmark_id for each in self._plane.landmarks}
            if found.landmark is not None and found.landmark not in known:
                self._plane.add_landmark(LandmarkKind.ACCEPTANCE, landmark_id=found.landmark)
                self._plane.add_landmark(LandmarkKind.ACCEPTANCE)

    def next_marker(self) -> IntendedMarker:
        with self._plane.lock:
            self._plane.given = (self._plane.given[0] + 1, token_hex(16))
            number, nonce = self._plane.given
            return IntendedMarker(str(nonce), number, self.newest_landmark())

    def newest_landmark(self) -> str | None:
        return self._plane.landmarks[-1].landmark_id if self._plane.landmarks else None

    def memory_of(self, seen: Observation | None, accepted: Baseline | None) -> Memory:
        with self._plane.lock:
            number, nonce = self._plane.given
            landmark = seen.marker.landmark if seen and seen.marker else None
            known = {each.landmark_id for each in self._plane.landmarks}
            return Memory(
                number=number,
                nonce=nonce,
                has_landmark=landmark is None or landmark in known,
                was_replaced=seen is not None
                and self._was_replaced(seen.identity.created_at, accepted),
            )

    def _was_replaced(self, created_at: datetime, accepted: Baseline | None) -> bool:
        if accepted is not None and same_creation(accepted.identity.created_at, created_at):
            return False
        return any(
            each.created_at is not None and same_creation(each.created_at, created_at)
            for each in self._plane.landmarks
        )

    def _add_acceptance(self, kind: LandmarkKind, accepted: Baseline) -> None:
        self._plane.add_landmark(kind, created_at=accepted.identity.created_at)

    def record_check(self, check: Check) -> None:
        with self._plane.lock:
            self._plane.checks.append(storable_check(check))
            cutoff = self._plane.clock.now() - CHECKS_KEPT_FOR
            newest_good = self.newest_good_check()
            newest = self._plane.checks[-CHECKS_KEPT:]
            self._plane.checks = [
                each
                for each in self._plane.checks[:-CHECKS_KEPT]
                if each.checked_at >= cutoff or each is newest_good
            ] + newest

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
        self._plane.go_above(baseline.marker)
        self._plane.store = replace(self._plane.claimed_store(), baseline=baseline)
        return baseline


def newest_good_check(state: MemoryState) -> Check | None:
    """Return the newest check that identified the store as the accepted one."""
    return next((each for each in _newest_first(state) if each.is_good), None)


def _newest_first(state: MemoryState) -> list[Check]:
    # Of several with the same time, the last written comes first.
    now = state.clock.now()
    return sorted(
        state.checks,
        key=lambda each: (not is_in_the_future(each.checked_at, now), each.checked_at),
    )[::-1]


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

    def open(
        self,
        loss: Loss,
        *,
        target: Baseline | None,
        judged: Baseline | None,
        hold: str | None = None,
        began_empty: bool = False,
    ) -> Incident:
        with self._plane.lock:
            good = newest_good_check(self._plane)
            opening = Opening(
                incident_id=str(uuid4()),
                at=self._now(),
                newest_point_at=newest_point_at(self._plane),
                newest_good_check_at=good.checked_at if good else None,
                oldest_failing_at=oldest_failing_at(self._plane),
            )
            kept = storable_loss(loss)
            opened = self._keep(
                moves.open_incident(
                    self._standing(),
                    kept,
                    target=target,
                    judged=judged,
                    opening=opening,
                    held=held_by_itself(hold, opening.at),
                    began_empty=began_empty,
                )
            )
            self._plane.add_landmark(LandmarkKind.INCIDENT_OPENED, about=opened.incident_id)
            return opened

    def join(
        self,
        loss: Loss,
        *,
        target: Baseline | None,
        judged: Incident,
        hold: str | None = None,
        began_empty: bool = False,
    ) -> Incident:
        with self._plane.lock:
            kept, held = storable_loss(loss), held_by_itself(hold, self._now())
            return self._keep(
                moves.join(
                    self._standing(),
                    kept,
                    target=target,
                    judged=judged,
                    held=held,
                    began_empty=began_empty,
                )
            )

    def adopt_target(
        self, target: Baseline, *, judged: Incident, began_empty: bool = False
    ) -> Incident:
        with self._plane.lock:
            return self._keep(
                moves.adopt_target(self._standing(), target, judged=judged, began_empty=began_empty)
            )

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
            move = moves.claim_attempt(self._leased(lease), judged=judged, now=self._now())
            incident = self._keep(move)
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
            self._end_newest(judged, outcome)

    def fail_attempt(self, outcome: str, *, judged: Incident, lease: Lease) -> None:
        with self._plane.lock:
            move = moves.fail_attempt(self._leased(lease), judged=judged, now=self._now())
            self._end_newest(judged, outcome)
            if move is not None:
                self._keep(move)

    def return_attempt(
        self, outcome: str, *, judged: Incident, lease: Lease, waited: Waiting | None
    ) -> Incident:
        with self._plane.lock:
            move = moves.return_attempt(self._leased(lease), judged=judged, waited=waited)
            self._end_newest(judged, outcome)
            return self._keep(move)

    def _end_newest(self, judged: Incident, outcome: str) -> None:
        attempts = self._plane.attempts.get(judged.incident_id, [])
        if attempts and attempts[-1].ended_at is None:
            attempts[-1] = replace(attempts[-1], ended_at=self._now(), outcome=storable(outcome))

    def give_up(
        self,
        reason: FailureReason,
        detail: str,
        *,
        judged: Incident,
        lease: Lease,
        code: str | None = None,
    ) -> Incident:
        with self._plane.lock:
            given_up = given_up_for(reason, detail, code, self._now())
            return self._keep(moves.give_up(self._leased(lease), given_up, judged=judged))

    def close(
        self, closing: Closing, *, judged: Incident, lease: Lease, resets: Collection[Reset] = ()
    ) -> Incident:
        with self._plane.lock:
            standing, ended = self._leased(lease), ended_by(closing, self._now())
            closed = self._keep(
                moves.close(standing, ended, baseline=closing.baseline, judged=judged)
            )
            self._plane.add_landmark(
                LandmarkKind.INCIDENT_CLOSED,
                about=closed.incident_id,
                created_at=closing.baseline.identity.created_at,
            )
            for reset in resets:
                add_reset(self._plane, storable_reset(reset))
            counts = self._plane.counts
            self._plane.counts = {
                at: replace(count, is_outdated=True) for at, count in counts.items()
            }
            self._plane.deletions_until = None
            return closed

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
        self._plane.go_above(move.baseline.marker if move.baseline else None)
        self._plane.incidents[incident.incident_id] = incident
        self._plane.launches_before[incident.incident_id] = move.launches_before
        self._plane.store = replace(
            self._plane.claimed_store(), state=move.state, baseline=move.baseline
        )
        return incident
