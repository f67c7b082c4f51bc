"""Restores: the automatic one, manual ones, and what they share."""

from budget_recovery_dagster.services.restore.automatic import GaveUp as GaveUp
from budget_recovery_dagster.services.restore.automatic import NothingToDo as NothingToDo
from budget_recovery_dagster.services.restore.automatic import Recovered as Recovered
from budget_recovery_dagster.services.restore.automatic import RecoveryResult as RecoveryResult
from budget_recovery_dagster.services.restore.automatic import StillWaiting as StillWaiting
from budget_recovery_dagster.services.restore.automatic import recover_store as recover_store
from budget_recovery_dagster.services.restore.manual import Acceptance as Acceptance
from budget_recovery_dagster.services.restore.manual import Applied as Applied
from budget_recovery_dagster.services.restore.manual import Order as Order
from budget_recovery_dagster.services.restore.manual import Resolved as Resolved
from budget_recovery_dagster.services.restore.manual import hold_restore as hold_restore
from budget_recovery_dagster.services.restore.manual import release_restore as release_restore
from budget_recovery_dagster.services.restore.manual import resolve_incident as resolve_incident
from budget_recovery_dagster.services.restore.manual import (
    restore_manually as restore_manually,
)
from budget_recovery_dagster.services.restore.preview import RestoreRequest as RestoreRequest
from budget_recovery_dagster.services.restore.session import LowerCounters as LowerCounters
from budget_recovery_dagster.services.restore.session import Remainder as Remainder
from budget_recovery_dagster.services.restore.tenants import Guards as Guards
from budget_recovery_dagster.services.restore.tenants import TenantRestored as TenantRestored
from budget_recovery_dagster.services.restore.tenants import restore_tenant as restore_tenant
