"""Commands start without importing the libraries that only some of them use."""

import subprocess
import sys
from pathlib import Path

import pytest
from alembic.config import Config
from alembic.script import ScriptDirectory

from budget_recovery_dagster.adapters.postgres import migrations

LIBRARIES = {"alembic", "dagster", "pandas", "pyarrow", "sqlalchemy"}


def loaded_by(statements: str, home: Path) -> str:
    program = f"import sys\n{statements}\nprint({LIBRARIES} & sys.modules.keys(), file=sys.stderr)"
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


@pytest.mark.parametrize("arguments", [["--help"], ["preview"], ["status"]])
def test_simple_commands_load_no_heavy_library(arguments: list[str], tmp_path: Path) -> None:
    assert (
        loaded_by(
            "from budget_recovery_dagster.cli.main import main\n"
            f"try: main({arguments})\n"
            "except SystemExit: pass",
            tmp_path,
        )
        == "set()"
    )


def test_the_known_versions_match_the_migrations() -> None:
    config = Config()
    config.set_main_option(
        "script_location", "budget_recovery_dagster.adapters.postgres:migrations"
    )
    revisions = [each.revision for each in ScriptDirectory.from_config(config).walk_revisions()]
    assert list(migrations.VERSIONS) == revisions
