"""Keys of what is derived from counters; each has the same parts as the counters' own."""

from budget_recovery_dagster.adapters.nats.codec import (
    COUNTERS,
    CounterKey,
    UnreadableKeyError,
    decode_key,
    encode_key,
)

BLOCKED = "blocked"
"""``blocked.<tenant>.<budget>.<window>.<entity>``: an entity that is at or over its limit."""

_ANY_ENTITY = "="


def suffix_of(counter: CounterKey) -> str:
    """Return what the keys of a counter and of its block have in common.

    Raises:
        UnusableNameError: no key may hold one of the names.
    """
    return encode_key(counter).removeprefix(f"{COUNTERS}.")


def counter_of(suffix: str) -> CounterKey:
    """Read what ``suffix_of`` writes.

    Raises:
        UnreadableKeyError: it names no counter.
    """
    return decode_key(f"{COUNTERS}.{suffix}")


def board_of(group: str) -> CounterKey:
    """Read ``<tenant>.<budget>.<window>``; the entity says nothing.

    Raises:
        UnreadableKeyError: it names no window of a budget.
    """
    return counter_of(f"{group}.{_ANY_ENTITY}")


def described(suffix: str) -> str:
    """Name a counter to a person."""
    try:
        counter = counter_of(suffix)
    except UnreadableKeyError:
        return suffix
    entity = "" if counter.entity is None else f" for {counter.entity!r}"
    return f"budget {counter.of.budget!r} of {counter.tenant!r}{entity}, {counter.of.window.token}"
