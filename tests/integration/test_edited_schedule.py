"""A schedule whose cron expression changes within an hour."""

from datetime import timedelta
from pathlib import Path

import dagster as dg
from dagster import DagsterRunStatus
from dagster._core.storage.tags import (
    RUN_KEY_TAG,
    SCHEDULE_NAME_TAG,
    SCHEDULED_EXECUTION_TIME_TAG,
)

from budget_recovery_dagster.domain import Hour
from tests import services
from tests.integration.recovery_runs import schedule_tick
from tests.nats_servers import Bucket


def test_a_schedule_edited_within_the_hour_requests_no_second_snapshot(
    configured: Bucket, current_hour: Hour, tmp_path: Path
) -> None:
    # As dagster-io/dagster#13597: Dagster compares only run keys of the same scheduled time.
    with dg.DagsterInstance.local_temp(str(tmp_path)) as instance:
        first = schedule_tick(instance, current_hour.start)
        assert isinstance(first, dg.RunRequest)
        run = instance.create_run_for_job(
            services.definitions().resolve_job_def("hourly_snapshot_job"),
            status=DagsterRunStatus.STARTED,
            tags={
                **first.tags,
                "dagster/partition": current_hour.key,
                # The tags that the scheduler adds.
                SCHEDULE_NAME_TAG: "hourly_snapshot_schedule",
                SCHEDULED_EXECUTION_TIME_TAG: current_hour.start.isoformat(),
                RUN_KEY_TAG: current_hour.key,
            },
        )
        # As if the scheduler died before it recorded the tick: it finds its run.
        assert isinstance(schedule_tick(instance, current_hour.start), dg.RunRequest)
        edited = schedule_tick(instance, current_hour.start + timedelta(minutes=59))
        assert isinstance(edited, dg.SkipReason)
        assert str(edited.skip_message) == (
            f"Run {run.run_id[:8]} of the hour {current_hour} is started."
        )
