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
    with recovering_dev(place) as there, shut_gate(there.postgres_url, "globex") as gate:
        there.wait_for_a_good_check()
        assert there.command("wipe", "--yes").returncode == 0
        wait_until(lambda: gate.has_waiting, seconds=RECOVERY_SECONDS)
        (lost,) = there.restores()
        # Kill worker, code server, daemon, store and database at once.
        there.dev.process.kill()
        there.dev.process.wait()
    with recovering_dev(place) as there:
        wait_until(
            lambda: there.incident()["closed_at"] or is_held(there), seconds=_TAKE_OVER_SECONDS
        )

        incident = there.incident()
        assert not is_held(there), incident["held_reason"]
        assert (incident["outcome"], incident["attempts"]) == ("restored", 2)
        assert there.status()["condition"] == "healthy"
        assert [run.status for run in there.restores()] == ["SUCCESS", "FAILURE"]
        assert there.restores()[1].run_id == lost.run_id


def is_held(there: RecoveringDev) -> bool:
    return there.incident()["held_at"] is not None
