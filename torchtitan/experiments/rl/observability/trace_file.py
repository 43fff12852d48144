"""Writes a profile as one file that chrome://tracing and Perfetto (ui.perfetto.dev) open. Neither sends it anywhere.

Chrome's trace format: a complete event ("X") for each span, and metadata events ("M") that name processes and rows. Times are
in microseconds since the first event.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchtitan.experiments.rl.process.trace import Event


def write_trace(path: Path, processes: Mapping[str, Sequence[Event]]) -> None:
    """
    Args:
        processes: events by the name of the process, in the order in which the processes are shown.
    """
    text = json.dumps({"displayTimeUnit": "ms", "traceEvents": trace_events(processes)}, default=str)
    path.write_text(text + "\n", encoding="utf-8")


def trace_events(processes: Mapping[str, Sequence[Event]]) -> list[dict[str, Any]]:
    """The events of the file. Process ids and thread ids are places in the order shown."""
    zero = min((event.start_ns for events in processes.values() for event in events), default=0)
    written: list[dict[str, Any]] = []
    for pid, (process, events) in enumerate(processes.items(), start=1):
        written.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": process}})
        written.append({"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}})
        rows = {row: tid for tid, row in enumerate(sorted({event.row for event in events}, key=_place), start=1)}
        for row, tid in rows.items():
            written.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": row}})
            written.append({"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}})
        # Of two events that begin together, the longer one is outside.
        for event in sorted(events, key=lambda event: (event.start_ns, -event.duration_ns)):
            written.append(
                {
                    "ph": "X",
                    "name": event.name,
                    "pid": pid,
                    "tid": rows[event.row],
                    "ts": (event.start_ns - zero) / 1e3,
                    "dur": event.duration_ns / 1e3,
                    "args": event.details,
                }
            )
    return written


def _place(row: str) -> tuple[str, int]:
    """Lanes of a kind by their number."""
    kind, _, number = row.rpartition(" ")
    return (kind, int(number)) if number.isdigit() else (row, 0)
