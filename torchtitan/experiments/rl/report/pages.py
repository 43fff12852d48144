"""What the pages of a run ask for, by their names."""

from collections.abc import Callable
from typing import Any

from torchtitan.experiments.rl.report.evaluations import evaluations
from torchtitan.experiments.rl.report.overview import ledger, overview
from torchtitan.experiments.rl.report.run import ReportedRun
from torchtitan.experiments.rl.report.timeline import timeline

PAGES: dict[str, Callable[[ReportedRun], dict[str, Any]]] = {
    "overview": overview,
    "ledger": ledger,
    "evaluations": evaluations,
    "timeline": timeline,
}
