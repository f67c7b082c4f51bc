"""Real servers for the tests, started once per session as owned child processes."""

import fcntl
import gc
import importlib
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql

from budget_recovery_dagster.adapters.postgres import migrate
from budget_recovery_dagster.embedded import NatsServer, PostgresServer
from tests.postgres_servers import temporary_database

# Linux keeps these files in memory. Each test has its own database of about a thousand files;
# on a disk, creating and deleting them would take most of the time of the tests.
_MEMORY = Path("/dev/shm")  # noqa: S108 - only the parent of a directory with a random name
# More than all servers of several workers need.
_ENOUGH_MEMORY_BYTES = 3 * 1024**3

_PREFIX = "budget-recovery tests "
# Locked by the tests whose servers use the directory.
_LOCK = "tests.lock"
# A directory is locked right after its creation.
_SURELY_LOCKED_SECONDS = 60

# Servers that no test kills need not survive a crash of the machine.
_NOT_DURABLE = {
    "fsync": "off",
    "full_page_writes": "off",
    "max_wal_size": "128MB",
}


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put slow files first, so that no worker starts one when the others are done."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def pytest_collection_finish() -> None:
    """Make garbage collections cheap and rare."""
    gc.collect()
    # The modules that are loaded by now stay.
    gc.freeze()
    # By default, every 700 new objects.
    gc.set_threshold(50_000, 20, 100)


def _directory_of_servers() -> Path | None:
    """Return the directory for files of servers; None: the default for temporary files."""
    try:
        # Programs that a server's account cannot reach are copied into its data directory.
        may_run_programs = not os.statvfs(_MEMORY).f_flag & os.ST_NOEXEC
        has_room = shutil.disk_usage(_MEMORY).free >= _ENOUGH_MEMORY_BYTES
    except OSError:
        return None
    return _MEMORY if may_run_programs and has_room and os.access(_MEMORY, os.W_OK) else None


def _remove_left_behind(parent: Path) -> None:
    """Remove directories that killed tests have left in memory."""
    for directory in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # in use, owned by another user, or being removed
            if time.time() - directory.stat().st_mtime > _SURELY_LOCKED_SECONDS:
                with (directory / _LOCK).open("a") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(directory)


@pytest.fixture(scope="session")
def server_dir() -> Iterator[Path]:
    """Create a directory that a server's account can reach; pytest's are private to the user."""
    parent = _directory_of_servers()
    if parent is not None:
        _remove_left_behind(parent)
    with tempfile.TemporaryDirectory(prefix=_PREFIX, dir=parent) as directory:
        path = Path(directory)
        path.chmod(0o711)
        with (path / _LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield path


@pytest.fixture(scope="session")
def pandas() -> Any:
    """Import pandas: few tests need it, and it is slow to import."""
    return importlib.import_module("pandas")


@pytest.fixture(scope="session")
def nats_server(server_dir: Path) -> Iterator[NatsServer]:
    with NatsServer(server_dir / "nats") as server:
        yield server


@pytest.fixture(scope="session")
def postgres_server(server_dir: Path) -> Iterator[PostgresServer]:
    with PostgresServer(server_dir / "postgres", settings=_NOT_DURABLE) as server:
        yield server


@pytest.fixture(scope="session")
def migrated_template(postgres_server: PostgresServer) -> str:
    """Create an empty migrated database as a template."""
    name = f"template_{uuid.uuid4().hex[:12]}"
    with psycopg.connect(postgres_server.url(), autocommit=True) as connection:
        connection.execute(sql.SQL("create database {}").format(sql.Identifier(name)))
    migrate(postgres_server.url(name))
    return name


@pytest.fixture
def database_url(postgres_server: PostgresServer, migrated_template: str) -> Iterator[str]:
    """Create a migrated database for this test."""
    with temporary_database(postgres_server, migrated_template) as url:
        yield url


@pytest.fixture
def empty_database_url(postgres_server: PostgresServer) -> Iterator[str]:
    """Create a database without the schema for this test."""
    with temporary_database(postgres_server, "template0") as url:
        yield url
