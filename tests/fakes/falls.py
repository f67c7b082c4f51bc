"""Fake counts of keys, falls and configurations of the bucket."""

from collections.abc import Mapping
from datetime import datetime
from itertools import pairwise

from budget_recovery_dagster.domain import (
    FALLS_KEPT_FOR,
    Configuration,
    ConfigurationChange,
    Fall,
    KeyCount,
    changes_between,
)
from tests.fakes.control_plane import OnState


class MemoryFalls(OnState):
    """What is missing from an intact store, in memory."""

    def counts(self) -> tuple[tuple[KeyCount, ...], int | None]:
        now = self._plane.clock.now()
        open_ones = (each for each in self._plane.counts.values() if _is_open(each, now))
        return tuple(open_ones), self._plane.deletions_until

    def record_counts(self, counts: Mapping[KeyCount, KeyCount], *, until: int) -> None:
        plane = self._plane
        with plane.lock:
            now = plane.clock.now()
            if {each for each in plane.counts.values() if _is_open(each, now)} == counts.keys():
                plane.counts |= {count.at: count for count in counts.values()}
                plane.deletions_until = until
            retained = {tenant for tenant, _ in plane.snapshots}
            plane.counts = {
                at: each
                for at, each in plane.counts.items()
                if _is_open(each, now) or at.tenant in retained
            }
            cutoff = now - FALLS_KEPT_FOR
            plane.ended_falls = [each for each in plane.ended_falls if each.ended_at >= cutoff]

    def open(self) -> tuple[Fall, ...]:
        now = self._plane.clock.now()
        falls = [fall for fall in self._plane.falls if _is_open(fall, now)]
        by_name = sorted(falls, key=_name)
        return tuple(sorted(by_name, key=lambda fall: (fall.usage, fall.counters), reverse=True))

    def touched(self) -> Mapping[str, datetime]:
        plane = self._plane
        found: dict[str, datetime] = {}
        for fall in self.open():
            tenant = fall.at.tenant
            restored = (
                audit.finished_at
                for audit in plane.audits.values()
                if audit.entry.tenant == tenant and audit.entry.raised and audit.finished_at
            )
            reset = (each.recorded_at for each in plane.resets if each.tenant == tenant)
            times = [at for at in (*restored, *reset) if at > fall.judged_at]
            if times:
                found[tenant] = max(*times, found.get(tenant, times[0]))
        return dict(sorted(found.items()))

    def record_configuration(self, found: Configuration) -> tuple[ConfigurationChange, ...]:
        kept, now = self._plane.configurations, self._plane.clock.now()
        before = kept[-1][1] if kept else None
        if before == found:
            return ()
        kept.append((now, dict(found)))
        return () if before is None else changes_between(before, found, now)

    def configuration_changes(self, since: datetime) -> tuple[ConfigurationChange, ...]:
        kept = self._plane.configurations
        pairs = list(pairwise(kept))
        return tuple(
            change
            for (_, before), (found_at, after) in reversed(pairs)
            if found_at > since
            for change in changes_between(before, after, found_at)
        )


def _is_open(each: Fall | KeyCount, now: datetime) -> bool:
    return each.at.of.window.is_current(now)


def _name(fall: Fall) -> tuple[str, str, str]:
    return fall.at.tenant, fall.at.of.budget, fall.at.of.window.token
