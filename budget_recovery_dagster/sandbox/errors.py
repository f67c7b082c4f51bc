"""What can go wrong with the servers that this project runs itself."""

from budget_recovery_dagster.errors import BudgetRecoveryError


class SandboxError(BudgetRecoveryError):
    """Base of the errors about programs that run as children of this process."""


class CannotStartError(SandboxError):
    """Something outside the servers stands in the way of starting them."""


class MissingProgramError(CannotStartError):
    """A server's program is not installed."""


class UnusableDataError(CannotStartError):
    """A data directory cannot be used: not writable, or another owner's or version's."""


class AlreadyRunningError(CannotStartError):
    """Another instance runs on the same data; the message names its pid."""


class PortTakenError(CannotStartError):
    """The address to serve the web pages at is not free, or not this machine's."""


class ChildEndedError(SandboxError):
    """A child did not become ready, or ended unasked; the hint says where its log is."""


class DagsterUiError(SandboxError):
    """The Dagster webserver did not answer as it should."""


class NoRunningDevError(SandboxError):
    """No ``budget-recovery dev`` runs where one was looked for."""


class NotWipedError(SandboxError):
    """The simulated gateway's bucket was not destroyed, or that cannot be told."""


class NotConfirmedError(SandboxError):
    """Something that destroys data was not confirmed, and there is nobody to ask."""


class DemoError(SandboxError):
    """The story of the demo could not be told to its end; what it shows proves nothing."""
