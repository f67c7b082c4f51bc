"""Discarding snapshots dated in the future: a clock was wrong when they were captured."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from budget_recovery_dagster.domain.admission import CAPTURE_LEASE
from budget_recovery_dagster.domain.snapshots import ListedSnapshot
from budget_recovery_dagster.domain.windows import MAX_CLOCK_SKEW, clocks_in_words
from budget_recovery_dagster.errors import ChoiceError, ClockSkewError, StoreError
from budget_recovery_dagster.ports import ControlPlane, OpenStore
from budget_recovery_dagster.services.store_watch import measure_clock_skew, measure_host_skew


@dataclass(frozen=True, slots=True)
class FutureSnapshots:
    """The snapshots dated in the future, newest first: those that would be discarded.

    ``unmeasured`` is why the store's clock was not compared; None: it was.
    """

    found: tuple[ListedSnapshot, ...]
    unmeasured: str | None


def list_future(plane: ControlPlane, open_store: OpenStore | None) -> FutureSnapshots:
    """Return the snapshots dated in the future; ``open_store`` None: no store is configured.

    With a clock that is behind, good snapshots would look as if they were dated in the future.
    PostgreSQL and this host may share one clock, so the store's is compared as well.

    Raises:
        ClockSkewError: the database's clock and this host's or the store's disagree.
        ChoiceError: no snapshot is dated in the future.
    """
    now = plane.clock.now()
    _require_agreement(measure_host_skew(plane.clock), now, "this host's")
    unmeasured = _require_agreeing_store(plane, open_store)
    found = plane.snapshots.in_future(now)
    if not found:
        raise ChoiceError(
            "No snapshot is dated in the future, so there is nothing to discard.",
            "list the snapshots with `budget-recovery snapshots`.",
        )
    return FutureSnapshots(found, unmeasured)


def _require_agreeing_store(plane: ControlPlane, open_store: OpenStore | None) -> str | None:
    """Return why the store's clock could not be compared with the database's; None: they agree."""
    if open_store is None:
        return "No NATS server is configured."
    try:
        with open_store() as store:
            skew = measure_clock_skew(plane.clock, store)
    except StoreError as error:
        return error.message
    if skew is None:
        return "The usage store does not report its time."
    _require_agreement(skew, plane.clock.now(), "the usage store's")
    return None


def _require_agreement(skew: timedelta, now: datetime, other: str) -> None:
    if abs(skew) > MAX_CLOCK_SKEW:
        raise ClockSkewError(
            clocks_in_words(skew, now, other) + ". Nothing was discarded.",
            "synchronize the clocks with NTP first: with a clock that is behind, good snapshots"
            " look as if they were dated in the future.",
        )


def discard_future(  # noqa: PLR0913 - by keyword, each the caller's own
    plane: ControlPlane,
    confirmed: Sequence[ListedSnapshot],
    open_store: OpenStore | None,
    *,
    by: str,
    reason: str,
    holder: str,
) -> tuple[ListedSnapshot, ...]:
    """Discard those of the confirmed snapshots that are still dated in the future; return them.

    Each is recorded. ``confirmed`` is what ``list_future`` returned and a person saw. ``by``
    and ``reason`` are recorded with them; ``holder`` identifies this work to captures.

    Raises:
        ClockSkewError, ChoiceError: as ``list_future``; nothing is discarded.
        LeaseHeldError: a capture is running.
        CapturesPausedError: the store is not HEALTHY.
    """
    with plane.leases.hold(CAPTURE_LEASE, holder) as lease:
        list_future(plane, open_store)
        times = {each.captured_at for each in confirmed}
        return plane.snapshots.discard_future(times, by=by, reason=reason, lease=lease)
