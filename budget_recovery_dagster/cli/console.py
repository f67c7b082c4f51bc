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
    """Return the console for results: standard output."""
    return Console(highlight=False, soft_wrap=soft_wrap, width=_width())


def errors(*, soft_wrap: bool = False) -> Console:
    """Return the console for errors and progress: standard error."""
    return Console(highlight=False, soft_wrap=soft_wrap, stderr=True, width=_width())


def _width() -> int | None:
    """Return the usual width if the terminal's is too narrow to read; None: it is wide enough."""
    return _USUAL if Console().width < _NARROWEST else None


def show_failure(message: str, hint: str) -> None:
    """Write to standard error what happened and what to try, a line each."""
    console = errors(soft_wrap=True)
    console.print(Text.assemble(("Error:", "bold red"), " ", escape_unprintable(console, message)))
    if hint:
        console.print(Text.assemble(("Try:", "bold"), " ", escape_unprintable(console, hint)))


@contextmanager
def progress(what: str) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows the progress of the work, a sentence each time.

    On a terminal each sentence replaces the last one, and the line disappears at the end.
    Elsewhere each sentence is a line.
    """
    console = errors()
    if not console.is_terminal:
        yield lambda text: console.print(Text(escape_unprintable(console, text)), soft_wrap=True)
        return
    with console.status(Text(what)) as status:
        yield lambda text: status.update(
            Text(escape_unprintable(console, text), overflow="ellipsis")
        )


def confirmed(question: str) -> bool:
    """Ask for confirmation; Ctrl-C or the end of input means no."""
    try:
        return click.confirm(question)
    except click.Abort:
        click.echo()
        return False
