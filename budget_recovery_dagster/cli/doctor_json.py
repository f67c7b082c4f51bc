"""The examination as JSON: stable keys, moments in UTC."""

from budget_recovery_dagster.domain.findings import Examination, State
from budget_recovery_dagster.presentation.documents import dumped, moment_or_none


def examination_json(examination: Examination, exit_code: int) -> str:
    """Write the examination; every key is there in every situation."""
    return dumped(
        exit_code=exit_code,
        at=moment_or_none(examination.at),
        counts={_key(state): examination.count(state) for state in State},
        findings=[
            {
                "topic": finding.topic.name.lower(),
                "name": finding.name,
                "state": _key(finding.state),
                "found": finding.found,
                "to_do": finding.to_do or None,
            }
            for finding in examination.findings
        ],
        error=None,
    )


def refusal_json(message: str, hint: str, exit_code: int) -> str:
    """Write that nothing was examined, with the same keys, and why."""
    return dumped(
        exit_code=exit_code,
        at=None,
        counts=None,
        findings=None,
        error={"message": message, "hint": hint},
    )


def _key(state: State) -> str:
    return state.name.lower()
