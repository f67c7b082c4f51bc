"""``budget-recovery demo``: a store is lost and restored on servers of its own, with figures.

Servers, gateway and traffic are those of the sandbox; the services that restore are those that
Dagster runs. Every figure is read from the servers, and a pure function judges them.
"""

from budget_recovery_dagster.sandbox.demo.stage import Figures as Figures
from budget_recovery_dagster.sandbox.demo.stage import Usages as Usages
from budget_recovery_dagster.sandbox.demo.stage import data_dir as data_dir
from budget_recovery_dagster.sandbox.demo.stage import is_of_the_budget as is_of_the_budget
from budget_recovery_dagster.sandbox.demo.stage import running_stage as running_stage
from budget_recovery_dagster.sandbox.demo.story import Account as Account
from budget_recovery_dagster.sandbox.demo.story import Evidence as Evidence
from budget_recovery_dagster.sandbox.demo.story import Page as Page
from budget_recovery_dagster.sandbox.demo.story import account as account
from budget_recovery_dagster.sandbox.demo.story import judge as judge
from budget_recovery_dagster.sandbox.demo.story import run_story as run_story
