"""Rules of leases and stores: who may work on the store, and which snapshot may be stored.

The database and its fake read the facts in their own way, and both decide here.
"""

from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

from budget_recovery_dagster.domain.incident import RecoveryState
from budget_recovery_dagster.domain.recovery_point import is_in_the_future
from budget_recovery_dagster.domain.snapshots import TenantSnapshot
from budget_recovery_dagster.domain.store import Baseline, StoreIdentity
from budget_recovery_dagster.domain.windows import Hour
from budget_recovery_dagster.errors import (
    BaselineMovedError,
    CapturesPausedError,
    ClockSkewError,
    HourClosedError,
    LeaseHeldError,
    LeaseLostError,
    NotNewerError,
)

CAPTURE_LEASE = "capture"
"""The lease of the one process that stores and prunes snapshots."""

CHECK_LEASE = "check"
"""The lease of the one process that renews the store's marker."""

LONGEST_LEASE = timedelta(minutes=2)
"""Every lease is shorter than this: a live holder renews it every few seconds."""

RESTORE_LEASE = "restore"
"""The lease of the one process that restores the store."""

LONGEST_RESTORE = timedelta(hours=1)
"""How long a restore may hold its lease: a hanging worker must not block other restores.

A worker that is only slow loses nothing: the counters that it raised stay raised.
"""


@dataclass(frozen=True, slots=True)
class Holding:
    """The state of a lease: holder, token, start and expiry."""

    holder: str
    token: int
    acquired_at: datetime
    expires_at: datetime


@dataclass(frozen=True, slots=True)
class LeaseState:
    """The state of a lease: its newest token, and its holder, None if it is free.

    ``left`` is a holding that has expired without having been released: its worker died, or was
    suspended.
    """

    token: int
    holder: str | None
    left: Holding | None = field(default=None, compare=False)

    @classmethod
    def of(cls, token: int, holding: Holding | None, now: datetime) -> "LeaseState":
        """Return the state at ``now`` of a lease that was last held, and not released, so."""
        holder = holder_at(holding, now)
        return cls(token, holder, holding if holder is None else None)


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts that admit a capture.

    ``newest`` is the latest time of a snapshot of the tenant that is not in the future.
    """

    now: datetime
    state: RecoveryState
    baseline: Baseline | None
    newest: datetime | None


def holder_at(holding: Holding | None, now: datetime) -> str | None:
    """Return the holder of a lease at ``now``; None if it is free or has expired.

    An expiry that is too far in the future is ignored: the clock was ahead and has been corrected.
    """
    if holding is None or not now < holding.expires_at <= now + LONGEST_LEASE:
        return None
    return holding.holder


def require_free(name: str, holding: Holding | None, now: datetime) -> None:
    """Refuse to take a lease that is held.

    Raises:
        LeaseHeldError: another holder has it.
    """
    if holding is not None and holder_at(holding, now) is not None:
        raise LeaseHeldError(
            f"Another {name} is running: {holding.holder}, since {_utc(holding.acquired_at)}.",
            "wait for it to end. If that worker died, its lease expires at "
            f"{_utc(holding.expires_at)}.",
        )


def require_lease_of(name: str, needed: str) -> None:
    """Refuse a lease of other work: it would not exclude another process from this work.

    Raises:
        ValueError: the lease has another name.
    """
    if name != needed:
        raise ValueError(f"this needs the lease {needed}, not {name}")


def require_ours(name: str, token: int, holding: Holding | None, now: datetime) -> None:
    """Refuse to work under a lease that is no longer held with this token.

    Raises:
        LeaseLostError: it has expired, was released, or was taken by another holder.
    """
    if holding is None:
        raise lease_lost(name, "it is no longer held")
    if holding.token != token:
        raise lease_lost(name, f"{holding.holder} has taken it")
    if now >= holding.expires_at:
        raise lease_lost(name, f"it expired at {_utc(holding.expires_at)}")


def lease_lost(name: str, why: str) -> LeaseLostError:
    """Return the error of a lost lease."""
    return LeaseLostError(
        f"The lease {name} is lost: {why}.",
        "start again; if it happens often, find out why this host or its database stalls.",
    )


def require_unmoved(baseline: Baseline | None, judged: Baseline | None) -> None:
    """Refuse a decision that was judged against another baseline than the present one.

    Raises:
        BaselineMovedError: the baseline is not the ``judged`` one any more.
    """
    # The whole baseline is compared: versions restart at 1 if the store's row was lost.
    if baseline != judged:
        raise BaselineMovedError(
            f"The baseline moved from {_name(judged)} to {_name(baseline)} since the store was"
            " compared with it.",
            "compare the store with the new baseline and try again.",
        )


def require_healthy(state: RecoveryState, consequence: str) -> None:
    """Refuse work on snapshots and on the baseline during an incident.

    Snapshots stay because old ones may be all there are, and the baseline stays because it
    describes the store before the loss. ``consequence`` says what does not happen, for people.

    Raises:
        CapturesPausedError: the store is not HEALTHY.
    """
    if state.captures_paused:
        raise CapturesPausedError(
            f"The store is {state.name}, so {consequence}.",
            "wait for the recovery to end; see `budget-recovery status`.",
        )


def admit(
    snapshot: TenantSnapshot,
    *,
    hour: Hour,
    judged: Baseline | None,
    first: Baseline | None = None,
    facts: Facts,
) -> Baseline:
    """Admit a snapshot and return the baseline that holds with it.

    ``first`` is the store as a first capture observed it: the baseline if there is none.

    Raises:
        CapturesPausedError: the store is not HEALTHY.
        BaselineMovedError: the baseline is not the ``judged`` one any more.
        HourClosedError: the hour is past.
        ClockSkewError: its time is in the future: the clock was set back since.
        NotNewerError: the tenant has a snapshot at or after this one's time.
        ValueError: the snapshot is not of that hour.
    """
    if Hour.containing(snapshot.captured_at) != hour:
        raise ValueError(f"a snapshot of {_utc(snapshot.captured_at)} is not of the hour {hour}")
    require_healthy(facts.state, f"tenant {snapshot.tenant!r} is not captured")
    require_unmoved(facts.baseline, judged)
    if hour.is_past(facts.now):
        raise HourClosedError(
            f"The hour {hour} has closed; it is {_utc(facts.now)}.",
            "capture the current hour: the store no longer holds the usage of a past hour.",
        )
    if is_in_the_future(snapshot.captured_at, facts.now):
        raise ClockSkewError(
            f"The snapshot has the time {_utc(snapshot.captured_at)}, but it is"
            f" {_utc(facts.now)}: the database's clock was set back during the capture.",
            "synchronize the clock of the database's server with NTP, then capture the hour again.",
        )
    if facts.newest is not None and snapshot.captured_at <= facts.newest:
        raise NotNewerError(
            f"Tenant {snapshot.tenant!r} has a snapshot of {_utc(facts.newest)}, not older than"
            f" this one of {_utc(snapshot.captured_at)}.",
            "capture again: the database's clock was set back by a few seconds.",
        )
    return _accept(facts.baseline or first, snapshot.identity)


def _accept(baseline: Baseline | None, identity: StoreIdentity) -> Baseline:
    if baseline is None:
        return Baseline(identity, version=1)
    if baseline.identity == identity:
        return baseline
    return replace(baseline, identity=identity, version=baseline.version + 1)


def _name(baseline: Baseline | None) -> str:
    return "none" if baseline is None else f"version {baseline.version} ({baseline.identity})"


def _utc(at: datetime) -> str:
    return f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"
