"""The supervisor's cursor: how many ticks found nothing out, and what seems to be dead or lost."""

from datetime import datetime

from budget_recovery_dagster.domain.supervision import Suspicion


def write_suspicion(suspicion: Suspicion | None) -> str:
    """Write a cursor after a tick that found something out."""
    if suspicion is None:
        return "0"
    return f"0 {suspicion.suspect} {suspicion.token} {suspicion.since.isoformat()}"


def read_suspicion(cursor: str | None) -> Suspicion | None:
    """Read the suspicion; None where there is none, also where somebody has edited the cursor."""
    try:
        _, suspect, token, since = (cursor or "").split()
        moment = datetime.fromisoformat(since)
        return Suspicion(suspect, int(token), moment) if moment.tzinfo else None
    except ValueError:
        return None
