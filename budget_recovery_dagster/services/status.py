"""Where the store stands: for people and for whoever watches over it."""

from dataclasses import dataclass
from datetime import timedelta
from itertools import takewhile

from budget_recovery_dagster.domain.admission import RESTORE_LEASE
from budget_recovery_dagster.domain.identity import Verdict
from budget_recovery_dagster.ports import Clock, Leases
from budget_recovery_dagster.recovery_ports import Incidents, StoreChecks
from budget_recovery_dagster.services.assessment import Assessment, Facts, assess
from budget_recovery_dagster.table_ports import RecoveryPoints

MOST_CHECKS = 100
"""How many checks are looked at; so many that could not tell may be more."""


@dataclass(frozen=True, slots=True)
class Status:
    """What is known of the store, and what that amounts to."""

    facts: Facts
    assessment: Assessment


@dataclass(frozen=True, slots=True)
class StatusService:
    """Looks at the control-plane database alone, and changes nothing.

    So it tells what was found last, not how the store is at this moment.
    """

    incidents: Incidents
    checks: StoreChecks
    points: RecoveryPoints
    leases: Leases
    clock: Clock
    check_interval: timedelta

    def look(self) -> Status:
        """Tell how the store stands.

        Raises:
            DatabaseError: the database did not do what was asked, so nothing can be told.
        """
        now = self.clock.now()
        recovery = self.incidents.recovery()
        open_one = recovery.incident
        attempts = self.incidents.attempts_of(open_one.incident_id) if open_one else ()
        # At most one is open, and it is the newest.
        recent = self.incidents.recent(2)
        checks = self.checks.newest(MOST_CHECKS)
        closed = next((each for each in recent if each.ended is not None), None)
        # What could not be told before the store was accepted anew says nothing of it.
        accepted_at = closed.ended.at if closed and closed.ended else None
        unknown = takewhile(
            lambda check: (
                check.verdict is Verdict.UNKNOWN
                and (accepted_at is None or check.checked_at > accepted_at)
            ),
            checks,
        )
        facts = Facts(
            at=now,
            check_interval=self.check_interval,
            recovery=recovery,
            attempt=attempts[-1] if attempts else None,
            worker=self.leases.look(RESTORE_LEASE).holder,
            closed=closed,
            checks=checks,
            unknown_in_a_row=sum(1 for _ in unknown),
            newest_good=self.checks.newest_good(),
            newest_points=self.points.newest_points(now),
            newest_snapshot=max(self.points.newest_snapshots().values(), default=None),
            failing=self.points.failing(),
        )
        return Status(facts, assess(facts))
