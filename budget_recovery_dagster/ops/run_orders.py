"""What a person orders by a run."""

import dagster as dg

from budget_recovery_dagster.resources import holder_of
from budget_recovery_dagster.services.orders import Order


def order_by(context: dg.OpExecutionContext, reason: str, *, accept_unconverged: bool) -> Order:
    """Return the order of a run; whoever waits for it reads the run's log."""
    run_id = context.run.run_id
    return Order(
        by=holder_of(run_id),
        reason=reason,
        run_id=run_id,
        tell=context.log.info,
        accept_unconverged=accept_unconverged,
    )
