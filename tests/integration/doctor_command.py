"""Running ``budget-recovery doctor`` with its JSON and its page."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from budget_recovery_dagster.cli.main import main
from budget_recovery_dagster.doctor import CHECKS
from tests.nats_servers import Bucket

WIDTH = 80

NATS_URL = "BUDGET_RECOVERY_NATS_URL"
POSTGRES_URL = "BUDGET_RECOVERY_POSTGRES_URL"
DAGSTER_URL = "BUDGET_RECOVERY_DAGSTER_POSTGRES_URL"
STORAGE = "dagster_storage"
CONNECTION = "nats_connection"


@dataclass(frozen=True)
class Checked:
    """The reported checks by code, and the exit code."""

    exit_code: int
    checks: dict[str, dict[str, Any]]

    def __getitem__(self, check: str) -> dict[str, Any]:
        return self.checks[check]

    def ended(self, outcome: str) -> set[str]:
        return {check for check, each in self.checks.items() if each["outcome"] == outcome}

    @property
    def failed(self) -> set[str]:
        return self.ended("fail")


def run_doctor(*arguments: str, **environment: str | None) -> Result:
    env = {"COLUMNS": str(WIDTH), "DAGSTER_HOME": None, **environment}
    return CliRunner().invoke(main, ["doctor", *arguments], env=env)


def doctor(*arguments: str, **environment: str | None) -> Checked:
    """Run the command and return its JSON."""
    ended = run_doctor("--json", *arguments, **environment)
    assert ended.stderr == "", ended.stderr
    content = json.loads(ended.stdout)
    assert set(content) == {"schema", "exit_code", "at", "counts", "checks", "error"}
    assert content["schema"] == 1
    assert content["exit_code"] == ended.exit_code
    checks = {each["check"]: each for each in content["checks"]}
    assert list(checks) == [check.code for check in CHECKS]
    for each in checks.values():
        assert set(each) == {"check", "outcome", "code", "facts", "message", "hint"}
        assert each["message"]
        assert each["hint"] or each["outcome"] in ("ok", "skipped")
    assert sum(content["counts"].values()) == len(content["checks"]) == len(checks)
    assert (ended.exit_code == 1) == (content["counts"]["fail"] > 0)
    return Checked(ended.exit_code, checks)


def page(*arguments: str, **environment: str | None) -> str:
    """Run the command and return its page."""
    ended = run_doctor(*arguments, **environment)
    lines = ended.stdout.splitlines()
    assert lines
    assert all(len(line) <= WIDTH and line == line.rstrip() for line in lines), ended.stdout
    return ended.stdout


@contextmanager
def untouched(bucket: Bucket) -> Iterator[None]:
    """Require that nothing is stored and no consumer is left."""
    before, consumers = bucket.info().state, bucket.consumers()
    yield
    after = bucket.info().state
    assert (after.last_seq, after.messages) == (before.last_seq, before.messages)
    assert bucket.consumers() == consumers


def dagster_home(directory: Path, url: str, *, content: str | None = None) -> dict[str, str]:
    """Create a DAGSTER_HOME with this project's settings; return its environment."""
    ours = (Path(__file__).parents[2] / "dagster.yaml").read_text(encoding="utf-8")
    directory.mkdir()
    (directory / "dagster.yaml").write_text(ours if content is None else content)
    return {"DAGSTER_HOME": str(directory), DAGSTER_URL: url}


def require_skipped(checked: Checked, *checks: str) -> None:
    assert checks
    assert set(checks) <= checked.ended("skipped")
