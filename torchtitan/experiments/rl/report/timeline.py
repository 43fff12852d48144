"""The page Timeline: traces of profiled steps, and how the run's processes fared."""

import re
from pathlib import Path
from typing import Any

from torchtitan.experiments.rl.report.overview import metric_names, series, thinned
from torchtitan.experiments.rl.report.run import ReportedRun

TRACE = re.compile(r"trace-steps-\d+-\d+\.json")


def timeline(run: ReportedRun) -> dict[str, Any]:
    """Restarts by part, and the traces of profiled steps."""
    return {
        "name": run.name,
        "restarts": series(run, metric_names(run, like="restarts/%")),
        "busy": {name: thinned(points) for name, points in series(run, metric_names(run, like="perf/%/busy")).items()},
        "traces": [path.name for path in traces(run.folder)],
        "logs": sorted(path.name for path in (run.folder / "logs").glob("*.jsonl") if path.is_file()),
    }


def traces(folder: Path) -> list[Path]:
    """Files of profiled steps; a link is none."""
    return sorted(path for path in folder.iterdir() if TRACE.fullmatch(path.name) and path.is_file() and not path.is_symlink())
