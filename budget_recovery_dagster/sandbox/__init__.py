"""``budget-recovery dev`` and ``demo``: all services on this machine, with a simulated gateway."""

from budget_recovery_dagster.sandbox.dagster_services import (
    DEFINITIONS,
    LOCATION,
    DagsterUi,
    DagsterUiError,
)
from budget_recovery_dagster.sandbox.data_directory import (
    DEV_FILE,
    NoRunningDevError,
    RunningDev,
    announced,
    find_running_dev,
    held_data_dir,
)
from budget_recovery_dagster.sandbox.first_snapshot import snapshot_run

__all__ = [
    "DEFINITIONS",
    "DEV_FILE",
    "LOCATION",
    "DagsterUi",
    "DagsterUiError",
    "NoRunningDevError",
    "RunningDev",
    "announced",
    "find_running_dev",
    "held_data_dir",
    "snapshot_run",
]
