"""Processes of this machine, from /proc."""

import os

_ZOMBIE = "Z"


def is_running(pid: int) -> bool:
    """Return whether a process is running; a zombie is not."""
    state = _state_and_parent(pid)
    return state is not None and state[0] != _ZOMBIE


def descendants(pid: int) -> set[int]:
    """Return the running descendants of a process."""
    children: dict[int, list[int]] = {}
    for name in (entry.name for entry in os.scandir("/proc")):
        if name.isdecimal():
            state = _state_and_parent(int(name))
            if state is not None and state[0] != _ZOMBIE:
                children.setdefault(state[1], []).append(int(name))
    found: set[int] = set()
    waiting = [pid]
    while waiting:
        below = children.get(waiting.pop(), [])
        found.update(below)
        waiting.extend(below)
    return found


def _state_and_parent(pid: int) -> tuple[str, int] | None:
    # Tests list all processes many times a second, for which pathlib is too slow.
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as stat:  # noqa: PTH123
            state, parent = stat.read(1024).rpartition(b")")[2].split()[:2]
    except (FileNotFoundError, ProcessLookupError):
        return None
    return state.decode(), int(parent)
