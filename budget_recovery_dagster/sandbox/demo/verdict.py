"""Whether everything came back, judged by what was read from the servers. Pure."""

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from decimal import Decimal

from budget_recovery_dagster.adapters.nats.codec import CounterKey
from budget_recovery_dagster.domain.counters import exact_sum, format_usage
from budget_recovery_dagster.sandbox.demo.figures import Figures, Usages
from budget_recovery_dagster.sandbox.gateway.keys import described, suffix_of


@dataclass(frozen=True, slots=True)
class Evidence:
    """What was read: the newest snapshot, the store before and after the wipe, and in the end.

    ``after_wipe`` is of before the restore. ``is_refused`` is whether the request that was refused
    before the wipe is refused in the end.
    """

    snapshot: Usages
    before_wipe: Figures
    after_wipe: Figures
    in_the_end: Figures
    is_refused: bool


@dataclass(frozen=True, slots=True)
class Promise:
    """Something that must hold of so many things, and of which of them it does not."""

    text: str
    broken: tuple[str, ...]

    @property
    def is_kept(self) -> bool:
        """Whether it holds."""
        return not self.broken


def judge(evidence: Evidence) -> tuple[Promise, ...]:
    """Say what must hold once everything has come back, and where it does not.

    Only windows that are still current in the end count: of one that has closed meanwhile, the
    gateway removes the counters itself. Where there is nothing to compare, nothing is proven, and
    so that is a broken promise, too.
    """
    end = evidence.in_the_end

    def is_current(counter: CounterKey) -> bool:
        return counter.of.window.is_current(end.at)

    recorded = _of(evidence.snapshot, is_current)
    live = _of(evidence.after_wipe.counters, is_current)
    blocked = set(filter(is_current, evidence.before_wipe.blocked))
    held = _of(end.counters, is_current)
    return (
        Promise(
            f"{len(recorded):,} counters of the snapshot are at least as high as in it",
            tuple(_lower(held, than=recorded, told="in the snapshot")) or _nothing(recorded),
        ),
        Promise(
            f"{len(live):,} counters of after the wipe are not lower than they were then",
            tuple(_lower(held, than=live, told="after the wipe")) or _nothing(live),
        ),
        Promise(
            f"{len(blocked):,} blocks of before the wipe are back",
            tuple(f"{_named(each)} is not blocked" for each in _sorted(blocked - end.blocked))
            or _nothing(blocked),
        ),
        Promise(
            f"{len(held):,} counters are no higher than what was really spent",
            tuple(_higher(held, than=end.spent)) or _nothing(held),
        ),
        Promise(
            "the request that was refused before the wipe is refused again",
            () if evidence.is_refused else ("it is let through",),
        ),
    )


@dataclass(frozen=True, slots=True)
class Account:
    """Where the money of some counters is, in dollars.

    Of what was spent ``between`` the snapshot and the wipe no snapshot knows. Of what was spent
    ``since`` the wipe, ``not_added`` is where a snapshot knows more than was counted since: the
    higher value stands, not the sum. All else is in the counters.
    """

    between: Decimal
    since: Decimal
    not_added: Decimal

    @property
    def kept(self) -> Decimal:
        """What was spent since the wipe and is in the counters."""
        return self.since - self.not_added


def account(evidence: Evidence, is_meant: Callable[[CounterKey], bool]) -> Account:
    """Say where the money of the counters that are meant is; their windows must be current.

    ``between`` and ``not_added`` together are what was spent and is not in the counters.
    """
    end = evidence.in_the_end
    recorded, counted = total(evidence.snapshot, is_meant), total(end.counters, is_meant)
    until_wipe = total(evidence.before_wipe.spent, is_meant)
    spent = total(end.spent, is_meant)
    between = until_wipe - recorded
    return Account(between, spent - until_wipe, spent - counted - between)


def total(usages: Usages, is_meant: Callable[[CounterKey], bool]) -> Decimal:
    """Add up the usages of the counters that are meant, exactly."""
    return exact_sum(_of(usages, is_meant).values())


def _of(usages: Usages, is_meant: Callable[[CounterKey], bool]) -> Usages:
    return {counter: usage for counter, usage in usages.items() if is_meant(counter)}


def _lower(found: Usages, *, than: Usages, told: str) -> Iterator[str]:
    for counter in _sorted(than):
        usage = found.get(counter)
        if usage is None or usage < than[counter]:
            now = "is gone" if usage is None else f"is {format_usage(usage)}"
            yield f"{_named(counter)} was {format_usage(than[counter])} {told} and {now}"


def _higher(found: Usages, *, than: Usages) -> Iterator[str]:
    for counter in _sorted(found):
        spent = than.get(counter, Decimal(0))
        if found[counter] > spent:
            yield (
                f"{_named(counter)} is {format_usage(found[counter])}, and {format_usage(spent)}"
                " was spent"
            )


def _nothing(compared: Collection[CounterKey]) -> tuple[str, ...]:
    return () if compared else ("there was nothing to compare",)


def _sorted(counters: Iterable[CounterKey]) -> list[CounterKey]:
    return sorted(counters, key=suffix_of)


def _named(counter: CounterKey) -> str:
    return described(suffix_of(counter))
