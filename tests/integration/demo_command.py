"""``budget-recovery demo`` as a child of a test."""

import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

import psycopg

from tests.integration.commands import PROGRAM
from tests.integration.dev_command import UNSET
from tests.processes import descendants, is_running
from tests.waiting import wait_until

SECONDS = 180
# Each listing reads all processes of the machine.
POLL_SECONDS = 0.25


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


@dataclass
class Demo:
    """A running command; ``owned`` are its observed child processes."""

    process: subprocess.Popen[bytes]
    output: Path
    owned: set[int] = field(default_factory=set)
    sockets: set[Path] = field(default_factory=set)

    @property
    def text(self) -> str:
        return self.output.read_text()

    def wait_for_output(self, text: str) -> None:
        def does() -> bool:
            self._see()
            assert self.process.poll() is None or text in self.text, self.text
            return text in self.text

        wait_until(does, seconds=SECONDS, every=POLL_SECONDS)

    def wait_for_child(self, program: bytes) -> int:
        """Wait for a child whose command line contains this; return its pid."""
        found: list[int] = []

        def runs() -> bool:
            self._see()
            assert self.process.poll() is None, self.text
            living = filter(is_running, self.owned)
            found.extend(pid for pid in living if program in _command(pid))
            return bool(found)

        # The child may exist only briefly, so this polls without a pause.
        wait_until(runs, seconds=SECONDS)
        return found[0]

    def wait(self) -> int:
        def has_ended() -> bool:
            self._see()
            return self.process.poll() is not None

        wait_until(has_ended, seconds=SECONDS, every=POLL_SECONDS)
        return self.process.wait()

    def stop(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        return self.wait()

    def _see(self) -> None:
        living = descendants(self.process.pid)
        self.owned |= living
        for pid in living if not self.sockets else ():
            words = _command(pid).decode().split("\0")
            named = [word for word in words if word.startswith("unix_socket_directories=")]
            self.sockets.update(Path(word.partition("=")[2]) for word in named)

    def database(self) -> psycopg.Connection:
        (host,) = self.sockets
        url = f"postgresql://postgres@:5432/budget_recovery?host={quote(str(host), safe='')}"
        return psycopg.connect(url, autocommit=True)

    def require_no_leftovers(self) -> None:
        assert not any(map(is_running, self.owned))
        assert not any(each.exists() for each in self.sockets)


@contextmanager
def started(
    place: Path,
    output: Path,
    *arguments: str,
    user: int | None = None,
    environment: dict[str, str] | None = None,
) -> Iterator[Demo]:
    with (
        output.open("wb") as out,
        subprocess.Popen(
            [*PROGRAM, "demo", *arguments],
            stdout=out,
            stderr=subprocess.STDOUT,
            umask=0,  # everything is private nevertheless
            env={**UNSET, **(environment or {}), "TMPDIR": str(place)},
            user=user,
            group=user,
            extra_groups=None if user is None else [],
        ) as process,
    ):
        demo = Demo(process, output)
        try:
            yield demo
        finally:
            if process.poll() is None:
                process.terminate()
