"""A simulated gateway: it answers requests, reports and adds up their costs, and derives blocks.

Three parts that, as in a real gateway, share only NATS:

- The **gate** answers each request from the blocks that it knows, and never waits. It records the
  allowed requests in its **ledger** and publishes their costs from there.
- The **aggregator** takes the costs from their stream and adds them to the counters.
- The **derivation** watches the counters and maintains leaderboards and blocked keys.

The ledger is the exact record of true spend, which the counters must match.
"""

from budget_recovery_dagster.sandbox.gateway.aggregator import UNUSED, Counter, Recent
from budget_recovery_dagster.sandbox.gateway.derivation import (
    Group,
    Standing,
    board_entries,
    shown_entries,
    wanted_blocks,
    wanted_board,
    write_board,
)
from budget_recovery_dagster.sandbox.gateway.gate import Answer, Gate, Tally, log_every_minute
from budget_recovery_dagster.sandbox.gateway.ledger import Ledger, LedgerError
from budget_recovery_dagster.sandbox.gateway.operations import (
    AGGREGATOR_READY,
    GATE_READY,
    REQUESTS_PER_SECOND,
    NotWipedError,
    RunningGate,
    begin,
    count_contents,
    count_history,
    running_aggregator,
    running_gate,
    wipe,
)
from budget_recovery_dagster.sandbox.gateway.requests import (
    Applied,
    Budgets,
    Charge,
    Request,
    UnreadableChargeError,
    Watermark,
    utc_clock,
)
from budget_recovery_dagster.sandbox.gateway.store import (
    NOTHING,
    Place,
    Seen,
    board_of,
    bucket_stream,
    cost_stream,
    cost_subject,
)
from budget_recovery_dagster.sandbox.gateway.traffic import BUDGETS, USERS, Traffic

__all__ = [
    "AGGREGATOR_READY",
    "BUDGETS",
    "GATE_READY",
    "NOTHING",
    "REQUESTS_PER_SECOND",
    "UNUSED",
    "USERS",
    "Answer",
    "Applied",
    "Budgets",
    "Charge",
    "Counter",
    "Gate",
    "Group",
    "Ledger",
    "LedgerError",
    "NotWipedError",
    "Place",
    "Recent",
    "Request",
    "RunningGate",
    "Seen",
    "Standing",
    "Tally",
    "Traffic",
    "UnreadableChargeError",
    "Watermark",
    "begin",
    "board_entries",
    "board_of",
    "bucket_stream",
    "cost_stream",
    "cost_subject",
    "count_contents",
    "count_history",
    "log_every_minute",
    "running_aggregator",
    "running_gate",
    "shown_entries",
    "utc_clock",
    "wanted_blocks",
    "wanted_board",
    "wipe",
    "write_board",
]
