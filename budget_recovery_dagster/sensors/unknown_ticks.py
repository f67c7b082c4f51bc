"""Ticks that could find nothing out: skipped with the reason, and red after several in a row."""

import dagster as dg

ALLOWED = 3
"""A tick that could find nothing out fails if it is at least this one in a row."""


def unknown_tick(
    context: dg.SensorEvaluationContext,
    reason: str,
    hint: str,
    events: list[dg.AssetObservation] | None = None,
) -> dg.SensorResult:
    """Skip the tick, and count it in the cursor.

    Raises:
        dagster.Failure: it is not the first ones in a row any more.
    """
    count = _counted(context.cursor) + 1
    told = f"{reason} Try: {hint}" if hint else reason
    if count >= ALLOWED:
        # The cursor stays as it is, so the next one fails as well unless it finds something out.
        raise dg.Failure(f"At least {count} ticks in a row could find nothing out. {told}")
    return dg.SensorResult(skip_reason=told, cursor=str(count), asset_events=events or [])


def _counted(cursor: str | None) -> int:
    # It can be edited in the UI. The supervisor keeps more behind the count.
    count = (cursor or "").partition(" ")[0]
    return int(count) if count.isdecimal() else 0
