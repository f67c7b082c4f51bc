"""The supervisor's cursor: how many ticks found nothing out, and which run seems to be dead."""

from datetime import datetime

from budget_recovery_dagster.domain.supervision import Suspicion


def write_suspicion(suspicion: Suspicion | None) -> str:
    """Write a cursor after a tick that found something out."""
    if suspicion is None:
        return "0"
    return f"0 {suspicion.run_id} {suspicion.token} {suspicion.since.isoformat()}"


def read_suspicion(cursor: str | None) -> Suspicion | None:
    """Read the suspicion; None where there is none, also where somebody has edited the cursor."""
    try:
        _, run_id, token, since = (cursor or "").split()
        moment = datetime.fromisoformat(since)
        return Suspicion(run_id, int(token), moment) if moment.tzinfo else None
    except ValueError:
        return None
