"""docs/doctor.md lists all checks, codes and keys of `budget-recovery doctor`."""

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from budget_recovery_dagster import doctor
from budget_recovery_dagster.cli.main import main
from budget_recovery_dagster.doctor import CHECKS, REQUIREMENT_NOT_MET
from budget_recovery_dagster.errors import UNEXPECTED_ERROR

PAGE = (Path(__file__).parents[2] / "docs/doctor.md").read_text(encoding="utf-8")
NATS_URL = "BUDGET_RECOVERY_NATS_URL"
POSTGRES_URL = "BUDGET_RECOVERY_POSTGRES_URL"
# The functions and errors that end a check; their first argument is the code.
ENDS = {"warn", "fail", "skipped", "CheckFailed"}


def rows(heading: str, number: int = 1) -> list[list[str]]:
    """The cells of each row of a table under a heading."""
    table = PAGE.split(f"\n## {heading}\n")[1].split("\n|---")[number].split("\n\n")[0]
    return [line.strip("|").split(" | ") for line in table.splitlines()[1:]]


def codes(cell: str) -> list[str]:
    return re.findall(r"`(\w+)`", cell)


def written_codes() -> Iterator[str]:
    for file in Path(doctor.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                code = node.args[0] if node.func.id in ENDS else None
                if isinstance(code, ast.Constant):
                    yield str(code.value)


def test_every_check_is_listed_with_what_it_requires() -> None:
    listed = [(codes(check)[0], codes(requires)) for check, _, requires in rows("Checks")]
    assert listed == [(check.code, list(check.needs)) for check in CHECKS]


def test_every_code_is_listed() -> None:
    listed = {code for _, _, cell, _ in rows("Codes") for code in codes(cell)}
    own = {*written_codes(), "ok", REQUIREMENT_NOT_MET, UNEXPECTED_ERROR}
    errors = {
        "database",
        "database_unreachable",
        "schema_version",
        "settings",
        "store_missing",
        "store_no_quorum",
        "store_permission",
        "store_read",
        "store_unreachable",
        "tables",
    }
    assert listed == own | errors


def test_every_key_is_listed(tmp_path: Path) -> None:
    def report(nats_url: str | None) -> Any:
        environment = {NATS_URL: nats_url, POSTGRES_URL: None, "DAGSTER_HOME": None}
        command = ["doctor", "--json", "--data-dir", str(tmp_path)]
        return json.loads(CliRunner().invoke(main, command, env=environment).stdout)

    keys = [codes(key)[0] for key, _ in rows("JSON")]
    # No server is configured, so no check runs.
    assert list(report(None)) == keys
    unreachable = report("nats://127.0.0.1:1")
    assert list(unreachable) == keys
    for check in unreachable["checks"]:
        assert list(check) == [codes(key)[0] for key, _ in rows("JSON", 2)]
