"""The state of the store, doubts about it, and what needs attention, as the database knows them."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from itertools import takewhile

from budget_recovery_dagster.domain.admission import RESTORE_LEASE
from budget_recovery_dagster.domain.audits import MOST_AMOUNTS, IncidentAmounts
from budget_recovery_dagster.domain.falls import (
    CHANGES_SHOWN_FOR,
    ConfigurationChange,
    Fall,
    KeyCount,
)
from budget_recovery_dagster.domain.incident import Attempt, Incident, Recovery, RecoveryState
from budget_recovery_dagster.domain.recovery_point import is_in_the_future, is_too_old
from budget_recovery_dagster.domain.snapshots import (
    CaptureFailure,
    FailingTenant,
    RecordedRun,
    RunOutcome,
    Uncaptured,
)
from budget_recovery_dagster.domain.verdict import Check, Evidence, Verdict
from budget_recovery_dagster.domain.windows import RESTORE_CLOCK_SKEW
from budget_recovery_dagster.errors import (
    StoreChangedError,
    StoreMissingError,
    StoreNoQuorumError,
    StoreNotReadyError,
    StoreReadError,
    StoreUnreachableError,
)
from budget_recovery_dagster.ports import ControlPlane
from budget_recovery_dagster.services.capture import TenantFailed
from budget_recovery_dagster.services.falls import counters_gone
from budget_recovery_dagster.services.recovery_points import (
    VERIFY_WITHIN,
    PointAges,
    judge_point_ages,
)

MISSED_CHECKS = 3
"""After so many checks that are missing or unknown, the state of the store is unknown."""
# As often as a snapshot is due.
_LONG_HOLD = timedelta(hours=1)
# Errors that end once the store answers: a check that identifies it shows that.
_OF_ANSWERS = frozenset(
    error.code
    for error in (
        StoreChangedError,
        StoreMissingError,
        StoreNoQuorumError,
        StoreNotReadyError,
        StoreReadError,
        StoreUnreachableError,
    )
)
MOST_CHECKS = 100
"""How many checks are read; if all of them are unknown, there may be more."""
MOST_RUNS = 100
"""How many captures are read; if all of them failed, there may be more."""


class Condition(StrEnum):
    """The state of the store in one word.

    A HEALTHY state is *attention* if a person has to act although the store is intact. A RECOVERING
    one is *held* while its restore is on hold.
    """

    HEALTHY = "healthy"
    ATTENTION = "attention"
    RECOVERING = "recovering"
    HELD = "held"
    FAILED = "failed"
    UNKNOWN = "unknown"


class Doubt(StrEnum):
    """A reason why the store may not be intact, or why its restore may be forgotten."""

    CHECK_IN_FUTURE = "check_in_future"
    LOSS_FOUND = "loss_found"
    CHECKS_UNKNOWN = "checks_unknown"
    NEVER_INTACT = "never_intact"
    OVERDUE = "overdue"
    LONG_HOLD = "long_hold"


class Attention(StrEnum):
    """A reason why a person has to act although the store is intact; the most important first."""

    USAGE_MISSING = "usage_missing"
    COUNTERS_GONE = "counters_gone"
    CLOCK_SKEW = "clock_skew"
    CAPTURES_FAILING = "captures_failing"
    NO_SNAPSHOT = "no_snapshot"
    TENANTS_FAILING = "tenants_failing"
    SNAPSHOTS_LATE = "snapshots_late"
    RECORDS_DAMAGED = "records_damaged"
    UNREADABLE_KEYS = "unreadable_keys"
    SNAPSHOT_IN_FUTURE = "snapshot_in_future"
    MARKER_NOT_WRITTEN = "marker_not_written"


@dataclass(frozen=True, slots=True)
class TenantFailures:
    """Tenants, by name, whose last capture failed for one reason; the texts are of the first."""

    tenants: tuple[str, ...]
    reason: str
    hint: str


@dataclass(frozen=True, slots=True)
class Status:
    """What the database knows of the store at ``at``, and how often the store is to be checked.

    ``checks`` are the newest, newest first; ``newest_good`` is the newest that found the store
    intact, ``first_checked_at`` the time of the oldest. ``attempt`` is the newest of the open
    incident, ``closed`` the newest closed incident; ``amounts`` and ``closed_amounts`` are what
    they cost. ``worker`` is the process that is restoring. ``runs`` are the newest captures, newest
    first. ``stray_keys`` are keys without a tenant that the newest ended one found, or the first of
    them. ``falls`` are the open ones, largest first; ``gone`` are counts with counters that a check
    found gone since the newest snapshot, most first. ``changes`` are those of the bucket's
    configuration in the last 24 hours, newest first.
    """

    at: datetime
    check_interval: timedelta
    recovery: Recovery
    attempt: Attempt | None
    worker: str | None
    closed: Incident | None
    checks: tuple[Check, ...]
    newest_good: Check | None
    first_checked_at: datetime | None
    runs: tuple[RecordedRun, ...]
    stray_keys: tuple[CaptureFailure, ...]
    points: PointAges
    falls: tuple[Fall, ...]
    gone: tuple[KeyCount, ...]
    changes: tuple[ConfigurationChange, ...]
    amounts: IncidentAmounts | None = None
    closed_amounts: IncidentAmounts | None = None

    @property
    def unknown_in_a_row(self) -> int:
        """How many of the newest checks, since the last incident, are unknown."""
        unknown = takewhile(
            lambda check: check.verdict is Verdict.UNKNOWN and self._is_news(check.checked_at),
            self.checks,
        )
        return sum(1 for _ in unknown)

    @property
    def known_whole_at(self) -> datetime | None:
        """When the store was last known to be intact: checked, or accepted after a loss.

        Before the first check, a stored snapshot counts: a capture compares the store, too.
        """
        known = [self.newest_good.checked_at] if self.newest_good else []
        if self.closed is not None and self.closed.ended is not None:
            known.append(self.closed.ended.at)
        if not self.checks and self.points.newest_snapshot is not None:
            known.append(self.points.newest_snapshot)
        return max(known, default=None)

    @property
    def condition(self) -> Condition:
        """The state of the store; that of a HEALTHY one with a doubt is unknown."""
        match self.recovery.state:
            case RecoveryState.RECOVERING:
                incident = self.recovery.incident
                is_held = incident is not None and incident.is_held
                return Condition.HELD if is_held else Condition.RECOVERING
            case RecoveryState.FAILED:
                return Condition.FAILED
            case RecoveryState.HEALTHY:
                if self.doubts:
                    return Condition.UNKNOWN
                return Condition.ATTENTION if self.attentions else Condition.HEALTHY

    @property
    def cause_gone_since(self) -> datetime | None:
        """Since when checks show that the cause of the restore's failure is gone.

        None: it is not, or checks cannot show it.
        """
        incident = self.recovery.incident
        given_up = incident.given_up if incident is not None else None
        if given_up is None or given_up.code not in _OF_ANSWERS:
            return None
        is_missing = given_up.code == StoreMissingError.code

        def answers(check: Check) -> bool:
            is_there = check.evidence is not Evidence.GONE or not is_missing
            return check.verdict is not Verdict.UNKNOWN and is_there

        answered = takewhile(
            lambda check: answers(check) and check.checked_at > given_up.at, self.checks
        )
        return min((check.checked_at for check in answered), default=None)

    @property
    def doubts(self) -> tuple[Doubt, ...]:
        """The doubts about a HEALTHY store, or about its restore; the most important first."""
        match self.recovery.state:
            case RecoveryState.RECOVERING:
                return (Doubt.LONG_HOLD,) if self._is_held_long() else ()
            case RecoveryState.FAILED:
                return ()
            case RecoveryState.HEALTHY:
                # A wrong time makes all ages meaningless, and a loss needs no further doubt.
                overriding = self._overriding_doubt()
                return (overriding,) if overriding else tuple(self._doubts_of_age())

    @property
    def attentions(self) -> tuple[Attention, ...]:
        """Why a person has to act although the store is HEALTHY; the most important first.

        Nothing is judged while a loss is being confirmed. While a time in the future makes all ages
        meaningless, only what does not depend on them is judged.
        """
        doubt = self._overriding_doubt()
        if self.recovery.state is not RecoveryState.HEALTHY or doubt is Doubt.LOSS_FOUND:
            return ()
        found = {
            Attention.USAGE_MISSING: bool(self.falls),
            Attention.COUNTERS_GONE: bool(self.gone),
            Attention.CLOCK_SKEW: abs(self.clock_skew or timedelta(0)) > RESTORE_CLOCK_SKEW,
            Attention.CAPTURES_FAILING: bool(self.failed_runs),
            Attention.NO_SNAPSHOT: doubt is None and self._was_never_captured(),
            Attention.TENANTS_FAILING: bool(self.failing),
            Attention.SNAPSHOTS_LATE: (
                doubt is None and (bool(self.late_tenants) or self._is_behind())
            ),
            Attention.RECORDS_DAMAGED: bool(self.points.damage.records),
            Attention.UNREADABLE_KEYS: bool(self.ended_runs and self.stray_keys),
            Attention.SNAPSHOT_IN_FUTURE: self.points.future is not None,
            Attention.MARKER_NOT_WRITTEN: self._lacks_a_new_marker(),
        }
        return tuple(attention for attention in Attention if found[attention])

    @property
    def ended_runs(self) -> tuple[RecordedRun, ...]:
        """The newest captures that have ended or whose hour has, newest first.

        A capture whose hour is over cannot store anything any more: its process hangs or died.
        Captures from before the end of the last incident do not count: their cause may have ended
        with it.
        """
        return tuple(
            takewhile(
                lambda run: self._is_news(run.ended_at or run.hour.end),
                (run for run in self.runs if run.result or run.hour.is_past(self.at)),
            )
        )

    @property
    def failed_runs(self) -> int:
        """How many of the newest captures in a row stored nothing because they failed."""
        failed = takewhile(
            lambda run: run.result is None or run.result.outcome is RunOutcome.FAILED,
            self.ended_runs,
        )
        return sum(1 for _ in failed)

    @property
    def skew_run(self) -> RecordedRun | None:
        """The newest capture that measured the skew of the clocks."""
        return next((run for run in self.ended_runs if _skew_of(run) is not None), None)

    @property
    def clock_skew(self) -> timedelta | None:
        """How far the store's clock was ahead of the database's; None: not measured lately."""
        run = self.skew_run
        return None if run is None else _skew_of(run)

    @property
    def failing(self) -> Mapping[str, FailingTenant]:
        """The tenants whose last capture failed, after the end of the last incident."""
        failing = self.points.failing.items()
        return {tenant: each for tenant, each in failing if self._is_news(each.failed_at)}

    @property
    def failures(self) -> tuple[TenantFailures, ...]:
        """The failing tenants, grouped by reason; the most common reason first."""
        return group_failures(self.failing)

    def _is_news(self, at: datetime) -> bool:
        """Whether something happened after the last incident."""
        ended = self.closed.ended if self.closed else None
        return ended is None or at > ended.at

    def _was_never_captured(self) -> bool:
        """Whether the first capture is overdue."""
        first = self.first_checked_at
        is_missing = self.points.newest_snapshot is None
        return is_missing and first is not None and is_too_old(first, self.at)

    def _lacks_a_new_marker(self) -> bool:
        """Whether the newest good check could not renew the marker: some losses go undetected."""
        good = self.newest_good
        return good is not None and good.evidence is Evidence.MARKER_NOT_WRITTEN

    def _is_behind(self) -> bool:
        return self.points.newest_snapshot is not None and self.points.is_behind

    @property
    def late_tenants(self) -> tuple[str, ...]:
        """The tenants whose newest snapshot of an open window is too old, by name.

        That of a tenant whose counters are all gone has no window.
        """
        return tuple(sorted(self.points.newest_points.keys() & self.points.too_old.keys()))

    def _is_held_long(self) -> bool:
        """Whether a hold may have been forgotten: captures are paused as long as it lasts."""
        incident = self.recovery.incident
        held = incident.held if incident is not None and incident.is_held else None
        return held is not None and self.at - held.at >= _LONG_HOLD

    def _overriding_doubt(self) -> Doubt | None:
        newest = self.checks[0] if self.checks else None
        if newest is not None and is_in_the_future(newest.checked_at, self.at):
            return Doubt.CHECK_IN_FUTURE
        if newest is not None and newest.verdict.is_alarm and self._is_news(newest.checked_at):
            # Without an incident, an older database was accepted: only renewals were missing.
            is_behind = newest.verdict is Verdict.DATABASE_BEHIND
            return None if is_behind and newest.incident_id is None else Doubt.LOSS_FOUND
        return None

    def _doubts_of_age(self) -> Iterator[Doubt]:
        if self.unknown_in_a_row >= MISSED_CHECKS:
            yield Doubt.CHECKS_UNKNOWN
        allowed = self.check_interval * (MISSED_CHECKS if self.checks else 1)
        if self.known_whole_at is None:
            yield Doubt.NEVER_INTACT
        elif self.at - self.known_whole_at > allowed:
            yield Doubt.OVERDUE


def _amounts_of(plane: ControlPlane, incident: Incident | None) -> IncidentAmounts | None:
    if incident is None:
        return None
    return plane.audits.amounts_in(incident.incident_id, MOST_AMOUNTS)


def _stray_keys(plane: ControlPlane, runs: Iterable[RecordedRun]) -> tuple[CaptureFailure, ...]:
    """Return the keys without a tenant that the newest ended capture recorded."""
    newest = next((run for run in runs if run.result is not None), None)
    failures = () if newest is None else plane.reports.failures_of(newest.run_id)
    return tuple(each for each in failures if each.kind is Uncaptured.KEY)


def _skew_of(run: RecordedRun) -> timedelta | None:
    return None if run.result is None else run.result.clock_skew


def group_failures(
    failing: Mapping[str, FailingTenant | TenantFailed],
) -> tuple[TenantFailures, ...]:
    """Group failed tenants by reason; the most common reason first."""
    groups: defaultdict[str, list[str]] = defaultdict(list)
    for tenant, each in sorted(failing.items()):
        # Reasons that differ only in the name of the tenant are the same.
        same = re.sub(rf"(?<!\w){re.escape(tenant)}(?!\w)", "", each.reason)
        groups[same].append(tenant)
    largest_first = sorted(groups.values(), key=len, reverse=True)
    return tuple(
        TenantFailures(tuple(tenants), failing[tenants[0]].reason, failing[tenants[0]].hint)
        for tenants in largest_first
    )


def read_status(plane: ControlPlane, *, check_interval: timedelta) -> Status:
    """Read the status from the control plane; the store itself is not read.

    The records are verified last. If that fails or is not done in time, the status says so.

    Raises:
        DatabaseError: the database failed.
    """
    recovery = plane.incidents.recovery()
    open_one = recovery.incident
    attempts = plane.incidents.attempts_of(open_one.incident_id) if open_one else ()
    # At most one incident is open, and it is the newest.
    recent = plane.incidents.recent(2)
    checks = plane.registry.newest_checks(MOST_CHECKS)
    closed = next((each for each in recent if each.ended is not None), None)
    good = plane.registry.newest_good_check()
    worker = plane.leases.state_of(RESTORE_LEASE).holder
    falls, gone = plane.falls.open(), counters_gone(plane)
    changes = plane.falls.configuration_changes(plane.clock.now() - CHANGES_SHOWN_FOR)
    runs = plane.reports.newest_runs(MOST_RUNS)
    # Last, because it is slow: its time is that of the status, so no check above is in the future.
    points = judge_point_ages(plane, within=VERIFY_WITHIN)
    return Status(
        at=points.now,
        check_interval=check_interval,
        recovery=recovery,
        attempt=attempts[-1] if attempts else None,
        worker=worker,
        closed=closed,
        checks=checks,
        newest_good=good,
        first_checked_at=plane.registry.first_checked_at(),
        runs=runs,
        stray_keys=_stray_keys(plane, runs),
        points=points,
        falls=falls,
        gone=gone,
        changes=changes,
        amounts=_amounts_of(plane, open_one),
        closed_amounts=_amounts_of(plane, closed),
    )
