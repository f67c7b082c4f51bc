import json
import traceback
from pathlib import Path

import pytest
from click.testing import CliRunner

from budget_recovery_dagster.cli.main import main
from budget_recovery_dagster.domain import RetentionPolicy
from budget_recovery_dagster.errors import SettingsError
from budget_recovery_dagster.settings import load_settings


@pytest.mark.parametrize("value", ["0", "-1", "7days", "1.5", "99999999999", "seven"])
def test_an_invalid_retention_is_rejected_by_name(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BUDGET_RECOVERY_RETENTION_DAYS", value)
    with pytest.raises(SettingsError) as refused:
        load_settings()
    assert refused.value.message == (
        f"BUDGET_RECOVERY_RETENTION_DAYS is '{value}', which is not a whole number of days from 1 "
        "to 3660."
    )


@pytest.mark.parametrize(
    ("name", "value", "bounds"),
    [
        ("ANSWER_TIMEOUT_SECONDS", "0", "1 to 300"),
        ("ANSWER_TIMEOUT_SECONDS", "2.5", "1 to 300"),
        ("READ_TIMEOUT_SECONDS", "9", "10 to 3600"),
        ("READ_TIMEOUT_SECONDS", "forever", "10 to 3600"),
    ],
)
def test_a_wrong_timeout_is_rejected_by_name(
    name: str, value: str, bounds: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"BUDGET_RECOVERY_{name}", value)
    with pytest.raises(SettingsError) as refused:
        load_settings()
    assert refused.value.message == (
        f"BUDGET_RECOVERY_{name} is '{value}', which is not a whole number of seconds from"
        f" {bounds}."
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("BUCKET", "budget.usage"),
        ("BUCKET", "*"),
        ("BUCKET", "a b"),
    ],
)
def test_other_invalid_values_are_rejected_by_name(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"BUDGET_RECOVERY_{name}", value)
    expected = f"BUDGET_RECOVERY_{name} is '.*', which is not letters, digits, - and _"
    with pytest.raises(SettingsError, match=expected):
        load_settings()


def test_the_defaults_need_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BUDGET_RECOVERY_RETENTION_DAYS", "")
    settings = load_settings()
    assert settings.retention == RetentionPolicy(7)
    assert settings.bucket == "budget-usage"


@pytest.mark.parametrize("name", ["NATS_URL", "POSTGRES_URL"])
def test_a_missing_url_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(f"BUDGET_RECOVERY_{name}", raising=False)
    settings = load_settings()
    ask = settings.require_nats_url if name == "NATS_URL" else settings.require_postgres_url
    with pytest.raises(SettingsError, match=f"BUDGET_RECOVERY_{name} is not set"):
        ask()


@pytest.mark.parametrize("name", ["NATS_URL", "POSTGRES_URL"])
def test_a_url_that_is_not_utf_8_is_rejected_without_its_password(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What Python makes of a byte that is not UTF-8.
    monkeypatch.setenv(f"BUDGET_RECOVERY_{name}", "scheme://u:hunter2\udcff@host/db")
    with pytest.raises(SettingsError) as refusal:
        load_settings()
    assert refusal.value.message == f"BUDGET_RECOVERY_{name} is not valid UTF-8."
    shown = "".join(traceback.format_exception(refusal.value))
    assert "hunter2" not in shown
    # The commands that read settings one by one refuse it too.
    ended = CliRunner().invoke(main, ["doctor", "--json"])
    assert ended.exit_code == 2
    assert json.loads(ended.stdout)["error"]["message"] == refusal.value.message


def test_passwords_are_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BUDGET_RECOVERY_POSTGRES_URL", "postgresql://u:hunter2@host/db")
    monkeypatch.setenv("BUDGET_RECOVERY_NATS_URL", "nats://u:hunter2@host")
    settings = load_settings()
    assert "hunter2" not in repr(settings)
    assert settings.require_postgres_url() == "postgresql://u:hunter2@host/db"
    assert settings.require_nats_url() == "nats://u:hunter2@host"


def test_an_unknown_capture_source_is_rejected_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BUDGET_RECOVERY_CAPTURE_SOURCE", "boards")
    with pytest.raises(SettingsError) as refused:
        load_settings()
    assert refused.value.message == (
        "BUDGET_RECOVERY_CAPTURE_SOURCE is 'boards', which is not 'counters' or 'leaderboards'."
    )


@pytest.mark.parametrize("name", ["TABLES_DIR", "DATA_DIR"])
@pytest.mark.parametrize("value", ["tables", "./tables", "~nobody-of-this-name/tables"])
def test_a_relative_directory_is_rejected_by_name(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"BUDGET_RECOVERY_{name}", value)
    with pytest.raises(SettingsError) as refused:
        load_settings()
    assert refused.value.message == (
        f"BUDGET_RECOVERY_{name} is '{value}', which is not an absolute path."
    )


def test_tables_are_in_the_data_directory_by_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("BUDGET_RECOVERY_DATA_DIR", "/data")
    assert load_settings().tables_place == Path("/data/tables")
    monkeypatch.setenv("BUDGET_RECOVERY_TABLES_DIR", "~/tables")
    assert load_settings().tables_place == Path.home() / "tables"


def test_a_normal_user_has_a_default_data_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert load_settings().data_place == Path("/state/budget-recovery")
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    assert load_settings().data_place == Path.home() / ".local/state/budget-recovery"
