"""Hung servers: they accept connections, but do not respond."""

import os
import signal
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.nats_servers import DisturbedNetwork
from tests.waiting import wait_until

_STOPPED = "T"


@contextmanager
def hung(*pids: int) -> Iterator[None]:
    """Stop processes with SIGSTOP for a while."""
    try:
        _halt(pids)
        yield
    finally:
        _resume(pids)


@contextmanager
def hung_at_request(
    network: DisturbedNetwork, find_pids: Callable[[], Collection[int]]
) -> Iterator[None]:
    """Stop processes with SIGSTOP when a request arrives that the network watches."""
    halted: list[int] = []

    def halt(_: int) -> None:
        network.before_request = None
        halted.extend(find_pids())
        _halt(halted)

    network.before_request = halt
    try:
        yield
        assert halted
    finally:
        _resume(halted)


def _halt(pids: Collection[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    # The kernel stops threads one by one; until then they may still respond.
    wait_until(lambda: all(_is_stopped(pid) for pid in pids))


def _resume(pids: Collection[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGCONT)


def _is_stopped(pid: int) -> bool:
    return all(
        file.read_text().rpartition(")")[2].split()[0] == _STOPPED
        for file in Path(f"/proc/{pid}/task").glob("*/stat")
    )
