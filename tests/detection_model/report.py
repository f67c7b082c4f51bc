"""Counts of right and wrong decisions over many histories."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from tests.detection_model.histories import History
from tests.detection_model.judge import Decision, Harm, Risk, harm_of
from tests.detection_model.world import Outcome


@dataclass(frozen=True)
class Fault:
    """A wrong decision that no known risk explains, with the steps that led to it."""

    seed: str
    steps: tuple[str, ...]
    outcome: Outcome

    def __str__(self) -> str:
        right = ", ".join(sorted(self.outcome.right))
        return f"{self.seed}: {self.outcome.decision}, right: {right}\n" + "\n".join(self.steps)


@dataclass
class Report:
    """How often each decision was made, and how often it was wrong."""

    histories: int = 0
    decisions: Counter[Decision] = field(default_factory=Counter)
    risks: Counter[tuple[Decision, Risk]] = field(default_factory=Counter)
    faults: list[Fault] = field(default_factory=list)

    def add(self, history: History) -> None:
        """Play a history, and count its decisions."""
        self.histories += 1
        for outcome in history.play():
            self.decisions[outcome.decision] += 1
            if outcome.risk is not None:
                self.risks[outcome.decision, outcome.risk] += 1
            elif not outcome.is_right:
                self.faults.append(Fault(history.seed, tuple(history.steps), outcome))

    @property
    def of_risk(self) -> Counter[Risk]:
        """How often each known risk came true."""
        counts: Counter[Risk] = Counter()
        for (_, risk), count in self.risks.items():
            counts[risk] += count
        return counts

    @property
    def of_harm(self) -> Counter[Harm]:
        """How often wrong decisions led to each harm."""
        counts: Counter[Harm] = Counter()
        for (decision, risk), count in self.risks.items():
            counts[harm_of(decision, risk)] += count
        return counts

    def lines(self) -> Iterator[str]:
        """Return the tables in Markdown."""
        made = sum(self.decisions.values())
        yield f"{self.histories:,} histories, {made:,} decisions, {len(self.faults)} faults"
        yield from ("", "| decision | made | faults | wrong by a known risk |", "|---|--:|--:|---|")
        for decision in Decision:
            faults = sum(each.outcome.decision is decision for each in self.faults)
            known = ", ".join(
                f"{risk} {self.risks[decision, risk]:,}"
                for risk in Risk
                if self.risks[decision, risk]
            )
            yield f"| {decision} | {self.decisions[decision]:,} | {faults} | {known} |"
        yield from ("", "| harm | wrong decisions |", "|---|--:|")
        yield from (f"| {harm} | {self.of_harm[harm]:,} |" for harm in Harm)


def report_on(count: int, seed: str, *, first: int = 0) -> Report:
    """Play so many histories; each has a seed of its own, which ends with its number."""
    report = Report()
    for number in range(first, first + count):
        report.add(History(f"{seed} {number}"))
    return report


def merged(reports: Iterable[Report]) -> Report:
    """Return the counts of several reports as one."""
    whole = Report()
    for each in reports:
        whole.histories += each.histories
        whole.decisions += each.decisions
        whole.risks += each.risks
        whole.faults += each.faults
    return whole
