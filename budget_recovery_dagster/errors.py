"""What can go wrong, told so that an operator knows what to do.

Every error carries one sentence of what happened and a hint of what to try. Drivers' own errors
stop at the adapters and are kept as the cause. The sentences never hold a password.
"""


class BudgetRecoveryError(Exception):
    """Base of all errors that this project raises on purpose."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} Try: {self.hint}" if self.hint else self.message


def describe_error(error: Exception) -> tuple[str, str]:
    """Say what happened and what to try; an error that nobody foresaw is named by its type."""
    if isinstance(error, BudgetRecoveryError):
        return error.message, error.hint
    return (
        f"Unexpected {type(error).__name__}: {error}",
        "read the traceback in the run's log and report it.",
    )


class SettingsError(BudgetRecoveryError):
    """A setting is missing or wrong; the message names it."""


class ChoiceError(BudgetRecoveryError):
    """What a person chose does not exist or is incomplete; nothing was done. The hint says more."""


class PreviewOutdatedError(BudgetRecoveryError):
    """The store is another one than at the preview; nothing was written."""


class StoreError(BudgetRecoveryError):
    """The usage store did not give what was asked. Nothing may be concluded about its data."""


class StoreMissingError(StoreError):
    """The cluster answered with authority that the bucket does not exist."""


class StoreUnreachableError(StoreError):
    """No answer came from the store: down, cut off, or too slow."""


class StoreNoQuorumError(StoreError):
    """JetStream answered that it cannot serve: no leader or no quorum."""


class StorePermissionError(StoreError):
    """The NATS user may not do this; the message names the subject where the server said it."""


class StoreReadError(StoreError):
    """A reading was interrupted or could not be brought to its end."""


class StoreNotReadyError(StoreError):
    """The store answers, but is not yet fit to be restored: it has not converged, or its clock."""


class StoreWriteError(StoreError):
    """The store refused to write, and said why; nothing of that writing is in it."""


class MarkerConflictError(StoreError):
    """Another marker stands where ours was to be written; nothing was overwritten."""


class PossibleLossError(BudgetRecoveryError):
    """The store may have lost data, and that is not settled yet; nothing was stored."""


class StoreLostError(BudgetRecoveryError):
    """The store has lost data, and an incident is open for it; nothing was stored."""


class DatabaseError(BudgetRecoveryError):
    """The control-plane database did not do what was asked; nothing was half-written."""


class DatabaseUnreachableError(DatabaseError):
    """No connection to the control-plane database."""


class SchemaVersionError(DatabaseError):
    """The database schema is missing, older or newer than this version of the project."""


class LeaseHeldError(BudgetRecoveryError):
    """Somebody else is at the same work; the message says who and since when."""


class LeaseLostError(BudgetRecoveryError):
    """The lease under which this work ran has expired or was taken over; nothing was written."""


class CapturesPausedError(BudgetRecoveryError):
    """The store is not Healthy, so no snapshot may be stored."""


class HourClosedError(BudgetRecoveryError):
    """The hour of a capture has closed: present values must not stand under a past name."""


class BaselineMovedError(BudgetRecoveryError):
    """The baseline changed after the identity was judged; judge again."""


class IncidentMovedError(BudgetRecoveryError):
    """The incident is not as it was read: closed, failed, or lost further; nothing was changed."""


class IncidentHeldError(BudgetRecoveryError):
    """A person has put the incident on hold; the message says who, since when and why."""


class AttemptFailedError(BudgetRecoveryError):
    """An attempt to restore did not succeed; what it has raised stays raised."""


class AttemptsUsedUpError(BudgetRecoveryError):
    """The loss has had all its attempts; nothing was claimed."""


class NotNewerError(BudgetRecoveryError):
    """The tenant already has a snapshot at or after this capture's time."""


class HourNotReachedError(BudgetRecoveryError):
    """The hour of a capture has not begun."""


class HourNotCapturedError(BudgetRecoveryError):
    """A past hour has no stored snapshot, and none can be taken any more."""


class ClockSkewError(BudgetRecoveryError):
    """The database's clock and the store's are too far apart to name hours and windows by."""


class TablesError(BudgetRecoveryError):
    """The tables of tenants could not be written; the message names the setting of their place."""


class ForeignTablesError(TablesError):
    """The tables belong to another installation, which would lose them; nothing was touched."""
