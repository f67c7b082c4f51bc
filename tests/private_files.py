"""Whether other accounts can read files."""

import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path


def require_private(directory: Path, *, allowed: Mapping[Path, int] | None = None) -> int:
    """Require 0700 and 0600 of everything below, other modes only as allowed; return the number."""
    allowed = allowed or {}
    found = [
        path
        for path in directory.rglob("*")
        # The account of the database runs a copy of its programs.
        if not path.is_symlink() and "embedded-postgres-" not in str(path)
    ]
    modes = {}
    for path in found:
        # Servers that run remove files meanwhile.
        with suppress(FileNotFoundError):
            modes[path] = stat.S_IMODE(path.stat().st_mode)
    wide = {
        str(path): oct(mode)
        for path, mode in modes.items()
        if mode & 0o077 and mode != allowed.get(path)
    }
    assert not wide, wide
    return len(modes)
