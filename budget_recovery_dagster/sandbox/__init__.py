"""``budget-recovery dev`` and ``demo``: all services on this machine, with a simulated gateway."""

from budget_recovery_dagster.sandbox.dagster_services import DEFINITIONS as DEFINITIONS
from budget_recovery_dagster.sandbox.dagster_services import LOCATION as LOCATION
from budget_recovery_dagster.sandbox.dagster_services import DagsterUi as DagsterUi
from budget_recovery_dagster.sandbox.dagster_services import DagsterUiError as DagsterUiError
from budget_recovery_dagster.sandbox.dagster_services import snapshot_run as snapshot_run
from budget_recovery_dagster.sandbox.dev import DEV_FILE as DEV_FILE
from budget_recovery_dagster.sandbox.dev import NoRunningDevError as NoRunningDevError
from budget_recovery_dagster.sandbox.dev import RunningDev as RunningDev
from budget_recovery_dagster.sandbox.dev import announced as announced
from budget_recovery_dagster.sandbox.dev import find_running_dev as find_running_dev
from budget_recovery_dagster.sandbox.dev import held_data_dir as held_data_dir
