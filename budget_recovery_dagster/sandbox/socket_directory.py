"""Where unix sockets lie: their paths may not be longer than about a hundred bytes."""

import hashlib
import os
import stat
from pathlib import Path

from budget_recovery_dagster.sandbox.accounts import Account
from budget_recovery_dagster.sandbox.errors import UnusableDataError

_PRIVATE = 0o700


def private_socket_dir(of: Path, account: Account | None = None) -> Path:
    """Make, or find again, the directory for sockets of the server whose data are in ``of``.

    Only ``account`` (None: this process's) may enter it. Its short name can be foreseen, so an
    existing one is believed only with the right owner and mode.

    Raises:
        UnusableDataError: something else stands in its place.
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
                f"{directory} should be a private directory of {Account.of(uid).name} and is not.",
                "look at who made it, and remove it.",
            ) from None
    return directory
