"""The runbook quotes every report of the supervision as the code writes it."""

import ast
import inspect
import re
from types import ModuleType

from budget_recovery_dagster import sensors, silent_runs
from budget_recovery_dagster.domain import incident, supervision
from tests import documentation

HEADING = "What restore_supervisor_sensor reports"


def reports_in(module: ModuleType) -> set[str]:
    """Return the reports without a request: what ``Rest`` and ``Supervised`` are given."""
    calls = (
        node
        for node in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in ("Rest", "Supervised")
        # With a second positional argument, `Supervised` requests a run, and a tick has no text.
        and not (ast.unparse(node.func) == "Supervised" and len(node.args) > 1)
    )
    return {text for call in calls if call.args and (text := documentation.template(call.args[0]))}


def returned_by(module: ModuleType, *functions: str) -> set[str]:
    """Return the texts that functions of a module return."""
    return {
        text
        for node in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(node, ast.FunctionDef) and node.name in functions
        for each in ast.walk(node)
        if isinstance(each, ast.Return)
        and each.value
        and (text := documentation.template(each.value))
    }


def documented() -> set[str]:
    rows = documentation.section("docs/runbook.md", HEADING).split("|---|---|---|\n")[1]
    return {row.split("|")[1].strip().strip("*") for row in rows.strip().splitlines()}


def test_every_report_is_quoted_and_every_quote_is_a_report() -> None:
    reports = (
        reports_in(sensors)
        | reports_in(supervision)
        | returned_by(incident, "may_launch", "on_hold", "awaited_attempt")
        | returned_by(silent_runs, "end_run")
        | returned_by(sensors, "shown_report", "not_shown_report")
    )
    assert len(reports) > 10
    state = "The store is …."
    states = {state.replace("…", name) for name in ("HEALTHY", "RECOVERING")}
    assert documented() == reports - {state} | states


def test_the_quotes_have_the_form_of_a_report() -> None:
    on_hold = "Incident 11111111 has been on hold since 2026-11-25 11:58:30 UTC, by ann: the disk."
    patterns = [re.escape(text).replace("…", ".+") for text in documented()]
    assert any(re.fullmatch(pattern, on_hold) for pattern in patterns)
