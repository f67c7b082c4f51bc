"""Rows of a page for people, at home in 80 columns."""

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from budget_recovery_dagster.cli.harmless_text import harmless

_WIDEST = 100
_NARROWEST = 20
_HANGING = "  "

Parts = str | Sequence[tuple[str, str]]
"""A text, or its parts, each with a style."""


def print_row(console: Console, parts: Parts, *, indent: int = 0) -> None:
    """Print a line, broken at words where the page ends; what runs over is indented more."""
    told = [(parts, "")] if isinstance(parts, str) else parts
    line = Text.assemble(*((harmless(console, text), style) for text, style in told))
    margin = " " * indent
    width = max(min(console.width, _WIDEST) - indent - len(_HANGING), _NARROWEST)
    for number, row in enumerate(line.wrap(console, width)):
        row.rstrip()
        hanging = _HANGING if number else ""
        console.print(Text.assemble(margin, hanging, row), soft_wrap=True)


def print_columns(
    console: Console, rows: Sequence[Sequence[str]], *, right: Sequence[int], indent: int = 0
) -> None:
    """Print rows in columns as wide as they need; those in ``right`` are set to the right."""
    if not rows:
        return
    shown = [[harmless(console, cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in shown) for column in range(len(shown[0]))]
    for row in shown:
        cells = [
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        console.print(Text((" " * indent + "  ".join(cells)).rstrip()), soft_wrap=True)
