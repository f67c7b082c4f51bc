"""Discarding snapshots dated in the future: a clock was wrong when they were captured."""

from collections.abc import Sequence
from datetime import datetime

from budget_recovery_dagster.domain.admission import CAPTURE_LEASE
from budget_recovery_dagster.domain.snapshots import ListedSnapshot
from budget_recovery_dagster.domain.windows import MAX_CLOCK_SKEW, clocks_in_words
from budget_recovery_dagster.errors import ChoiceError, ClockSkewError
from budget_recovery_dagster.ports import ControlPlane


def list_future(plane: ControlPlane, *, host_time: datetime) -> tuple[ListedSnapshot, ...]:
    """Return the snapshots dated in the future, newest first: those that would be discarded.

    ``host_time`` is the time of this host. With a clock that is behind, good snapshots would look
    as if they were dated in the future.

    Raises:
        ClockSkewError: the database's clock and this host's disagree.
        ChoiceError: no snapshot is dated in the future.
    """
    now = plane.clock.now()
    skew = host_time - now
    if abs(skew) > MAX_CLOCK_SKEW:
        raise ClockSkewError(
            clocks_in_words(skew, now, "this host's") + ". Nothing was discarded.",
            "synchronize the clocks with NTP first: with a clock that is behind, good snapshots"
            " look as if they were dated in the future.",
        )
    found = plane.snapshots.in_future(now)
    if not found:
        raise ChoiceError(
            "No snapshot is dated in the future, so there is nothing to discard.",
            "list the snapshots with `budget-recovery snapshots`.",
        )
    return found


def discard_future(  # noqa: PLR0913 - by keyword, each the caller's own
    plane: ControlPlane,
    confirmed: Sequence[ListedSnapshot],
    *,
    by: str,
    reason: str,
    holder: str,
    host_time: datetime,
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
        list_future(plane, host_time=host_time)
        times = {each.captured_at for each in confirmed}
        return plane.snapshots.discard_future(times, by=by, reason=reason, lease=lease)
