"""Checks what is missing from a store whose identity is unchanged, and requests captures."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from budget_recovery_dagster.domain.admission import CAPTURE_LEASE
from budget_recovery_dagster.domain.falls import (
    ConfigurationChange,
    Deletions,
    KeyCount,
    TenantWindow,
)
from budget_recovery_dagster.domain.incident import Incident, Outcome
from budget_recovery_dagster.domain.recovery_point import is_in_the_future
from budget_recovery_dagster.domain.verdict import Observation
from budget_recovery_dagster.domain.windows import Hour
from budget_recovery_dagster.errors import StoreError, StoreReadError
from budget_recovery_dagster.ports import ControlPlane, UsageStore

# A sensor's tick has ten seconds for everything. Counts of 10,000 windows take about two.
_COUNT_WITHIN = timedelta(seconds=3)
_READ_WITHIN = timedelta(seconds=2)
# They take two seconds; what is left is read by the next check, or covered by a capture.
_MOST_CHANGES_READ = 50_000
# A capture that starts this late would find its hour closed; the next one is due anyway.
_HOUR_ENDS = timedelta(minutes=1)
# `resolve` captures by itself after it has closed the incident; it needs seconds to begin.
_RESOLVE_CAPTURES_WITHIN = timedelta(seconds=10)
_DIGEST_CHARACTERS = 16
# If all of these failed, a requested capture stays due.
_NEWEST_RUNS = 20
# As often as the schedule tries an hour that failed, after the first ten minutes.
_AGAIN_AFTER_SECONDS = 600


@dataclass(frozen=True, slots=True)
class CaptureRequest:
    """A capture of an hour before the next scheduled one; the same cause has the same key.

    ``reason`` is a sentence for people.
    """

    key: str
    hour: Hour
    reason: str


@dataclass(frozen=True, slots=True)
class Compared:
    """What a check found in a store whose identity is unchanged.

    ``gone`` are the counts with missing counters, most first. ``notes`` are sentences for people:
    what is missing, changed, or could not be compared; ``hint`` is what to do about the latter.
    """

    gone: tuple[KeyCount, ...] = ()
    changes: tuple[ConfigurationChange, ...] = ()
    request: CaptureRequest | None = None
    notes: tuple[str, ...] = ()
    hint: str = ""


def compare_counts(plane: ControlPlane, store: UsageStore, seen: Observation) -> Compared:
    """Compare counts of keys and the bucket's configuration with what was known.

    ``seen`` is the observation that identified the store as the accepted one. Without an open
    incident, a difference requests a capture, which names what is missing. So does a restore or a
    reset that may have ended a fall.

    Raises:
        DatabaseError: the database failed.
    """
    if plane.incidents.recovery().incident is not None:
        return Compared()
    notes: list[str] = []
    changes: tuple[ConfigurationChange, ...] = ()
    hint = ""
    try:
        changes = plane.falls.record_configuration(store.configuration())
        failure = _count(plane, store, seen)
    except StoreError as error:
        failure = error
    if failure is not None:
        notes.append(f"Missing counters were not searched for: {failure.message}")
        hint = failure.hint
    gone = counters_gone(plane)
    request = _request(plane, gone, plane.falls.touched())
    if gone:
        notes.append(describe_gone(gone))
    if changes:
        notes.append(f"The bucket's configuration changed: {', '.join(map(str, changes))}.")
    if request is not None:
        notes.append("A capture is requested.")
    return Compared(gone, changes, request, tuple(notes), hint)


def missed_by_checks(plane: ControlPlane) -> CaptureRequest | None:
    """Return the request that the next check makes for what earlier ones found; None: none."""
    return _request(plane, counters_gone(plane), plane.falls.touched())


def requested_capture(plane: ControlPlane) -> CaptureRequest | None:
    """Return the request for a capture that cannot wait for the next hour; None: none is due.

    The end of an incident requests one, because captures were paused until then, and so does the
    first good check of an installation. A request is due until a capture begins.

    Raises:
        DatabaseError: the database failed.
    """
    # At most one incident is open, and it is the newest.
    newest = next(iter(plane.incidents.recent(1)), None)
    if newest is not None and newest.ended is None:
        return None
    cause = _after_incident(plane, newest) if newest else _first_start(plane)
    hour = _current_hour(plane)
    if cause is None or hour is None or plane.leases.state_of(CAPTURE_LEASE).holder is not None:
        return None
    key, reason = cause
    # The daemon launches nothing for a key that had a run, and that run may have died or failed.
    slot = int(plane.clock.now().timestamp()) // _AGAIN_AFTER_SECONDS
    return CaptureRequest(f"{key}/{slot}", hour, reason)


def _after_incident(plane: ControlPlane, incident: Incident) -> tuple[str, str] | None:
    """Return the key and the reason of a capture after a closed incident; None: it is taken."""
    ended = incident.ended
    if ended is None or _newest_run_at(plane) >= ended.at:
        return None
    is_fresh = plane.clock.now() - ended.at < _RESOLVE_CAPTURES_WITHIN
    if ended.outcome is Outcome.ACCEPTED and is_fresh:
        return None
    return (
        f"after-incident/{incident.incident_id}",
        f"Incident {incident.short_id} is closed, and no snapshot was taken since.",
    )


def _first_start(plane: ControlPlane) -> tuple[str, str] | None:
    """Return the key and the reason of the first capture; None: it is taken, or not possible."""
    good = plane.registry.newest_good_check()
    if good is None or plane.reports.newest_runs(1) or plane.snapshots.tenants():
        return None
    return (
        f"first/{plane.registry.claim().deployment_id}",
        "The store is found, and no snapshot was ever taken.",
    )


def _newest_run_at(plane: ControlPlane) -> datetime:
    """Return when the newest capture began that has not failed; long ago if there is none."""
    never = datetime.min.replace(tzinfo=UTC)
    if runs := plane.reports.newest_runs(_NEWEST_RUNS):
        # One that failed has stored nothing.
        began = next((run.started_at for run in runs if not run.has_failed), never)
        # The clock was ahead then, so nothing can follow from that time.
        return never if is_in_the_future(began, plane.clock.now()) else began
    # Captures before version 2 of the schema left only their snapshots.
    return max(plane.reports.newest_snapshots().values(), default=never)


def _current_hour(plane: ControlPlane) -> Hour | None:
    """Return the current hour; None if it ends before a requested capture could begin."""
    now = plane.clock.now()
    hour = Hour.containing(now)
    return None if hour.is_past(now + _HOUR_ENDS) else hour


def counters_gone(plane: ControlPlane) -> tuple[KeyCount, ...]:
    """Return the counts from which checks found counters gone, most first."""
    counts, _ = plane.falls.counts()
    gone = (each for each in counts if each.missing)
    return tuple(sorted(gone, key=lambda each: (-each.missing, each.at.tenant)))


def describe_gone(gone: Sequence[KeyCount]) -> str:
    """Describe in a sentence how many counters are missing; ``gone`` is sorted, most first."""
    total, worst = sum(count.missing for count in gone), gone[0]
    return (
        f"Counters missing from the store since the newest snapshots: {total:,}. The"
        f" largest: {worst.missing:,} of tenant {worst.at.tenant!r}, {worst.at.of}."
    )


def _count(plane: ControlPlane, store: UsageStore, seen: Observation) -> StoreError | None:
    """Count the keys, and store the counts that differ; return why deletions were not read."""
    known, until = plane.falls.counts()
    if not known:
        return None
    last_sequence = seen.identity.last_sequence
    before = [each for each in known if not each.is_outdated]
    keys = store.count_keys(_in_turn(known, seen), within=_COUNT_WITHIN)
    start = max(min((each.sequence for each in before), default=last_sequence), until or 0)
    deletions, failure = _read_deletions(store, min(start, last_sequence))
    # A snapshot accounts for the deletions before it.
    sequences = {each.at: each.sequence for each in before}
    deleted = Counter(
        at for at, sequence in deletions.found if sequence > sequences.get(at, sequence)
    )
    now = plane.clock.now()
    after = {each: each.counted(keys.get(each.at), deleted[each.at], now) for each in before}
    # What was counted before a loss says nothing about the store that was accepted after it.
    after |= {
        each: each.restarted(keys[each.at], last_sequence, now)
        for each in known
        if each.at not in sequences and each.at in keys
    }
    changed = {each: count for each, count in after.items() if not count.equals(each)}
    plane.falls.record_counts({each: each for each in known} | changed, until=deletions.until)
    return failure or _not_counted([each.at for each in known if each.at not in keys], len(known))


def _not_counted(unknown: Sequence[TenantWindow], known: int) -> StoreError | None:
    """Return what to report about windows whose count is unknown; None: all were counted."""
    if not unknown:
        return None
    first = unknown[0]
    return StoreReadError(
        f"The keys of {len(unknown)} of {known} windows were not counted, such as tenant"
        f" {first.tenant!r}, {first.of}.",
        "check the load of the NATS servers; the next check counts them again.",
    )


def _read_deletions(store: UsageStore, after: int) -> tuple[Deletions, StoreError | None]:
    """Read the deletions after a sequence; on a failure, the next check reads them again."""
    try:
        found = store.read_deletions(after, at_most=_MOST_CHANGES_READ, within=_READ_WITHIN)
    except StoreError as error:
        return Deletions((), after), error
    return found, None


def _in_turn(known: Sequence[KeyCount], seen: Observation) -> dict[TenantWindow, int]:
    """Begin at another place each time, so that a count that takes too long reaches all in turn."""
    start = seen.identity.last_sequence % len(known)
    return {each.at: each.keys for each in (*known[start:], *known[:start])}


def _request(
    plane: ControlPlane, gone: Iterable[KeyCount], touched: Mapping[str, datetime]
) -> CaptureRequest | None:
    """Return the request for a capture; each difference, restore or reset has its own key."""
    facts = [
        f"{each.at.tenant!r} {each.at.of.budget!r} {each.at.of.window.token} {each.missing}"
        f" {each.missing_since}"
        for each in gone
    ]
    facts += [f"{tenant!r} {at}" for tenant, at in touched.items()]
    hour = _current_hour(plane)
    if not facts or hour is None:
        return None
    digest = hashlib.sha256("\n".join(sorted(facts)).encode()).hexdigest()
    reason = "Counters are missing from the store, or were restored or reset."
    return CaptureRequest(f"missing/{digest[:_DIGEST_CHARACTERS]}", hour, reason)
