"""``budget-recovery demo``: a store is lost and restored on servers of its own, with figures.

Servers, gateway and traffic are those of the sandbox; the services that restore are those that
Dagster runs. Every figure is read from the servers, and a pure function judges them.
"""

from budget_recovery_dagster.sandbox.demo.stage import data_dir, is_of_the_budget, running_stage
from budget_recovery_dagster.sandbox.demo.story import Page, run_story
from budget_recovery_dagster.sandbox.demo.verdict import (
    Account,
    Evidence,
    Figures,
    Usages,
    account,
    judge,
)

__all__ = [
    "Account",
    "Evidence",
    "Figures",
    "Page",
    "Usages",
    "account",
    "data_dir",
    "is_of_the_budget",
    "judge",
    "run_story",
    "running_stage",
]
