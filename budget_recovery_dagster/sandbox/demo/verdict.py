"""Whether everything came back, judged by figures that were read from the servers. Pure."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal

from budget_recovery_dagster.adapters.nats.codec import CounterKey
from budget_recovery_dagster.domain.counters import exact_sum, format_usage
from budget_recovery_dagster.sandbox.gateway.store import described, suffix_of

Usages = Mapping[CounterKey, Decimal]


@dataclass(frozen=True, slots=True)
class Figures:
    """Counters and blocks of the store, and the spend in the ledger, all read before ``at``.

    So a window that is current at ``at`` was current during the whole read.
    """

    at: datetime
    counters: Usages
    blocked: frozenset[CounterKey]
    spent: Usages


@dataclass(frozen=True, slots=True)
class Evidence:
    """The newest snapshot, and the figures before the wipe, before the restore and at the end.

    ``is_refused`` is whether the request that was refused before the wipe is refused at the end.
    """

    snapshot: Usages
    before_wipe: Figures
    after_wipe: Figures
    at_the_end: Figures
    is_refused: bool


@dataclass(frozen=True, slots=True)
class Promise:
    """A statement that must hold, and where it does not."""

    text: str
    broken: tuple[str, ...]

    @property
    def is_kept(self) -> bool:
        """Whether it holds."""
        return not self.broken


def judge(evidence: Evidence) -> tuple[Promise, ...]:
    """Return what must hold after a complete recovery, and where it does not.

    Only windows that are current at the end count, because the gateway removes the counters of
    windows that close meanwhile. With nothing to compare, nothing is proven: that breaks a promise.
    """
    end = evidence.at_the_end

    def is_current(counter: CounterKey) -> bool:
        return counter.of.window.is_current(end.at)

    recorded = _only(evidence.snapshot, is_current)
    live = _only(evidence.after_wipe.counters, is_current)
    blocked = set(filter(is_current, evidence.before_wipe.blocked))
    held = _only(end.counters, is_current)
    return (
        Promise(
            f"{len(recorded):,} counters are at least as high as in the snapshot",
            tuple(_lower(held, than=recorded, when="in the snapshot")) or _nothing(recorded),
        ),
        Promise(
            f"{len(live):,} counters are at least as high as after the wipe",
            tuple(_lower(held, than=live, when="after the wipe")) or _nothing(live),
        ),
        Promise(
            f"{len(blocked):,} blocks from before the wipe are back",
            tuple(f"{_named(each)} is not blocked" for each in _sorted(blocked - end.blocked))
            or _nothing(blocked),
        ),
        Promise(
            f"{len(held):,} counters are no higher than the true spend",
            tuple(_higher(held, than=end.spent)) or _nothing(held),
        ),
        Promise(
            "the request that was refused before the wipe is refused again",
            () if evidence.is_refused else ("it is allowed",),
        ),
    )


@dataclass(frozen=True, slots=True)
class Account:
    """The spend of some counters, in dollars, by whether a restore can know it.

    No snapshot has the spend ``between`` the snapshot and the wipe. Of the spend ``since`` the
    wipe, ``not_added`` belongs to counters with a higher value in the snapshot: the higher value
    counts, not the sum. The rest is in the counters.
    """

    between: Decimal
    since: Decimal
    not_added: Decimal

    @property
    def kept(self) -> Decimal:
        """The spend since the wipe that is in the counters."""
        return self.since - self.not_added


def account(evidence: Evidence, is_included: Callable[[CounterKey], bool]) -> Account:
    """Return the account of the included counters, whose windows must be current.

    ``between`` and ``not_added`` together are the spend that is not in the counters.
    """
    end = evidence.at_the_end
    recorded, counted = total(evidence.snapshot, is_included), total(end.counters, is_included)
    until_wipe = total(evidence.before_wipe.spent, is_included)
    spent = total(end.spent, is_included)
    between = until_wipe - recorded
    return Account(between, spent - until_wipe, spent - counted - between)


def total(usages: Usages, is_included: Callable[[CounterKey], bool]) -> Decimal:
    """Return the exact sum of the included counters."""
    return exact_sum(_only(usages, is_included).values())


def _only(usages: Usages, is_included: Callable[[CounterKey], bool]) -> Usages:
    return {counter: usage for counter, usage in usages.items() if is_included(counter)}


def _lower(found: Usages, *, than: Usages, when: str) -> Iterator[str]:
    for counter in _sorted(than):
        usage = found.get(counter)
        if usage is None or usage < than[counter]:
            now = "is missing" if usage is None else f"is {format_usage(usage)}"
            yield f"{_named(counter)} was {format_usage(than[counter])} {when} and {now}"


def _higher(found: Usages, *, than: Usages) -> Iterator[str]:
    for counter in _sorted(found):
        spent = than.get(counter, Decimal(0))
        if found[counter] > spent:
            usage = format_usage(found[counter])
            yield f"{_named(counter)} is {usage}, but the true spend is {format_usage(spent)}"


def _nothing(compared: Collection[CounterKey]) -> tuple[str, ...]:
    return () if compared else ("there was nothing to compare",)


def _sorted(counters: Iterable[CounterKey]) -> list[CounterKey]:
    return sorted(counters, key=suffix_of)


def _named(counter: CounterKey) -> str:
    return described(suffix_of(counter))
