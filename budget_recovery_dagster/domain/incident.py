"""The recovery state of a store, and the only moves between its states.

    HEALTHY --loss--> RECOVERING --restored, or the accepted store returned--> HEALTHY
                          |  ^
                   gave up|  |  (nothing leads back from FAILED to RECOVERING)
                          v
                       FAILED --restored manually, or resolved--> HEALTHY

A further loss joins the open incident: RECOVERING starts again, FAILED stays.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

from budget_recovery_dagster.domain.store import Baseline, StoreIdentity
from budget_recovery_dagster.domain.verdict import Evidence, Verdict, same_creation

MAX_ATTEMPTS = 3
"""How many attempts a restore has for one loss before an operator must act."""
_OTHER_CHOICE = (
    "Pass --record-resets instead only if all usage that the store lacks was removed on purpose."
)
_FIRST_BACKOFF = timedelta(seconds=30)
_LONGEST_BACKOFF = timedelta(minutes=5)
# After the first and the second attempt. What made an attempt fail often passes within minutes,
# such as a permission that is being granted. None is longer than the longest backoff.
_PAUSES = (timedelta(minutes=1), timedelta(minutes=5))


def backoff(waits: int) -> timedelta:
    """Return the pause before the next launch, after so many launches that had to wait."""
    # The exponent is bounded as well: a store may be unreachable for weeks.
    doublings = min(max(waits - 1, 0), 10)
    return min(_FIRST_BACKOFF * (1 << doublings), _LONGEST_BACKOFF)


def pause_after(attempts: int) -> timedelta | None:
    """Return the pause after an attempt, by how many count with it; None: it was the last one."""
    return _PAUSES[attempts - 1] if attempts < MAX_ATTEMPTS else None


class RecoveryState(StrEnum):
    """Whether the store is trusted; captures are paused in every state but HEALTHY.

    Sentences show a state by its name, in capitals.
    """

    HEALTHY = "healthy"
    RECOVERING = "recovering"
    FAILED = "failed"

    @property
    def captures_paused(self) -> bool:
        """Whether captures are paused, so that no snapshot is taken of a damaged store."""
        return self is not RecoveryState.HEALTHY


class Event(StrEnum):
    """What moves the state."""

    LOSS = "loss"
    RESTORED = "restored"
    NOTHING_TO_RAISE = "nothing_to_raise"
    RETURNED = "returned"
    GAVE_UP = "gave_up"
    RESTORED_MANUALLY = "restored_manually"
    RESOLVED = "resolved"


class IllegalMoveError(ValueError):
    """An event that cannot happen in a state."""


_HEALTHY, _RECOVERING, _FAILED = RecoveryState
_MOVES: Mapping[tuple[RecoveryState, Event], RecoveryState] = {
    (_HEALTHY, Event.LOSS): _RECOVERING,
    (_RECOVERING, Event.LOSS): _RECOVERING,
    (_FAILED, Event.LOSS): _FAILED,
    (_RECOVERING, Event.RESTORED): _HEALTHY,
    (_RECOVERING, Event.NOTHING_TO_RAISE): _HEALTHY,
    (_RECOVERING, Event.RETURNED): _HEALTHY,
    (_RECOVERING, Event.GAVE_UP): _FAILED,
    (_RECOVERING, Event.RESTORED_MANUALLY): _HEALTHY,
    (_FAILED, Event.RESTORED_MANUALLY): _HEALTHY,
    (_RECOVERING, Event.RESOLVED): _HEALTHY,
    (_FAILED, Event.RESOLVED): _HEALTHY,
}


def after(state: RecoveryState, event: Event) -> RecoveryState:
    """Return the state that follows.

    Raises:
        IllegalMoveError: the event cannot happen in this state.
    """
    try:
        return _MOVES[state, event]
    except KeyError:
        raise IllegalMoveError(
            f"The event {event.value} is not permitted while the store is {state.name}."
        ) from None


class Outcome(StrEnum):
    """How an incident ended."""

    RESTORED = "restored"
    RESTORED_IN_PART = "restored_in_part"
    NOTHING_LOST = "nothing_lost"
    NOTHING_CURRENT = "nothing_current"
    RETURNED = "returned"
    RESTORED_MANUALLY = "restored_manually"
    ACCEPTED = "accepted"

    @property
    def event(self) -> Event:
        """The event of this outcome in the table of moves."""
        match self:
            case Outcome.RESTORED | Outcome.RESTORED_IN_PART:
                return Event.RESTORED
            case Outcome.RETURNED:
                return Event.RETURNED
            case Outcome.RESTORED_MANUALLY:
                return Event.RESTORED_MANUALLY
            case Outcome.ACCEPTED:
                return Event.RESOLVED
            case _:
                return Event.NOTHING_TO_RAISE

    @property
    def words(self) -> str:
        """The outcome in words, as the attempt that closed the incident records it."""
        return self.value.replace("_", " ")

    @property
    def is_automatic(self) -> bool:
        """Whether an automatic restore ended the incident."""
        return self.event in (Event.RESTORED, Event.NOTHING_TO_RAISE)

    @property
    def is_manual(self) -> bool:
        """Whether a person ended the incident, which is possible even after it was given up."""
        return self in (Outcome.RESTORED_MANUALLY, Outcome.ACCEPTED)


class FailureReason(StrEnum):
    """Why a restore was given up."""

    NO_SNAPSHOTS = "no_snapshots"
    NOT_WRITTEN = "not_written"


@dataclass(frozen=True, slots=True)
class Loss:
    """One alarm about the store, as it was found.

    ``after`` is None if the store was gone, or if observations of it did not agree.
    """

    found_at: datetime
    found_by: str
    verdict: Verdict
    reason: str
    before: StoreIdentity
    after: StoreIdentity | None
    evidence: Evidence | None = None


@dataclass(frozen=True, slots=True)
class Waiting:
    """A restore that waits for the store: since when, why, and how many launches had to wait."""

    since: datetime
    reason: str
    waits: int


ITSELF = "budget-recovery"
"""Who holds a restore that no person has put on hold."""


@dataclass(frozen=True, slots=True)
class Held:
    """A hold of the restore, by a person or by this program: when, by whom, and why."""

    at: datetime
    by: str
    reason: str

    @property
    def awaits_choice(self) -> bool:
        """Whether this program holds the restore until a person chooses what to do."""
        return self.by == ITSELF


@dataclass(frozen=True, slots=True)
class GivenUp:
    """The final failure of a restore: when and why.

    ``code`` is that of the error that ended the last attempt; None if no error did, or unknown.
    """

    at: datetime
    reason: FailureReason
    detail: str
    code: str | None = None


@dataclass(frozen=True, slots=True)
class Restored:
    """How many tenants, windows, counters and leaderboards a restore changed."""

    tenants: int = 0
    windows: int = 0
    counters: int = 0
    boards: int = 0


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of an incident: when, how, and what was restored."""

    at: datetime
    outcome: Outcome
    detail: str
    restored: Restored


@dataclass(frozen=True, slots=True)
class Incident:
    """A loss of the store, and everything until its end.

    ``attempts`` is how many attempts count. A release starts the count again. So does a further
    loss, unless the same store lost something again.
    ``target`` is the restore target: a further loss is detected against it. None while it is gone.
    ``newest_point_at`` is the newest snapshot at the time of the loss that has an intact record or
    never had a record; if captures of a tenant failed, that tenant's, which is older. So no tenant
    lacks more usage than that of ``uncovered``. ``last_good_at`` is when the store was last known
    to be intact: no intact record has the usage in between.
    ``next_launch_at`` is the earliest time of the next launch, ``next_attempt_at`` that of the next
    attempt. No restore starts or continues from ``held`` until ``released_at``.
    ``began_empty``: the target was provably created empty after the loss, so the gateway has
    counted all that it holds since then, except what restores raised.
    """

    incident_id: str
    opened_at: datetime
    losses: tuple[Loss, ...]
    target: Baseline | None
    newest_point_at: datetime | None
    last_good_at: datetime | None
    attempts: int = 0
    launches: int = 0
    next_launch_at: datetime | None = None
    next_attempt_at: datetime | None = None
    waiting: Waiting | None = None
    held: Held | None = None
    released_at: datetime | None = None
    given_up: GivenUp | None = None
    ended: Ended | None = None
    began_empty: bool = False

    def __post_init__(self) -> None:
        if not self.losses:
            raise ValueError("an incident has at least one loss")

    @property
    def short_id(self) -> str:
        """The first characters of the id, for people."""
        return self.incident_id[:8]

    @property
    def due_at(self) -> datetime | None:
        """The earliest time of the next launch that makes an attempt; None: now."""
        return max(filter(None, (self.next_launch_at, self.next_attempt_at)), default=None)

    def awaited_attempt(self, now: datetime) -> str | None:
        """Return a sentence with the time of the next attempt; None if it is due at ``now``."""
        if not _is_ahead(self.next_attempt_at, now):
            return None
        return (
            f"Attempt {self.attempts + 1} of {MAX_ATTEMPTS} for incident {self.short_id} is due at "
            f"{self.next_attempt_at:%H:%M:%S} UTC."
        )

    @property
    def is_held(self) -> bool:
        """Whether the restore is on hold."""
        if self.held is None:
            return False
        return self.released_at is None or self.released_at < self.held.at

    @property
    def on_hold(self) -> str | None:
        """A sentence with the time, the person and the reason of the hold; None if not on hold."""
        if self.held is None or not self.is_held:
            return None
        return (
            f"Incident {self.short_id} has been on hold since {self.held.at:%Y-%m-%d %H:%M:%S} UTC,"
            f" by {self.held.by}: {self.held.reason.rstrip('.')}."
        )

    @property
    def hold_ends(self) -> str:
        """What a person does about a hold, as the hint of an error."""
        if self.is_database_behind:
            return (
                "check `budget-recovery preview`, and record missing resets again. Then run"
                " `budget-recovery resolve --keep-snapshots` to accept the store as it is, or"
                f" `budget-recovery restore` to raise its counters. {_OTHER_CHOICE}"
            )
        if self.given_up is not None:
            return (
                "if BUDGET_RECOVERY_NATS_URL is wrong, correct it. Otherwise check"
                " `budget-recovery preview`, then run `budget-recovery restore` to raise the"
                " counters of the store that the server shows, or `budget-recovery resolve"
                " --keep-snapshots` to accept it as it is."
            )
        if self.awaits_choice:
            # The accepted store comes back only if nothing but another address hides it.
            correct = (
                "correct it: the incident then closes by itself."
                if self.losses[0].verdict is Verdict.OTHER_STORE
                else "correct it first."
            )
            return (
                f"if BUDGET_RECOVERY_NATS_URL is wrong, {correct} If the store that the server"
                " shows replaces the accepted one, `budget-recovery release` restores the counters"
                " into it. If it has the right counters already, `budget-recovery resolve"
                f" --keep-snapshots` accepts it as it is. {_OTHER_CHOICE}"
            )
        return (
            "fix the cause of the hold, then run `budget-recovery release`. No automatic restore"
            " starts until then."
        )

    @property
    def is_database_behind(self) -> bool:
        """Whether the database may lack what the store has: only a person can end the incident."""
        return any(loss.verdict is Verdict.DATABASE_BEHIND for loss in self.losses)

    @property
    def may_return(self) -> bool:
        """Whether the incident closes by itself once the server shows the accepted store again."""
        return self.awaits_choice and self.given_up is None and not self.is_database_behind

    def is_about(self, store: StoreIdentity) -> bool:
        """Whether a store is the one that people are shown: the restore target, or the newest loss.

        What a person decides about the incident holds for no other store.
        """
        shown = (self.target.identity if self.target else None, self.losses[-1].after)
        return any(each and same_creation(each.created_at, store.created_at) for each in shown)

    @property
    def awaits_choice(self) -> bool:
        """Whether a person must choose what to do about another store, or an older database.

        Until then the accepted baseline stays what the store is compared with, and ``target`` is
        only the store that was found. A further loss changes nothing about that.
        """
        return self.held is not None and self.is_held and self.held.awaits_choice

    @property
    def uncovered(self) -> timedelta | None:
        """The longest time whose usage no snapshot has; None: there was no snapshot.

        It ends when the last loss was found. The last good check would be too early: usage from
        after it is in no snapshot either. A further loss takes what was counted since the first.
        """
        if self.newest_point_at is None:
            return None
        return max(self.lost_at - self.newest_point_at, timedelta(0))

    @property
    def lost_at(self) -> datetime:
        """When the last loss was found; if the store lost nothing, the first alarm."""
        return max(self._lost_at, default=self.losses[0].found_at)

    @property
    def lost_times(self) -> int:
        """How many alarms were losses of the store."""
        return len(self._lost_at)

    @property
    def _lost_at(self) -> list[datetime]:
        return [loss.found_at for loss in self.losses if loss.verdict is Verdict.LOST]


@dataclass(frozen=True, slots=True)
class Recovery:
    """The state of the store and its open incident, if any."""

    state: RecoveryState
    incident: Incident | None


@dataclass(frozen=True, slots=True)
class StoreRecord:
    """The one store of the control-plane database: bucket, id, state and baseline."""

    bucket: str
    deployment_id: str
    state: RecoveryState
    baseline: Baseline | None


def may_launch(recovery: Recovery, now: datetime) -> str | None:
    """Return the reason why no restore may be launched now; None if one may be.

    A launch is allowed even after the last attempt died: that run only checks and decides.
    """
    incident = recovery.incident
    if recovery.state is not RecoveryState.RECOVERING or incident is None:
        if recovery.state is RecoveryState.FAILED:
            return "The store is FAILED: no restore starts until an operator acts."
        return f"The store is {recovery.state.name}."
    if incident.on_hold is not None:
        return incident.on_hold
    if _is_ahead(incident.next_launch_at, now):
        return (
            f"The next launch for incident {incident.short_id} is due at "
            f"{incident.next_launch_at:%H:%M:%S} UTC."
        )
    return incident.awaited_attempt(now)


def _is_ahead(due: datetime | None, now: datetime) -> bool:
    # A time further away than the longest pause comes from a clock that was ahead.
    return due is not None and now < due <= now + _LONGEST_BACKOFF


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt to restore after a loss; ``outcome`` is None while it runs, or if it died."""

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
    """The outcome with which to close an incident, and the baseline to accept."""

    outcome: Outcome
    detail: str
    restored: Restored
    baseline: Baseline
