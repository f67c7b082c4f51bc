"""The host of a restore dies with all its processes, and the command is started again."""

from pathlib import Path

import pytest

from tests.acceptance.recovering_dev import RECOVERY_SECONDS, RecoveringDev, recovering_dev
from tests.shut_gates import shut_gate
from tests.waiting import wait_until

# A start, a minute without a worker, two ticks of the supervisor and a run on a busy machine.
_TAKE_OVER_SECONDS = 240


@pytest.mark.disaster
def test_a_run_whose_host_died_is_declared_dead_and_launched_again(place: Path) -> None:
    # As dagster-io/dagster#17403: such a run stays started for hours.
    with recovering_dev(place) as recovering, shut_gate(recovering.postgres_url, "globex") as gate:
        recovering.wait_for_a_good_check()
        assert recovering.command("wipe", "--yes").returncode == 0
        wait_until(lambda: gate.has_waiting, seconds=RECOVERY_SECONDS)
        (lost,) = recovering.restores()
        # Kill worker, code server, daemon, store and database at once.
        recovering.dev.process.kill()
        recovering.dev.process.wait()
    with recovering_dev(place) as recovering:
        wait_until(
            lambda: recovering.incident()["closed_at"] or is_held(recovering),
            seconds=_TAKE_OVER_SECONDS,
        )

        incident = recovering.incident()
        assert not is_held(recovering), incident["held_reason"]
        assert (incident["outcome"], incident["attempts"]) == ("restored", 2)
        assert recovering.status()["condition"] == "healthy"
        assert [run.status for run in recovering.restores()] == ["SUCCESS", "FAILURE"]
        assert recovering.restores()[1].run_id == lost.run_id


def is_held(recovering: RecoveringDev) -> bool:
    return recovering.incident()["held_at"] is not None
