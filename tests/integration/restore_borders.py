"""A real restore with a fault injected at one border, including those around its writes."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from budget_recovery_dagster.domain import IsOpen
from budget_recovery_dagster.ports import LiveTenant, OpenStore, UsageStore
from tests.integration.check_borders import Borders, bordered_store
from tests.integration.restore_worker import Overriding


class _BorderedTenant(Overriding):
    """A tenant with borders before and after its counters and boards are written.

    There is none between two writes: ``restore_worker`` kills the process there.
    """

    def __init__(self, part: LiveTenant, borders: Borders) -> None:
        super().__init__(part)
        self._borders = borders

    def raise_counters(self, orders: Sequence[Any], *, is_open: IsOpen) -> Any:
        return self._write("raise_counters", orders, is_open)

    def rebuild_boards(self, orders: Sequence[Any], *, is_open: IsOpen) -> Any:
        return self._write("rebuild_boards", orders, is_open)

    def _write(self, name: str, orders: Sequence[Any], is_open: IsOpen) -> Any:
        self._cross(f"before {name}")
        results = getattr(self._part, name)(orders, is_open=is_open)
        self._cross(f"after {name}")
        return results

    def _cross(self, name: str) -> None:
        self._borders.cross(name, of_store=True)


class _BorderedStore(Overriding):
    def __init__(self, part: UsageStore, borders: Borders) -> None:
        super().__init__(part)
        self._borders = borders

    def open_tenant(self, tenant: str) -> LiveTenant:
        found: Any = _BorderedTenant(self._part.open_tenant(tenant), self._borders)
        tenant_: LiveTenant = found
        return tenant_


def bordered_restoring(open_store: OpenStore, borders: Borders) -> OpenStore:
    """Return an opener of the store with borders around each call, including writes."""

    @contextmanager
    def opened() -> Iterator[UsageStore]:
        with open_store() as store:
            found: Any = _BorderedStore(store, borders)
            yield found

    return bordered_store(opened, borders)
