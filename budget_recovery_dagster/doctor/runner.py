"""Runs all checks. A failed check stops no other check, except those that need it."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from functools import cache
from typing import Any

from budget_recovery_dagster.doctor.checks_dagster import DAGSTER_CHECKS
from budget_recovery_dagster.doctor.checks_host import HOST_CHECKS
from budget_recovery_dagster.doctor.checks_nats import NATS_CHECKS, open_store
from budget_recovery_dagster.doctor.checks_postgres import POSTGRES_CHECKS, open_database
from budget_recovery_dagster.doctor.model import (
    REQUIREMENT_NOT_MET,
    Check,
    Installation,
    Outcome,
    Report,
    Result,
    Subject,
    failed_with,
    skipped,
)
from budget_recovery_dagster.settings import PREFIX

CHECKS: tuple[Check[Any], ...] = (
    *HOST_CHECKS,
    *DAGSTER_CHECKS,
    *POSTGRES_CHECKS,
    *NATS_CHECKS,
)
"""All checks, in the order in which they run."""


def run_checks(installation: Installation) -> Report:
    """Run all checks. They change nothing in the store, in the database or on this host.

    An invalid setting has its default in ``installation.settings``; no check uses it.
    """
    started_at = datetime.now(UTC)
    settings = installation.settings
    runner = _Runner(f"{PREFIX}{field.upper()}" for field in installation.invalid)
    with ExitStack() as exits:
        database = cache(lambda: exits.enter_context(open_database(settings)))
        runner.run((*HOST_CHECKS, *DAGSTER_CHECKS), lambda: installation)
        runner.run(POSTGRES_CHECKS, database)
        runner.run(
            NATS_CHECKS,
            lambda: exits.enter_context(open_store(settings, lambda: database().now())),
        )
    return Report(started_at, tuple(runner.results))


class _Runner:
    """The results so far, and which needs are not met."""

    def __init__(self, invalid_settings: Iterable[str]) -> None:
        self.results: list[tuple[Check[Any], Result]] = []
        # By code or setting: what is to be repaired before a check that needs it can run.
        self._unmet: dict[str, tuple[str, ...]] = {name: (name,) for name in invalid_settings}

    def run(self, checks: Sequence[Check[Subject]], open_subject: Callable[[], Subject]) -> None:
        """Run checks of one subject. If it cannot be opened, the first fails and none can run."""
        first, *others = checks
        try:
            subject = open_subject()
        except Exception as error:  # noqa: BLE001 - the result of the first check
            self._record(first, failed_with(error))
            for check in others:
                self._skip(check, (first.code,))
            return
        for check in checks:
            causes = dict.fromkeys(
                cause for need in check.needs for cause in self._unmet.get(need, ())
            )
            if causes:
                self._skip(check, tuple(causes))
            else:
                self._record(check, _result(check, subject))

    def _skip(self, check: Check[Any], causes: tuple[str, ...]) -> None:
        self._unmet[check.code] = causes
        result = skipped(REQUIREMENT_NOT_MET, f"Requires {', '.join(causes)}.", requires=causes)
        self.results.append((check, result))

    def _record(self, check: Check[Any], result: Result) -> None:
        if result.outcome in (Outcome.FAIL, Outcome.SKIPPED):
            self._unmet[check.code] = (check.code,)
        self.results.append((check, result))


def _result(check: Check[Subject], subject: Subject) -> Result:
    try:
        return check.run(subject)
    except Exception as error:  # noqa: BLE001 - a result; it stops no other check
        return failed_with(error)
