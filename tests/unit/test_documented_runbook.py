"""The runbook has a section for each state, asset check and verdict."""

import pytest

from budget_recovery_dagster.definitions import defs
from budget_recovery_dagster.domain import Verdict
from budget_recovery_dagster.presentation import label
from budget_recovery_dagster.services import Condition
from tests.documentation import headings, rows, section

PAGE = "docs/runbook.md"


@pytest.mark.parametrize("condition", Condition)
def test_every_state_has_a_section_with_steps(condition: Condition) -> None:
    assert "\n1. " in section(PAGE, label(condition).upper())


def test_every_asset_check_has_a_section_with_steps() -> None:
    checks = {key.name for key in defs.resolve_asset_graph().asset_check_keys}
    assert checks
    for check in checks:
        assert "\n1. " in section(PAGE, check)


def test_every_verdict_is_in_the_table() -> None:
    listed = {
        word.strip("* ")
        for cell, *_ in rows(PAGE, "verdict", "meaning")
        for word in cell.split(",")
    }
    assert listed == {label(verdict) for verdict in Verdict}


@pytest.mark.parametrize("group", ["Warnings of status", "Warnings of preview"])
def test_every_warning_has_steps_or_a_table(group: str) -> None:
    below = [heading for heading in headings(PAGE) if f"### {heading}\n" in section(PAGE, group)]
    assert below
    for heading in below:
        steps = section(PAGE, heading)
        assert any(mark in steps for mark in ("\n1. ", "\n- ", "\n| ")), heading
