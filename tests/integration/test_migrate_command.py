"""The command ``budget-recovery migrate``."""

import psycopg
import pytest
from click.testing import CliRunner, Result

from budget_recovery_dagster.cli.main import main
from tests.free_ports import unused_port

POSTGRES_URL = "BUDGET_RECOVERY_POSTGRES_URL"


def migrate(url: str | None) -> Result:
    return CliRunner().invoke(main, ["migrate"], env={POSTGRES_URL: url})


def test_migrate_creates_the_schema_and_can_be_repeated(empty_database_url: str) -> None:
    first, second = migrate(empty_database_url), migrate(empty_database_url)
    assert (first.exit_code, second.exit_code) == (0, 0)
    version = first.output.removeprefix("Created the schema, version ").removesuffix(".\n")
    assert version.isalnum()
    assert second.output == f"The schema is already at version {version}.\n"


def test_a_schema_of_an_unreleased_checkout_is_refused_with_a_hint(
    empty_database_url: str,
) -> None:
    with psycopg.connect(empty_database_url) as connection:
        connection.execute("create schema budget_recovery")
        connection.execute(
            "create table budget_recovery.alembic_version as select '0006' as version_num"
        )
    environment = {POSTGRES_URL: empty_database_url}
    for command in ("migrate", "status", "snapshots"):
        ended = CliRunner().invoke(main, [command], env=environment)
        assert ended.exit_code != 0
        assert "version 0006 of an unreleased checkout" in " ".join(ended.output.split())
        assert "drop schema budget_recovery cascade" in " ".join(ended.output.split())


@pytest.mark.parametrize("url", [None, ""])
def test_a_missing_setting_is_refused_with_a_hint(url: str | None) -> None:
    ended = migrate(url)
    sentence, hint = ended.output.splitlines()
    assert ended.exit_code == 2
    assert sentence == f"Error: {POSTGRES_URL} is not set."
    assert hint.startswith("Try: ")


def test_an_unreachable_database_is_reported_without_its_password() -> None:
    ended = migrate(f"postgresql://me:s3cret@127.0.0.1:{unused_port()}/database")
    assert ended.exit_code == 1
    assert ended.output.startswith("Error: ")
    assert "s3cret" not in ended.output
