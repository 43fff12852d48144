"""The page Timeline: traces of profiled steps, and how the run's processes fared, by its metrics and logs."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchtitan.experiments.rl.report.overview import metric_names, series, thinned
from torchtitan.experiments.rl.report.run import ReportedRun

TRACE = re.compile(r"trace-steps-\d+-\d+\.json")
LOG_BYTES = 256 * 1024
"""Read of each log, from its end."""
MOST_EVENTS = 200
MOST_CHARACTERS = 1_000
"""Of an event."""
OURS = "torchtitan.experiments.rl."
HEALTH = tuple(f"{OURS}controller.{part}" for part in ("supervision", "restarts", "hang_watch", "part"))
"""Loggers whose every line is about the life of a process."""
_GRAVE = ("ERROR", "CRITICAL")


def timeline(run: ReportedRun) -> dict[str, Any]:
    """Restarts by part; use, last sign of life, deaths, hangs and errors of the processes; the traces of profiled steps."""
    busy = series(run, metric_names(run, like="perf/%/busy"))
    lines = {path.stem: list(_lines(path)) for path in logs(run.folder)}
    processes = [_process(name, own, busy) for name, own in sorted(lines.items())]
    events = sorted((line for own in lines.values() for line in own if _is_event(line)), key=lambda line: line["time"])
    return {
        "name": run.name,
        "restarts": series(run, metric_names(run, like="restarts/%")),
        "busy": {name: thinned(points) for name, points in busy.items()},
        "processes": processes,
        "events": [
            {name: line[name] for name in ("time", "process", "level")}
            | {"text": run.without_secrets(line["message"])[:MOST_CHARACTERS]}
            for line in reversed(events[-MOST_EVENTS:])
        ],
        "traces": [path.name for path in traces(run.folder)],
    }


def traces(folder: Path) -> list[Path]:
    """Files of profiled steps; a link is none."""
    return sorted(path for path in folder.iterdir() if TRACE.fullmatch(path.name) and path.is_file() and not path.is_symlink())


def logs(folder: Path) -> list[Path]:
    """Of the run's processes; a link is none, nor is what lies in a linked folder."""
    own = folder / "logs"
    return [] if own.is_symlink() else sorted(p for p in own.glob("*.jsonl") if p.is_file() and not p.is_symlink())


def _lines(path: Path) -> Iterator[dict[str, str]]:
    """Whole lines at the end of a log, each with the texts ``time``, ``level``, ``logger``, ``process`` and ``message``."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - LOG_BYTES))
            data = file.read(LOG_BYTES)
    except OSError:
        return
    for line in data.split(b"\n")[1 if size > LOG_BYTES else 0 : -1]:
        try:
            record = json.loads(line)
        except ValueError:  # a process that was killed in mid-write
            continue
        if isinstance(record, dict):
            yield {name: str(record.get(name, "")) for name in ("time", "level", "logger", "process", "message")}


def _is_event(line: dict[str, str]) -> bool:
    ours = line["logger"].startswith(OURS)
    return line["level"] in _GRAVE or (ours and line["level"] == "WARNING") or line["logger"].startswith(HEALTH)


def _process(name: str, lines: list[dict[str, str]], busy: dict[str, Any]) -> dict[str, Any]:
    """``name``: of its log. The use of generator-0 is perf/generator_0/busy, that of trainer-0 perf/trainer_rank_0/busy."""
    metric = re.sub(r"^trainer_", "trainer_rank_", name.replace("-", "_"))
    known = [value for _, value in busy.get(f"perf/{metric}/busy", []) if value is not None]
    return {
        "process": name,
        "last": lines[-1]["time"] if lines else None,
        "warnings": sum(line["level"] == "WARNING" for line in lines),
        "errors": sum(line["level"] in _GRAVE for line in lines),
        "busy": known[-1] if known else None,
        "busy_mean": sum(known) / len(known) if known else None,
    }
