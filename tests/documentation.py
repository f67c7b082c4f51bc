"""What the docs show, taken from their own text, so that it is the docs that are tested."""

import re
from pathlib import Path

_PROJECT = Path(__file__).parents[1]
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_CELL = re.compile(r"(?<!\\)\|")


def blocks(page: str, language: str) -> list[str]:
    """Return the blocks of code of a page in a language, in their order."""
    return [block for named, block in _BLOCK.findall(_text(page)) if named == language]


def block(page: str, language: str, holding: str) -> str:
    """Return the one block of code of a page that holds a text."""
    (found,) = [each for each in blocks(page, language) if holding in each]
    return found


def rows(page: str, *head: str) -> list[list[str]]:
    """Return the rows of the one table of a page that begins with these columns."""
    lines = _text(page).splitlines()
    (start,) = [
        number
        for number, line in enumerate(lines)
        if line.startswith("|") and _cells(line)[: len(head)] == list(head)
    ]
    found = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        found.append(_cells(line))
    assert found
    return found


def code(cell: str) -> str:
    """Return what a cell shows as code; nothing else is in it."""
    shown = re.fullmatch(r"`+ ?(.*?) ?`+", cell)
    assert shown, cell
    return shown[1]


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in _CELL.split(line.strip())[1:-1]]


def _text(page: str) -> str:
    return (_PROJECT / page).read_text(encoding="utf-8")
