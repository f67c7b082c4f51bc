"""The terminal: consoles, errors, progress, confirmations, and signals that stop a command."""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from types import FrameType

import click
from rich.console import Console
from rich.text import Text

from budget_recovery_dagster.errors import BudgetRecoveryError, NotConfirmedError
from budget_recovery_dagster.presentation.documents import error_json
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


def show_error(error: BudgetRecoveryError, *, as_json: bool) -> None:
    """Write an error of ours: to standard error, and as JSON to standard output if wanted."""
    if as_json:
        click.echo(error_json(error))
    show_failure(error.message, error.hint)


def is_written(what: str, write: Callable[[], None]) -> bool:
    """Write a result to standard output; report it and return False if that fails."""
    try:
        write()
        sys.stdout.flush()
    except OSError as error:
        _discard_output()
        show_failure(f"The {what} cannot be written: {error.strerror}.", "check the output.")
        return False
    return True


def can_write_output() -> bool:
    """Whether standard output accepts an empty line; if not, further output is discarded."""
    try:
        sys.stdout.write("\n")
        sys.stdout.flush()
    except OSError:
        _discard_output()
        return False
    return True


def _discard_output() -> None:
    """Discard what standard output still holds.

    Otherwise Python tries to write it when it ends, reports that, and changes the exit code.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


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


def require_terminal(refusal: str, hint: str = "pass --yes.") -> None:
    """Require a terminal that can ask for confirmation.

    Raises:
        NotConfirmedError: there is none; its message begins with ``refusal``.
    """
    if not sys.stdin.isatty():
        raise NotConfirmedError(f"{refusal}: there is no terminal to ask for confirmation.", hint)


def confirmed(question: str) -> bool:
    """Ask for confirmation; Ctrl-C or the end of input means no."""
    try:
        return click.confirm(question)
    except click.Abort:
        click.echo()
        return False


STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def shown_steps(console: Console) -> Callable[[str], AbstractContextManager[None]]:
    """Return a step that writes its name and duration to this console."""

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


class StoppedBySignal(KeyboardInterrupt):
    """A signal asked to stop; ``exit_code`` is the one that shells expect, 130 for Ctrl-C."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.exit_code = 128 + number


@contextmanager
def stop_signals_interrupt() -> Iterator[None]:
    """Turn the first stop signal into an exception; later signals cannot interrupt the shutdown.

    Raises:
        StoppedBySignal: at any point of the program.
    """

    def interrupt(number: int, _frame: FrameType | None) -> None:
        ignore_stop_signals()
        # Written directly: the interrupted code may be writing to a buffer.
        with suppress(OSError):
            os.write(1, b"\nStopping ...\n")
        raise StoppedBySignal(number)

    before = {number: signal.signal(number, interrupt) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def ignore_stop_signals() -> None:
    """Ignore further stop signals, so that the shutdown completes."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
