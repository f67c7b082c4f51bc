"""Read-only checks of everything that budget-recovery depends on; only the CLI imports it."""

from contextlib import ExitStack
from datetime import UTC, datetime
from functools import cache
from typing import Any

from budget_recovery_dagster.doctor.checks_installation import INSTALLATION_CHECKS
from budget_recovery_dagster.doctor.checks_nats import BUCKET_JUDGEMENTS as BUCKET_JUDGEMENTS
from budget_recovery_dagster.doctor.checks_nats import NATS_CHECKS, open_store
from budget_recovery_dagster.doctor.checks_nats import BucketInfo as BucketInfo
from budget_recovery_dagster.doctor.checks_nats import judge_bucket as judge_bucket
from budget_recovery_dagster.doctor.checks_nats import judge_credentials as judge_credentials
from budget_recovery_dagster.doctor.checks_nats import judge_versions as judge_versions
from budget_recovery_dagster.doctor.checks_postgres import POSTGRES_CHECKS
from budget_recovery_dagster.doctor.checks_postgres import judge_host_clock as judge_host_clock
from budget_recovery_dagster.doctor.checks_postgres import judge_store_clock as judge_store_clock
from budget_recovery_dagster.doctor.checks_postgres import missing_privileges as missing_privileges
from budget_recovery_dagster.doctor.checks_postgres import open_database as open_database
from budget_recovery_dagster.doctor.model import REQUIREMENT_NOT_MET as REQUIREMENT_NOT_MET
from budget_recovery_dagster.doctor.model import Check as Check
from budget_recovery_dagster.doctor.model import Installation, Runner
from budget_recovery_dagster.doctor.model import Outcome as Outcome
from budget_recovery_dagster.doctor.model import Report as Report
from budget_recovery_dagster.doctor.model import Result as Result
from budget_recovery_dagster.doctor.model import fail as fail
from budget_recovery_dagster.doctor.model import ok as ok
from budget_recovery_dagster.doctor.model import skipped as skipped
from budget_recovery_dagster.doctor.model import warn as warn
from budget_recovery_dagster.settings import PREFIX

CHECKS: tuple[Check[Any], ...] = (*INSTALLATION_CHECKS, *POSTGRES_CHECKS, *NATS_CHECKS)
"""All checks, in the order in which they run."""


def run_checks(installation: Installation) -> Report:
    """Run all checks. They change nothing in the store, in the database or on this host.

    An invalid setting has its default in ``installation.settings``; no check uses it.
    """
    started_at = datetime.now(UTC)
    settings = installation.settings
    runner = Runner(f"{PREFIX}{field.upper()}" for field in installation.invalid)
    with ExitStack() as exits:
        database = cache(lambda: exits.enter_context(open_database(settings)))
        runner.run(INSTALLATION_CHECKS, lambda: installation)
        runner.run(POSTGRES_CHECKS, database)
        runner.run(NATS_CHECKS, lambda: exits.enter_context(open_store(settings, database)))
    return Report(started_at, tuple(runner.results))
