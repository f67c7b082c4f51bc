"""What an examination needs from the outside world; as in ``ports``, with promises.

Nothing here changes anything, neither in the store nor in the database nor on a disk.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from budget_recovery_dagster.domain.bucket_settings import BucketSettings
from budget_recovery_dagster.domain.store import ClusterView
from budget_recovery_dagster.errors import StoreError


@dataclass(frozen=True, slots=True)
class StoreServer:
    """A NATS server of the URL: ``url`` without a password, and its version, or why it has none."""

    url: str
    version: str | None
    failure: StoreError | None


@dataclass(frozen=True, slots=True)
class Credentials:
    """The credentials file of the NATS user; ``expire_at`` None: never."""

    file: Path
    expire_at: datetime | None


class Permission(StrEnum):
    """What a NATS user must be allowed to publish, and what it is for."""

    ASK = "looking at the bucket"
    READ_KEY = "reading one key"
    READ_COUNTERS = "reading counters"
    READ_BOARDS = "reading leaderboards"
    PULL = "taking what is read"
    TIDY = "removing our consumers"
    MARK = "writing our marker"
    RAISE = "raising counters"
    REBUILD = "rebuilding leaderboards"


@dataclass(frozen=True, slots=True)
class Grant:
    """Whether the user may publish to ``subject``; ``failure``: it could not be found out."""

    subject: str
    is_granted: bool
    failure: StoreError | None = None


@dataclass(frozen=True, slots=True)
class BucketSeen:
    """What the stream's leader says of a bucket at one moment; ``told_at`` is its own time.

    ``subject`` is the one under which a bucket of this name has all its keys.
    """

    subject: str
    settings: BucketSettings
    cluster: ClusterView
    told_at: datetime | None


class StoreExamination(Protocol):
    """The usage store, looked at with the rights of the NATS user."""

    @property
    def credentials(self) -> Credentials | None:
        """The credentials file that is in use, if one is."""
        ...

    def servers(self) -> tuple[StoreServer, ...]:
        """Connect to each server of the URL, in its order."""
        ...

    def require_answers(self) -> str:
        """See that the user may receive answers; return the subject that it may subscribe to.

        Raises:
            StorePermissionError: it may not.
        """
        ...

    def grants(self, bucket: str) -> Mapping[Permission, Grant]:
        """Find out all permissions, whether or not the bucket exists.

        What is sent to find out is such that the servers refuse it themselves if the user may send
        it: nothing is stored, and no consumer is made.
        """
        ...

    def look(self, bucket: str) -> BucketSeen:
        """Ask the stream's leader about the bucket.

        Raises:
            StoreMissingError: the cluster says that the bucket does not exist.
        """
        ...

    def read_nothing(self, bucket: str) -> None:
        """Read the counters of a tenant that cannot exist, in the way in which all are read.

        A consumer is made for it, and removed.
        """
        ...


OpenStoreExamination = Callable[[], AbstractContextManager[StoreExamination]]
"""Raises SettingsError where a setting is missing or wrong; connects to nothing yet."""


@dataclass(frozen=True, slots=True)
class DatabaseServer:
    """Where one is connected: the server's version as it says it, the database and the role."""

    version: str
    database: str
    role: str


class DatabaseExamination(Protocol):
    """The control-plane database, on a connection of its own that can only read."""

    @property
    def server(self) -> DatabaseServer:
        """Where one is connected."""
        ...

    def require_usable(self) -> None:
        """See that version and encoding of the server are such as we need.

        Raises:
            DatabaseError: they are not.
        """
        ...

    def require_primary(self) -> None:
        """See that the server takes writings.

        Raises:
            DatabaseError: it does not.
        """
        ...

    def require_current(self) -> str:
        """Return the version of the schema, which is the one that this project works on.

        Raises:
            SchemaVersionError: it is missing, older or newer.
        """
        ...

    def missing_rights(self) -> tuple[str, ...]:
        """Name the rights that the role lacks, such as ``insert, update on capture``."""
        ...

    def bucket(self) -> str | None:
        """Return the bucket to which the database belongs; None: not known yet."""
        ...

    def now(self) -> datetime:
        """Return the present moment by the server's clock."""
        ...


OpenDatabaseExamination = Callable[[], AbstractContextManager[DatabaseExamination]]
"""Connects.

Raises SettingsError where a setting is missing, DatabaseError where there is no connection.
"""


@dataclass(frozen=True, slots=True)
class DagsterStorage:
    """Where Dagster keeps its runs and events, in words without a password.

    ``problem`` and ``to_do`` are told of one that works and is not for production.
    """

    said: str
    problem: str = ""
    to_do: str = ""


class Installation(Protocol):
    """What is installed and set on the host that looks."""

    def python(self) -> str:
        """Return the version of Python.

        Raises:
            InstallationError: it is none that this project is made for.
        """
        ...

    def packages(self) -> str:
        """Say in which versions the most important packages are installed.

        Raises:
            InstallationError: some are missing, or in versions that do not fit.
        """
        ...

    def tables_place(self) -> Path:
        """Return the directory of the tables, in which files can be made.

        Raises:
            SettingsError, TablesError: it cannot be used.
        """
        ...

    def dagster_storage(self) -> DagsterStorage | None:
        """Find out where Dagster keeps its runs and events, and connect to it.

        None: it is that of a running dev, which sees to it by itself.

        Raises:
            InstallationError: it cannot be used.
        """
        ...
