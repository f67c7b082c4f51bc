"""Programs that this process owns: they end with it, however it ends.

Each child leads a session of its own, so that Ctrl-C in the terminal reaches only this process,
which then stops its children in order. If this process is killed, the kernel tells each child with
its death signal (Linux only; elsewhere a killed parent leaves its children behind).
"""

import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from budget_recovery_dagster.sandbox.accounts import Account
from budget_recovery_dagster.sandbox.errors import ChildEndedError

POLL_SECONDS = 0.02

_PR_SET_PDEATHSIG = 1
_LOG_TAIL_BYTES = 8192
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")

Found = TypeVar("Found")


def poll(
    find: Callable[[], Found | None], *, seconds: float, interval: float = POLL_SECONDS
) -> Found | None:
    """Call ``find`` until it returns something; None when the time is over."""
    deadline = time.monotonic() + seconds
    while (found := find()) is None and time.monotonic() < deadline:
        time.sleep(interval)
    return found


@dataclass(frozen=True, slots=True)
class Program:
    """What to run, and how it is ended: ``command`` runs with only ``environment``, in ``/``.

    Its output is appended to ``log``; ``files`` are open ones that it keeps. ``stop_signal`` asks
    it to end; after ``grace_seconds`` it is killed. ``death_signal`` is what it gets when this
    process dies; with ``has_workers`` its own children are killed then, too.
    """

    name: str
    command: Sequence[str | Path]
    log: Path
    environment: Mapping[str, str]
    account: Account | None = None
    stop_signal: signal.Signals = signal.SIGTERM
    death_signal: signal.Signals = signal.SIGTERM
    grace_seconds: float = 20.0
    files: Sequence[int] = ()
    has_workers: bool = False


class OwnedProcess:
    """A running child. The starting thread must live on: its end is the parent's to the kernel."""

    def __init__(self, program: Program) -> None:
        """Start the program.

        Raises:
            ChildEndedError: it cannot be executed.
        """
        self._program = program
        self._asked_to_end = False
        account = program.account
        with program.log.open("ab") as output:
            self._log_start = output.tell()
            try:
                self._process = subprocess.Popen(
                    [str(part) for part in program.command],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=dict(program.environment),
                    cwd="/",
                    start_new_session=True,
                    pass_fds=program.files,
                    user=account.uid if account else None,
                    group=account.gid if account else None,
                    extra_groups=[] if account else None,
                    # Popen changes the account first and calls this after it: the kernel forgets
                    # a death signal that was set before.
                    preexec_fn=_BoundToParent(program.death_signal),  # noqa: PLW1509 - no locks
                )
            except (OSError, subprocess.SubprocessError) as error:
                raise ChildEndedError(
                    f"{program.name} cannot be started: {error}.",
                    f"run {program.command[0]} by hand to see why.",
                ) from error
        self._guardian = _GroupGuardian(self.pid) if program.has_workers else None

    @property
    def name(self) -> str:
        """What the child is called before people."""
        return self._program.name

    @property
    def log(self) -> Path:
        """Where its output goes."""
        return self._program.log

    @property
    def pid(self) -> int:
        """The process id, which is also the id of its session and group."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative: the number of the signal that ended it."""
        if self._process.returncode is not None:
            return self._process.returncode
        # Looked at without reaping: until stop() the id belongs to this child and to no other.
        ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    def wait_until_ready(self, find: Callable[[], Found | None], *, seconds: float) -> Found:
        """Poll ``find`` until it returns something, and return that.

        Raises:
            ChildEndedError: the child ended before, or the time is over; it is stopped then.
        """

        def settle() -> tuple[Found | None] | None:
            found = find()
            return None if found is None and self.exit_code is None else (found,)

        settled = poll(settle, seconds=seconds)
        if settled is not None and settled[0] is not None:
            return settled[0]
        error = self.ended_error() if settled else self._late_error(seconds)
        self.stop()
        raise error

    def wait(self, *, seconds: float) -> None:
        """Wait for the child's own, successful end; it is stopped if the waiting is cut short.

        Raises:
            ChildEndedError: it failed, or the time is over; it is stopped then.
        """
        try:
            code = poll(lambda: self.exit_code, seconds=seconds)
            error = self._late_error(seconds) if code is None else self.ended_error()
        finally:
            self.stop()
        if code != 0:
            raise error

    def ended_error(self) -> ChildEndedError:
        """Describe an end that nobody asked for, with the last words in the log."""
        code = self.exit_code or 0
        how = f"with exit code {code}" if code >= 0 else f"by {signal.Signals(-code).name}"
        # What a signal ended had no time to say why.
        said = self._last_words() if code >= 0 else ""
        return ChildEndedError(
            f"{self.name} ended {how}" + (f": {said.rstrip('.')}." if said else "."),
            f"see its log {self.log}.",
        )

    def _late_error(self, seconds: float) -> ChildEndedError:
        return ChildEndedError(
            f"{self.name} was not ready within {seconds:g} seconds.", f"see its log {self.log}."
        )

    def has_said(self, text: str) -> bool | None:
        """Whether ``text`` stands in its output so far; None while it does not."""
        return True if text in self._output() else None

    def _last_words(self) -> str:
        lines = self._output().splitlines()
        return next((line.strip() for line in reversed(lines) if line.strip()), "")

    def _output(self) -> str:
        """Read the end of what it has written, and nothing of what others wrote before it."""
        with self.log.open("rb") as log:
            log.seek(max(self._log_start, log.seek(0, os.SEEK_END) - _LOG_TAIL_BYTES))
            return _COLOUR.sub("", log.read().decode(errors="replace"))

    def ask_to_end(self) -> None:
        """Send the stop signal, once, and do not wait."""
        if self._process.returncode is None and not self._asked_to_end:
            self._asked_to_end = True
            os.kill(self.pid, self._program.stop_signal)

    def stop(self) -> None:
        """Ask the child to end and wait; then kill what is left of its group.

        Calling it twice is harmless.
        """
        if self._process.returncode is not None:
            return
        self.ask_to_end()
        poll(lambda: self.exit_code, seconds=self._program.grace_seconds)
        os.killpg(self.pid, signal.SIGKILL)
        if self._guardian is not None:
            self._guardian.dismiss()
        self._process.wait()


class _GroupGuardian:
    """A shell that waits for this process's death, however it comes, and then kills a group.

    The kernel signals a dead parent's children only, not theirs.
    """

    _SCRIPT = 'read -r _; kill -s KILL -- "-$1"'

    def __init__(self, group: int) -> None:
        # Nothing is ever written to the pipe: it ends with this process, its only writer.
        self._shell = subprocess.Popen(
            ["/bin/sh", "-c", self._SCRIPT, "guardian", str(group)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
        )

    def dismiss(self) -> None:
        """End the shell, its group untouched."""
        self._shell.kill()
        self._shell.communicate()


class _BoundToParent:
    """Runs in the child between fork and exec: asks for a signal at the parent's death."""

    def __init__(self, death_signal: signal.Signals) -> None:
        self._death_signal = death_signal
        self._parent = os.getpid()
        # Loaded before the fork: between fork and exec as little as possible may happen.
        self._libc = ctypes.CDLL(None, use_errno=True)

    def __call__(self) -> None:
        # A shell that starts this process in the background makes it, and so its children, deaf
        # to SIGINT.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        if sys.platform == "linux":
            if self._libc.prctl(_PR_SET_PDEATHSIG, int(self._death_signal), 0, 0, 0) != 0:
                raise OSError(ctypes.get_errno(), "prctl")
            if os.getppid() != self._parent:  # it died before the kernel was asked
                os._exit(1)
