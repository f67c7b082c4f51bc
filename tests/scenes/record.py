"""Playing scenes, each in its own process and on its own servers."""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ParamSpec, TypeVar

from tests.scenes.script import SCENES
from tests.scenes.servers import running_servers
from tests.scenes.stage import stage

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

# Scenes mostly wait for commands to start.
_AT_ONCE = 2


def record(names: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Play these scenes; return the documents of each, in this order."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        playing = [(name, pool.submit(in_own_process, _play, name)) for name in names]
        try:
            for name, future in playing:
                yield name, future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _play(name: str) -> dict[str, Any]:
    scene = SCENES[name]
    began = time.monotonic()
    with running_servers() as servers, stage(servers, name, **scene.settings) as on:
        scene.play(on)
        documents = on.normalized()
    sys.stdout.write(f"{name}: {time.monotonic() - began:.0f} s\n")
    sys.stdout.flush()
    return documents


def in_own_process(
    work: Callable[Parameters, Result], *arguments: Parameters.args, **named: Parameters.kwargs
) -> Result:
    """Call ``work`` in a fresh Python process, whose error output is shown only if it fails."""
    # The order of sets must not change between runs.
    os.environ["PYTHONHASHSEED"] = "0"
    with TemporaryDirectory(prefix="budget-recovery-log-") as directory:
        log = Path(directory, "log")
        pool = ProcessPoolExecutor(
            1, get_context("spawn"), initializer=_set_up_process, initargs=(log,)
        )
        with pool:
            try:
                return pool.submit(work, *arguments, **named).result()
            except BaseException:
                if log.exists():
                    sys.stderr.write(log.read_text(errors="replace")[-20_000:])
                raise


def _set_up_process(log: Path) -> None:
    # Servers are stopped however the scene ends.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(descriptor, 2)
    os.close(descriptor)
