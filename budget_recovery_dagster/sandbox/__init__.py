"""``budget-recovery dev`` and ``demo``: all services on this machine, with a simulated gateway.

What needs the gateway is not exported here: commands that look for a running dev start without it.
"""

from budget_recovery_dagster.sandbox.dagster_services import DEFINITIONS as DEFINITIONS
from budget_recovery_dagster.sandbox.dagster_services import LOCATION as LOCATION
from budget_recovery_dagster.sandbox.dagster_services import DagsterUi as DagsterUi
from budget_recovery_dagster.sandbox.dagster_services import DagsterUiError as DagsterUiError
from budget_recovery_dagster.sandbox.dagster_services import snapshot_run as snapshot_run
from budget_recovery_dagster.sandbox.data_dir import DEV_FILE as DEV_FILE
from budget_recovery_dagster.sandbox.data_dir import NoRunningDevError as NoRunningDevError
from budget_recovery_dagster.sandbox.data_dir import RunningDev as RunningDev
from budget_recovery_dagster.sandbox.data_dir import announced as announced
from budget_recovery_dagster.sandbox.data_dir import find_running_dev as find_running_dev
from budget_recovery_dagster.sandbox.data_dir import held_data_dir as held_data_dir
