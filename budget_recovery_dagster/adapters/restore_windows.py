"""Windows of a restore's recovery point while their records are read, one by one."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal

from budget_recovery_dagster.domain.counters import (
    BudgetWindow,
    Entity,
    OmittedCounter,
    ValueShape,
)
from budget_recovery_dagster.domain.recovery_point import Usages
from budget_recovery_dagster.domain.resets import Reset, concerning, eligible, keeping_out
from budget_recovery_dagster.domain.windows import Period, Window
from budget_recovery_dagster.restore_ports import WindowPoint


def tokens_at(moment: datetime) -> frozenset[str]:
    """Return the tokens of all windows that are current at a moment."""
    return frozenset(Window.containing(period, moment).token for period in Period)


@dataclass(frozen=True, slots=True)
class RecordMarks:
    """What is told of one record beside its usages."""

    is_truncated: bool = False
    is_partial: bool = False
    omitted: tuple[OmittedCounter, ...] = ()
    omitted_count: int = 0


_UNMARKED = RecordMarks()


class WindowInMaking:
    """One budget and window; records may be added in any order, and more than once.

    What ``resets``, which may be all of the tenant, make ineligible is left out.
    """

    def __init__(
        self,
        of: BudgetWindow,
        *,
        newest_at: datetime,
        shape: ValueShape | None,
        expiry_seconds: int | None,
        resets: Sequence[Reset] = (),
    ) -> None:
        self.of = of
        self._newest_at = newest_at
        self._shape = shape
        self._expiry_seconds = expiry_seconds
        self._resets = concerning(of, resets)
        self._kept_out: set[Reset] = set()
        self._usages: dict[Entity, Decimal] = {}
        self._sources: dict[Entity, datetime] = {}
        self._sound: set[datetime] = set()
        self._corrupt: set[datetime] = set()

    @property
    def needs_all_records(self) -> bool:
        """Whether a record that should have stood for earlier ones cannot."""
        return bool(self._corrupt)

    @property
    def newest_sound(self) -> datetime | None:
        """The time of the newest sound record that was added; None: there was none."""
        return max(self._sound, default=None)

    def add(self, captured_at: datetime, usages: Usages | None) -> None:
        """Add a record; ``usages`` None: it holds something else than was captured."""
        if usages is None:
            self._corrupt.add(captured_at)
            return
        self._sound.add(captured_at)
        if self._resets:
            self._kept_out.update(keeping_out(usages, captured_at, self.of, self._resets))
            usages = eligible(usages, captured_at, self.of, self._resets)
        self._merge(captured_at, usages)

    def note_kept_out(self, reset: Reset) -> None:
        """Note that a reset keeps usages of records out that need not be added."""
        self._kept_out.add(reset)

    def _merge(self, captured_at: datetime, usages: Usages) -> None:
        best, sources = self._usages, self._sources
        if not best:
            best.update(usages)
            self._sources = dict.fromkeys(usages, captured_at)
            return
        for entity, usage in usages.items():
            known = best.get(entity)
            if known is None or usage > known:
                best[entity] = usage
                sources[entity] = captured_at
            elif captured_at > sources[entity] and usage == known:
                sources[entity] = captured_at

    def finished(self, marks: RecordMarks = _UNMARKED) -> WindowPoint:
        """Return the window as the records that were added make it.

        ``marks`` are those of the newest sound one.
        """
        return WindowPoint(
            of=self.of,
            usages=self._usages,
            newest_at=self.newest_sound or self._newest_at,
            shape=self._shape,
            expiry_seconds=self._expiry_seconds,
            corrupt=tuple(sorted(self._corrupt)),
            sources=self._sources,
            is_truncated=marks.is_truncated,
            is_partial=marks.is_partial,
            omitted=marks.omitted,
            omitted_count=marks.omitted_count,
            resets=tuple(reset for reset in self._resets if reset in self._kept_out),
        )
