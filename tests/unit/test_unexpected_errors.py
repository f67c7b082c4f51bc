"""An unexpected error of a command: a document with `--json`, and always its traceback."""

import json

import click
import pytest
from click.testing import CliRunner

from budget_recovery_dagster.cli.main import main


@click.command()
@click.option("--json", "as_json", is_flag=True)
def broken(*, as_json: bool) -> None:
    raise ZeroDivisionError(f"as_json={as_json}")


@click.command()
@click.option("--json", "as_json", is_flag=True)
def ended(*, as_json: bool) -> None:
    raise click.exceptions.Exit(7 if as_json else 8)


@pytest.fixture(autouse=True)
def more_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    for command in (broken, ended):
        monkeypatch.setitem(main.commands, str(command.name), command)


def test_json_has_a_document_for_an_unexpected_error() -> None:
    result = CliRunner().invoke(main, ["broken", "--json"])
    assert isinstance(result.exception, ZeroDivisionError)
    document = json.loads(result.stdout)
    assert list(document) == ["schema", "error"]
    assert document["error"]["code"] == "unexpected_error"
    assert document["error"]["message"] == "Unexpected ZeroDivisionError: as_json=True"


def test_without_json_an_unexpected_error_prints_no_document() -> None:
    result = CliRunner().invoke(main, ["broken"])
    assert isinstance(result.exception, ZeroDivisionError)
    assert result.stdout == ""


def test_an_exit_code_is_no_error() -> None:
    result = CliRunner().invoke(main, ["ended", "--json"])
    assert (result.exit_code, result.stdout) == (7, "")
