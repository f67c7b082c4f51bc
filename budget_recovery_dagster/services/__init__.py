"""Use cases, written against the ports."""

from budget_recovery_dagster.services.capture import Captured as Captured
from budget_recovery_dagster.services.capture import Paused as Paused
from budget_recovery_dagster.services.capture import TenantAbsent as TenantAbsent
from budget_recovery_dagster.services.capture import TenantFailed as TenantFailed
from budget_recovery_dagster.services.capture import TenantOutcome as TenantOutcome
from budget_recovery_dagster.services.capture import TenantStored as TenantStored
from budget_recovery_dagster.services.capture import Verified as Verified
from budget_recovery_dagster.services.capture import capture_hour as capture_hour
from budget_recovery_dagster.services.check import Checked as Checked
from budget_recovery_dagster.services.check import check_store as check_store
from budget_recovery_dagster.services.falls import CaptureRequest as CaptureRequest
from budget_recovery_dagster.services.recovery_points import VERIFY_WITHIN as VERIFY_WITHIN
from budget_recovery_dagster.services.recovery_points import PointAges as PointAges
from budget_recovery_dagster.services.recovery_points import PointSurvey as PointSurvey
from budget_recovery_dagster.services.recovery_points import (
    judge_point_ages as judge_point_ages,
)
from budget_recovery_dagster.services.recovery_points import (
    survey_points as survey_points,
)
from budget_recovery_dagster.services.resets import RecordedReset as RecordedReset
from budget_recovery_dagster.services.resets import ResetRequest as ResetRequest
from budget_recovery_dagster.services.resets import record_reset as record_reset
from budget_recovery_dagster.services.restore.preview import EntryPreview as EntryPreview
from budget_recovery_dagster.services.restore.preview import Preview as Preview
from budget_recovery_dagster.services.restore.preview import TenantPreview as TenantPreview
from budget_recovery_dagster.services.restore.preview import WindowPreview as WindowPreview
from budget_recovery_dagster.services.restore.preview import preview_restore as preview_restore
from budget_recovery_dagster.services.restore.report import WRITTEN as WRITTEN
from budget_recovery_dagster.services.status import MOST_CHECKS as MOST_CHECKS
from budget_recovery_dagster.services.status import Attention as Attention
from budget_recovery_dagster.services.status import Condition as Condition
from budget_recovery_dagster.services.status import Doubt as Doubt
from budget_recovery_dagster.services.status import Status as Status
from budget_recovery_dagster.services.status import read_status as read_status
from budget_recovery_dagster.services.store_watch import (
    measure_clock_skew as measure_clock_skew,
)
from budget_recovery_dagster.services.tables import TableFailed as TableFailed
from budget_recovery_dagster.services.tables import TablesBuilt as TablesBuilt
from budget_recovery_dagster.services.tables import build_tables as build_tables
