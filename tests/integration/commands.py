"""The command line in this process."""

from click.testing import CliRunner

from budget_recovery_dagster.cli.main import main


def run(*arguments: str, code: int = 0) -> str:
    """Run a command; return its output."""
    ended = CliRunner().invoke(main, list(arguments))
    assert ended.exit_code == code, ended.output
    return ended.stdout
