"""A usage store in memory that keeps the promises of the port and can be made to fail."""

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from budget_recovery_dagster.adapters.nats_codec import (
    CounterKey,
    KeysRead,
    StoredValue,
    decode_name,
    encode_key,
)
from budget_recovery_dagster.adapters.nats_sources import SOURCES, SourceReader
from budget_recovery_dagster.domain.counters import BudgetWindow, Entity
from budget_recovery_dagster.domain.identity import StoreIdentity
from budget_recovery_dagster.domain.snapshots import CaptureSource
from budget_recovery_dagster.domain.windows import Window
from budget_recovery_dagster.errors import StoreError

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class MemoryUsageStore:
    """Counters and leaderboards by key, as the gateway would have written them.

    Every writing gives out the next sequence. What is set here happens at the next calls:
    ``stream`` is the identity that is shown and ``clock`` the time; ``identity_failure``, of both,
    and ``listing_failure`` are raised; ``failures`` are raised for the tenants that they name;
    ``in_mid_reading`` is called with the tenant when half of its keys have been read, each time
    that they are read.
    """

    def __init__(self, created_at: datetime = EPOCH) -> None:
        self.stream = StoreIdentity(created_at, 0)
        self.clock: datetime | None = None
        self.identity_failure: StoreError | None = None
        self.listing_failure: StoreError | None = None
        self.failures: dict[str, StoreError] = {}
        self.in_mid_reading: Callable[[str], None] | None = None
        self._values: dict[str, StoredValue] = {}

    def put(
        self, key: str, value: bytes, *, ttl: str | None = None, written_at: datetime = EPOCH
    ) -> None:
        """Write any key with any value, sound or not, as the gateway could."""
        microseconds = (written_at - EPOCH) // timedelta(microseconds=1)
        self._values[key] = StoredValue(value, ttl, microseconds * 1000)
        self._give_out_sequence()

    def put_usage(self, tenant: str, budget: str, window: str, entity: Entity, usage: str) -> None:
        """Write a counter as the gateway usually does."""
        of = BudgetWindow(budget, Window.parse(window))
        self.put(encode_key(CounterKey(tenant, of, entity)), b'{"usage":"%s"}' % usage.encode())

    def remove(self, key: str) -> None:
        """Delete a key, as the gateway does: the deletion has a sequence of its own."""
        del self._values[key]
        self._give_out_sequence()

    def purge(self, prefix: str = "") -> None:
        """Remove the keys that begin with ``prefix`` so that the identity shows nothing of it."""
        self._values = {
            key: value for key, value in self._values.items() if not key.startswith(prefix)
        }

    def recreate(self, created_at: datetime) -> None:
        """Replace the store by an empty one, created at another moment."""
        self._values.clear()
        self.stream = StoreIdentity(created_at, 0)

    def identity(self) -> StoreIdentity:
        """Read the identity."""
        if self.identity_failure is not None:
            raise self.identity_failure
        return self.stream

    def now(self) -> datetime | None:
        """Return the time that was set; the leader that tells it is the one of the identity."""
        if self.identity_failure is not None:
            raise self.identity_failure
        return self.clock

    def reader(self, source: CaptureSource) -> SourceReader:
        """Return a reader of one source."""
        return SourceReader(
            SOURCES[source], list_keys=self._list_keys, read_values=self._read_values
        )

    def _list_keys(self, prefix: str) -> list[str]:
        if self.listing_failure is not None:
            raise self.listing_failure
        return self._keys(prefix)

    def _read_values(self, prefix: str) -> KeysRead:
        _, token, _ = prefix.split(".")
        tenant = decode_name(token)
        if tenant in self.failures:
            raise self.failures[tenant]
        values, is_complete = self._read_once(tenant, prefix)
        if not is_complete:
            values, is_complete = self._read_once(tenant, prefix)
        return KeysRead(values, is_partial=not is_complete)

    def _read_once(self, tenant: str, prefix: str) -> tuple[dict[str, StoredValue], bool]:
        announced = self._keys(prefix)
        middle = len(announced) // 2
        found = {key: self._values[key] for key in announced[:middle]}
        if self.in_mid_reading is not None:
            self.in_mid_reading(tenant)
        found |= {key: self._values[key] for key in self._keys(prefix) if key not in found}
        return found, len(found) >= len(announced)

    def _keys(self, prefix: str) -> list[str]:
        return [key for key in self._values if key.startswith(prefix) and key != prefix]

    def _give_out_sequence(self) -> None:
        self.stream = replace(self.stream, last_sequence=self.stream.last_sequence + 1)
