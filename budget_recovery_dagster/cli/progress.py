"""How a command shows that long work goes on: where errors go, so that the answer stays clean."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.text import Text

from budget_recovery_dagster.cli.consoles import errors
from budget_recovery_dagster.cli.harmless_text import harmless


@contextmanager
def progress(what: str) -> Iterator[Callable[[str], None]]:
    """Give what is to be told sentence by sentence.

    On a terminal the newest one stands in a line that is gone at the end, else each has its own.
    """
    console = errors()
    if not console.is_terminal:
        yield lambda told: console.print(Text(harmless(console, told)), soft_wrap=True)
        return
    with console.status(Text(what)) as status:
        yield lambda told: status.update(Text(harmless(console, told), overflow="ellipsis"))
