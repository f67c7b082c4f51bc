"""Who may work on the store and what may be stored of it: decided on what the locks show.

The database and its fake read the facts each in their own way, and decide here.
"""

from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

from budget_recovery_dagster.domain.incident import RecoveryState
from budget_recovery_dagster.domain.snapshots import TenantSnapshot
from budget_recovery_dagster.domain.store import Baseline, StoreIdentity
from budget_recovery_dagster.domain.windows import Hour
from budget_recovery_dagster.errors import (
    BaselineMovedError,
    CapturesPausedError,
    HourClosedError,
    LeaseHeldError,
    LeaseLostError,
    NotNewerError,
)

CAPTURE_LEASE = "capture"
"""The lease under which snapshots are stored and pruned, by one at a time."""

CHECK_LEASE = "check"
"""The lease under which the store's marker is renewed, by one at a time."""

LONGEST_LEASE = timedelta(minutes=2)
"""No lease is given out for so long: a living holder renews it every few seconds."""

RESTORE_LEASE = "restore"
"""The lease under which the store is restored, by one at a time."""

LONGEST_RESTORE = timedelta(hours=1)
"""How long a restore may hold its lease: a worker that hangs must not keep others from restoring.

One that is merely slow loses nothing by it: what it has raised stays raised for the next.
"""

_WAIT_FOR_RECOVERY = "wait for the recovery to end; `budget-recovery status` says how it stands."


@dataclass(frozen=True, slots=True)
class Holding:
    """A lease as it stands: who has it, under which token, since when and until when."""

    holder: str
    token: int
    acquired_at: datetime
    expires_at: datetime


@dataclass(frozen=True, slots=True)
class Facts:
    """What a capture is compared with; ``newest`` is the time of the tenant's last snapshot."""

    now: datetime
    state: RecoveryState
    baseline: Baseline | None
    newest: datetime | None


def holder_at(holding: Holding | None, now: datetime) -> str | None:
    """Return who holds a lease at ``now``; None if nobody does, or it has expired.

    One that would last longer than any is of a clock that was ahead and has been set right.
    """
    if holding is None or not now < holding.expires_at <= now + LONGEST_LEASE:
        return None
    return holding.holder


def require_free(name: str, holding: Holding | None, now: datetime) -> None:
    """Refuse to take a lease that somebody holds.

    Raises:
        LeaseHeldError: somebody does.
    """
    if holding is not None and holder_at(holding, now) is not None:
        raise LeaseHeldError(
            f"{name} is at work already: {holding.holder}, since {_utc(holding.acquired_at)}.",
            f"wait for it to end; if it has died, it is free at {_utc(holding.expires_at)}.",
        )


def require_lease_of(name: str, needed: str) -> None:
    """Refuse to do work under the lease of other work: it would keep nobody else from this.

    Raises:
        ValueError: it is of another name.
    """
    if name != needed:
        raise ValueError(f"this is done under the lease of {needed}, not of {name}")


def require_ours(name: str, token: int, holding: Holding | None, now: datetime) -> None:
    """Refuse to work under a lease, taken with this token, that is not in force.

    Raises:
        LeaseLostError: it has expired, was released, or was taken by another.
    """
    if holding is None:
        raise lease_lost(name, "it is no longer held")
    if holding.token != token:
        raise lease_lost(name, f"{holding.holder} has taken it")
    if now >= holding.expires_at:
        raise lease_lost(name, f"it expired at {_utc(holding.expires_at)}")


def lease_lost(name: str, why: str) -> LeaseLostError:
    """Say how a lease was lost."""
    return LeaseLostError(
        f"The lease of {name} is lost: {why}.",
        "start again; if it happens often, see why this host or its database stalls for long.",
    )


def require_unmoved(baseline: Baseline | None, judged: Baseline | None) -> None:
    """Refuse what rests on a judgement against another baseline than the present one.

    Raises:
        BaselineMovedError: the baseline is not the ``judged`` one any more.
    """
    # All of it counts: versions begin again where the store's row was lost.
    if baseline != judged:
        raise BaselineMovedError(
            f"The baseline has moved from {_name(judged)} to {_name(baseline)} since the store was"
            " judged.",
            "judge the store against the new baseline and try again.",
        )


def admit_baseline(state: RecoveryState) -> None:
    """Let the baseline move: while a loss is open, it says what the store was before.

    Raises:
        CapturesPausedError: the store is not Healthy.
    """
    if state.captures_paused:
        raise CapturesPausedError(
            f"The store is {state.name}, so its baseline stays as it is.", _WAIT_FOR_RECOVERY
        )


def admit_prune(state: RecoveryState) -> None:
    """Let a prune begin: while a loss is open, what is old may be all that there is.

    Raises:
        CapturesPausedError: the store is not Healthy.
    """
    if state.captures_paused:
        raise CapturesPausedError(
            f"The store is {state.name}, so no snapshot is removed.", _WAIT_FOR_RECOVERY
        )


def admit(
    snapshot: TenantSnapshot, *, hour: Hour, judged: Baseline | None, facts: Facts
) -> Baseline:
    """Let a snapshot in and return the baseline that holds with it.

    Raises:
        CapturesPausedError: the store is not Healthy.
        BaselineMovedError: the baseline is not the ``judged`` one any more.
        HourClosedError: the hour is past.
        NotNewerError: the tenant has a snapshot at or after this one's time.
        ValueError: the snapshot is not of that hour.
    """
    if Hour.containing(snapshot.captured_at) != hour:
        raise ValueError(f"a snapshot of {_utc(snapshot.captured_at)} is not of the hour {hour}")
    if facts.state.captures_paused:
        raise CapturesPausedError(
            f"The store is {facts.state.name}, so nothing is stored of tenant {snapshot.tenant!r}.",
            _WAIT_FOR_RECOVERY,
        )
    require_unmoved(facts.baseline, judged)
    if hour.is_past(facts.now):
        raise HourClosedError(
            f"The hour {hour} has closed; it is {_utc(facts.now)}.",
            "capture the present hour instead: what the store holds now is not what it held then.",
        )
    if facts.newest is not None and snapshot.captured_at <= facts.newest:
        raise NotNewerError(
            f"Tenant {snapshot.tenant!r} has a snapshot of {_utc(facts.newest)}, not older than"
            f" this one of {_utc(snapshot.captured_at)}.",
            "capture again; if that time has not come, the database's clock was wrong then, and "
            "this tenant has to wait for it.",
        )
    return _accept(facts.baseline, snapshot.identity)


def _accept(baseline: Baseline | None, identity: StoreIdentity) -> Baseline:
    if baseline is None:
        return Baseline(identity, version=1)
    if baseline.identity == identity:
        return baseline
    return replace(baseline, identity=identity, version=baseline.version + 1)


def _name(baseline: Baseline | None) -> str:
    return "none" if baseline is None else f"version {baseline.version} ({baseline.identity})"


def _utc(moment: datetime) -> str:
    return f"{moment.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"
