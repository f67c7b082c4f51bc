"""A PostgreSQL server of this process's own: only on a private unix socket, never on TCP."""

import os
import shlex
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote

from budget_recovery_dagster.sandbox.accounts import Account, account_to_drop_to
from budget_recovery_dagster.sandbox.child_process import OwnedProcess, Program, poll
from budget_recovery_dagster.sandbox.data_directory import make_reachable
from budget_recovery_dagster.sandbox.embedded_server import EmbeddedServer
from budget_recovery_dagster.sandbox.errors import UnusableDataError
from budget_recovery_dagster.sandbox.postgres_binaries import (
    PostgresBinaries,
    find_binaries,
    reachable_binaries,
)
from budget_recovery_dagster.sandbox.socket_directory import private_socket_dir

SUPERUSER = "postgres"

_INITDB_SECONDS = 120
# Recovery after a crash is part of a start.
_READY_SECONDS = 120
# How long a server takes at most to see that its parent is gone.
_NOTICE_SECONDS = 2
_SHUTDOWN_SECONDS = 60
_PRIVATE = 0o700
# No TCP port: it names the socket.
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


class PostgresServer(EmbeddedServer):
    """An embedded PostgreSQL whose files are in ``data_dir``; its log lies beside that.

    The data are made at the first start and kept. As root the server runs as the owner of the
    data, ``postgres`` or ``nobody``, and no mode of an existing directory is changed.
    """

    def __init__(self, data_dir: Path, *, settings: Mapping[str, str] | None = None) -> None:
        super().__init__("PostgreSQL", data_dir)
        self._settings = {**_SERVER_SETTINGS, **(settings or {})}
        self._socket_dir: Path | None = None

    def url(self, database: str = "postgres") -> str:
        """Return a libpq URL of a database of the running server, as its superuser."""
        host = quote(str(self._require_socket_dir()), safe="")
        # With the port: a PGPORT in the client's environment would count otherwise.
        return f"postgresql://{SUPERUSER}@:{_PORT}/{quote(database, safe='')}?host={host}"

    def psql(self, database: str = SUPERUSER) -> str:
        """Return a shell command that opens a database of the running server in psql."""
        program = "psql" if shutil.which("psql") else str(find_binaries().psql)
        return shlex.join(
            [program, "-h", str(self._require_socket_dir()), "-U", SUPERUSER, database]
        )

    def _require_socket_dir(self) -> Path:
        if self._socket_dir is None:
            raise self._not_started()
        return self._socket_dir

    def _start(self) -> None:
        make_reachable(self._data_dir.parent)
        version_file = self._data_dir / "PG_VERSION"
        owner = version_file.stat().st_uid if version_file.exists() else None
        account = account_to_drop_to(owner)
        if account is None:
            binaries = find_binaries()
        else:
            binaries = reachable_binaries(account, self._data_dir.parent)
        if owner is None:
            self._make_data(binaries, account)
        self._check_version(version_file, binaries)
        self._outlive_former_server()
        self._socket_dir = private_socket_dir(self._data_dir, account)
        settings = {**self._settings, "unix_socket_directories": str(self._socket_dir)}
        process = self._process = OwnedProcess(
            Program(
                "PostgreSQL",
                [
                    *(binaries.server, "-D", self._data_dir),
                    *(
                        word
                        for name, value in settings.items()
                        for word in ("-c", f"{name}={value}")
                    ),
                ],
                log=self.log,
                environment=_ENVIRONMENT,
                account=account,
                # A fast and clean shutdown: open transactions are rolled back.
                stop_signal=signal.SIGINT,
                death_signal=signal.SIGINT,
                grace_seconds=_SHUTDOWN_SECONDS,
            )
        )
        process.wait_until_ready(lambda: self._is_ready(process.pid), seconds=_READY_SECONDS)

    def stop(self) -> None:
        """Shut down cleanly, without waiting for clients. Calling it twice is harmless."""
        super().stop()
        if self._socket_dir is not None:
            shutil.rmtree(self._socket_dir, ignore_errors=True)

    def _make_data(self, binaries: PostgresBinaries, account: Account | None) -> None:
        """Make the data elsewhere and move them, so that they are never left half made."""
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
                raise UnusableDataError(
                    f"The account {account.name}, as which PostgreSQL runs, cannot reach"
                    f" {self._data_dir}.",
                    "choose a data directory outside private directories, such as"
                    " /var/lib/budget-recovery.",
                )
        initdb = Program(
            "initdb",
            [
                *(binaries.initdb, "--pgdata", unfinished),
                *("--username", SUPERUSER),
                # Whoever reaches the private socket is the owner or root.
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

    def _check_version(self, version_file: Path, binaries: PostgresBinaries) -> None:
        of_data = version_file.read_text().strip()
        if of_data != binaries.major:
            raise UnusableDataError(
                f"The data in {self._data_dir} are PostgreSQL {of_data}'s, and PostgreSQL"
                f" {binaries.major} cannot read them.",
                "choose another data directory, or move the data over with pg_dump.",
            )

    @property
    def _pid_file(self) -> Path:
        return self._data_dir / "postmaster.pid"

    def _is_ready(self, pid: int) -> bool | None:
        # A crashed server leaves its file behind, "ready" and all: it counts only with our pid.
        lines = _lines(self._pid_file)
        return True if lines[:1] == [str(pid)] and lines[7:8] == ["ready"] else None

    def _outlive_former_server(self) -> None:
        """Wait for a server that is shutting down; drop a pid file that names another program.

        PostgreSQL itself would refuse to start while any process of its account has the pid that
        is noted there, whatever that process is.
        """
        noted = next(iter(_lines(self._pid_file)), "")
        if not noted.isdecimal():
            return
        former = int(noted)

        def has_ended() -> bool | None:
            return None if self._is_served_by(former) else True

        def is_ending() -> bool | None:
            return has_ended() or _lines(self._pid_file)[7:8] == ["stopping"] or None

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
        # A server works in its data directory. Where there is no /proc, a live pid is believed.
        try:
            return Path(f"/proc/{pid}/cwd").readlink() == self._data_dir.resolve()
        except PermissionError:
            return False  # another account's process; the data are ours
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
