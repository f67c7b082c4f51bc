"""Reports the costs in the ledger to their stream: one message each, in order, none left out."""

from budget_recovery_dagster.sandbox.gateway.gate import Gate
from budget_recovery_dagster.sandbox.gateway.ledger import Ledger
from budget_recovery_dagster.sandbox.gateway.store import Store

_AT_ONCE = 200


async def report(store: Store, ledger: Ledger, gate: Gate) -> None:
    """Report what is not reported, and whatever the gate records, for ever.

    A message is sent only when the one before it is acknowledged, so that the order is certain. One
    whose acknowledgement was lost is sent again, under the same id.

    Raises:
        nats.errors.Error, OSError: the stream does not take it.
    """
    while True:
        gate.recorded.clear()
        for charge in ledger.unreported(_AT_ONCE):
            await store.report(charge.to_json(), message_id=str(charge.watermark))
            ledger.reported(charge.number)
            gate.recorded.set()  # there may be more
        await gate.recorded.wait()
