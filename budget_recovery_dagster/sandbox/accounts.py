"""Under which account a server runs: PostgreSQL refuses to run as root, and rightly so."""

import os
import pwd
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from budget_recovery_dagster.sandbox.errors import UnusableDataError

ROOT = 0
_UNPRIVILEGED = ("postgres", "nobody")


@dataclass(frozen=True, slots=True)
class Account:
    """A user account of this machine."""

    name: str
    uid: int
    gid: int

    @classmethod
    def of(cls, uid: int) -> Self:
        """Return the account with this id, also where it has no name."""
        try:
            entry = pwd.getpwuid(uid)
        except KeyError:
            return cls(f"uid {uid}", uid, uid)
        return cls(entry.pw_name, entry.pw_uid, entry.pw_gid)

    def may_run(self, *command: str | Path) -> bool:
        """Whether a short command succeeds as this account: the kernel's own answer."""
        try:
            ended = subprocess.run(
                [str(part) for part in command],
                check=False,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                cwd="/",
                user=self.uid,
                group=self.gid,
                extra_groups=[],
                timeout=30,
            )
        except (OSError, subprocess.SubprocessError):
            return False
        return ended.returncode == 0


def account_to_drop_to(owner: int | None) -> Account | None:
    """Say as whom a server runs whose existing data belong to ``owner``; None: as this process.

    As root that is the owner of the data, without data ``postgres`` if there is such an account,
    else ``nobody``.

    Raises:
        UnusableDataError: the data belong to root, or this is not root and they are another's.
    """
    me = os.geteuid()
    if owner is not None and ((me == ROOT and owner == ROOT) or me not in (ROOT, owner)):
        raise UnusableDataError(
            f"The database files belong to {Account.of(owner).name}, and this is"
            f" {Account.of(me).name}.",
            "start as their owner, or choose another data directory.",
        )
    if me != ROOT:
        return None
    return Account.of(owner) if owner is not None else _unprivileged()


def _unprivileged() -> Account:
    for name in _UNPRIVILEGED:
        try:
            return Account.of(pwd.getpwnam(name).pw_uid)
        except KeyError:
            continue
    raise UnusableDataError(
        "PostgreSQL does not run as root, and there is neither an account postgres nor nobody.",
        "start as a normal user.",
    )
