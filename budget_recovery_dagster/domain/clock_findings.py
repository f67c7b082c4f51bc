"""Whether clocks agree well enough for what is named and decided by them."""

from datetime import datetime, timedelta

from budget_recovery_dagster.domain.findings import Finding, Topic, advice, ok, wrong
from budget_recovery_dagster.domain.windows import MAX_CLOCK_SKEW, RESTORE_CLOCK_SKEW

STORE_CLOCK = "of the store"
HOST_CLOCK = "of this host"
CLOCKS = (STORE_CLOCK, HOST_CLOCK)

_SHOWN_SECONDS = 0.1
_BY_NTP = "set the clocks of both servers by NTP."


def judge_store_clock(
    before: datetime, told: datetime | None, after: datetime, *, version: str
) -> Finding:
    """Judge the clock of the stream's leader, asked between two looks at the database's."""
    if told is None:
        return advice(
            Topic.CLOCKS,
            STORE_CLOCK,
            f"nats-server {version} does not tell its time, so it is compared with nothing.",
            "use 2.10 or newer.",
        )
    ahead = _ahead(before, told, after)
    if abs(ahead) <= RESTORE_CLOCK_SKEW:
        return ok(Topic.CLOCKS, STORE_CLOCK, f"{_in_words(ahead)} the database's")
    then = (
        "nothing is captured or restored" if abs(ahead) > MAX_CLOCK_SKEW else "nothing is restored"
    )
    return wrong(
        Topic.CLOCKS, STORE_CLOCK, f"It is {_in_words(ahead)} the database's: {then}.", _BY_NTP
    )


def judge_host_clock(before: datetime, told: datetime, after: datetime) -> Finding:
    """Judge the database's clock, asked between two looks at this host's."""
    ahead = -_ahead(before, told, after)
    if abs(ahead) <= MAX_CLOCK_SKEW:
        return ok(Topic.CLOCKS, HOST_CLOCK, f"{_in_words(ahead)} the database's")
    return advice(
        Topic.CLOCKS,
        HOST_CLOCK,
        f"It is {_in_words(ahead)} the database's: where Dagster runs on this host, its schedule"
        " ticks for other hours than the database names.",
        "set the clock of this host by NTP.",
    )


def _ahead(before: datetime, told: datetime, after: datetime) -> timedelta:
    """Return by how much a clock is certainly ahead of another; negative: behind."""
    if told > after:
        return told - after
    return told - before if told < before else timedelta(0)


def _in_words(ahead: timedelta) -> str:
    seconds = ahead.total_seconds()
    if abs(seconds) < _SHOWN_SECONDS:
        return "as"
    return f"{abs(seconds):,.1f} s {'ahead of' if seconds > 0 else 'behind'}"
