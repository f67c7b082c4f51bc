"""PostgreSQL and NATS from Python wheels, run as child processes for ``dev``, ``demo`` and tests.

Only programs of the standard library and of the wheels are used: nothing has to be installed on
the machine. Linux only; other systems are untested.
"""

from budget_recovery_dagster.embedded.child_process import (
    ROOT,
    Account,
    CannotStartError,
    ChildEndedError,
    OwnedProcess,
    Program,
    UnusableDataError,
    poll,
)
from budget_recovery_dagster.embedded.nats import NatsServer
from budget_recovery_dagster.embedded.postgres import PostgresServer, find_binaries
from budget_recovery_dagster.embedded.server import make_reachable, private_socket_dir, try_lock

__all__ = [
    "ROOT",
    "Account",
    "CannotStartError",
    "ChildEndedError",
    "NatsServer",
    "OwnedProcess",
    "PostgresServer",
    "Program",
    "UnusableDataError",
    "find_binaries",
    "make_reachable",
    "poll",
    "private_socket_dir",
    "try_lock",
]
