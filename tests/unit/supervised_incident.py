"""An incident whose restore is supervised."""

from datetime import UTC, datetime, timedelta

from budget_recovery_dagster.domain import Incident, Loss, StoreIdentity, Verdict

NOW = datetime(2026, 11, 25, 12, tzinfo=UTC)
INCIDENT = Incident(
    incident_id="0f8fad5b-d9cb-469f-a165-70867728950e",
    opened_at=NOW - timedelta(hours=1),
    losses=(Loss(NOW, "tick", Verdict.LOST, "why", StoreIdentity(NOW, 1), after=None),),
    target=None,
    newest_point_at=None,
    last_good_at=None,
)
