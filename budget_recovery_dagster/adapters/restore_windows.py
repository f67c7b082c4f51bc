"""Windows of a restore's recovery point while their records are read, one by one."""

from datetime import datetime

from budget_recovery_dagster.domain.counters import BudgetWindow, ValueShape
from budget_recovery_dagster.domain.recovery_point import Usages, max_merge
from budget_recovery_dagster.domain.windows import Period, Window
from budget_recovery_dagster.restore_ports import WindowPoint


def tokens_at(moment: datetime) -> frozenset[str]:
    """Return the tokens of all windows that are current at a moment."""
    return frozenset(Window.containing(period, moment).token for period in Period)


class WindowInMaking:
    """One budget and window; records may be added in any order, and more than once."""

    def __init__(
        self,
        of: BudgetWindow,
        *,
        newest_at: datetime,
        shape: ValueShape | None,
        expiry_seconds: int | None,
    ) -> None:
        self.of = of
        self._newest_at = newest_at
        self._shape = shape
        self._expiry_seconds = expiry_seconds
        self._usages: Usages = {}
        self._sound: set[datetime] = set()
        self._corrupt: set[datetime] = set()

    @property
    def needs_all_records(self) -> bool:
        """Whether a record that should have stood for earlier ones cannot."""
        return bool(self._corrupt)

    def add(self, captured_at: datetime, usages: Usages | None) -> None:
        """Add a record; ``usages`` None: it holds something else than was captured."""
        if usages is None:
            self._corrupt.add(captured_at)
        else:
            self._sound.add(captured_at)
            self._usages = max_merge(self._usages, usages)

    def finished(self) -> WindowPoint:
        """Return the window as the records that were added make it."""
        return WindowPoint(
            of=self.of,
            usages=self._usages,
            newest_at=max(self._sound, default=self._newest_at),
            shape=self._shape,
            expiry_seconds=self._expiry_seconds,
            corrupt=tuple(sorted(self._corrupt)),
        )
