"""Measures the models one after the other, and ends early at a signal."""

import sys
from pathlib import Path
from typing import Any

from monarch.actor import shutdown_context, this_proc

from torchtitan.experiments.rl.compat.monarch import MONARCH_OUTPUT, printed_to
from torchtitan.experiments.rl.controller.session import SIGNAL_POLL_S, Signals, cause
from torchtitan.experiments.rl.evaluate.checked import Candidate
from torchtitan.experiments.rl.evaluate.measure import Evaluator
from torchtitan.experiments.rl.observability.console import write_line
from torchtitan.experiments.rl.printable import printable_line
from torchtitan.experiments.rl.process.descendants import descendants, kill_descendants
from torchtitan.experiments.rl.process.setup import quiet_libraries
from torchtitan.experiments.rl.process.temporary import TemporaryFolder
from torchtitan.experiments.rl.tasks.validation_config import ValidationConfig


def measure_all(models: list[Candidate], temporary: TemporaryFolder) -> tuple[int, list[dict[str, Any]]]:
    """Returns the exit code, and what ``Evaluator.measure`` returned for each model that was measured whole."""
    signals = Signals()
    results: list[dict[str, Any]] = []
    stops: list[Any] = []
    try:
        for number, model in enumerate(models):
            sizes = [f"{name} (at most {plan.examples} x {plan.attempts})" for name, plan in _scheduled(model)]
            write_line(sys.stderr, printable_line(f"measuring   {model.label} on {', '.join(sizes)}"))
            with printed_to(Path(model.run_dir) / MONARCH_OUTPUT):
                here = this_proc()
            evaluator = here.spawn(
                f"evaluator_{number}", Evaluator, model.config, model.plan, run_dir=model.run_dir, endpoint=model.endpoint
            )
            running = evaluator.measure.call_one()
            while True:
                try:
                    result = running.get(timeout=SIGNAL_POLL_S)
                    break
                except TimeoutError:
                    temporary.note_shared_memory(descendants())
                    if len(signals.received) > 1:
                        write_line(sys.stderr, "stopped at once")
                        kill_descendants()
                        return 128 + signals.received[0], results
                    if signals.received and not stops:
                        write_line(sys.stderr, "stopping; once more stops at once")
                        stops.append(evaluator.request_stop.call_one())
                except Exception as error:
                    write_line(sys.stderr, f"error: {printable_line(cause(error))} (logs in {model.run_dir}/logs)")
                    return 1, results
            if result["metrics"] is None:
                ended = sum(map(len, result["examples"].values()))
                write_line(
                    sys.stderr, printable_line(f"stopped: {ended} examples of it were measured, recorded in {model.run_dir}")
                )
                return 128 + signals.received[0], results
            results.append(result)
        return 0, results
    finally:
        with quiet_libraries():
            shutdown_context().get()


def _scheduled(model: Candidate) -> list[tuple[str, ValidationConfig]]:
    return [(name, task.validation_schedule or model.config.validation) for name, task in model.config.tasks.items()]
