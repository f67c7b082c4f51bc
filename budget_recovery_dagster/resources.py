"""What ops, schedules and sensors share: resources, failures, progress, previews of ticks."""

import logging
import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn

import dagster as dg

from budget_recovery_dagster.errors import BudgetRecoveryError
from budget_recovery_dagster.ports import Clock, ControlPlane
from budget_recovery_dagster.services.restore.manual import Order
from budget_recovery_dagster.settings import Settings
from budget_recovery_dagster.wiring import opened_control_plane

OUTCOME_TAG = "budget_recovery/outcome"
"""Tag of a run: its outcome, beyond success or failure."""
_log = logging.getLogger(__name__)
_MUTED_SECONDS = 60.0
_DAGSTER_AWAY_SECONDS = 600.0
_ASK_AGAIN = timedelta(seconds=5)


def failure(
    message: str,
    hint: str,
    metadata: Mapping[str, Any] | None = None,
    *,
    allow_retries: bool = False,
) -> dg.Failure:
    """Return the failure of a step: first what happened, then what to do."""
    return dg.Failure(
        description=f"{message} Try: {hint}",
        metadata={"action": hint, **(metadata or {})},
        allow_retries=allow_retries,
    )


# So many seconds after a failed try the next one follows, within the same run. An election or a
# restart of a server is over then; a longer wait would hold one of Dagster's run slots.
RETRY_AFTER = (5, 15)
StepContext = dg.OpExecutionContext | dg.AssetExecutionContext | dg.AssetCheckExecutionContext


def fail_step(context: StepContext, error: Exception, failed: dg.Failure) -> NoReturn:
    """Fail a step because of an error; try it again in a few seconds if the error may pass.

    Raises:
        dagster.RetryRequested: the error may pass, and a try is left.
        dagster.Failure: otherwise.
    """
    tries_before = context.retry_number
    may_pass = isinstance(error, BudgetRecoveryError) and error.may_pass
    if not may_pass or tries_before >= len(RETRY_AFTER):
        raise failed from error
    failed.__cause__ = error
    raise dg.RetryRequested(
        max_retries=len(RETRY_AFTER), seconds_to_wait=RETRY_AFTER[tries_before]
    ) from failed


@dataclass(frozen=True, slots=True)
class ControlPlaneResource:
    """The control-plane database that the settings name, and the usage store that belongs to it.

    Definitions load without any server; a run or tick without a URL fails and names the setting.
    """

    settings: Settings

    def opened(self) -> AbstractContextManager[ControlPlane]:
        """Open the database for one run, check or tick.

        Raises:
            SettingsError: BUDGET_RECOVERY_POSTGRES_URL is not set.
            DatabaseError: the database cannot be reached, or its schema is not current.
        """
        return opened_control_plane(self.settings)

    @contextmanager
    def opened_in_step(self, retried: StepContext | None = None) -> Iterator[ControlPlane]:
        """Open the database for a step or check; our errors become its failures, with the hint.

        ``retried`` is the context of a step that may be tried again by itself, see ``fail_step``.

        Raises:
            dagster.Failure: an error of ours, from opening the database or from the step.
            dagster.RetryRequested: such an error may pass.
        """
        try:
            with self.opened() as plane:
                yield plane
        except BudgetRecoveryError as error:
            failed = failure(error.message, error.hint)
            if retried is None:
                raise failed from error
            fail_step(retried, error, failed)


ControlPlaneParam = dg.ResourceParam[ControlPlaneResource]
"""The parameter type with which Dagster objects request the resource ``control_plane``."""


def control_plane_resource(settings: Settings) -> dg.ResourceDefinition:
    """Return the definition of the resource ``control_plane``."""
    return dg.ResourceDefinition(
        lambda _: ControlPlaneResource(settings),
        description="The control-plane database and the usage store, as the settings name them.",
    )


def holder_of(run_id: str) -> str:
    """Name this process and its run; shown to a process that finds the lease taken."""
    return f"run {run_id[:8]} on {socket.gethostname()} (pid {os.getpid()})"


# Dagster has no flag for a dry run. Its daemon records a tick before it evaluates it, and
# ends the log key with the number of the tick. Previews of the pages and of `dagster sensor
# preview` have no tick and no log key, so the context makes one up from the time. Only that form
# counts: if Dagster changes it, a preview writes, but no loss goes undetected.
_MADE_UP = re.compile(r"\d{8}_\d{6}")


def is_dry_run(log_key: Sequence[str] | None) -> bool:
    """Whether a person previews a tick, which must change nothing."""
    return log_key is not None and _MADE_UP.fullmatch(log_key[-1]) is not None


def never_failing(log: Callable[..., None]) -> Callable[..., None]:
    """Return what shows sentences in a run's log as ``log`` does, and never fails the work.

    While Dagster's database does not answer, the process's own log receives them: each try would
    take seconds.
    """
    muted_until = 0.0

    def show(sentence: str, **details: Any) -> None:
        nonlocal muted_until
        if time.monotonic() >= muted_until:
            try:
                log(sentence, **details)
            except Exception:  # noqa: BLE001 - of any driver that Dagster stores its log with
                muted_until = time.monotonic() + _MUTED_SECONDS
            else:
                return
        _log.warning("Dagster's database does not answer: %s", sentence, **details)

    return show


_SHOWN_EVERY = timedelta(minutes=1)


def each_minute(clock: Clock, log: Callable[..., None]) -> Callable[[str], None]:
    """Return what shows the progress of a step in its run's log: at most one sentence a minute.

    Each loop of a step that holds no lease, and may take minutes, calls it: a run that stores no
    event for five minutes looks as if it had no worker, and is ended. As ``never_failing``.
    """
    show, shown_at = never_failing(log), clock.host_time()

    def show_progress(sentence: str) -> None:
        nonlocal shown_at
        # Events have the time of their host, which may be set back.
        now = clock.host_time()
        if abs(now - shown_at) >= _SHOWN_EVERY:
            shown_at = now
            show(sentence)

    return show_progress


def await_dagster(context: dg.OpExecutionContext, plane: ControlPlane) -> None:
    """Wait until Dagster's database answers, so that it can store the result of a run.

    Raises:
        Exception: it has not answered for ten minutes.
    """
    give_up_at = time.monotonic() + _DAGSTER_AWAY_SECONDS
    while True:
        try:
            context.instance.get_run_by_id(context.run.run_id)
        except Exception as error:
            if time.monotonic() >= give_up_at:
                raise
            _log.warning("The result waits for Dagster's database: %s", error)
            plane.clock.wait(_ASK_AGAIN)
        else:
            return


def order_by(context: dg.OpExecutionContext, reason: str, *, accept_unconverged: bool) -> Order:
    """Return the order of a run; its progress goes to the run's log."""
    run_id = context.run.run_id
    return Order(
        by=holder_of(run_id),
        reason=reason,
        run_id=run_id,
        on_progress=never_failing(context.log.info),
        accept_unconverged=accept_unconverged,
    )
