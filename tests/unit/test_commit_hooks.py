"""The pre-commit hooks are the steps of ``make check``."""

import re
from pathlib import Path

import yaml  # type: ignore[import-untyped]  # it ships none

PROJECT = Path(__file__).parents[2]


def test_a_commit_runs_what_make_check_runs() -> None:
    makefile = (PROJECT / "Makefile").read_text(encoding="utf-8")
    (recipe,) = re.findall(r"^check: .*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    steps = [step.replace("$(BIN)", ".venv/bin").strip() for step in recipe.splitlines()]

    config = yaml.safe_load((PROJECT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    hooks = [hook for repo in config["repos"] for hook in repo["hooks"]]

    assert [hook["entry"] for hook in hooks] == steps
    for hook in hooks:
        # On all files, as `make check` does, whatever the commit contains.
        assert (hook["language"], hook["pass_filenames"], hook["always_run"]) == (
            "system",
            False,
            True,
        )
