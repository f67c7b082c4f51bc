"""Every command and option shown in the docs exists."""

import re
import shlex

import click
import pytest

from budget_recovery_dagster.cli.main import main
from tests.documentation import PAGES, PROJECT, Command, commands, shown_commands, spans

MAKEFILE = (PROJECT / "Makefile").read_text(encoding="utf-8")
TARGETS = set(re.findall(r"^([a-z][a-z-]*):", MAKEFILE, re.MULTILINE))
GROUP = click.Context(main, info_name="budget-recovery")
COMMANDS = [main.get_command(GROUP, name) for name in main.list_commands(GROUP)]
OPTIONS = {
    option
    for command in (main, *filter(None, COMMANDS))
    for parameter in command.get_params(click.Context(command))
    for option in parameter.opts
}


def require_valid(command: Command) -> None:
    """Raise an error if the parser of budget-recovery refuses the command; execute nothing."""
    _, words, _ = main.make_parser(GROUP).parse_args(list(command.arguments))
    if not words:
        return
    named = main.get_command(GROUP, words[0])
    assert named is not None, f"{command}: there is no such command"
    context = click.Context(named, info_name=words[0], parent=GROUP)
    given, rest, _ = named.make_parser(context).parse_args(words[1:])
    assert not rest, f"{command}: {rest} is not an option"
    for parameter in named.params:
        if parameter.name in given:
            parameter.type_cast_value(context, given[parameter.name])


@pytest.mark.parametrize("page", PAGES)
def test_the_parser_accepts_every_command(page: str) -> None:
    for command in shown_commands(page, "budget-recovery"):
        try:
            require_valid(command)
        except click.UsageError as error:
            raise AssertionError(f"{command}: {error.format_message()}") from error


@pytest.mark.parametrize("page", PAGES)
def test_make_has_every_target(page: str) -> None:
    for command in shown_commands(page, "make"):
        variables = [word for word in command.arguments if "=" in word]
        targets = [word for word in command.arguments if "=" not in word]
        assert set(targets) <= TARGETS, command
        for variable in variables:
            name, _, value = variable.partition("=")
            assert f"$({name})" in MAKEFILE, command
            if name == "ARGS" and targets and targets[0] in main.list_commands(GROUP):
                require_valid(Command("budget-recovery", (targets[0], *shlex.split(value))))


@pytest.mark.parametrize("page", PAGES)
def test_every_option_named_without_a_command_exists(page: str) -> None:
    for span in spans(page):
        if span.startswith("--"):
            assert span.split()[0] in OPTIONS, span


def listed_codes(command: click.Command) -> list[int] | None:
    """Return the exit codes in a command's help; None: it lists none of its own."""
    found = re.search(r"Exit codes[^:]*:(.*)", command.help or "", re.DOTALL)
    return found and [int(code) for code in re.findall(r"\b(\d+),", found[1])]


def test_the_help_lists_every_exit_code() -> None:
    own = {"demo": [0, 1, 2, 130], "doctor": [0, 1, 2], "restore": [0, 1, 2, 130]}
    own |= {"snapshot": [0, 1, 2]}
    own |= {"status": [0, 1, 2, 3, 4], "wipe": [0, 1, 2]}
    for command in filter(None, COMMANDS):
        assert listed_codes(command) == own.get(str(command.name)), command.name
    assert listed_codes(main) == [0, 1, 2]
    # A move of the incident by someone else is refused with 1, and an invalid option with 2.
    assert "2, invalid options or settings, refused, or declined." in " ".join(
        str(main.help).split()
    )


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("budget-recovery repair", "no such command"),
        ("budget-recovery status --yaml", "No such option"),
        ("budget-recovery restore --reason", "requires an argument"),
        ("budget-recovery status now", "is not an option"),
        ("budget-recovery dev --port many", "not a valid integer"),
    ],
)
def test_an_invalid_command_is_detected(line: str, wrong: str) -> None:
    (command,) = commands(line, "budget-recovery")
    with pytest.raises((AssertionError, click.UsageError), match=wrong):
        require_valid(command)


def test_commands_are_found_anywhere_in_a_script() -> None:
    script = """
    # budget-recovery is a comment here
    told=$(budget-recovery status --json 2>/dev/null); code=$?
    A=1 make dev ARGS="--port 3001"   # until Ctrl-C
    budget-recovery restore \\
      --reason "it is back" && .venv/bin/budget-recovery status
    nsc add user --name budget-recovery
    """
    assert [str(found) for found in commands(script, "budget-recovery", "make")] == [
        "budget-recovery status --json",
        "make dev ARGS=--port 3001",
        "budget-recovery restore --reason it is back",
        "budget-recovery status",
    ]
