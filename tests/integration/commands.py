"""The command line, in this process and as a program of its own."""

import sys

from click.testing import CliRunner

from budget_recovery_dagster.cli.main import main

PROGRAM = [sys.executable, "-c", "from budget_recovery_dagster.cli.main import main; main()"]
"""``budget-recovery``, for a subprocess that runs this checkout."""


def run(*arguments: str, code: int = 0) -> str:
    """Run a command; return its output."""
    ended = CliRunner().invoke(main, list(arguments))
    assert ended.exit_code == code, ended.output
    return ended.stdout
