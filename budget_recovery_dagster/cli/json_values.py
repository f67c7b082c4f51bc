"""How values stand in the command's JSON: moments in UTC, usages and sequences as exact text."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import click

from budget_recovery_dagster.domain.counters import format_usage
from budget_recovery_dagster.domain.identity import StoreIdentity
from budget_recovery_dagster.errors import BudgetRecoveryError


def dumped(**content: Any) -> str:
    """Write an object with these keys in their order."""
    return json.dumps(content, indent=2)


def moment_or_none(moment: datetime | None) -> str | None:
    """Write a moment in UTC, to the microsecond."""
    if moment is None:
        return None
    return moment.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def usage_or_none(usage: Decimal | None) -> str | None:
    """Write a usage in plain digits; a number would lose some in most programs."""
    return None if usage is None else format_usage(usage)


def identity_or_none(identity: StoreIdentity | None) -> Mapping[str, str | None] | None:
    """Write an identity; its sequence as text, for it may pass 2^53."""
    if identity is None:
        return None
    return {
        "created_at": moment_or_none(identity.created_at),
        "last_sequence": str(identity.last_sequence),
    }


def error_json(error: Exception, message: str, hint: str) -> str:
    """Write that something was not done, and why."""
    return dumped(error={"kind": type(error).__name__, "message": message, "hint": hint})


@contextmanager
def errors_in_json(*, wanted: bool) -> Iterator[None]:
    """Write an error of ours as JSON where that is wanted, and let it go on."""
    try:
        yield
    except BudgetRecoveryError as error:
        if wanted:
            click.echo(error_json(error, error.message, error.hint))
        raise
