"""``budget-recovery doctor``, as programs and people read it."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from budget_recovery_dagster.cli.main import main
from tests.nats_servers import Bucket

WIDTH = 80

NATS_URL = "BUDGET_RECOVERY_NATS_URL"
POSTGRES_URL = "BUDGET_RECOVERY_POSTGRES_URL"
DAGSTER_URL = "BUDGET_RECOVERY_DAGSTER_POSTGRES_URL"
STORAGE = ("installation", "Dagster's storage")
CONNECTION = ("servers", "connection")


@dataclass(frozen=True)
class Told:
    """What the command has said, and how it ended; findings by topic and name."""

    exit_code: int
    findings: dict[tuple[str, str], list[dict[str, Any]]]

    def __getitem__(self, of: tuple[str, str]) -> dict[str, Any]:
        (finding,) = self.findings[of]
        return finding

    def names(self, state: str) -> set[tuple[str, str]]:
        return {
            of
            for of, findings in self.findings.items()
            if any(each["state"] == state for each in findings)
        }

    @property
    def wrong(self) -> set[tuple[str, str]]:
        return self.names("wrong")


def run_doctor(*arguments: str, **environment: str | None) -> Result:
    env = {"COLUMNS": str(WIDTH), "DAGSTER_HOME": None, **environment}
    return CliRunner().invoke(main, ["doctor", *arguments], env=env)


def doctor(*arguments: str, **environment: str | None) -> Told:
    """Let the command look, and return what it says to programs."""
    ended = run_doctor("--json", *arguments, **environment)
    assert ended.stderr == "", ended.stderr
    content = json.loads(ended.stdout)
    assert set(content) == {"exit_code", "at", "counts", "findings", "error"}
    assert content["exit_code"] == ended.exit_code
    findings: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for each in content["findings"]:
        assert set(each) == {"topic", "name", "state", "found", "to_do"}
        assert each["found"]
        assert each["to_do"] or each["state"] in ("ok", "not_looked_at")
        findings.setdefault((each["topic"], each["name"]), []).append(each)
    assert sum(content["counts"].values()) == len(content["findings"])
    assert (ended.exit_code == 1) == (content["counts"]["wrong"] > 0)
    return Told(ended.exit_code, findings)


def page(*arguments: str, **environment: str | None) -> str:
    """Let the command look, and return what it says to people."""
    ended = run_doctor(*arguments, **environment)
    lines = ended.stdout.splitlines()
    assert lines
    assert all(len(line) <= WIDTH and line == line.rstrip() for line in lines), ended.stdout
    return ended.stdout


@contextmanager
def untouched(bucket: Bucket) -> Iterator[None]:
    """See that nothing was stored, and no consumer is left."""
    before, consumers = bucket.info().state, bucket.consumers()
    yield
    after = bucket.info().state
    assert (after.last_seq, after.messages) == (before.last_seq, before.messages)
    assert bucket.consumers() == consumers


def dagster_home(directory: Path, url: str, *, content: str | None = None) -> dict[str, str]:
    """Make a home for Dagster that has this project's settings; return the environment of it."""
    ours = (Path(__file__).parents[2] / "dagster.yaml").read_text(encoding="utf-8")
    directory.mkdir()
    (directory / "dagster.yaml").write_text(ours if content is None else content)
    return {"DAGSTER_HOME": str(directory), DAGSTER_URL: url}


def require_unseen(told: Told, topic: str, *names: str) -> None:
    assert names
    assert {told[topic, name]["state"] for name in names} == {"not_looked_at"}
