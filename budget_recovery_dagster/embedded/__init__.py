"""PostgreSQL and NATS from Python wheels, run as child processes for ``dev``, ``demo`` and tests.

Only programs of the standard library and of the wheels are used: nothing has to be installed on
the machine. Linux only; other systems are untested.
"""

from budget_recovery_dagster.embedded.child_process import ROOT as ROOT
from budget_recovery_dagster.embedded.child_process import Account as Account
from budget_recovery_dagster.embedded.child_process import CannotStartError as CannotStartError
from budget_recovery_dagster.embedded.child_process import ChildEndedError as ChildEndedError
from budget_recovery_dagster.embedded.child_process import OwnedProcess as OwnedProcess
from budget_recovery_dagster.embedded.child_process import Program as Program
from budget_recovery_dagster.embedded.child_process import UnusableDataError as UnusableDataError
from budget_recovery_dagster.embedded.child_process import make_reachable as make_reachable
from budget_recovery_dagster.embedded.child_process import poll as poll
from budget_recovery_dagster.embedded.child_process import private_files as private_files
from budget_recovery_dagster.embedded.child_process import private_socket_dir as private_socket_dir
from budget_recovery_dagster.embedded.child_process import try_lock as try_lock
from budget_recovery_dagster.embedded.nats import NatsServer as NatsServer
from budget_recovery_dagster.embedded.postgres import PostgresServer as PostgresServer
from budget_recovery_dagster.embedded.postgres import find_binaries as find_binaries
