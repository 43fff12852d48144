"""``python -m tests.zoo [-k PATTERN] [--verbose]``: a line a case, and "N of N" at the end."""

import argparse
import json
import sys
import time
from pathlib import Path

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
    parser.add_argument("--every", type=int, default=1, help="only each so manieth case")
    parser.add_argument("--json", metavar="FILE", help="also write the problems of each case")
    options = parser.parse_args()
    started, held, count = time.monotonic(), 0, 0
    problems: dict[str, list[str]] = {}
    for result in run_cases(pattern=options.k, every=options.every, at_once=options.jobs):
        count += 1
        problems[result.name] = result.problems
        held += not result.problems
        shown = result.problems if options.verbose else result.problems[:1]
        lines = [
            f"{'FAIL' if shown else 'ok  '} {result.seconds:5.2f} s  {result.name}",
            *(f"       {text}" for text in shown),
        ]
        text = "\n".join(map(printable_line, lines))
        print(text.encode(errors="backslashreplace").decode(), flush=True)
    if options.json is not None:
        Path(options.json).write_text(json.dumps(problems))
    print(f"{held} of {count} in {time.monotonic() - started:.0f} s")
    return 0 if held == count else 1


if __name__ == "__main__":
    sys.exit(main())
