"""Where the servers of a running ``budget-recovery dev`` are, told by it in its data directory.

So other commands find them without any setting. A file that is left by one that was killed does not
count: the kernel knows whether anybody holds the directory.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from budget_recovery_dagster.sandbox.data_directory import DEV_FILE, is_held
from budget_recovery_dagster.sandbox.errors import NoRunningDevError, UnusableDataError

_PRIVATE = 0o600


@dataclass(frozen=True, slots=True)
class RunningDev:
    """What runs; the URL of a server that was given to it is None, and its password stays there."""

    ui_url: str
    bucket: str
    check_interval_seconds: int
    nats_url: str | None
    postgres_url: str | None


@contextmanager
def announced(data_dir: Path, running: RunningDev) -> Iterator[None]:
    """Tell in the held directory what runs, to its owner only, until the context ends."""
    file = data_dir / DEV_FILE
    unfinished = file.with_suffix(".unfinished")
    unfinished.unlink(missing_ok=True)
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _PRIVATE)
    with os.fdopen(descriptor, "w", encoding="utf-8") as written:
        json.dump(asdict(running), written)
    # Whoever reads it reads all of it.
    unfinished.replace(file)
    try:
        yield
    finally:
        file.unlink(missing_ok=True)


def find_running_dev(data_dir: Path) -> RunningDev:
    """Return what runs on a data directory.

    Raises:
        NoRunningDevError: nothing does, or it has not come up yet.
        UnusableDataError: this account may not see it, or another version has told it.
    """
    directory = data_dir.expanduser().absolute()
    try:
        if not is_held(directory):
            raise NoRunningDevError(
                f"No budget-recovery dev runs on {directory}.",
                "for servers of your own load the environment of the services, which has "
                "BUDGET_RECOVERY_POSTGRES_URL; else start `budget-recovery dev` there, or name "
                "its directory with --data-dir.",
            )
        return RunningDev(**json.loads((directory / DEV_FILE).read_text(encoding="utf-8")))
    except FileNotFoundError as error:
        raise NoRunningDevError(
            f"The budget-recovery dev on {directory} is not up: it is starting or stopping.",
            "wait until it says where to look, and try again.",
        ) from error
    except OSError as error:
        raise UnusableDataError(
            f"The data directory {directory} cannot be used: {error.strerror}.",
            "use the account that runs `budget-recovery dev`, or another --data-dir.",
        ) from error
    except (TypeError, ValueError) as error:
        raise UnusableDataError(
            f"{directory / DEV_FILE} does not say what runs: {error}.",
            "restart `budget-recovery dev`; it may be of another version than this command.",
        ) from error
