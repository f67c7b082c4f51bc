"""A recorded reset as people read it."""

from budget_recovery_dagster.domain.resets import Everyone, Reset
from budget_recovery_dagster.services.resets import RecordedReset, moment_in_words


def told(recorded: RecordedReset) -> tuple[str, ...]:
    """Say in paragraphs what was recorded, what it does, and what may still be wrong."""
    reset = recorded.reset
    what = (
        f"Recorded: {_whose(reset)} in {reset.window or 'all windows'} of budget {reset.budget!r}"
        f" of tenant {reset.tenant!r}, reset at {moment_in_words(reset.at)}. What snapshots of that"
        f" moment or before hold of {_it(reset)} comes back no more, unless a restore by hand is"
        " told to."
    )
    warning = (
        f"The gateway must have lowered {_it(reset)} before that moment: what a later snapshot"
        f" reads is used. If it had not, lower {_it(reset)} now and record the reset again."
    )
    doubt = (
        "A restore is under way, and may have read the older snapshots before: look at the"
        " counters when it is done, and lower again what has come back."
    )
    return (what, _left_out(recorded), warning, *((doubt,) if recorded.is_restoring else ()))


def _whose(reset: Reset) -> str:
    if isinstance(reset.entity, Everyone):
        return "every entity and the aggregate"
    return "the aggregate" if reset.entity is None else f"entity {reset.entity!r}"


def _it(reset: Reset) -> str:
    return "them" if reset.is_of_everyone else "it"


def _left_out(recorded: RecordedReset) -> str:
    if recorded.windows:
        tokens = ", ".join(of.window.token for of in recorded.windows)
        return f"It leaves recorded usage out of these current windows: {tokens}."
    return (
        "No snapshot so far has such a usage in a current window, so it changes nothing yet: see"
        " that names and window are written as in the snapshots."
    )
