"""The command line, in this process and as a program of its own."""

import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from click.testing import CliRunner, Result

from budget_recovery_dagster.cli.main import main

PROGRAM = [sys.executable, "-c", "from budget_recovery_dagster.cli.main import main; main()"]
"""``budget-recovery``, for a subprocess that runs this checkout."""


WIDTH = 80


def invoke(*arguments: str, **options: Any) -> Result:
    """Run a command on a page of 80 columns; return its result."""
    return CliRunner().invoke(main, list(arguments), env={"COLUMNS": str(WIDTH)}, **options)


def answer(*arguments: str, code: int = 0) -> Any:
    """Run a command with ``--json``; return its document."""
    result = invoke(*arguments, "--json")
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def page(*arguments: str, code: int = 0) -> list[str]:
    """Run a command; return the lines of its output, none of which is too wide."""
    result = invoke(*arguments)
    assert result.exit_code == code, result.output
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= WIDTH
    return lines


def run(*arguments: str, code: int = 0) -> str:
    """Run a command; return its output."""
    ended = CliRunner().invoke(main, list(arguments))
    assert ended.exit_code == code, ended.output
    return ended.stdout


@contextmanager
def answering(answer: str) -> Iterator[int]:
    """Provide the standard input of a person who types this answer at a terminal."""
    ours, theirs = pty.openpty()
    try:
        os.write(ours, f"{answer}\n".encode())
        yield theirs
    finally:
        os.close(ours)
        os.close(theirs)


def run_at_terminal(answer: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command as a program of its own, whose input is a person's answer at a terminal."""
    with answering(answer) as terminal:
        return subprocess.run(
            [*PROGRAM, *arguments],
            check=False,
            stdin=terminal,
            capture_output=True,
            text=True,
            timeout=120,
        )
