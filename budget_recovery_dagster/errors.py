"""The errors of this project, each with a message and a hint for the operator.

The message says what happened and why, the hint what to try. Adapters turn drivers' errors into
these and keep them as the cause. Messages and hints never contain a password.
"""

import re
from typing import Any, ClassVar

UNEXPECTED_ERROR = "unexpected_error"
"""The code of an error that is not one of ours."""

_WORD_START = re.compile(r"(?<!^)(?=[A-Z])")


class BudgetRecoveryError(Exception):
    """Base of all expected errors; ``str`` gives the message and the hint.

    ``code`` is stable, for programs: the name of the class, such as ``store_missing``. ``may_pass``
    tells whether the same work may succeed within seconds, although no person does anything.
    """

    code: ClassVar[str] = "budget_recovery"
    may_pass: ClassVar[bool] = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # A private class is a detail of the public one that it is derived from.
        if not cls.__name__.startswith("_"):
            cls.code = _WORD_START.sub("_", cls.__name__.removesuffix("Error")).lower()

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} Try: {self.hint}" if self.hint else self.message


def error_code(error: Exception) -> str:
    """Return the stable code of an error."""
    return error.code if isinstance(error, BudgetRecoveryError) else UNEXPECTED_ERROR


def describe_error(error: Exception) -> tuple[str, str]:
    """Return message and hint of an error; an unexpected error is named by its type."""
    if isinstance(error, BudgetRecoveryError):
        return error.message, error.hint
    return (
        f"Unexpected {type(error).__name__}: {error}",
        "read the traceback in the run's log and report it.",
    )


class SettingsError(BudgetRecoveryError):
    """A setting is missing or invalid; the message names it."""


class ChoiceError(BudgetRecoveryError):
    """The options of a manual command are invalid or match nothing; nothing was done."""


class NotConfirmedError(BudgetRecoveryError):
    """A command that changes data was not confirmed, and there is no terminal to ask at."""


class PreviewOutdatedError(BudgetRecoveryError):
    """The store was lost or replaced since the preview; nothing was written."""


class StoreError(BudgetRecoveryError):
    """A request to the usage store failed. This implies nothing about its data."""


class StoreMissingError(StoreError):
    """The cluster responded, with authority, that the bucket does not exist."""


class StoreUnreachableError(StoreError):
    """No response from the store: it is down, unreachable or too slow."""

    may_pass = True


class StoreNoQuorumError(StoreError):
    """JetStream responded that it has no leader or no quorum."""

    may_pass = True


class StorePermissionError(StoreError):
    """The NATS user lacks a permission; the message names the subject if the server did."""


class StoreReadError(StoreError):
    """A read was interrupted, timed out, or got an unexpected response."""

    may_pass = True


class StoreChangedError(StoreError):
    """The address led to another store than at the start of this work; nothing of it was used."""


class StoreNotReadyError(StoreError):
    """The store responds, but a restore must wait until it, or its clock, has converged."""


class StoreWriteError(StoreError):
    """The store rejected a write, with a reason; nothing of it is stored."""


class StoreRefusedError(StoreWriteError):
    """The server answered that it stores nothing, such as at a limit of bucket or account."""


class StoreFullError(StoreWriteError):
    """A write was not sent, because the bucket would delete other keys to make room for it."""


class MarkerConflictError(StoreError):
    """The marker's key has changed since it was read; nothing was overwritten."""


class PossibleLossError(BudgetRecoveryError):
    """A possible loss of the store is not yet confirmed; nothing was stored."""

    may_pass = True


class StoreLostError(BudgetRecoveryError):
    """The store has lost data and an incident is open; nothing was stored."""


class DatabaseError(BudgetRecoveryError):
    """A request to the control-plane database failed; no transaction was half-written."""


class DatabaseUnreachableError(DatabaseError):
    """No connection to the control-plane database."""

    may_pass = True


class DatabaseBusyError(DatabaseError):
    """The control-plane database ended a request that waited or ran for too long."""

    may_pass = True


class SchemaVersionError(DatabaseError):
    """The database schema is missing, older or newer than this version of the project."""


class LeaseHeldError(BudgetRecoveryError):
    """Another worker holds the lease; the message says which one and since when."""

    may_pass = True


class LeaseLostError(BudgetRecoveryError):
    """The lease of this work has expired or was taken over; nothing was written."""


class CapturesPausedError(BudgetRecoveryError):
    """The store is not Healthy, so no snapshot may be stored."""


class HourClosedError(BudgetRecoveryError):
    """The hour of a capture has ended; present values must not be stored for a past hour."""


class BaselineMovedError(BudgetRecoveryError):
    """The baseline changed after the identity check; check again."""


class IncidentMovedError(BudgetRecoveryError):
    """The incident has changed since it was read; nothing was changed."""


class IncidentHeldError(BudgetRecoveryError):
    """The incident is on hold; the message says who holds it, since when and why."""


class AttemptFailedError(BudgetRecoveryError):
    """A restore attempt failed; counters that it has raised stay raised."""


class AttemptsUsedUpError(BudgetRecoveryError):
    """All attempts for this loss are used; no attempt was started."""


class AttemptNotDueError(BudgetRecoveryError):
    """The next attempt is due later; no attempt was started."""


class NotNewerError(BudgetRecoveryError):
    """The tenant already has a snapshot at or after this capture's time."""


class HourNotReachedError(BudgetRecoveryError):
    """The hour of a capture has not started."""


class HourNotCapturedError(BudgetRecoveryError):
    """A past hour has no stored snapshot, and can no longer be captured."""


class ClockSkewError(BudgetRecoveryError):
    """The clocks of database and store differ too much to assign hours and windows."""


class TablesError(BudgetRecoveryError):
    """The tenants' tables could not be written; the message names the directory's setting."""


class TablesBusyError(TablesError):
    """Another run is writing tables; nothing was written."""

    may_pass = True


class ForeignTablesError(TablesError):
    """The tables belong to another installation; nothing was written or removed."""
