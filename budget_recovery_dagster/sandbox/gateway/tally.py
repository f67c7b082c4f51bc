"""How many requests of each tenant the gate has let through and refused, told once a minute."""

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable

from budget_recovery_dagster.sandbox.gateway.gate import Answer

log = logging.getLogger("gate")

_SECONDS = 60.0
_NO_LEDGER = "no ledger"


class Tally:
    """Counts answers since it was last taken."""

    def __init__(self) -> None:
        self._allowed: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()
        self._reasons: defaultdict[str, set[str]] = defaultdict(set)

    def add(self, tenant: str, answer: Answer) -> None:
        """Count the answer to a request of this tenant."""
        if answer.is_allowed:
            self._allowed[tenant] += 1
            return
        self._refused[tenant] += 1
        self._reasons[tenant] |= {each.budget for each in answer.blocked_by} or {_NO_LEDGER}

    def taken(self) -> str:
        """Say what was counted, by tenant, and begin at zero."""
        tenants = sorted(self._allowed.keys() | self._refused.keys())
        text = "; ".join(map(self._of, tenants)) or "no requests"
        self._allowed.clear()
        self._refused.clear()
        self._reasons.clear()
        return text

    def _of(self, tenant: str) -> str:
        parts = []
        if allowed := self._allowed[tenant]:
            parts.append(f"{allowed} allowed")
        if refused := self._refused[tenant]:
            parts.append(f"{refused} refused ({', '.join(sorted(self._reasons[tenant]))})")
        return f"{tenant} {', '.join(parts)}"


async def tell_every_minute(
    tally: Tally, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
) -> None:
    """Log what was counted in each minute, for ever."""
    while True:
        await sleep(_SECONDS)
        log.info("Last minute: %s.", tally.taken())
