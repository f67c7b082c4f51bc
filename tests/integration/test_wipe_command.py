"""What ``budget-recovery wipe`` refuses: stores of others, and a dev that does not run."""

import stat
from dataclasses import replace
from pathlib import Path

from click.testing import CliRunner, Result

from budget_recovery_dagster.cli.main import main
from budget_recovery_dagster.sandbox import (
    DEV_FILE,
    RunningDev,
    announced,
    find_running_dev,
    held_data_dir,
)
from tests.integration.dev_command import PASSWORD

NATS_URL = "BUDGET_RECOVERY_NATS_URL"
NOWHERE = RunningDev(
    ui_url="http://127.0.0.1:1",
    bucket="budget-usage",
    check_interval_seconds=600,
    nats_url="nats://127.0.0.1:1",
    postgres_url=None,
)


def refused(data_dir: Path, **environment: str) -> str:
    ended: Result = CliRunner().invoke(
        main,
        ["wipe", "--yes", "--data-dir", str(data_dir)],
        env={NATS_URL: None, **environment},
    )
    assert ended.exit_code == 2
    assert PASSWORD not in ended.output
    sentence, hint = ended.output.splitlines()
    assert hint.startswith("Try: ")
    return sentence


def test_a_store_named_by_a_setting_is_never_wiped(tmp_path: Path) -> None:
    with held_data_dir(tmp_path / "data") as data_dir, announced(data_dir, NOWHERE):
        assert refused(data_dir, **{NATS_URL: f"nats://me:{PASSWORD}@127.0.0.1:1"}) == (
            f"Error: {NATS_URL} is set, and the store that it names is never wiped."
        )


def test_a_store_given_to_the_running_dev_is_never_wiped(tmp_path: Path) -> None:
    given = replace(NOWHERE, nats_url=None)
    with held_data_dir(tmp_path / "data") as data_dir, announced(data_dir, given):
        assert refused(data_dir) == (
            f"Error: The running dev uses the store of its {NATS_URL}, which is never wiped."
        )


def test_nothing_is_wiped_without_a_running_dev(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    not_running = f"Error: No budget-recovery dev runs on {data_dir}."
    assert refused(data_dir) == not_running
    assert not data_dir.exists()
    with held_data_dir(data_dir), announced(data_dir, NOWHERE):
        left_behind = (data_dir / DEV_FILE).read_bytes()
    assert not (data_dir / DEV_FILE).exists()
    # The state after a kill.
    (data_dir / DEV_FILE).write_bytes(left_behind)
    assert refused(data_dir) == not_running
    with held_data_dir(data_dir):
        assert refused(data_dir) == (
            f"Error: The budget-recovery dev on {data_dir} is starting or stopping."
        )


def test_the_servers_of_a_dev_are_published_to_its_owner_only(tmp_path: Path) -> None:
    with held_data_dir(tmp_path / "data") as data_dir, announced(data_dir, NOWHERE):
        assert stat.S_IMODE((data_dir / DEV_FILE).stat().st_mode) == 0o600
        assert find_running_dev(data_dir) == NOWHERE
        (data_dir / DEV_FILE).write_text('{"another": "version"}')
        assert "does not describe a running dev" in refused(data_dir)


def test_a_store_that_does_not_answer_is_one_error_message(tmp_path: Path) -> None:
    with held_data_dir(tmp_path / "data") as data_dir, announced(data_dir, NOWHERE):
        ended = CliRunner().invoke(
            main, ["wipe", "--yes", "--data-dir", str(data_dir)], env={NATS_URL: None}
        )
    assert ended.exit_code == 1
    assert ended.output.startswith("Error: Bucket budget-usage at nats://127.0.0.1:1 could not be")
