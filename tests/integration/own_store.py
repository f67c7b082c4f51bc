"""A usage store on a test's own NATS server, which can be stopped, rolled back and restarted."""

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytest

from budget_recovery_dagster.embedded import NatsServer
from tests.free_ports import unused_port
from tests.nats_servers import PASSWORD, Bucket, with_user

BUCKET = "budget-usage"

Result = TypeVar("Result")


class OwnStore:
    """A server with one bucket, at the same address after every start.

    ``config`` configures the server; ``user`` is the gateway's user if it has users.
    """

    def __init__(self, directory: Path, *, config: str = "", user: str | None = None) -> None:
        self._directory = directory / "nats"
        self._copy = directory / "copy of nats"
        self._user = user
        self.server = NatsServer(self._directory, port=unused_port(), config=config)

    def do(self, work: Callable[[Bucket], Result]) -> Result:
        """Use the bucket as the gateway, on a new connection."""
        url = self.server.url
        if self._user is not None:
            url = with_user(url, self._user, PASSWORD)
        with Bucket.connected(url, BUCKET) as bucket:
            return work(bucket)

    @property
    def last_sequence(self) -> int:
        return self.do(lambda bucket: int(bucket.info().state.last_seq))

    def spend(self, usage: str) -> None:
        """Set one counter, which advances the sequence by one."""
        self.do(lambda bucket: bucket.spend("acme", "total", "lifetime", {None: usage}))

    def restart(self) -> None:
        self.server.stop()
        self.server.start()

    def kill(self) -> None:
        os.kill(self.server.pid, signal.SIGKILL)
        self.server.stop()

    def lose_half_of_the_first_block(self) -> None:
        """Kill the server; half of its oldest file of records, and its index, reach no disk."""
        os.kill(self.server.pid, signal.SIGKILL)
        self.server.stop()
        blocks = sorted(self._directory.rglob("*.blk"), key=lambda path: int(path.stem))
        assert len(blocks) > 1, "the newest records must be in another file"
        os.truncate(blocks[0], blocks[0].stat().st_size // 2)
        for index in self._directory.rglob("index.db"):
            index.unlink()
        self.server.start()

    def copy(self) -> None:
        """Copy the server's files; an earlier copy is replaced."""
        self.server.stop()
        shutil.rmtree(self._copy, ignore_errors=True)
        shutil.copytree(self._directory, self._copy)
        self.server.start()

    def set_back(self) -> None:
        """Replace the server's files by the copy, like a restored disk backup."""
        self.server.stop()
        shutil.rmtree(self._directory)
        shutil.copytree(self._copy, self._directory)
        self.server.start()


@contextmanager
def opened_store(
    directory: Path,
    database_url: str,
    monkeypatch: pytest.MonkeyPatch,
    *,
    config: str = "",
    user: str | None = None,
) -> Iterator[OwnStore]:
    """Start such a server without a bucket, and set the settings to it."""
    store = OwnStore(directory, config=config, user=user)
    with store.server:
        monkeypatch.setenv("BUDGET_RECOVERY_NATS_URL", store.server.url)
        monkeypatch.setenv("BUDGET_RECOVERY_BUCKET", BUCKET)
        monkeypatch.setenv("BUDGET_RECOVERY_POSTGRES_URL", database_url)
        yield store
