"""Answer of the page Timeline, from the metrics and from the logs of the run's processes."""

import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from torchtitan.experiments.rl.command.history import read_history
from torchtitan.experiments.rl.tools.report.run import Json, ReportedRun
from torchtitan.experiments.rl.tools.report.series import (
    Points,
    metric_names,
    read_series,
    thinned,
)

LOG_BYTES = 256 * 1024
"""Number of bytes that are read of each log, from its end."""
MOST_EVENTS = 200
"""Maximum number of events that the page lists: the newest ones."""
MOST_WARNINGS = 50
"""Maximum number of warnings and errors of a process that the page lists: the newest ones."""
MOST_CHARACTERS = 1_000
"""Maximum number of characters of an event's text."""
MOST_TRACEBACK = 10_000
"""Maximum number of characters of a traceback, from its end."""
OURS = "torchtitan.experiments.rl."
"""Beginning of the names of the library's loggers."""
DEATHS = f"{OURS}fleet.restarts.deaths"
"""Name of the logger of processes' deaths and hangs. The console prints these by itself, so their
level is INFO."""
GRAVE_LEVELS = ("ERROR", "CRITICAL")

LogLine = dict[str, str]
"""Line of a log: ``time``, ``level``, ``logger``, ``process``, ``message`` and, with its traceback,
``exception``; "" if there is none."""


def timeline(run: ReportedRun) -> Json:
    """Return the answer of the page Timeline.

    Returns:
        ``restarts`` and ``busy``: metrics of the processes. ``processes``: last sign of life,
        warnings, errors and use of each. ``events``: how the run ended, if it failed; then deaths,
        hangs and errors, the newest first. ``traces``: names of the files of profiled steps.
    """
    busy = read_series(run, metric_names(run, like="perf/%/busy"))
    lines_by_process = {path.stem: list(_last_lines(path)) for path in logs(run.folder)}
    events = [line for lines in lines_by_process.values() for line in lines if _is_event(line)]
    events.sort(key=lambda line: line["time"])
    return {
        "restarts": read_series(run, metric_names(run, like="restarts/%")),
        "busy": {name: thinned(points) for name, points in busy.items()},
        "processes": [_process(run, name, lines, busy) for name, lines in lines_by_process.items()],
        "events": [*_failure(run), *_events(run, events, MOST_EVENTS)],
        "traces": [path.name for path in traces(run.folder)],
    }


def traces(folder: Path) -> list[Path]:
    """Return the files of profiled steps. A link is none."""
    return _plain_files(folder, "trace-steps-*-*.json")


def logs(folder: Path) -> list[Path]:
    """Return the logs of the run's processes. A link is none, nor is a file of a linked folder."""
    if (folder / "logs").is_symlink():
        return []
    return _plain_files(folder / "logs", "*.jsonl")


def _plain_files(folder: Path, pattern: str) -> list[Path]:
    return sorted(path for path in folder.glob(pattern) if path.is_file() and not path.is_symlink())


def _last_lines(path: Path) -> Iterator[LogLine]:
    """Yield the whole lines at the end of a log."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - LOG_BYTES))
            data = file.read(LOG_BYTES)
    except OSError:
        return
    lines = data.split(b"\n")[:-1]
    if size > LOG_BYTES:
        del lines[0]  # its beginning was not read
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:  # the process was killed while it wrote
            continue
        if isinstance(record, dict):
            names = ("time", "level", "logger", "process", "message", "exception")
            yield {name: str(record.get(name, "")) for name in names}


def _is_event(line: LogLine) -> bool:
    """Return True for an error, for a warning of the library, and for a death."""
    is_warning = line["level"] == "WARNING" and line["logger"].startswith(OURS)
    return line["level"] in GRAVE_LEVELS or is_warning or line["logger"] == DEATHS


def _failure(run: ReportedRun) -> list[Json]:
    """Return the error that ended the run, as the command printed it, as an event."""
    end = read_history(run.folder).end
    if end is None or end.how != "failed":
        return []
    return [
        {
            "time": datetime.fromtimestamp(end.time, UTC).isoformat(timespec="milliseconds"),
            "process": "command",
            "level": "FAILED",
            "text": run.without_secrets(end.why or ""),
            "traceback": "",
        }
    ]


def _events(run: ReportedRun, lines: list[LogLine], most: int) -> list[Json]:
    """Return the last lines as events, the newest first."""
    return [
        {
            "time": line["time"],
            "process": line["process"],
            "level": line["level"],
            "text": run.without_secrets(line["message"])[:MOST_CHARACTERS],
            "traceback": run.without_secrets(line["exception"])[-MOST_TRACEBACK:],
        }
        for line in reversed(lines[-most:])
    ]


def _process(run: ReportedRun, name: str, lines: list[LogLine], busy: dict[str, Points]) -> Json:
    """Return what the page says of one process.

    Args:
        name: name of the log. The use of generator-0 is perf/generator_0/busy, and that of
            trainer-0 is perf/trainer_rank_0/busy.
    """
    metric = re.sub(r"^trainer_", "trainer_rank_", name.replace("-", "_"))
    points = busy.get(f"perf/{metric}/busy", [])
    shares = [share for _, share in points if share is not None]
    listed = [line for line in lines if line["level"] in ("WARNING", *GRAVE_LEVELS)]
    errors = sum(line["level"] in GRAVE_LEVELS for line in listed)
    return {
        "process": name,
        "last": lines[-1]["time"] if lines else None,
        "warnings": len(listed) - errors,
        "errors": errors,
        "listed": _events(run, listed, MOST_WARNINGS),
        "busy": shares[-1] if shares else None,
        "busy_mean": sum(shares) / len(shares) if shares else None,
    }
