"""Commands start without the libraries that only some of them use."""

import subprocess
import sys

import pytest
from alembic.config import Config
from alembic.script import ScriptDirectory

from budget_recovery_dagster.adapters.postgres import migrations


@pytest.mark.parametrize(
    "module", ["budget_recovery_dagster.cli.main", "budget_recovery_dagster.wiring"]
)
def test_migrations_and_tables_load_their_libraries_when_they_need_them(module: str) -> None:
    program = (
        f"import sys, {module}; print({{'alembic', 'pandas', 'pyarrow'}} & sys.modules.keys())"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=120
    )
    assert ended.stdout == "set()\n"


def test_the_known_versions_are_those_of_the_migrations() -> None:
    config = Config()
    config.set_main_option(
        "script_location", "budget_recovery_dagster.adapters.postgres:migrations"
    )
    revisions = [each.revision for each in ScriptDirectory.from_config(config).walk_revisions()]
    assert list(migrations.VERSIONS) == revisions
