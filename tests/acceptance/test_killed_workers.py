"""``budget-recovery dev`` launches restores again whose workers end midway."""

import os
import signal
from pathlib import Path

import pytest

from tests.acceptance.recovering_dev import RecoveringDev, recovering_dev
from tests.processes import descendants, is_running
from tests.shut_gates import Gate, shut_gate
from tests.waiting import wait_until

# The lease, a tick of the supervisor and the start of a run on a busy machine.
_TAKE_OVER_SECONDS = 150
# A started run without a worker gets another minute.
_RESTART_SECONDS = 240


def kill_at(gate: Gate, recovering: RecoveringDev) -> None:
    """Kill the worker that waits at the gate, or arrives there."""
    wait_until(lambda: gate.has_waiting, seconds=_TAKE_OVER_SECONDS)
    pid = recovering.worker_pid()
    assert pid in descendants(recovering.dev.process.pid)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not is_running(pid) and not gate.has_waiting)


@pytest.mark.disaster
def test_a_third_attempt_succeeds_after_two_killed_workers(
    place: Path,
) -> None:
    # As dagster-io/dagster#16168: a retry policy does not act if the process dies.
    with recovering_dev(place) as recovering:
        recovering.wait_for_a_good_check()
        with shut_gate(recovering.postgres_url, "globex") as gate:
            assert recovering.command("wipe", "--yes").returncode == 0
            kill_at(gate, recovering)
            assert recovering.status()["condition"] == "recovering"
            # The lease of the first worker expires on its own.
            kill_at(gate, recovering)
            recovering.let_leases_run_out()
            gate.open()
            wait_until(lambda: recovering.incident()["closed_at"], seconds=_TAKE_OVER_SECONDS)

        assert [number for number, _, _ in recovering.attempts()] == [1, 2, 3]
        found = recovering.status()
        incident = found["last_closed_incident"]
        assert (found["condition"], found["exit_code"]) == ("healthy", 0)
        assert incident["ended"]["outcome"] == "restored"
        assert (incident["attempts"], incident["launches"]) == (3, 3)
        runs = recovering.restores()
        assert [run.status for run in runs] == ["SUCCESS", "FAILURE", "FAILURE"]
        assert [run.tags["dagster/run_key"] for run in runs] == [
            f"{incident['id']}/launch-{launch}" for launch in (3, 2, 1)
        ]
        assert len({run_id for _, _, run_id in recovering.attempts()}) == 3


@pytest.mark.disaster
def test_a_restore_is_launched_again_after_ctrl_c_and_a_restart(place: Path) -> None:
    with recovering_dev(place) as recovering:
        recovering.wait_for_a_good_check()
        with shut_gate(recovering.postgres_url, "globex") as gate:
            assert recovering.command("wipe", "--yes").returncode == 0
            wait_until(lambda: gate.has_waiting, seconds=_TAKE_OVER_SECONDS)
            worker = recovering.worker_pid()
            assert recovering.dev.stop(signal.SIGINT) == 0
            assert not is_running(worker)

    with recovering_dev(place) as recovering:
        wait_until(
            lambda: recovering.incident()["closed_at"] or recovering.incident()["held_at"],
            seconds=_RESTART_SECONDS,
        )
        incident = recovering.incident()
        assert incident["held_at"] is None, incident["held_reason"]
        assert (incident["outcome"], incident["attempts"]) == ("restored", 2)
        assert recovering.status()["condition"] == "healthy"
        assert [run.status for run in recovering.restores()] == ["SUCCESS", "FAILURE"]
