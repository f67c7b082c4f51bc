"""What a person chooses to bring back: whose counters, and from which snapshot."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from budget_recovery_dagster.errors import ChoiceError

EVERY_TENANT = "*"
"""How a person chooses all tenants."""

LATEST = "latest"
"""How a person chooses the recovery point: the highest that any retained snapshot knows."""

_NAMED = 12

# A moment as people write it, whole or only its beginning: a day, an hour, a minute, a second. The
# hour may also stand as in the key of a partition. ASCII digits only.
_MOMENT = re.compile(
    r"([0-9]{4}-[0-9]{2}-[0-9]{2})"
    r"(?:[T -]([0-9]{2})(?::([0-9]{2})(?::([0-9]{2})(?:\.([0-9]{1,6}))?)?)?)?"
    r" ?(?:Z|UTC)?"
)


@dataclass(frozen=True, slots=True)
class RestoreChoice:
    """Which counters are brought back, and from what.

    ``tenant`` None: every tenant's. ``budget`` None: every budget's; one is always a tenant's.
    ``snapshot`` None: from the recovery point, else exactly from the snapshot of that moment.
    ``despite_resets``: also what was reset on purpose.
    """

    tenant: str | None = None
    budget: str | None = None
    snapshot: datetime | None = None
    despite_resets: bool = False

    def __post_init__(self) -> None:
        if self.budget is not None and self.tenant is None:
            raise ValueError("a budget is always a tenant's")

    def __str__(self) -> str:
        whose = "every tenant" if self.tenant is None else f"tenant {self.tenant!r}"
        what = whose if self.budget is None else f"budget {self.budget!r} of {whose}"
        source = (
            "the latest" if self.snapshot is None else f"the snapshot of {moment(self.snapshot)}"
        )
        despite = ", also what was reset" if self.despite_resets else ""
        return f"{what}, from {source}{despite}"


def moment(at: datetime) -> str:
    """Write the moment of a snapshot so that it can be chosen by it."""
    return f"{at.astimezone(UTC):%Y-%m-%dT%H:%M:%S.%f}Z"


def choose_tenant(text: str, known: Sequence[str]) -> str | None:
    """Return the tenant that is meant; None for all.

    Raises:
        ChoiceError: there is no such tenant in the snapshots.
    """
    if text == EVERY_TENANT:
        return None
    if text in known:
        return text
    raise ChoiceError(
        f"The tenant is {text!r}, of which no snapshot is retained.",
        _one_of("tenant", [EVERY_TENANT, *sorted(known)]),
    )


def choose_budget(text: str, tenant: str | None, known: Sequence[str]) -> str | None:
    """Return the budget that is meant; None for all, which is chosen by an empty text.

    Raises:
        ChoiceError: there is no such budget in the tenant's snapshots, or no tenant is named.
    """
    if not text:
        return None
    if tenant is None:
        raise ChoiceError(
            f"The budget is {text!r}, but the tenant is {EVERY_TENANT}.",
            "name the tenant whose budget it is, or leave the budget out.",
        )
    if text in known:
        return text
    raise ChoiceError(
        f"The budget is {text!r}, of which tenant {tenant!r} has no retained snapshot.",
        _one_of("budget", sorted(known)),
    )


def is_latest(text: str) -> bool:
    """Whether the latest of everything is meant, and no snapshot."""
    return text.strip().lower() == LATEST


def choose_snapshot(text: str, retained: Sequence[datetime]) -> datetime | None:
    """Return the moment of the snapshot that is meant; None for the latest of everything.

    ``text`` is ``latest``, or a moment in UTC; its beginning is enough where only one snapshot's
    begins so.

    Raises:
        ChoiceError: it is no moment, or no snapshot's, or that of several.
    """
    if is_latest(text):
        return None
    written = text.strip()
    newest_first = sorted(retained, reverse=True)
    match = _MOMENT.fullmatch(written)
    if match is None:
        raise ChoiceError(
            f"The snapshot is {text!r}, which is neither {LATEST} nor a moment in UTC.",
            _one_of("snapshot", [LATEST, *map(moment, newest_first)]),
        )
    found = [at for at in newest_first if moment(at).startswith(_beginning(match))]
    if not found:
        raise ChoiceError(
            f"The snapshot is {text!r}, of which none is retained.",
            _one_of("snapshot", [LATEST, *map(moment, newest_first)]),
        )
    if len(found) > 1:
        raise ChoiceError(
            f"The snapshot is {text!r}, and {len(found)} of them begin so.",
            _one_of("snapshot", [*map(moment, found)]),
        )
    return found[0]


def _beginning(match: re.Match[str]) -> str:
    """Write as much of a moment as is given, as ``moment`` writes it."""
    day, hour, minute, second, fraction = match.groups()
    written = f"{day}T"
    if hour is not None:
        written = f"{written}{hour}:"
    if minute is not None:
        written = f"{written}{minute}:"
    if second is not None:
        written = f"{written}{second}."
    return written if fraction is None else f"{written}{fraction}"


def _one_of(what: str, choices: Sequence[str]) -> str:
    if not choices:
        return f"there is no {what} to choose: nothing is retained."
    more = f", and {len(choices) - _NAMED} more" if len(choices) > _NAMED else ""
    return f"choose the {what} from: {', '.join(choices[:_NAMED])}{more}."
