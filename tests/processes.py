"""Processes of this machine, from /proc."""

from pathlib import Path

_ZOMBIE = "Z"


def is_running(pid: int) -> bool:
    """Return whether a process is running; a zombie is not."""
    state = _state_and_parent(pid)
    return state is not None and state[0] != _ZOMBIE


def descendants(pid: int) -> set[int]:
    """Return the running descendants of a process."""
    children: dict[int, list[int]] = {}
    for directory in Path("/proc").glob("[0-9]*"):
        child = int(directory.name)
        state = _state_and_parent(child)
        if state is not None and state[0] != _ZOMBIE:
            children.setdefault(state[1], []).append(child)
    found: set[int] = set()
    waiting = [pid]
    while waiting:
        below = children.get(waiting.pop(), [])
        found.update(below)
        waiting.extend(below)
    return found


def _state_and_parent(pid: int) -> tuple[str, int] | None:
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except (FileNotFoundError, ProcessLookupError):
        return None
    return state, int(parent)
