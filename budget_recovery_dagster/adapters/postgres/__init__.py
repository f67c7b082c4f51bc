"""The control-plane database in PostgreSQL."""

from budget_recovery_dagster.adapters.postgres.database import MAX_CONNECTIONS as MAX_CONNECTIONS
from budget_recovery_dagster.adapters.postgres.database import MAX_NAMED as MAX_NAMED
from budget_recovery_dagster.adapters.postgres.database import Connection as Connection
from budget_recovery_dagster.adapters.postgres.database import Database as Database
from budget_recovery_dagster.adapters.postgres.database import driver_errors as driver_errors
from budget_recovery_dagster.adapters.postgres.database import (
    refuse_unless_newest as refuse_unless_newest,
)
from budget_recovery_dagster.adapters.postgres.database import server_clock as server_clock
from budget_recovery_dagster.adapters.postgres.database import storable as storable
from budget_recovery_dagster.adapters.postgres.database import storable_id as storable_id
from budget_recovery_dagster.adapters.postgres.incidents import attempt_after as attempt_after
from budget_recovery_dagster.adapters.postgres.incidents import ended_by as ended_by
from budget_recovery_dagster.adapters.postgres.incidents import given_up_for as given_up_for
from budget_recovery_dagster.adapters.postgres.incidents import held_by as held_by
from budget_recovery_dagster.adapters.postgres.incidents import held_by_itself as held_by_itself
from budget_recovery_dagster.adapters.postgres.incidents import storable_loss as storable_loss
from budget_recovery_dagster.adapters.postgres.leases import PostgresLeases as PostgresLeases
from budget_recovery_dagster.adapters.postgres.leases import require_lease as require_lease
from budget_recovery_dagster.adapters.postgres.plans import PostgresBudgets as PostgresBudgets
from budget_recovery_dagster.adapters.postgres.plans import PostgresPreviews as PostgresPreviews
from budget_recovery_dagster.adapters.postgres.plans import storable_trail as storable_trail
from budget_recovery_dagster.adapters.postgres.resets import storable_reset as storable_reset
from budget_recovery_dagster.adapters.postgres.schema import Migration as Migration
from budget_recovery_dagster.adapters.postgres.schema import migrate as migrate
from budget_recovery_dagster.adapters.postgres.snapshots import (
    PostgresSnapshots as PostgresSnapshots,
)
from budget_recovery_dagster.adapters.postgres.snapshots import kept_omissions as kept_omissions
from budget_recovery_dagster.adapters.postgres.snapshots import named_drops_of as named_drops_of
from budget_recovery_dagster.adapters.postgres.snapshots import storable_failure as storable_failure
from budget_recovery_dagster.adapters.postgres.snapshots import storable_result as storable_result
from budget_recovery_dagster.adapters.postgres.snapshots import summary_of as summary_of
from budget_recovery_dagster.adapters.postgres.store import (
    PostgresStoreRegistry as PostgresStoreRegistry,
)
from budget_recovery_dagster.adapters.postgres.store import storable_check as storable_check
