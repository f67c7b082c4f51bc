"""Ports that nobody listens on now."""

import socket
from contextlib import ExitStack


def unused_ports(count: int) -> list[int]:
    """Return different ports of this machine."""
    with ExitStack() as stack:
        listeners = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)
        ]
        return [listener.getsockname()[1] for listener in listeners]


def unused_port() -> int:
    """Return one of them."""
    return unused_ports(1)[0]
