"""How results are shown to people and programs: sentences, terminal, JSON, Dagster metadata."""

from budget_recovery_dagster.presentation.metadata import duration as duration
from budget_recovery_dagster.presentation.metadata import points_metadata as points_metadata
from budget_recovery_dagster.presentation.metadata import preview_metadata as preview_metadata
from budget_recovery_dagster.presentation.metadata import table as table
from budget_recovery_dagster.presentation.text import comparison as comparison
from budget_recovery_dagster.presentation.text import figures as figures
from budget_recovery_dagster.presentation.text import headline as headline
from budget_recovery_dagster.presentation.text import limit_words as limit_words
from budget_recovery_dagster.presentation.text import reset_report as reset_report
from budget_recovery_dagster.presentation.text import window_lines as window_lines
