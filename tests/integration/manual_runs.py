"""Manual restores on real servers: through the services with a test's clock, and through jobs."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import dagster as dg

from budget_recovery_dagster.ports import ControlPlane
from budget_recovery_dagster.services import Preview, preview_restore
from budget_recovery_dagster.services.restore import (
    Applied,
    Order,
    RestoreRequest,
    restore_manually,
)
from tests import services
from tests.integration.timeless_store import opened_store


@dataclass
class Operator:
    """An operator who uses the services, on a store whose server does not report its time."""

    plane: ControlPlane
    messages: list[str] = field(default_factory=list)

    def preview(self, request: RestoreRequest) -> Preview:
        return preview_restore(
            self.plane, opened_store, request, by="ann", on_progress=self.messages.append
        )

    def apply(self, request: RestoreRequest, by: str = "ann") -> Applied:
        return restore_manually(
            self.plane,
            opened_store,
            request,
            Order(by, "a test", f"run of {by}", self.messages.append),
            convergence_timeout=services.present_settings().convergence_timeout,
        )


def run_job_with_config(
    instance: dg.DagsterInstance, job: str, op: str, config: Mapping[str, Any]
) -> dg.ExecuteInProcessResult:
    """Run a job with the config that the Launchpad would send."""
    return (
        services.definitions()
        .resolve_job_def(job)
        .execute_in_process(
            run_config={"ops": {op: {"config": dict(config)}}},
            instance=instance,
            raise_on_error=False,
        )
    )


def run_manual_restore(instance: dg.DagsterInstance, **config: Any) -> dg.ExecuteInProcessResult:
    return run_job_with_config(instance, "manual_restore_job", "manual_restore", config)


def shown(result: dg.ExecuteInProcessResult) -> Mapping[str, Any]:
    """Return the metadata of restored_usage of a run, tables as rows."""
    (event,) = [
        event
        for event in result.all_events
        if event.is_step_materialization or event.event_type_value == "ASSET_OBSERVATION"
    ]
    assert event.asset_key == dg.AssetKey("restored_usage")
    data = (
        event.step_materialization_data.materialization
        if event.is_step_materialization
        else event.asset_observation_data.asset_observation
    )
    return {name: content_of(value) for name, value in data.metadata.items()}


def content_of(value: dg.MetadataValue[Any]) -> Any:
    """Return the value of a metadata entry, a table as rows."""
    if isinstance(value, dg.TableMetadataValue):
        return [record.data for record in value.records]
    return value.value
