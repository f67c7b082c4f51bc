"""A simulated gateway: it answers requests, reports and adds up their costs, and derives blocks.

Three parts that, as in a real gateway, share only NATS:

- The **gate** answers each request from the blocks that it knows, and never waits. It records the
  allowed requests in its **ledger** and publishes their costs from there.
- The **aggregator** takes the costs from their stream and adds them to the counters.
- The **derivation** watches the counters and maintains leaderboards and blocked keys.

The ledger is the exact record of true spend, which the counters must match.
"""

from budget_recovery_dagster.sandbox.gateway.aggregator import UNUSED as UNUSED
from budget_recovery_dagster.sandbox.gateway.aggregator import Counter as Counter
from budget_recovery_dagster.sandbox.gateway.aggregator import Recent as Recent
from budget_recovery_dagster.sandbox.gateway.derivation import Group as Group
from budget_recovery_dagster.sandbox.gateway.derivation import Standing as Standing
from budget_recovery_dagster.sandbox.gateway.derivation import board_entries as board_entries
from budget_recovery_dagster.sandbox.gateway.derivation import shown_entries as shown_entries
from budget_recovery_dagster.sandbox.gateway.derivation import wanted_blocks as wanted_blocks
from budget_recovery_dagster.sandbox.gateway.derivation import wanted_board as wanted_board
from budget_recovery_dagster.sandbox.gateway.derivation import write_board as write_board
from budget_recovery_dagster.sandbox.gateway.gate import Answer as Answer
from budget_recovery_dagster.sandbox.gateway.gate import Gate as Gate
from budget_recovery_dagster.sandbox.gateway.gate import Tally as Tally
from budget_recovery_dagster.sandbox.gateway.gate import log_every_minute as log_every_minute
from budget_recovery_dagster.sandbox.gateway.ledger import Ledger as Ledger
from budget_recovery_dagster.sandbox.gateway.ledger import LedgerError as LedgerError
from budget_recovery_dagster.sandbox.gateway.operations import AGGREGATOR_READY as AGGREGATOR_READY
from budget_recovery_dagster.sandbox.gateway.operations import GATE_READY as GATE_READY
from budget_recovery_dagster.sandbox.gateway.operations import (
    REQUESTS_PER_SECOND as REQUESTS_PER_SECOND,
)
from budget_recovery_dagster.sandbox.gateway.operations import RunningGate as RunningGate
from budget_recovery_dagster.sandbox.gateway.operations import begin as begin
from budget_recovery_dagster.sandbox.gateway.operations import count_contents as count_contents
from budget_recovery_dagster.sandbox.gateway.operations import count_history as count_history
from budget_recovery_dagster.sandbox.gateway.operations import (
    running_aggregator as running_aggregator,
)
from budget_recovery_dagster.sandbox.gateway.operations import running_gate as running_gate
from budget_recovery_dagster.sandbox.gateway.operations import wipe as wipe
from budget_recovery_dagster.sandbox.gateway.requests import BUDGETS as BUDGETS
from budget_recovery_dagster.sandbox.gateway.requests import USERS as USERS
from budget_recovery_dagster.sandbox.gateway.requests import Applied as Applied
from budget_recovery_dagster.sandbox.gateway.requests import Budgets as Budgets
from budget_recovery_dagster.sandbox.gateway.requests import Charge as Charge
from budget_recovery_dagster.sandbox.gateway.requests import Request as Request
from budget_recovery_dagster.sandbox.gateway.requests import Traffic as Traffic
from budget_recovery_dagster.sandbox.gateway.requests import (
    UnreadableChargeError as UnreadableChargeError,
)
from budget_recovery_dagster.sandbox.gateway.requests import Watermark as Watermark
from budget_recovery_dagster.sandbox.gateway.requests import utc_clock as utc_clock
from budget_recovery_dagster.sandbox.gateway.store import NOTHING as NOTHING
from budget_recovery_dagster.sandbox.gateway.store import Place as Place
from budget_recovery_dagster.sandbox.gateway.store import Seen as Seen
from budget_recovery_dagster.sandbox.gateway.store import bucket_stream as bucket_stream
from budget_recovery_dagster.sandbox.gateway.store import cost_stream as cost_stream
from budget_recovery_dagster.sandbox.gateway.store import cost_subject as cost_subject
