"""One look: what it finds or, where it fails, why."""

from collections.abc import Callable

from budget_recovery_dagster.domain.findings import Finding, Topic, ok, wrong
from budget_recovery_dagster.errors import describe_error


def look(topic: Topic, name: str, check: Callable[[], Finding | str]) -> Finding:
    """Make a check that gives a finding, or what is well; its failure is a finding, too."""
    try:
        found = check()
    except Exception as error:  # noqa: BLE001 - told by name; no check stops another
        return failed(topic, name, error)
    return ok(topic, name, found) if isinstance(found, str) else found


def failed(topic: Topic, name: str, error: Exception) -> Finding:
    """Return the finding that a check failed, in the words of the failure."""
    message, hint = describe_error(error)
    return wrong(topic, name, message, hint)
