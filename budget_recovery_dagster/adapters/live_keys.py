"""Keys of the bucket as they stand, and what is to become of each: decided here, written elsewhere.

A change decides anew on whatever stands under its key, so that all adapters write by one rule.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Generic, NamedTuple, Protocol, TypeVar

from budget_recovery_dagster.adapters.nats_codec import KeysRead, StoredValue
from budget_recovery_dagster.errors import StoreWriteError
from budget_recovery_dagster.restore_ports import IsOpen

Outcome = TypeVar("Outcome")
Outcome_co = TypeVar("Outcome_co", covariant=True)

TRIES = 50
"""How often a key is read again because somebody else has written it; then it is given up on."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class LiveKey(NamedTuple):
    """A key as it stands: its value, None where it is deleted, and its revision.

    The revision is the sequence of its last writing or deletion, which the next writing must name;
    0 where the store knows of neither.
    """

    revision: int
    value: StoredValue | None


NEVER_WRITTEN = LiveKey(0, None)
"""A key of which the store knows nothing."""


@dataclass(frozen=True, slots=True)
class LiveKeysRead:
    """What was found under a prefix, deleted keys too. Partial: as of ``KeysRead``."""

    keys: dict[str, LiveKey]
    is_partial: bool

    def without_deleted(self) -> KeysRead:
        """Return the values, which deleted keys have not."""
        values = {key: live.value for key, live in self.keys.items() if live.value is not None}
        return KeysRead(values, self.is_partial)


class Write(NamedTuple):
    """A value to be written, with the text of its time to live, if it is to have one."""

    data: bytes
    ttl: str | None


class Decision(NamedTuple, Generic[Outcome_co]):
    """What becomes of a key; with a ``write``, once the store has taken that."""

    outcome: Outcome_co
    write: Write | None = None


class Change(Protocol[Outcome]):
    """What is wanted of one key."""

    @property
    def key(self) -> str:
        """The key."""
        ...

    def decide(self, live: LiveKey) -> Decision[Outcome]:
        """Decide what is to be written over what stands there; to be called right before it is."""
        ...

    def refused(self, outcome: Outcome, reason: str) -> Outcome:
        """Return what becomes of the key in place of ``outcome`` if the store refuses the value."""
        ...


@dataclass(frozen=True, slots=True)
class WritingTerms:
    """What every writing depends on besides its key.

    ``now`` tells the store's time (aware); ``keeps_ttl`` whether the store knows times to live of
    single keys. Where it does not, a key is kept too long, which does no harm.
    """

    is_open: IsOpen
    now: Callable[[], datetime]
    keeps_ttl: bool


def nanoseconds(moment: datetime) -> int:
    """Count the nanoseconds from 1970 to a moment (aware)."""
    return (moment - _EPOCH) // timedelta(microseconds=1) * 1000


def written_at(moment: datetime) -> str:
    """Write a moment (aware) as it stands in values: in UTC, to the second."""
    return moment.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def changes_too_fast(bucket: str, key: str) -> StoreWriteError:
    """Say that a key could not be written because others never stopped doing so."""
    return StoreWriteError(
        f"{key} in the bucket {bucket} was written by others {TRIES} times in a row.",
        "see who writes it so often; restore again once it is quieter.",
    )
