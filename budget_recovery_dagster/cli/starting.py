"""How a command shows that it starts something, and how long that took."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

from budget_recovery_dagster.sandbox.stack import Step


def starting(console: Console) -> Step:
    """Return what tells on this console what is being started."""

    @contextmanager
    def step(name: str) -> Iterator[None]:
        # No spinner: its thread would run while children are forked.
        if console.is_terminal:
            console.print(f"  ..  {name}", end="\r")
        begun = time.monotonic()
        try:
            yield
        except BaseException:
            if console.is_terminal:
                console.print()
            raise
        console.print(f"  [green]ok[/]  {name} [dim]{time.monotonic() - begun:.1f} s[/]")

    return step
