"""Resolving: a person ends the open incident and accepts the store as it is."""

from collections.abc import Iterator
from dataclasses import dataclass

from budget_recovery_dagster.domain.incident import Incident, Outcome
from budget_recovery_dagster.errors import IncidentMovedError
from budget_recovery_dagster.services.attempt import uncovered
from budget_recovery_dagster.services.by_hand import HandTools
from budget_recovery_dagster.services.count_words import counted
from budget_recovery_dagster.services.name_words import listed
from budget_recovery_dagster.services.orders import Order
from budget_recovery_dagster.services.remainder import Remainder


@dataclass(frozen=True, slots=True)
class Resolved:
    """The incident, closed, and what the snapshots still say more."""

    incident: Incident
    remainder: Remainder


@dataclass(frozen=True, slots=True)
class ResolveService:
    """Ends incidents without restoring anything."""

    tools: HandTools

    def resolve(self, order: Order) -> Resolved:
        """Accept the store as it is: captures resume, and it is compared with this from now on.

        Nothing is written into it but our marker.

        Raises:
            ChoiceError: no reason is given.
            IncidentMovedError: no incident is open, or somebody else has moved it.
            LeaseHeldError: somebody restores; the message says who and since when.
            StoreLostError, PossibleLossError, AttemptFailedError: the store became another one
                meanwhile, or cannot be seen to be the same.
            SettingsError: the database belongs to another bucket.
            StoreError, DatabaseError, LeaseLostError: it cannot be seen; nothing is changed.
        """
        order.require_reason()
        self._require_open()
        with self.tools.at_work(order) as work:
            work.await_ready()
            if refusal := work.take_ground():
                order.tell(f"A further loss may go unnoticed: {refusal}")
            if work.incident is None:
                self._require_open()
            remainder = work.remainder_as_left()
            seen = work.require_same()
            told = " ".join(_told(remainder, work.incident)) if work.incident else ""
            return Resolved(work.close(Outcome.ACCEPTED, told, seen), remainder)

    def _require_open(self) -> None:
        recovery = self.tools.incidents.recovery()
        if recovery.incident is None:
            raise IncidentMovedError(
                f"The store is {recovery.state}, and no incident is open.",
                "there is nothing to resolve; `budget-recovery status` says how it stands.",
            )


def _told(remainder: Remainder, incident: Incident) -> Iterator[str]:
    if remainder.counters:
        yield (
            f"Lower than the snapshots say, and left so: {counted(remainder.counters, 'counter')}."
        )
    yield from remainder.unknown()
    if remainder.unseen:
        yield f"Not everything could be seen: {listed(remainder.unseen)}"
    yield uncovered(incident)
