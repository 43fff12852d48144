"""The command that measures a policy without training, ``rl-evaluate``.

    python -m torchtitan.experiments.rl.evaluate --config NAME [--model FOLDER | --endpoint URL]
        [overrides]

Exit codes: 0 done; 1 it failed, or a task has no figure because every attempt failed; 2 the config
can't be evaluated, and nothing was spawned; 130, 143, 129 stopped by a signal.
"""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan.experiments.rl.command.command_line import (
    Command,
    check_whole_policy,
    find_model,
    load_config,
    parse_with_own,
    served_by,
)
from torchtitan.experiments.rl.command.hub import model_folder
from torchtitan.experiments.rl.command.run_folder import AGAINST_FOLDER, EVALUATION_FILE
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.observability.console import typed_command, write_line
from torchtitan.experiments.rl.printable import one_sentence, printable_line
from torchtitan.experiments.rl.process.entry import of_command, run_command
from torchtitan.experiments.rl.process.host import other_users_line
from torchtitan.experiments.rl.process.logs import quiet_libraries
from torchtitan.experiments.rl.process.setup import set_up_process
from torchtitan.experiments.rl.process.temporary import TemporaryFolder

if TYPE_CHECKING:  # imported after the process is set up
    from torchtitan.experiments.rl.tools.evaluate import Candidate, Result


@of_command()
def main(arguments: list[str] | None) -> int:
    options, command = parse_options(arguments)
    set_up_process()
    with quiet_libraries(), command.naming_the_runs_folder():
        models = _prepare(options, command)
    from torchtitan.experiments.rl.tools.evaluate import measure_all, result_lines

    temporary = TemporaryFolder()
    if line := other_users_line():
        write_line(sys.stderr, printable_line(line))
    try:
        code, results = measure_all(models, temporary)
    finally:
        temporary.remove()
    if not results:
        return code
    result = summarize(command.config_name, models, results)
    text = json.dumps(result, indent=2) + "\n"
    (models[0].run_dir / EVALUATION_FILE).write_text(text, encoding="utf-8")
    if options.json:
        print(json.dumps(result))
    else:
        print("\n".join(map(printable_line, result_lines(result))))
    errors = _tasks_without_rewards(models, results)
    for line in errors:
        print(printable_line(f"error: {line}"), file=sys.stderr)
    return code or int(bool(errors))


def _tasks_without_rewards(models: "list[Candidate]", results: "list[Result]") -> list[str]:
    """Return a line for each task of a model in which every attempt failed."""
    lines = []
    for model, result in zip(models, results, strict=False):
        for task, examples in result.examples.items():
            if any(example.rewards for example in examples):
                continue
            why = one_sentence(result.causes.get(task, "there were none"))
            lines.append(
                f"tasks.{task}: no attempt of {model.label} has a reward: {why} "
                f"(logs in {model.run_dir}/logs)"
            )
    return lines


def parse_options(arguments: list[str] | None) -> tuple[argparse.Namespace, Command]:
    """Return the command's own options, and those of a run's command.

    Raises:
        ConfigError: an option lacks its value, or two exclude each other.
    """
    parser = argparse.ArgumentParser(
        prog=typed_command("evaluate"),
        description="Measure a policy on the validation sets of a config's tasks, without "
        "training. The config's fields can be overridden as a run's: --validation.examples 64, "
        "--validation.temperature 1.",
        epilog="Also as a run's command: --module MODULE, --run-dir FOLDER (for the records and "
        "the result).",
        allow_abbrev=False,
        exit_on_error=False,
    )
    parser.add_argument(
        "--model",
        metavar="FOLDER",
        help="the policy, instead of the config's model: a run's folder (its newest policy; "
        "--config is not needed then), or a hub folder, such as a run's policy/step-100",
    )
    parser.add_argument(
        "--endpoint",
        metavar="URL",
        help="the policy is served by a vLLM server, such as http://host:8000/v1; several of one "
        "model with commas",
    )
    parser.add_argument(
        "--against",
        metavar="FOLDER|URL",
        help="a second model, measured on the same examples and compared",
    )
    parser.add_argument(
        "--tasks",
        nargs="+",
        default=[],
        metavar="TASK",
        help="only these (default: all with a validation set)",
    )
    parser.add_argument(
        "--attempts", type=int, metavar="K", help="rollouts of each example (default: the config's)"
    )
    parser.add_argument(
        "--json", action="store_true", help="print the result as one line of JSON, and nothing else"
    )
    options, command = parse_with_own(parser, arguments)
    if options.model is not None and options.endpoint is not None:
        raise ConfigError(
            "--endpoint",
            options.endpoint,
            "the policy is a folder or a server: leave this or --model out",
        )
    return options, command


def _prepare(options: argparse.Namespace, command: Command) -> "list[Candidate]":
    """Check everything before a process is spawned, and make the folders.

    Returns:
        The model, and the one that it is compared with if ``--against`` names one.

    Raises:
        ConfigError: an option or a field can't be evaluated.
    """
    from torchtitan.experiments.rl.command.resume import save_config
    from torchtitan.experiments.rl.command.run_folder import make_run_folder
    from torchtitan.experiments.rl.tools import evaluate as measure

    find_model(command)
    config = measure.evaluated_config(
        load_config(command), tasks=options.tasks, attempts=options.attempts
    )
    check_whole_policy(options, config)

    server = None
    if options.endpoint is not None:
        server = served_by(options, options.endpoint, "--endpoint", config)
    policies = [(config, server)]
    if options.against is not None:
        if options.against.startswith(("http://", "https://")):
            policies.append((config, served_by(options, options.against, "--against", config)))
        else:
            folder = model_folder(options.against, field="--against")
            model = replace(config.model, hf_assets_path=folder)
            policies.append((replace(config, model=model), None))
    plans = [measure.checked_plan(config, server) for config, server in policies]

    name = f"evaluate-{command.config_name}"
    run_dir = Path(make_run_folder(command.run_dir, config.output_dir, name, keep=True))
    models: list[Candidate] = []
    for (config, server), (plan, sizes) in zip(policies, plans, strict=True):
        model_dir = run_dir / AGAINST_FOLDER if models else run_dir
        model_dir.mkdir(exist_ok=True)
        save_config(model_dir, config)
        models.append(measure.Candidate(config, plan, server, model_dir, sizes))
    return models


def summarize(
    config_name: str | None, models: "list[Candidate]", results: "list[Result]"
) -> dict[str, Any]:
    """Return what ``--json`` prints.

    For each model it has ``metrics``, as a run's validation reports them, and ``tasks``, with
    intervals.
    """
    from torchtitan.experiments.rl.tools.evaluate import paired

    comparison = None
    if len(results) == 2:
        first, second = (result.examples for result in results)
        comparison = {task: paired(first[task], second[task]) for task in first}
    summaries = [
        {
            "model": model.label,
            "folder": str(model.run_dir),
            "metrics": result.metrics,
            "tasks": _figures_of_tasks(model, result),
        }
        for model, result in zip(models, results, strict=False)
    ]
    return {"config": config_name, "models": summaries, "comparison": comparison}


def _figures_of_tasks(model: "Candidate", result: "Result") -> dict[str, dict[str, Any]]:
    """Return the figures of each task, whose examples are put in order of their ids."""
    from torchtitan.experiments.rl.tools.evaluate import task_figures

    figures = {}
    for task, schedule in model.schedules.items():
        examples = result.examples[task]
        examples.sort(key=lambda example: (len(example.example), example.example))
        settings = {"attempts": schedule.attempts, "temperature": schedule.temperature}
        limits = {name: getattr(schedule, name) for name in ("top_p", "top_k", "max_tokens")}
        settings |= {name: value for name, value in limits.items() if value is not None}
        figures[task] = settings | task_figures(
            examples, attempts=schedule.attempts, pass_reward=schedule.pass_reward
        )
    return figures


if __name__ == "__main__":
    run_command(main)
