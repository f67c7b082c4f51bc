"""The story of ``budget-recovery demo`` as a person reads it, at home in 80 columns."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from decimal import Decimal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from budget_recovery_dagster.domain.counters import format_usage
from budget_recovery_dagster.sandbox.demo.cast import (
    AGENT,
    BUDGET,
    LIMIT,
    TENANT,
    counter_of,
    is_of_the_budget,
)
from budget_recovery_dagster.sandbox.demo.figures import Figures
from budget_recovery_dagster.sandbox.demo.verdict import Account, Evidence, Promise, total

_WIDEST = 80
_NARROWEST = 20
_MARGIN = 4
_MARK = 6
_AMOUNT = 18
_SHOWN = 10
# No request of the sandbox costs less than the seventh of them.
_DECIMALS = 7


class Page:
    """Tells the story on a console, step by step."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._steps = 0

    @contextmanager
    def step(self, title: str) -> Iterator[None]:
        """Number a step, and say in the end how long it took."""
        self._steps += 1
        self._console.print()
        self._console.print(Text(f"{self._steps:>2}  {title}", "bold"))
        begun = time.monotonic()
        yield
        self._write(Text(f"({time.monotonic() - begun:.1f} s)", "dim"))

    def say(self, text: str) -> None:
        """Tell something in sentences."""
        self._write(Text(self._writable(text)))

    def answer(self, request: str, *, is_refused: bool) -> None:
        """Tell how the gateway has answered a request."""
        answer = ("REFUSED", "bold red") if is_refused else ("LET THROUGH", "bold yellow")
        self._write(Text.assemble(request, " ", answer))

    def show_figures(self, evidence: Evidence) -> None:
        """Set the figures of three moments side by side, amounts to their last digit."""
        moments = (evidence.before_wipe, evidence.after_wipe, evidence.in_the_end)
        table = Table(box=None, padding=(0, 0, 0, 2), pad_edge=False, header_style="bold")
        table.add_column("")
        for name in ("before wipe", "after wipe", "after restore"):
            table.add_column(name, justify="right")

        def row(name: str, figure: Callable[[Figures], str]) -> None:
            table.add_row(name, *map(figure, moments))

        of_agent = counter_of(AGENT)
        row("Counters", lambda each: f"{len(each.counters):,}")
        row("Blocked", lambda each: f"{len(each.blocked):,}")
        row(
            f"Usage of {BUDGET!r} of {TENANT!r}, $",
            lambda each: _exact(total(each.counters, is_of_the_budget)),
        )
        row(
            f"  {AGENT}, limit {LIMIT}",
            lambda each: _exact(each.counters.get(of_agent, Decimal(0))),
        )
        row(
            "Spent, by the exact ledger, $",
            lambda each: _exact(total(each.spent, is_of_the_budget)),
        )
        self._console.print()
        self._console.print(table)

    def show_account(self, account: Account) -> None:
        """Say which money no restore could bring back, which it did not add, and which it kept."""
        self._console.print()
        self._console.print(Text(f"Of {BUDGET!r} of {TENANT!r}", "bold"))
        self._write_amount(
            account.between,
            "spent between the snapshot and the wipe: not covered, for it is in no snapshot",
        )
        self._write_amount(
            account.not_added,
            "spent after the wipe by those of whom the snapshot knows more: not added, for the"
            " higher value stands, never the sum",
        )
        self._write_amount(
            account.kept, "of what was spent after the wipe is in the counters, and stays"
        )

    def _write_amount(self, amount: Decimal, what: str) -> None:
        self._write(Text(what), Text(f"${_exact(amount)}  ".rjust(_AMOUNT)))

    def show_verdict(self, promises: Sequence[Promise], seconds: float) -> None:
        """Say what came back and what did not."""
        self._console.print()
        for promise in promises:
            mark = Text("  ok  ", "green") if promise.is_kept else Text("  no  ", "bold red")
            self._write(Text(promise.text), mark)
            for each in promise.broken[:_SHOWN]:
                self._write(Text(self._writable(each)), Text(" " * (_MARK + 2)))
            if len(promise.broken) > _SHOWN:
                self._write(
                    Text(f"and {len(promise.broken) - _SHOWN:,} more"), Text(" " * (_MARK + 2))
                )
        self._console.print()
        is_whole = all(promise.is_kept for promise in promises)
        verdict = (
            ("Everything that the snapshot knew came back.", "bold green")
            if is_whole
            else ("Not everything that the snapshot knew came back.", "bold red")
        )
        self._console.print(Text.assemble(verdict, f" From start to verdict: {seconds:.1f} s."))

    def _write(self, text: Text, margin: Text | None = None) -> None:
        """Set a text beside its margin, without blanks at the ends of lines."""
        margin = margin or Text(" " * _MARGIN)
        indent = len(margin)
        width = max(min(self._console.width, _WIDEST) - indent, _NARROWEST)
        for line in text.wrap(self._console, width):
            line.rstrip()
            self._console.print(Text.assemble(margin, line), soft_wrap=True)
            margin = Text(" " * indent)

    def _writable(self, text: str) -> str:
        encoding = self._console.encoding
        return text.encode(encoding, "backslashreplace").decode(encoding)


def _exact(amount: Decimal) -> str:
    text = format_usage(amount)
    return text if len(text.partition(".")[2]) > _DECIMALS else f"{amount:.{_DECIMALS}f}"
