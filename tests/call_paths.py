"""The files of the package that a capture, a restore and a preview run through.

``python -m tests.call_paths`` traces all three on real servers and prints, for each, the files in
the order in which a function of theirs is first called. The code of modules and classes does not
count, nor does what it calls while a module is imported; methods that ``dataclasses`` generates
belong to no file. ``errors.py``, ``settings.py`` and ``__init__.py`` are left out: everything
passes through them.
"""

import contextlib
import importlib.metadata
import importlib.util
import inspect
import io
import os
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from tests.scenes.record import in_own_process
from tests.scenes.servers import Servers, running_servers
from tests.scenes.stage import Stage, stage

PACKAGE = "budget_recovery_dagster"
# No hour may end during a trace; also a busy machine takes less than this.
_LONGEST_TRACE = timedelta(seconds=90)
NOT_COUNTED = frozenset({"errors.py", "settings.py", "__init__.py"})


def trace_capture(servers: Servers) -> list[str]:
    """Trace a run of the hourly job, with its checks, on a store that was captured before."""
    return in_own_process(_traced, "capture", servers)


def trace_restore(servers: Servers) -> list[str]:
    """Trace a loss from the sensor that finds it through the restore until all is HEALTHY."""
    return in_own_process(_traced, "restore", servers)


def trace_preview(servers: Servers) -> list[str]:
    """Trace ``budget-recovery preview`` from its arguments to the printed table."""
    return in_own_process(_traced, "preview", servers)


TRACES: dict[str, Callable[[Servers], list[str]]] = {
    "capture": trace_capture,
    "restore": trace_restore,
    "preview": trace_preview,
}


def _traced(path: str, servers: Servers) -> list[str]:
    with stage(servers, f"path_{path}", _LONGEST_TRACE) as on:
        on.command("migrate")
        on.gateway.spend("acme", "team", "lifetime", {None: "30", "user:alice": "20"})
        on.gateway.spend("globex", "total", on.month, {None: "5"})
        on.capture("first capture")
        on.check("check")
        return _WAYS[path](on)


def _capture(on: Stage) -> list[str]:
    on.gateway.spend("acme", "team", "lifetime", {None: "31", "user:alice": "21"})
    with _tracing() as files:
        result = on.job("capture", "hourly_snapshot_job")
    assert result.success
    assert result.get_asset_check_evaluations()
    return files


def _restore(on: Stage) -> list[str]:
    on.gateway.recreate()
    with _tracing() as files:
        on.check("check that finds the loss")
        result = on.restore("restore")
    assert result.success
    with on.database() as connection:
        row = connection.execute("select state from budget_recovery.store").fetchone()
    assert row is not None
    assert str(row[0]) == "healthy"
    return files


def _preview(on: Stage) -> list[str]:
    on.gateway.purge(on.gateway.counter("acme", "team", "lifetime", "user:alice"))
    (found,) = importlib.metadata.entry_points(group="console_scripts", name="budget-recovery")
    printed = io.StringIO()
    with _tracing() as files, contextlib.redirect_stdout(printed):
        command: Any = found.load()
        command.main(args=["preview"], prog_name=found.name, standalone_mode=False)
    assert "acme" in printed.getvalue()
    return files


_WAYS: dict[str, Callable[[Stage], list[str]]] = {
    "capture": _capture,
    "restore": _restore,
    "preview": _preview,
}


@contextlib.contextmanager
def _tracing() -> Iterator[list[str]]:
    """Provide a list that fills with the files whose functions are called, in all threads."""
    spec = importlib.util.find_spec(PACKAGE)
    assert spec is not None
    assert spec.origin is not None
    root = f"{Path(spec.origin).parent}{os.sep}"
    seen: set[CodeType] = set()
    files: list[str] = []

    def profile(frame: FrameType, event: str, _argument: object) -> None:
        code = frame.f_code
        if event != "call" or code in seen or not code.co_filename.startswith(root):
            return
        if _is_import(frame, root):
            # A function that a module calls while it is imported may be called later, too.
            return
        seen.add(code)
        file = code.co_filename.removeprefix(root)
        if file not in files and Path(file).name not in NOT_COUNTED:
            files.append(file)

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        yield files
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def _is_import(frame: FrameType, root: str) -> bool:
    """Whether this is the code of one of the package's modules or classes, or called by it."""
    each: FrameType | None = frame
    while each is not None:
        code = each.f_code
        # Only the code of functions is optimized.
        if not code.co_flags & inspect.CO_OPTIMIZED and code.co_filename.startswith(root):
            return True
        each = each.f_back
    return False


def main() -> None:
    """Print the three paths."""
    with running_servers() as servers:
        for name, trace in TRACES.items():
            files = trace(servers)
            sys.stdout.write(f"{name}: {len(files)} files\n")
            sys.stdout.writelines(f"  {file}\n" for file in files)


if __name__ == "__main__":
    main()
