"""Restores by hand on real servers: through the services, by a test's clock, and through jobs."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import dagster as dg

from budget_recovery_dagster.bootstrap import OpenedDatabase
from budget_recovery_dagster.definitions import defs
from budget_recovery_dagster.services import Preview
from budget_recovery_dagster.services.restore import (
    Applied,
    ManualRestoreService,
    Order,
    RestoreRequest,
)
from tests.integration.timeless_store import opened_store


@dataclass
class Hand:
    """A person at the services, on a store whose server does not tell the time."""

    plane: OpenedDatabase
    told: list[str] = field(default_factory=list)

    def preview(self, request: RestoreRequest) -> Preview:
        service = replace(self.plane.preview_service(), open_store=opened_store)
        return service.preview(request, by="ann", tell=self.told.append)

    @property
    def restores(self) -> ManualRestoreService:
        service = self.plane.manual_restore_service()
        return replace(service, tools=replace(service.tools, open_store=opened_store))

    def apply(self, request: RestoreRequest, by: str = "ann") -> Applied:
        order = Order(by, "a test", f"run of {by}", self.told.append)
        return self.restores.apply(request, order)


def run_by_hand(
    instance: dg.DagsterInstance, job: str, op: str, config: Mapping[str, Any]
) -> dg.ExecuteInProcessResult:
    """Run a job of a person with what the Launchpad would send."""
    return defs.resolve_job_def(job).execute_in_process(
        run_config={"ops": {op: {"config": dict(config)}}},
        instance=instance,
        raise_on_error=False,
    )


def run_manual_restore(instance: dg.DagsterInstance, **config: Any) -> dg.ExecuteInProcessResult:
    return run_by_hand(instance, "manual_restore_job", "restore_by_hand", config)


def shown(result: dg.ExecuteInProcessResult) -> Mapping[str, Any]:
    """Return the metadata of restored_usage that a run showed; of a table its rows."""
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
    return {name: _content(value) for name, value in data.metadata.items()}


def _content(value: dg.MetadataValue[Any]) -> Any:
    if isinstance(value, dg.TableMetadataValue):
        return [record.data for record in value.records]
    return value.value
