"""The examination as a page for people, at home in 80 columns."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby

from rich.console import Console
from rich.text import Text

from budget_recovery_dagster.domain.findings import Examination, Finding, State, Topic
from budget_recovery_dagster.presentation.text import escape_unprintable
from budget_recovery_dagster.services.words import counted

_WIDEST = 100
_NARROWEST = 20
_STATE = 8
_NAME = 25
_MARGIN = "  "
_INDENT = "    "

_STYLES: Mapping[State, str] = {
    State.OK: "green",
    State.ADVICE: "bold yellow",
    State.WRONG: "bold red",
    State.NOT_LOOKED_AT: "magenta",
}


def print_examination(console: Console, examination: Examination) -> None:
    """Write the page, without colours where it is not for a terminal."""
    for topic in Topic:
        of_topic = [finding for finding in examination.findings if finding.topic is topic]
        if of_topic:
            console.print(Text(topic[0].upper() + topic[1:], "bold"))
            for state_and_why, alike in groupby(of_topic, _alike):
                _print(console, state_and_why[0], list(alike))
            console.print()
    console.print(_summary(examination))


def _alike(finding: Finding) -> tuple[State, str, str]:
    """What was not looked at for one reason is told together."""
    if finding.state is State.NOT_LOOKED_AT:
        return finding.state, finding.found, finding.to_do
    return finding.state, finding.name, finding.to_do


def _print(console: Console, state: State, findings: Sequence[Finding]) -> None:
    first = findings[0]
    if state is State.NOT_LOOKED_AT:
        names = ", ".join(finding.name for finding in findings)
        _print_rows(console, [("not looked at: ", _STYLES[state]), (names, "")], _INDENT)
        _print_told(console, first)
        return
    margin = [(f"{state:<{_STATE}}", _STYLES[state])]
    if state is State.OK:
        told = f"{first.name:<{_NAME}} {first.found}"
        hanging = " " * (len(_MARGIN) + _STATE + _NAME + 1)
        _print_rows(console, [*margin, (told, "")], hanging)
        return
    _print_rows(console, [*margin, (first.name, "bold")], _INDENT)
    _print_told(console, first)


def _print_told(console: Console, finding: Finding) -> None:
    for told in filter(None, (finding.found, finding.to_do and f"Do: {finding.to_do}")):
        _print_rows(console, [(told, "")], _INDENT, first=_INDENT)


def _print_rows(
    console: Console, parts: Iterable[tuple[str, str]], hanging: str, *, first: str = _MARGIN
) -> None:
    """Set one line, broken where the page ends; what runs over is indented."""
    line = Text.assemble(*((escape_unprintable(console, text), style) for text, style in parts))
    for number, row in enumerate(_rows(console, line, hanging, first)):
        row.rstrip()
        console.print(Text.assemble(hanging if number else first, row), soft_wrap=True)


def _rows(console: Console, line: Text, hanging: str, first: str) -> Iterator[Text]:
    page = min(console.width, _WIDEST)
    rows = line.wrap(console, max(page - len(first), _NARROWEST))
    yield rows[0]
    # Those that follow are set anew, for they have less room.
    rest = line[len(rows[0]) :]
    rest = Text(rest.plain.lstrip(), style=rest.style)
    if rest.plain:
        yield from rest.wrap(console, max(page - len(hanging), _NARROWEST))


def _summary(examination: Examination) -> Text:
    wrong, advice = examination.count(State.WRONG), examination.count(State.ADVICE)
    unseen = examination.count(State.NOT_LOOKED_AT)
    if wrong:
        head = (f"{counted(wrong, 'thing')} wrong", _STYLES[State.WRONG])
    else:
        head = ("Nothing is wrong", _STYLES[State.OK])
    more = [f"{examination.count(State.OK)} ok"]
    if advice:
        more.append(f"{advice} advised")
    if unseen:
        more.append(f"{unseen} not looked at")
    return Text.assemble(head, f"; {', '.join(more)}.")
