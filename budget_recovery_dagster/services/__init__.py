"""Use cases, written against the ports."""

from budget_recovery_dagster.services.capture import Captured as Captured
from budget_recovery_dagster.services.capture import CaptureService as CaptureService
from budget_recovery_dagster.services.capture import Paused as Paused
from budget_recovery_dagster.services.capture import TenantAbsent as TenantAbsent
from budget_recovery_dagster.services.capture import TenantOutcome as TenantOutcome
from budget_recovery_dagster.services.capture import TenantStored as TenantStored
from budget_recovery_dagster.services.capture import Verified as Verified
from budget_recovery_dagster.services.preview import Preview as Preview
from budget_recovery_dagster.services.preview import PreviewService as PreviewService
from budget_recovery_dagster.services.recovery_points import (
    RecoveryPointsService as RecoveryPointsService,
)
from budget_recovery_dagster.services.resets import RecordedReset as RecordedReset
from budget_recovery_dagster.services.resets import ResetRequest as ResetRequest
from budget_recovery_dagster.services.resets import ResetService as ResetService
from budget_recovery_dagster.services.status import MOST_CHECKS as MOST_CHECKS
from budget_recovery_dagster.services.status import Condition as Condition
from budget_recovery_dagster.services.status import Status as Status
from budget_recovery_dagster.services.status import StatusService as StatusService
from budget_recovery_dagster.services.store_watch import Checked as Checked
from budget_recovery_dagster.services.store_watch import DetectionService as DetectionService
from budget_recovery_dagster.services.store_watch import MarkerWriting as MarkerWriting
from budget_recovery_dagster.services.tables import TableFailed as TableFailed
from budget_recovery_dagster.services.tables import TablesBuilt as TablesBuilt
from budget_recovery_dagster.services.tables import UsageTablesService as UsageTablesService
