"""Stores that refuse some writes, in memory and on a NATS server."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from uuid import uuid4

from budget_recovery_dagster.adapters.nats import open_usage_store
from budget_recovery_dagster.errors import StoreRefusedError
from tests.contract.usage_stores import Store
from tests.fakes.usage_store import MemoryUsageStore
from tests.nats_servers import PATIENT, Bucket

MOST_BYTES = 1000
FULL = StoreRefusedError("The store is full.", "make room.")
_MAX_BYTES = 100_000
_MORE_THAN_MEASURED = 150


@dataclass(frozen=True)
class Limited:
    """A store that can be made to refuse writes.

    ``leave_room_for_two`` gets a function that writes something small. Then there is room for two
    more of the same size, but not for a much larger value as the second of three.
    """

    store: Store
    put: Callable[[str, bytes], None]
    leave_room_for_two: Callable[[Callable[[], object]], None]
    fill: Callable[[], None]


Limit = Callable[..., AbstractContextManager[Limited]]


@contextmanager
def in_memory(*, is_limited_by_value: bool = False) -> Iterator[Limited]:
    store = MemoryUsageStore()
    if is_limited_by_value:
        store.max_value = MOST_BYTES

    def leave_room(write_small: Callable[[], object]) -> None:
        write_small()
        store.write_failures[store.writes + 2] = FULL

    def fill() -> None:
        store.write_failures = dict.fromkeys(range(store.writes + 1, 100_000), FULL)

    yield Limited(store, store.put, leave_room, fill)


@contextmanager
def on_nats(url: str, *, is_limited_by_value: bool = False) -> Iterator[Limited]:
    name = f"limited-{uuid4().hex}"
    with Bucket.connected(url, name) as bucket:
        bucket.create_with(
            **{"max_msg_size": MOST_BYTES} if is_limited_by_value else {"max_bytes": _MAX_BYTES}
        )

        def used() -> int:
            count: int = bucket.info().state.bytes
            return count

        def leave(room: int) -> None:
            before = used()
            bucket.put("filler.1", b"")
            around = used() - before
            bucket.put("filler.2", b"x" * (_MAX_BYTES - used() - around - room))

        def leave_room(write_small: Callable[[], object]) -> None:
            before = used()
            write_small()
            leave(2 * (used() - before) + _MORE_THAN_MEASURED)

        with open_usage_store(url, name, timeouts=PATIENT) as store:
            yield Limited(store, bucket.put, leave_room, lambda: leave(20))
        bucket.destroy()
