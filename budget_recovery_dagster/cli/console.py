"""The terminal: consoles, failures, progress, and a confirmation."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click
from rich.console import Console
from rich.text import Text

from budget_recovery_dagster.presentation.text import escape_unprintable

_NARROWEST = 20
_USUAL = 80


def answers(*, soft_wrap: bool = False) -> Console:
    """Return the place of answers."""
    return Console(highlight=False, soft_wrap=soft_wrap, width=_width())


def errors(*, soft_wrap: bool = False) -> Console:
    """Return the place of errors, and of what tells how work goes on."""
    return Console(highlight=False, soft_wrap=soft_wrap, stderr=True, width=_width())


def _width() -> int | None:
    """Return a width in the place of one in which nothing could be read; None: it can be."""
    return _USUAL if Console().width < _NARROWEST else None


def show_failure(message: str, hint: str) -> None:
    """Write what happened and what to try, a line each, where errors go."""
    console = errors(soft_wrap=True)
    console.print(Text.assemble(("Error:", "bold red"), " ", escape_unprintable(console, message)))
    if hint:
        console.print(Text.assemble(("Try:", "bold"), " ", escape_unprintable(console, hint)))


@contextmanager
def progress(what: str) -> Iterator[Callable[[str], None]]:
    """Give what is to be told sentence by sentence.

    On a terminal the newest one stands in a line that is gone at the end, else each has its own.
    """
    console = errors()
    if not console.is_terminal:
        yield lambda told: console.print(Text(escape_unprintable(console, told)), soft_wrap=True)
        return
    with console.status(Text(what)) as status:
        yield lambda text: status.update(
            Text(escape_unprintable(console, text), overflow="ellipsis")
        )


def confirmed(question: str) -> bool:
    """Ask a question that is to be answered with yes; to break it off is no answer, and so no."""
    try:
        return click.confirm(question)
    except click.Abort:
        click.echo()
        return False
