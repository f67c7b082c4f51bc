"""Commands start without importing the libraries that only some of them use."""

import subprocess
import sys
from pathlib import Path

import pytest
from alembic.config import Config
from alembic.script import ScriptDirectory
from click.testing import CliRunner

from budget_recovery_dagster import cli
from budget_recovery_dagster.adapters.postgres import migrations
from budget_recovery_dagster.cli.main import main

LIBRARIES = {"alembic", "dagster", "pandas", "pyarrow", "sqlalchemy"}
SANDBOX = {
    f"budget_recovery_dagster.{module}"
    for module in ("cli.demo", "cli.dev", "sandbox.demo", "sandbox.dev", "sandbox.gateway")
}


def loaded_by(statements: str, home: Path, of: set[str] = LIBRARIES) -> str:
    program = f"import sys\n{statements}\nprint({of} & sys.modules.keys(), file=sys.stderr)"
    ended = subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
        env={"HOME": str(home)},
    )
    return ended.stderr.splitlines()[-1]


@pytest.mark.parametrize("module", ["cli.main", "wiring"])
def test_imports_load_no_heavy_library(module: str, tmp_path: Path) -> None:
    assert loaded_by(f"import budget_recovery_dagster.{module}", tmp_path) == "set()"


def test_the_gateway_loads_no_driver_of_a_database(tmp_path: Path) -> None:
    statements = "import budget_recovery_dagster.sandbox.gateway.__main__"
    assert loaded_by(statements, tmp_path, of={"psycopg"}) == "set()"


def loaded_by_command(arguments: list[str], home: Path, of: set[str] = LIBRARIES) -> str:
    statements = (
        "from budget_recovery_dagster.cli.main import main\n"
        f"try: main({arguments})\n"
        "except SystemExit: pass"
    )
    return loaded_by(statements, home, of)


def test_the_help_loads_no_heavy_library(tmp_path: Path) -> None:
    assert loaded_by_command(["--help"], tmp_path) == "set()"


# Without settings, these look for a running dev.
@pytest.mark.parametrize(
    ("command", "others"),
    [
        ("doctor", SANDBOX),
        ("hold", SANDBOX),
        ("preview", SANDBOX | LIBRARIES),
        ("snapshots", SANDBOX),
        ("status", SANDBOX | LIBRARIES),
    ],
)
def test_commands_load_no_gateway_no_other_command_and_simple_ones_no_heavy_library(
    command: str, others: set[str], tmp_path: Path
) -> None:
    arguments = [command, "--reason", "x"] if command == "hold" else [command]
    assert loaded_by_command(arguments, tmp_path, of=others) == "set()"


def test_help_lists_every_command_and_a_wrong_name_gets_a_suggestion() -> None:
    commands = {path.stem for path in Path(cli.__file__).parent.glob("*.py")}
    shared = {"__init__", "console", "main", "options"}
    expected = {name.replace("_", "-") for name in commands - shared} | {"release"}
    shown = CliRunner().invoke(main, ["--help"]).output.split("Commands:\n")[1]
    lines = [line.split(maxsplit=1) for line in shown.splitlines()]
    assert [name for name, _ in lines] == sorted(expected)
    assert all(help_text.endswith(".") for _, help_text in lines)
    assert "Did you mean 'status'?" in CliRunner().invoke(main, ["stats"]).output


def test_the_known_versions_match_the_migrations() -> None:
    config = Config()
    config.set_main_option(
        "script_location", "budget_recovery_dagster.adapters.postgres:migrations"
    )
    revisions = [each.revision for each in ScriptDirectory.from_config(config).walk_revisions()]
    assert list(migrations.VERSIONS) == revisions
