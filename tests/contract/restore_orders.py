"""Orders to raise counters of a tenant, and answers to whether a window is open."""

from collections.abc import Callable, Mapping
from decimal import Decimal

from budget_recovery_dagster.adapters.nats import CounterKey, encode_key
from budget_recovery_dagster.domain import (
    NO_EXPIRY,
    BoardOrder,
    BudgetWindow,
    Entity,
    IsOpen,
    KnownExpiry,
    RaiseOrder,
    ValueShape,
    Window,
    Written,
)
from tests.contract.usage_stores import Subject
from tests.nats_servers import Stored

NOVEMBER = BudgetWindow("b", Window.parse("2026-11"))
LIFETIME = BudgetWindow("b", Window.parse("lifetime"))


def order(
    entity: Entity,
    usage: str,
    of: BudgetWindow = NOVEMBER,
    *,
    shape: ValueShape = ValueShape.TEXT,
    expiry: KnownExpiry = NO_EXPIRY,
) -> RaiseOrder:
    return RaiseOrder(of, entity, Decimal(usage), shape, expiry)


def board_order(
    usages: Mapping[Entity, str],
    of: BudgetWindow = NOVEMBER,
    expiry: KnownExpiry = NO_EXPIRY,
    *,
    may_create: bool = True,
) -> BoardOrder:
    return BoardOrder(
        of,
        {entity: Decimal(usage) for entity, usage in usages.items()},
        expiry,
        may_create=may_create,
    )


def key(entity: Entity, of: BudgetWindow = NOVEMBER, tenant: str = "t") -> str:
    return encode_key(CounterKey(tenant, of, entity))


def always(_: Window) -> bool:
    return True


def never(_: Window) -> bool:
    return False


def open_after(*interventions: Callable[[], object]) -> IsOpen:
    """Call one function at each write, between the decision and the write."""
    rest = iter(interventions)

    def is_open(_: Window) -> bool:
        next(rest, lambda: None)()
        return True

    return is_open


def raised(subject: Subject, *orders: RaiseOrder, tenant: str = "t") -> list[Written]:
    results = subject.store.open_tenant(tenant).raise_counters(orders, is_open=always)
    assert [result.order for result in results] == list(orders)
    return [result.written for result in results]


def stored(subject: Subject, name: str) -> Stored:
    found = subject.stored(name)
    assert found is not None
    return found
