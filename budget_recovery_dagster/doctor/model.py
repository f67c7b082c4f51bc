"""What a check of ``budget-recovery doctor`` is, what it returns, and how checks are run.

A failed check stops no other check, except those that need it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any, Generic, TypeVar

from budget_recovery_dagster.domain.windows import require_aware
from budget_recovery_dagster.errors import SettingsError, describe_error, error_code
from budget_recovery_dagster.settings import Settings

Subject = TypeVar("Subject")

Fact = str | int | float | bool | datetime | Sequence[str] | Mapping[str, Any] | None
"""What a program may read of a result; it can be written as JSON, a time (aware) in UTC."""

REQUIREMENT_NOT_MET = "requirement_not_met"


class Outcome(StrEnum):
    """How a check ended. A skipped check never counts as passed."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Result:
    """What a check found.

    ``code`` and ``facts`` are for programs and stable; the code of a passed check is ``ok``.
    ``message`` and ``hint`` are for people. A warning or a failure always has a hint.
    """

    outcome: Outcome
    code: str
    message: str
    hint: str = ""
    facts: Mapping[str, Fact] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.message:
            raise ValueError(f"the result {self.code} has no message")
        if self.outcome in (Outcome.WARN, Outcome.FAIL) and not self.hint:
            raise ValueError(f"the result {self.code} has no hint")


def ok(message: str, **facts: Fact) -> Result:
    """Return the result of a check that passed."""
    return Result(Outcome.OK, "ok", message, facts=facts)


def warn(code: str, message: str, hint: str, **facts: Fact) -> Result:
    """Return the result of a check that found something that works, and should be improved."""
    return Result(Outcome.WARN, code, message, hint, facts)


def fail(code: str, message: str, hint: str, **facts: Fact) -> Result:
    """Return the result of a check that found something that does not work, or soon will not."""
    return Result(Outcome.FAIL, code, message, hint, facts)


def skipped(code: str, message: str, hint: str = "", **facts: Fact) -> Result:
    """Return the result of a check that could not be made."""
    return Result(Outcome.SKIPPED, code, message, hint, facts)


def failed_with(error: Exception) -> Result:
    """Return the result of a check that raised an error."""
    if isinstance(error, CheckFailed):
        return error.result
    return fail(error_code(error), *describe_error(error))


def joined(hints: Iterable[str]) -> str:
    """Write several hints as one sentence, each once."""
    return "; ".join(dict.fromkeys(hint.rstrip(".") for hint in hints)) + "."


class CheckFailed(Exception):  # noqa: N818 - it carries a result; nothing is wrong with the check
    """Ends a check, from any depth, with the result it carries."""

    def __init__(self, code: str, message: str, hint: str, **facts: Fact) -> None:
        super().__init__(message)
        self.result = fail(code, message, hint, **facts)


@dataclass(frozen=True, slots=True)
class Check(Generic[Subject]):
    """One check: a function of its subject, such as an open database, with a stable code.

    ``needs`` are the codes of earlier checks that must not fail or be skipped, and the names of
    settings that must be valid. Otherwise the check is skipped.
    """

    code: str
    run: Callable[[Subject], Result]
    needs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Installation:
    """What is checked: the settings, and the errors of ``invalid`` ones by field.

    ``dagster_environment`` is the environment of Dagster's processes, None for a running dev.
    """

    settings: Settings
    invalid: Mapping[str, SettingsError]
    dagster_environment: Mapping[str, str] | None


@dataclass(frozen=True, slots=True)
class Report:
    """Every check with its result, and when doctor started (aware), by the clock of this host."""

    at: datetime
    results: tuple[tuple[Check[Any], Result], ...]

    def __post_init__(self) -> None:
        require_aware(self.at)

    @property
    def has_failed(self) -> bool:
        """Whether any check failed. Warnings and skipped checks do not count."""
        return self.count(Outcome.FAIL) > 0

    def count(self, outcome: Outcome) -> int:
        """Count the checks that ended in this way."""
        return sum(result.outcome is outcome for _, result in self.results)


class Runner:
    """The results so far, and which needs are not met."""

    def __init__(self, invalid_settings: Iterable[str]) -> None:
        self.results: list[tuple[Check[Any], Result]] = []
        # By code or setting: the causes to fix before a check that needs it can run.
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
