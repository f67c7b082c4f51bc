"""How results are shown to people and programs: sentences, terminal, JSON, Dagster metadata.

Only ``metadata`` and ``restore_metadata`` import Dagster, so nothing of them is exported here:
commands start without it.
"""

from budget_recovery_dagster.presentation.documents import INTERRUPTED as INTERRUPTED
from budget_recovery_dagster.presentation.documents import STATUS_UNREAD as STATUS_UNREAD
from budget_recovery_dagster.presentation.documents import USAGE_ERROR as USAGE_ERROR
from budget_recovery_dagster.presentation.documents import applied_json as applied_json
from budget_recovery_dagster.presentation.documents import captured_json as captured_json
from budget_recovery_dagster.presentation.documents import discarded_json as discarded_json
from budget_recovery_dagster.presentation.documents import error_json as error_json
from budget_recovery_dagster.presentation.documents import failure_json as failure_json
from budget_recovery_dagster.presentation.documents import held_json as held_json
from budget_recovery_dagster.presentation.documents import interrupted_json as interrupted_json
from budget_recovery_dagster.presentation.documents import preview_json as preview_json
from budget_recovery_dagster.presentation.documents import reset_json as reset_json
from budget_recovery_dagster.presentation.documents import resolved_json as resolved_json
from budget_recovery_dagster.presentation.documents import snapshots_json as snapshots_json
from budget_recovery_dagster.presentation.documents import status_json as status_json
from budget_recovery_dagster.presentation.documents import usage_error_json as usage_error_json
from budget_recovery_dagster.presentation.status import doubts as doubts
from budget_recovery_dagster.presentation.status import next_step as next_step
from budget_recovery_dagster.presentation.status import notices as notices
from budget_recovery_dagster.presentation.text import CHANGES as CHANGES
from budget_recovery_dagster.presentation.text import FAILURES as FAILURES
from budget_recovery_dagster.presentation.text import Warned as Warned
from budget_recovery_dagster.presentation.text import comparison as comparison
from budget_recovery_dagster.presentation.text import figures as figures
from budget_recovery_dagster.presentation.text import headline as headline
from budget_recovery_dagster.presentation.text import label as label
from budget_recovery_dagster.presentation.text import limit_words as limit_words
from budget_recovery_dagster.presentation.text import reset_report as reset_report
from budget_recovery_dagster.presentation.text import warnings as warnings
from budget_recovery_dagster.presentation.text import window_lines as window_lines
from budget_recovery_dagster.presentation.text import window_notes as window_notes
