"""Random histories of stores and databases: detection decides rightly, but for the known risks."""

import os
from pathlib import Path

import pytest

from tests.detection_model.judge import Decision, Harm, Risk
from tests.detection_model.report import Report, report_on

# Raise it to search for longer: DETECTION_HISTORIES=20000
_HISTORIES = int(os.environ.get("DETECTION_HISTORIES", "700"))
_SEED = os.environ.get("DETECTION_SEED", "1")
_PAGE = Path(__file__).parents[2] / "docs" / "decisions" / "0016-a-table-of-verdicts.md"


@pytest.fixture(scope="module")
def report() -> Report:
    return report_on(_HISTORIES, _SEED)


def test_each_decision_is_right_or_explained_by_a_known_risk(report: Report) -> None:
    assert not report.faults, report.faults[0]


def test_the_histories_lead_to_each_decision_and_each_known_risk(report: Report) -> None:
    assert min(report.decisions[decision] for decision in Decision) >= 20, report.decisions
    # Two are so rare that they need thousands of histories.
    common = set(Risk) - {Risk.FORMER_COPY, Risk.MARKER_DATED_LATE}
    assert min(report.of_risk[risk] for risk in common) >= 2, report.of_risk
    assert min(report.of_harm[harm] for harm in Harm) >= 2, report.of_harm


def test_the_docs_name_each_known_risk() -> None:
    page = _PAGE.read_text(encoding="utf-8")
    assert [risk for risk in Risk if f"**{risk.capitalize()}**" not in page] == []
