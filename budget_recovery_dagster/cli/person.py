"""Who gives a command, as far as this machine knows."""

import getpass
import os
import socket


def this_person() -> str:
    """Return the name of the account and of the host."""
    try:
        account = getpass.getuser()
    except (KeyError, OSError):
        # An account without a name, as in a container.
        account = f"uid {os.geteuid()}"
    return f"{account}@{socket.gethostname()}"
