"""Read-only checks of everything that budget-recovery depends on; only the CLI imports it."""

from budget_recovery_dagster.doctor.checks_nats import BUCKET_JUDGEMENTS as BUCKET_JUDGEMENTS
from budget_recovery_dagster.doctor.checks_nats import BucketInfo as BucketInfo
from budget_recovery_dagster.doctor.checks_nats import judge_bucket as judge_bucket
from budget_recovery_dagster.doctor.checks_nats import judge_credentials as judge_credentials
from budget_recovery_dagster.doctor.checks_nats import judge_versions as judge_versions
from budget_recovery_dagster.doctor.checks_postgres import judge_host_clock as judge_host_clock
from budget_recovery_dagster.doctor.checks_postgres import judge_store_clock as judge_store_clock
from budget_recovery_dagster.doctor.checks_postgres import missing_privileges as missing_privileges
from budget_recovery_dagster.doctor.checks_postgres import open_database as open_database
from budget_recovery_dagster.doctor.model import REQUIREMENT_NOT_MET as REQUIREMENT_NOT_MET
from budget_recovery_dagster.doctor.model import Check as Check
from budget_recovery_dagster.doctor.model import Outcome as Outcome
from budget_recovery_dagster.doctor.model import Report as Report
from budget_recovery_dagster.doctor.model import Result as Result
from budget_recovery_dagster.doctor.model import fail as fail
from budget_recovery_dagster.doctor.model import ok as ok
from budget_recovery_dagster.doctor.model import skipped as skipped
from budget_recovery_dagster.doctor.model import warn as warn
from budget_recovery_dagster.doctor.runner import CHECKS as CHECKS
from budget_recovery_dagster.doctor.runner import run_checks as run_checks
