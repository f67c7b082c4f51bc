"""Watching, through one capture, that the store stays the one that was accepted."""

from dataclasses import dataclass, field

from budget_recovery_dagster.domain.detection import Judgement, Sighting, judge_sighting
from budget_recovery_dagster.domain.identity import Baseline, StoreIdentity, Verdict, judge
from budget_recovery_dagster.errors import (
    BaselineMovedError,
    CapturesPausedError,
    IncidentMovedError,
    PossibleLossError,
    StoreLostError,
    StoreMissingError,
)
from budget_recovery_dagster.ports import Clock, Snapshots, StoreRegistry, UsageStore
from budget_recovery_dagster.recovery_ports import StoreChecks
from budget_recovery_dagster.services.losses import Losses, check_of, stand_in

# Each round reads the baseline anew, so only one that moves all the time uses them up.
_ROUNDS = 5


@dataclass(slots=True)
class IdentityWatch:
    """Compares a store with the ``baseline``, and opens an incident for one that is lost."""

    registry: StoreRegistry
    snapshots: Snapshots
    checks: StoreChecks
    losses: Losses
    clock: Clock
    bucket: str
    found_by: str
    baseline: Baseline | None = field(default=None, init=False)
    _deployment_id: str = field(default="", init=False)
    _last_seen: StoreIdentity | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.read_baseline()

    def read_baseline(self) -> None:
        """Take over the baseline as it is stored now."""
        record = self.registry.claim(self.bucket)
        self.baseline, self._deployment_id = record.baseline, record.deployment_id

    def accept(self, store: UsageStore) -> StoreIdentity:
        """Look at the store and compare it with the accepted one.

        Raises:
            StoreLostError: it is not the accepted one, and an incident is open for that.
            CapturesPausedError: the same, and somebody else has opened the incident.
            PossibleLossError: it may have lost data; that could not be settled.
            StoreError: it could not be looked at; a first one may not be there at all.
        """
        for _ in range(_ROUNDS):
            try:
                return self._compare(store)
            except BaselineMovedError:
                self.read_baseline()
        raise PossibleLossError(
            f"The usage store differs from what was accepted, and that moved {_ROUNDS} times.",
            "if it keeps happening, look for a second deployment that uses the same database.",
        )

    def _compare(self, store: UsageStore) -> StoreIdentity:
        if self.baseline is None:
            self.read_baseline()
        accepted = self.baseline or stand_in(self.snapshots)
        try:
            seen: Sighting | None = store.look(self._deployment_id)
        except StoreMissingError:
            if accepted is None and self._last_seen is None:
                raise
            seen = None
        judgement = judge_sighting(accepted, seen, self.clock.now())
        if judgement.verdict.is_loss:
            if self.registry.claim(self.bucket).baseline != self.baseline:
                # A check has just renewed the marker, say: nothing to wait for and look again.
                raise BaselineMovedError(judgement.reason, "compare with the new baseline.")
            self._open_incident(store, judgement, accepted)
        if seen is not None and judgement.verdict is Verdict.UNKNOWN:
            raise PossibleLossError(
                judgement.reason, "wait for the cluster to settle; the next capture looks again."
            )
        return self._compare_with_last(seen)

    def _open_incident(
        self, store: UsageStore, judgement: Judgement, accepted: Baseline | None
    ) -> None:
        try:
            incident = self.losses.open(
                judgement,
                lambda: store.look(self._deployment_id),
                accepted=accepted,
                judged=self.baseline,
                found_by=self.found_by,
            )
        except IncidentMovedError as error:
            raise CapturesPausedError(
                f"{judgement.reason} An incident is open for it already.",
                "wait for the recovery to end; captures resume by themselves.",
            ) from error
        self.checks.record(check_of(incident))
        raise StoreLostError(
            f"{judgement.reason} Nothing of it was stored; incident {incident.short_id} is open.",
            "wait: the restore begins by itself, and captures resume after it.",
        )

    def _compare_with_last(self, seen: Sighting | None) -> StoreIdentity:
        # The last look of this capture counts too: in a first one nothing is accepted yet.
        last = self._last_seen
        verdict = "gone" if seen is None else judge(last, seen.identity)
        if seen is None or judge(last, seen.identity).is_loss:
            raise PossibleLossError(
                f"The usage store may have lost data during this capture: it is {verdict}. It was: "
                f"{last}.",
                "see what happened to the gateway's bucket; the next capture looks again.",
            )
        self._last_seen = seen.identity
        return seen.identity
