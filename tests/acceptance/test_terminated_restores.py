"""An operator terminates a restore on its page and releases it in a terminal."""

from pathlib import Path

import pytest

from tests.acceptance.recovering_dev import RECOVERY_SECONDS, recovering_dev
from tests.shut_gates import shut_gate
from tests.waiting import wait_until


@pytest.mark.disaster
def test_a_terminated_restore_is_on_hold_until_it_is_released(place: Path) -> None:
    with recovering_dev(place) as recovering:
        recovering.wait_for_a_good_check()
        with shut_gate(recovering.postgres_url, "globex") as gate:
            assert recovering.command("wipe", "--yes").returncode == 0
            wait_until(lambda: gate.has_waiting, seconds=RECOVERY_SECONDS)
            (run,) = recovering.restores()
            recovering.terminate(run.run_id)
            wait_until(lambda: recovering.restores()[0].status == "CANCELED", every=0.2)
        # As dagster-io/dagster#15026: the retry policy started another attempt after that.
        assert [(number, run_id) for number, _, run_id in recovering.attempts()] == [
            (1, run.run_id)
        ]
        wait_until(lambda: recovering.incident()["held_at"], seconds=RECOVERY_SECONDS)
        status = recovering.command("status")
        assert status.returncode == 2
        assert f"run {run.run_id[:8]} was terminated" in status.stdout
        assert "budget-recovery release" in " ".join(status.stdout.split())
        assert len(recovering.attempts()) == len(recovering.restores()) == 1

        released = recovering.command("release")

        assert released.returncode == 0
        assert "The restore starts within 30 s." in released.stdout
        wait_until(lambda: recovering.incident()["closed_at"], seconds=RECOVERY_SECONDS)
        incident = recovering.incident()
        assert (incident["outcome"], incident["attempts"]) == ("restored", 1)
        assert recovering.status()["condition"] == "healthy"
        assert [run.tags["dagster/run_key"] for run in recovering.restores()] == [
            f"{incident['incident_id']}/launch-{launch}" for launch in (2, 1)
        ]
        assert [number for number, _, _ in recovering.attempts()] == [1, 2]
