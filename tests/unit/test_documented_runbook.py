"""The runbook has a section for each state, check and verdict, and quotes what is shown."""

import re

import pytest

from budget_recovery_dagster.definitions import defs
from budget_recovery_dagster.doctor import CHECKS
from budget_recovery_dagster.domain import Outcome, RecoveryState, Verdict
from budget_recovery_dagster.presentation import label
from budget_recovery_dagster.services import Condition
from tests.documentation import block, headings, product_texts, quotes, rows, section

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


# What is in italics but not a text of the program.
DAGSTER = {
    "Automation",
    "Checks",
    "Daemons",
    "Deployment",
    "Jobs",
    "Materialize all",
    "Queued",
    "Runs",
}


def test_every_quote_is_a_text_of_the_program() -> None:
    texts = product_texts()
    labels = {label(each) for each in (*Verdict, *Outcome)}
    found = quotes(PAGE)
    assert len(found) > 50

    def is_shown(quote: str) -> bool:
        # The name of a state is inserted.
        named = re.sub("|".join(state.name for state in RecoveryState), "…", quote)
        pattern = re.compile(re.escape(named).replace("…", ".*"))
        return any(pattern.search(text) for text in texts)

    others = set(found) - labels - DAGSTER
    assert [quote for quote in sorted(others) if not is_shown(quote)] == []
    # A label that is no longer quoted would hide a text that is not shown.
    assert set(found) >= DAGSTER


def test_the_number_of_checks_is_that_of_the_doctor() -> None:
    summary = block(PAGE, "text", " checks: ")
    total, ok, *others = map(int, re.findall(r"\d+", summary))
    assert total == len(CHECKS) == ok + sum(others)
