"""Code, tables and links of the docs, so that tests can run and check them."""

import ast
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

PROJECT = Path(__file__).parents[1]
PAGES = sorted(
    str(page.relative_to(PROJECT))
    for page in (*PROJECT.glob("*.md"), *PROJECT.glob("docs/**/*.md"))
)
"""All pages, as paths relative to the project."""

_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^(#+) (.+)$", re.MULTILINE)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_SPAN = re.compile(r"(?<!`)`([^`]+)`(?!`)")
_QUOTE = re.compile(r"(?<![*\\])\*([^*|]+)\*(?!\*)")
_CELL = re.compile(r"(?<!\\)\|")


def blocks(page: str, language: str) -> list[str]:
    """Return the code blocks of a page in a language, in order."""
    return [code for named, code in _fenced(_text(page)) if named == language]


def block(page: str, language: str, holding: str) -> str:
    """Return the one code block of a page that contains a text."""
    (found,) = [each for each in blocks(page, language) if holding in each]
    return found


def languages(page: str) -> set[str]:
    """Return the languages of a page's code blocks; empty for blocks without a language."""
    return {language for language, _ in _fenced(_text(page))}


def headings(page: str) -> list[str]:
    """Return the headings of a page, in order."""
    return [heading for _, heading in _HEADING.findall(_prose(_text(page)))]


def section(page: str, heading: str) -> str:
    """Return the text below a heading, up to the next one of the same or a higher level."""
    text = _text(page)
    (start,) = [found for found in _HEADING.finditer(text) if found[2] == heading]
    # A comment in a code block looks like a heading, so code blocks are blanked for the search.
    rest = _FENCE.sub(lambda found: " " * len(found[0]), text[start.end() :])
    ends = (found.start() for found in _HEADING.finditer(rest) if len(found[1]) <= len(start[1]))
    return text[start.end() :][: next(ends, None)]


def anchors(page: str) -> set[str]:
    """Return GitHub's anchors of the headings of a page."""
    found: set[str] = set()
    for heading in headings(page):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        name = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        numbered = (f"{name}-{number}" for number in range(1, len(found) + 1))
        found.add(name if name not in found else next(n for n in numbered if n not in found))
    return found


def links(page: str) -> list[str]:
    """Return the targets of a page's links and images, except in code."""
    return _LINK.findall(_SPAN.sub("", _prose(_text(page))))


def spans(page: str) -> list[str]:
    """Return the inline code of a page."""
    return spans_in(_prose(_text(page)))


def spans_in(text: str) -> list[str]:
    """Return the inline code of a text, such as a cell."""
    return [" ".join(span.split()) for span in _SPAN.findall(text)]


@dataclass(frozen=True, slots=True)
class Command:
    """A command on a page: the program and its arguments."""

    program: str
    arguments: tuple[str, ...]

    def __str__(self) -> str:
        return " ".join([self.program, *self.arguments])


def commands(text: str, *programs: str) -> Iterator[Command]:
    """Find the calls of some programs anywhere in a line or a script."""
    for line in text.replace("\\\n", " ").splitlines():
        words = _words(line) if any(program in line for program in programs) else []
        for number, word in enumerate(words):
            program = word.removeprefix(".venv/bin/")
            if program in programs and _begins_command(words[:number]):
                yield Command(program, tuple(_arguments(words[number + 1 :])))


def shown_commands(page: str, *programs: str) -> list[Command]:
    """Return the calls of some programs in the code blocks and the inline code of a page."""
    shown = (*blocks(page, "sh"), *spans(page))
    return [found for text in shown for found in commands(text, *programs)]


def steps(page: str, heading: str, program: str) -> list[Command]:
    """Return the calls of a program in the code blocks below a heading, in order."""
    scripts = (code for language, code in _fenced(section(page, heading)) if language == "sh")
    return [found for script in scripts for found in commands(script, program)]


def rows(page: str, *head: str) -> list[list[str]]:
    """Return the rows of the only table of a page that begins with these columns."""
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
    """Return the code of a cell that contains nothing else."""
    shown = re.fullmatch(r"`+ ?(.*?) ?`+", cell)
    assert shown, cell
    return shown[1]


def template(text: ast.expr) -> str | None:
    """Return a string of code, with an ellipsis for each inserted value; None: no string."""
    if isinstance(text, ast.JoinedStr):
        parts = (p.value if isinstance(p, ast.Constant) else "…" for p in text.values)
        return "".join(map(str, parts))
    if isinstance(text, ast.Constant) and isinstance(text.value, str):
        return text.value
    return None


def product_texts() -> set[str]:
    """Return all strings in the code of the product, except docstrings; see ``template``."""
    texts: set[str] = set()
    for file in sorted((PROJECT / "budget_recovery_dagster").rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        nodes = list(ast.walk(tree))
        docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        found = (
            template(node)
            for node in nodes
            if isinstance(node, ast.expr) and id(node) not in docstrings
        )
        texts.update(filter(None, found))
    return texts


def quotes(page: str) -> list[str]:
    """Return what a page has in italics: what the product shows, or labels in Dagster."""
    return [" ".join(found.split()) for found in _QUOTE.findall(_prose(_text(page)))]


def _fenced(text: str) -> list[tuple[str, str]]:
    """Return language and code of each block, without the indentation of a list."""
    return [
        (language, re.sub(rf"^{indent}", "", code, flags=re.MULTILINE))
        for indent, language, code in _FENCE.findall(text)
    ]


def _prose(text: str) -> str:
    return _FENCE.sub("", text)


_SHELL = set("();<>|&")


def _words(line: str) -> list[str]:
    """Split a line like a shell, with operators as separate words."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    return list(lexer)


def _is_operator(word: str) -> bool:
    return set(word) <= _SHELL


def _begins_command(before: list[str]) -> bool:
    """Whether the next word is a program: the first, or after an operator or an assignment."""
    return not before or _is_operator(before[-1]) or "=" in before[-1]


def _arguments(words: list[str]) -> Iterator[str]:
    """Return the words up to the next operator, without the number of a redirected stream."""
    for word, following in pairwise([*words, ""]):
        if _is_operator(word):
            return
        if not (word.isdigit() and following.startswith(">")):
            yield word


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in _CELL.split(line.strip())[1:-1]]


def _text(page: str) -> str:
    return (PROJECT / page).read_text(encoding="utf-8")
