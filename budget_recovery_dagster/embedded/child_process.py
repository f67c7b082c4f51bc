"""Child processes that end when this process ends, even when it is killed.

Each child leads its own session, so Ctrl-C in the terminal reaches only this process, which then
stops its children in order. If this process is killed, the kernel sends each child its death
signal (Linux only; on other systems the children keep running).
"""

import ctypes
import fcntl
import hashlib
import os
import pwd
import re
import signal
import stat
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeVar

from budget_recovery_dagster.errors import BudgetRecoveryError

POLL_SECONDS = 0.02
ROOT = 0

_PR_SET_PDEATHSIG = 1
_LOG_TAIL_BYTES = 8192
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_PRIVATE = 0o700
_PRIVATE_FILE = 0o600
_UMASK = 0o077

Found = TypeVar("Found")


class CannotStartError(BudgetRecoveryError):
    """Something outside this process prevents a start."""


class UnusableDataError(CannotStartError):
    """A directory cannot be used: not writable, in use, or another owner's or version's."""


class ChildEndedError(BudgetRecoveryError):
    """A child did not become ready, or ended unexpectedly; the hint names its log."""


def poll(find: Callable[[], Found], *, seconds: float, interval: float = POLL_SECONDS) -> Found:
    """Call ``find`` until its result is true or the time is over; return the last result."""
    deadline = time.monotonic() + seconds
    while not (found := find()) and time.monotonic() < deadline:
        time.sleep(interval)
    return found


@contextmanager
def private_files() -> Iterator[None]:
    """Let only this account read the files and directories that this process creates.

    Usage, tenants and reasons are in them, and the umask of root lets every account read them.
    """
    before = os.umask(_UMASK)
    try:
        yield
    finally:
        os.umask(before)


def open_private(path: str | Path, flags: int) -> int:
    """Open a file, an ``opener`` of ``open``; only its owner may read it, an older one too."""
    descriptor = os.open(path, flags, _PRIVATE_FILE)
    if os.fstat(descriptor).st_uid == os.geteuid():
        os.fchmod(descriptor, _PRIVATE_FILE)
    return descriptor


@dataclass(frozen=True, slots=True)
class Account:
    """A user account of this machine."""

    name: str
    uid: int
    gid: int

    @classmethod
    def of(cls, uid: int) -> Self:
        """Return the account with this id, even if it has no name."""
        try:
            entry = pwd.getpwuid(uid)
        except KeyError:
            return cls(f"uid {uid}", uid, uid)
        return cls(entry.pw_name, entry.pw_uid, entry.pw_gid)

    def may_run(self, *command: str | Path) -> bool:
        """Whether a short command succeeds as this account; the kernel checks the permissions."""
        try:
            ended = subprocess.run(
                [str(part) for part in command],
                check=False,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                cwd="/",
                user=self.uid,
                group=self.gid,
                extra_groups=[],
                timeout=30,
            )
        except (OSError, subprocess.SubprocessError):
            return False
        return ended.returncode == 0


@dataclass(frozen=True, slots=True)
class Program:
    """A command to run in ``/`` with only ``environment``, and how to end it.

    Its output is appended to ``log``. Only its account may read what it creates. It inherits the
    open ``files``. ``stop_signal`` asks it to end; after ``grace_seconds`` it is killed. It
    receives ``death_signal`` when this process dies; with ``has_workers`` its own children are then
    killed too.
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
    """A running child.

    The thread that starts it must outlive it: the kernel treats the end of that thread as the
    death of the parent.
    """

    def __init__(self, program: Program) -> None:
        """Start the program.

        Raises:
            ChildEndedError: it cannot be executed.
        """
        self._program = program
        self._is_stopping = False
        account = program.account
        with open(program.log, "ab", opener=open_private) as output:
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
                    umask=_UMASK,
                    pass_fds=program.files,
                    user=account.uid if account else None,
                    group=account.gid if account else None,
                    extra_groups=[] if account else None,
                    # Popen calls this after it has changed the account: the kernel clears a death
                    # signal that was set before the change.
                    preexec_fn=_BoundToParent(program.death_signal),  # noqa: PLW1509 - no locks
                )
            except (OSError, subprocess.SubprocessError) as error:
                raise ChildEndedError(
                    f"{program.name} cannot be started: {error}.",
                    f"run {program.command[0]} in a shell to see why.",
                ) from error
        self._guardian = _GroupGuardian(self.pid) if program.has_workers else None

    @property
    def pid(self) -> int:
        """The process id, which is also the id of its session and group."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative: the number of the signal that ended it."""
        if self._process.returncode is not None:
            return self._process.returncode
        # WNOWAIT does not reap the child, so its id cannot be reused before stop().
        ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    def has_ended(self) -> bool:
        """Whether it no longer runs."""
        return self.exit_code is not None

    def has_logged(self, text: str) -> bool:
        """Whether its recent output contains ``text``."""
        return text in self._output()

    def wait_until_ready(self, find: Callable[[], Found | None], *, seconds: float) -> Found:
        """Poll ``find`` until its result is true, and return that result.

        Raises:
            ChildEndedError: the child ended first, or the time is over; the child is stopped.
        """
        found: Found | None = None

        def is_settled() -> bool:
            nonlocal found
            found = find()
            return bool(found) or self.has_ended()

        is_over = poll(is_settled, seconds=seconds)
        if found:
            return found
        error = self.ended_error() if is_over else self._late_error(seconds)
        self.stop()
        raise error

    def wait(self, *, seconds: float) -> None:
        """Wait for a successful end. If the wait is interrupted, the child is stopped.

        Raises:
            ChildEndedError: it failed, or the time is over; the child is stopped.
        """
        try:
            is_over = poll(self.has_ended, seconds=seconds)
            error = self.ended_error() if is_over else self._late_error(seconds)
            has_succeeded = self.exit_code == 0
        finally:
            self.stop()
        if not has_succeeded:
            raise error

    def ended_error(self) -> ChildEndedError:
        """Describe an unexpected end, with the last line of the log."""
        code = self.exit_code or 0
        how = f"with exit code {code}" if code >= 0 else f"by {signal.Signals(-code).name}"
        # A program that a signal ended had no time to log a reason.
        lines = self._output().split("\n") if code >= 0 else []
        last_line = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return self._error(f"ended {how}" + (f": {last_line.rstrip('.')}" if last_line else ""))

    def _late_error(self, seconds: float) -> ChildEndedError:
        return self._error(f"was not ready within {seconds:g} seconds")

    def _error(self, what: str) -> ChildEndedError:
        program = self._program
        return ChildEndedError(f"{program.name} {what}.", f"see its log {program.log}.")

    def _output(self) -> str:
        """Read the end of its own output; earlier programs may have written to the same log."""
        with self._program.log.open("rb") as log:
            log.seek(max(self._log_start, log.seek(0, os.SEEK_END) - _LOG_TAIL_BYTES))
            return _COLOUR.sub("", log.read().decode(errors="replace"))

    def ask_to_end(self) -> None:
        """Send the stop signal, at most once, and do not wait."""
        if self._process.returncode is None and not self._is_stopping:
            self._is_stopping = True
            os.kill(self.pid, self._program.stop_signal)

    def stop(self) -> None:
        """Ask the child to end, wait, then kill the rest of its process group.

        A second call does nothing.
        """
        if self._process.returncode is not None:
            return
        self.ask_to_end()
        poll(self.has_ended, seconds=self._program.grace_seconds)
        os.killpg(self.pid, signal.SIGKILL)
        if self._guardian is not None:
            self._guardian.dismiss()
        self._process.wait()


class _GroupGuardian:
    """A shell that kills a process group when this process dies.

    The kernel sends the death signal only to the children of a dead parent, not to their children.
    """

    _SCRIPT = 'read -r _; kill -s KILL -- "-$1"'

    def __init__(self, group: int) -> None:
        # Nothing is written to the pipe; it closes when this process, its only writer, ends.
        self._shell = subprocess.Popen(
            ["/bin/sh", "-c", self._SCRIPT, "guardian", str(group)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
        )

    def dismiss(self) -> None:
        """End the shell and leave its group alone."""
        self._shell.kill()
        self._shell.communicate()


class _BoundToParent:
    """Runs in the child between fork and exec; requests a signal for the death of the parent."""

    def __init__(self, death_signal: signal.Signals) -> None:
        self._death_signal = death_signal
        self._parent = os.getpid()
        # Loaded before the fork: as little as possible may happen between fork and exec.
        self._libc = ctypes.CDLL(None, use_errno=True)

    def __call__(self) -> None:
        # A shell that starts this process in the background makes it, and therefore its children,
        # ignore SIGINT. Dagster then makes it ignore SIGTERM too.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        if sys.platform == "linux":
            if self._libc.prctl(_PR_SET_PDEATHSIG, int(self._death_signal), 0, 0, 0) != 0:
                raise OSError(ctypes.get_errno(), "prctl")
            if os.getppid() != self._parent:  # the parent died before the request
                os._exit(1)


class MissingProgramError(CannotStartError):
    """The program of a server is not installed."""


class EmbeddedServer(ABC):
    """A server whose files are in ``data_dir``, with its log next to that directory.

    Start it from a thread that outlives the server.
    """

    def __init__(self, name: str, data_dir: Path) -> None:
        self._name = name
        self._data_dir = data_dir.absolute()
        self._process: OwnedProcess | None = None

    @property
    def log(self) -> Path:
        """The file that receives the log of the server."""
        return self._data_dir.with_name(f"{self._data_dir.name}.log")

    @property
    def process(self) -> OwnedProcess:
        """The process of the started server."""
        if self._process is None:
            raise self._not_started()
        return self._process

    @property
    def pid(self) -> int:
        """The process id of the started server."""
        return self.process.pid

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start the server and return when it accepts connections; a failed start leaves nothing.

        Raises:
            MissingProgramError: the programs of the server are not installed.
            UnusableDataError: the data directory cannot be used.
            ChildEndedError: the server did not become ready; the message names a port in use.
        """
        try:
            self._start()
        except OSError as error:
            self.stop()
            raise UnusableDataError(
                f"The data directory {self._data_dir} cannot be used: {error.strerror}.",
                "choose another data directory.",
            ) from error
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Shut down cleanly without waiting for clients. A second call does nothing."""
        if self._process is not None:
            self._process.stop()
            self._process = None

    @abstractmethod
    def _start(self) -> None:
        """Start the process and wait for it; every OSError counts as one of the data directory."""

    def _not_started(self) -> RuntimeError:
        return RuntimeError(f"the {self._name} server has not been started")


def try_lock(descriptor: int) -> bool:
    """Take the exclusive lock of an open file; return False if another process holds it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def make_reachable(directory: Path) -> None:
    """Create a directory and its missing parents; every account may pass through those of root.

    Modes of existing directories stay as they are.
    """
    for missing in reversed(
        [path for path in (directory, *directory.parents) if not path.exists()]
    ):
        missing.mkdir(exist_ok=True)
        # chmod, because a umask of 077 would shut out the account of the database.
        missing.chmod(0o711 if os.geteuid() == ROOT else _PRIVATE)


def private_socket_dir(of: Path, account: Account | None = None) -> Path:
    """Create or reuse the socket directory of the server whose data are in ``of``.

    Paths of unix sockets are limited to about 100 bytes, so it is in ``/tmp``. Only ``account``
    (None: that of this process) may enter it. Its name is predictable, so an existing directory
    is accepted only with the right owner and mode.

    Raises:
        UnusableDataError: something else has this name.
    """
    uid = account.uid if account else os.geteuid()
    digest = hashlib.sha256(os.fsencode(of.resolve())).hexdigest()[:12]
    directory = Path("/tmp", f"budget-{uid}-{digest}")  # noqa: S108 - verified below
    try:
        directory.mkdir(mode=_PRIVATE)
        if account is not None:
            os.chown(directory, account.uid, account.gid)
    except FileExistsError:
        state = directory.lstat()
        if (
            not stat.S_ISDIR(state.st_mode)
            or state.st_uid != uid
            or stat.S_IMODE(state.st_mode) != _PRIVATE
        ):
            raise UnusableDataError(
                f"{directory} is not a private directory of {Account.of(uid).name}.",
                "find out who created it, and remove it.",
            ) from None
    return directory
