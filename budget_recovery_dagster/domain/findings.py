"""What an examination finds: each thing that was looked at, how it is, and what to do about it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from budget_recovery_dagster.domain.windows import require_aware


class Topic(StrEnum):
    """What a finding is about, in the order in which one looks."""

    INSTALLATION = "this installation"
    DATABASE = "PostgreSQL"
    SERVERS = "NATS"
    PERMISSIONS = "permissions of the NATS user"
    BUCKET = "bucket"
    CLOCKS = "clocks"


class State(StrEnum):
    """How something is found to be. What could not be looked at is never taken for well."""

    OK = "ok"
    ADVICE = "advice"
    WRONG = "wrong"
    NOT_LOOKED_AT = "not looked at"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was to be looked at.

    ``found`` says what was seen or, of what was not looked at, why; ``to_do`` is empty only where
    nothing is to be done.
    """

    topic: Topic
    name: str
    state: State
    found: str
    to_do: str = ""

    def __post_init__(self) -> None:
        if not self.found:
            raise ValueError(f"nothing is said of {self.name}")
        if self.state in (State.ADVICE, State.WRONG) and not self.to_do:
            raise ValueError(f"nothing is said of what to do about {self.name}")


@dataclass(frozen=True, slots=True)
class Examination:
    """All that was looked at, and when (aware), by the clock of the host that looked."""

    at: datetime
    findings: tuple[Finding, ...]

    def __post_init__(self) -> None:
        require_aware(self.at)

    @property
    def is_well(self) -> bool:
        """Whether nothing is wrong; advice may be left."""
        return not self.count(State.WRONG)

    def count(self, state: State) -> int:
        """Count the findings of a state."""
        return sum(finding.state is state for finding in self.findings)


def ok(topic: Topic, name: str, found: str, to_do: str = "") -> Finding:
    """Return the finding that something is as it should be."""
    return Finding(topic, name, State.OK, found, to_do)


def advice(topic: Topic, name: str, found: str, to_do: str) -> Finding:
    """Return the finding that something works and could be better."""
    return Finding(topic, name, State.ADVICE, found, to_do)


def wrong(topic: Topic, name: str, found: str, to_do: str) -> Finding:
    """Return the finding that something does not work, or will not."""
    return Finding(topic, name, State.WRONG, found, to_do)


def not_looked_at(topic: Topic, names: Iterable[str], why: str) -> list[Finding]:
    """Return the findings that these could not be looked at."""
    return [Finding(topic, name, State.NOT_LOOKED_AT, why) for name in names]


def is_wrong(findings: Sequence[Finding], name: str) -> bool:
    """Whether the finding of this name is that something is wrong, or could not be seen."""
    return any(
        each.name == name and each.state in (State.WRONG, State.NOT_LOOKED_AT) for each in findings
    )
