"""Launching a restore: one way for both sensors, so that an incident has one run at a time."""

import dagster as dg
from dagster import DagsterRunStatus

from budget_recovery_dagster.bootstrap import OpenedDatabase
from budget_recovery_dagster.domain.incident import may_launch

INCIDENT_TAG = "budget_recovery/incident"
"""On a run: the incident that it is to put right."""

_NOT_FINISHED = [
    DagsterRunStatus.QUEUED,
    DagsterRunStatus.NOT_STARTED,
    DagsterRunStatus.STARTING,
    DagsterRunStatus.STARTED,
    DagsterRunStatus.CANCELING,
]


def launch_restore(instance: dg.DagsterInstance, plane: OpenedDatabase) -> dg.RunRequest | str:
    """Claim a launch for the open incident and request its run, or say why there is none."""
    recovery = plane.incidents.recovery()
    incident = recovery.incident
    reason = may_launch(recovery, plane.clock.now())
    if reason is not None or incident is None:
        return reason or "No incident is open."
    tags = {INCIDENT_TAG: incident.incident_id}
    running = instance.get_runs(dg.RunsFilter(tags=tags, statuses=_NOT_FINISHED), limit=1)
    if running:
        run = running[0]
        return f"Run {run.run_id[:8]} is at incident {incident.short_id}: {run.status.value}."
    claimed = plane.incidents.claim_launch(judged=incident)
    if claimed is None:
        return f"A restore for incident {incident.short_id} has just been launched."
    # Dagster remembers run keys for ever, those of failed runs too: each launch has its own.
    return dg.RunRequest(run_key=f"{claimed.incident_id}/launch-{claimed.launches}", tags=tags)
