"""The command ``python -m tests.detection_model``: how often detection is wrong, as tables."""

import argparse
import sys
from concurrent.futures import ProcessPoolExecutor

from tests.detection_model.histories import History
from tests.detection_model.report import Report, merged, report_on

_CHUNK = 250


def play(count: int, seed: str) -> Report:
    """Play histories on all processors."""
    with ProcessPoolExecutor() as pool:
        works = [
            pool.submit(report_on, min(_CHUNK, count - first), seed, first=first)
            for first in range(0, count, _CHUNK)
        ]
        return merged(work.result() for work in works)


def main() -> int:
    """Return 0, or 1 if a decision was wrong without a known reason."""
    parser = argparse.ArgumentParser(prog="python -m tests.detection_model")
    parser.add_argument("histories", nargs="?", type=int, default=1000)
    parser.add_argument("--seed", default="1", help="another one plays other histories")
    parser.add_argument("--show", metavar="'SEED NUMBER'", help="show the steps of one history")
    arguments = parser.parse_args()
    if arguments.show:
        history = History(arguments.show)
        history.play()
        sys.stdout.writelines(f"{step}\n" for step in history.steps)
        return 0
    report = play(arguments.histories, arguments.seed)
    sys.stdout.writelines(f"{line}\n" for line in report.lines())
    sys.stdout.writelines(f"\n{fault}\n" for fault in report.faults)
    return 1 if report.faults else 0


if __name__ == "__main__":
    sys.exit(main())
