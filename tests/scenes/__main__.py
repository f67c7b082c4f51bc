"""The command ``python -m tests.scenes``: record the scenes, or compare two recordings."""

import argparse
import json
import signal
import sys
from pathlib import Path
from typing import Any

from tests.scenes.compare import differences
from tests.scenes.record import record
from tests.scenes.script import SCENES


def main() -> int:
    """Return 0, or 1 if compared recordings differ."""
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    parser = argparse.ArgumentParser(prog="python -m tests.scenes")
    parser.add_argument("output", nargs="?", type=Path, metavar="OUT.json", help="where to record")
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("A.json", "B.json"))
    parser.add_argument(
        "--only",
        action="append",
        choices=sorted(SCENES),
        help="record only this scene; OUT.json keeps its other scenes",
    )
    arguments = parser.parse_args()
    if arguments.compare:
        before, after = (json.loads(path.read_text()) for path in arguments.compare)
        found = list(differences(before, after))
        sys.stdout.writelines(f"{line}\n" for line in found)
        return 1 if found else 0
    if arguments.output is None:
        parser.error("name the file to record into, or two recordings to --compare.")
    recorded: dict[str, Any] = {}
    if arguments.only and arguments.output.exists():
        recorded = json.loads(arguments.output.read_text(encoding="utf-8"))
    for name, documents in record(arguments.only or list(SCENES)):
        recorded[name] = documents
        text = json.dumps(recorded, indent=1, ensure_ascii=False)
        arguments.output.write_text(f"{text}\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
