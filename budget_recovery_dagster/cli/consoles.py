"""Where the command writes for people, in the width that the terminal has."""

from rich.console import Console

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
