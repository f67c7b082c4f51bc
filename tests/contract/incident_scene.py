"""A store that was accepted and then lost, for tests of incidents."""

from dataclasses import replace
from datetime import timedelta

from budget_recovery_dagster.domain import (
    Baseline,
    Closing,
    FailureReason,
    Incident,
    IntendedMarker,
    Loss,
    Marker,
    Outcome,
    Restored,
    StoreIdentity,
    Verdict,
)
from tests.contract.control_planes import BORN, NOON, ControlPlane

REBORN = BORN + timedelta(days=20)
ACCEPTED = Baseline(StoreIdentity(BORN, 9007199254740993), 1, Marker("n1", 9007199254740990), NOON)
LOSS = Loss(
    found_at=NOON,
    found_by="tick 7",
    verdict=Verdict.LOST,
    reason="The store was recreated.",
    before=ACCEPTED.identity,
    after=StoreIdentity(REBORN, 3),
)
TARGET = Baseline(StoreIdentity(REBORN, 3), version=1)
MARKED_TARGET = Baseline(
    StoreIdentity(REBORN, 9007199254740993),
    version=1,
    marker=Marker("n2", 9007199254740993),
    marked_at=NOON + timedelta(seconds=5),
    intended=IntendedMarker("n3"),
)
GONE = replace(LOSS, found_by="tick 8", reason="The store is gone.", after=None)
CLOSING = Closing(
    outcome=Outcome.RESTORED,
    detail="12 counters were raised.",
    restored=Restored(tenants=1, windows=2, counters=12, boards=3),
    baseline=replace(MARKED_TARGET, intended=None, version=77),
)


def open_one(plane: ControlPlane) -> Incident:
    """Accept a store and open an incident for its loss."""
    accepted = plane.registry.accept(ACCEPTED, judged=plane.baseline)
    return plane.incidents.open(LOSS, target=TARGET, judged=accepted)


def close(plane: ControlPlane, incident: Incident) -> Incident:
    """Close an incident like a complete restore."""
    with plane.restore_lease() as lease:
        return plane.incidents.close(CLOSING, judged=incident, lease=lease)


def claim_attempt(plane: ControlPlane, incident: Incident, *, run_id: str = "run 1") -> Incident:
    """Claim an attempt under its own lease, as soon as it is due."""
    plane.clock.set(max(plane.clock.now(), incident.next_attempt_at or plane.clock.now()))
    with plane.restore_lease() as lease:
        return plane.incidents.claim_attempt(
            judged=incident, run_id=run_id, holder="a host", lease=lease
        )


def wait(plane: ControlPlane, incident: Incident, *, reason: str = "no leader") -> Incident:
    """Let a restore wait under its own lease."""
    with plane.restore_lease() as lease:
        return plane.incidents.wait(reason, judged=incident, lease=lease)


def give_up(plane: ControlPlane, incident: Incident) -> Incident:
    """Give up an incident like a restore that cannot write."""
    with plane.restore_lease() as lease:
        return plane.incidents.give_up(
            FailureReason.NOT_WRITTEN, "it refuses", judged=incident, lease=lease
        )
