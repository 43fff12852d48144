"""``python -m tests.zoo [-k PATTERN] [--verbose]``: a line a case, and "N of N" at the end."""

import argparse
import sys
import time

from tests.zoo.report import run_cases
from torchtitan.experiments.rl.printable import printable_line


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.zoo", description=__doc__)
    parser.add_argument(
        "-k", metavar="PATTERN", default="", help="only cases whose name holds this text"
    )
    parser.add_argument(
        "--verbose", action="store_true", help="every problem of a case, not only the first"
    )
    parser.add_argument("--jobs", type=int, default=2, help="children at once")
    options = parser.parse_args()
    started, held, count = time.monotonic(), 0, 0
    for result in run_cases(pattern=options.k, at_once=options.jobs):
        count += 1
        held += not result.problems
        shown = result.problems if options.verbose else result.problems[:1]
        lines = [
            f"{'FAIL' if shown else 'ok  '} {result.seconds:5.2f} s  {result.name}",
            *(f"       {text}" for text in shown),
        ]
        text = "\n".join(map(printable_line, lines))
        print(text.encode(errors="backslashreplace").decode(), flush=True)
    print(f"{held} of {count} in {time.monotonic() - started:.0f} s")
    return 0 if held == count else 1


if __name__ == "__main__":
    sys.exit(main())
