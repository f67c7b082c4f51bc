"""Free ports of this machine."""

import socket
from contextlib import ExitStack


def unused_ports(count: int) -> list[int]:
    """Return different free ports."""
    with ExitStack() as stack:
        listeners = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)
        ]
        return [listener.getsockname()[1] for listener in listeners]


def unused_port() -> int:
    """Return a free port."""
    return unused_ports(1)[0]
