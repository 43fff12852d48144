"""The command: ``python -m torchtitan.experiments.rl.evaluate --config NAME [--model FOLDER | --endpoint URL] [overrides]``.

Exit codes: 0 done; 1 it failed, or a task has no figure because every attempt failed; 2 the config can't be evaluated, and
nothing was spawned; 130, 143, 129 stopped by a signal.
"""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from torchtitan.experiments.rl.config.command_line import (
    Command,
    check_whole_policy,
    find_model,
    load_config,
    parse_with_own,
    served_by,
)
from torchtitan.experiments.rl.config.hub import model_folder
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.observability.console import typed_command, write_line
from torchtitan.experiments.rl.printable import one_sentence, printable_line
from torchtitan.experiments.rl.process.host import other_users_line
from torchtitan.experiments.rl.process.setup import (
    of_command,
    quiet_libraries,
    run_command,
    set_up_process,
)
from torchtitan.experiments.rl.process.temporary import TemporaryFolder

RESULT_FILE = "evaluation.json"


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
    result = summarized(command.config_name, models, results)
    (models[0].run_dir / RESULT_FILE).write_text(
        json.dumps(result, indent=2) + "\n", encoding="utf-8"
    )
    print(
        json.dumps(result) if options.json else "\n".join(map(printable_line, result_lines(result)))
    )
    for candidate, measured in zip(models, results, strict=False):
        for task, examples in measured.examples.items():
            if not any(example.rewards for example in examples):
                why = one_sentence(measured.causes.get(task, "there were none"))
                line = f"error: tasks.{task}: no attempt of {candidate.label} has a reward: {why}"
                print(printable_line(f"{line} (logs in {candidate.run_dir}/logs)"), file=sys.stderr)
                code = code or 1
    return code


def parse_options(arguments: list[str] | None) -> tuple[argparse.Namespace, Command]:
    """
    Raises:
        ConfigError: an option lacks its value, or two exclude each other.
    """
    parser = argparse.ArgumentParser(
        prog=typed_command("evaluate"),
        description="Measure a policy on the validation sets of a config's tasks, without training. The config's fields can be "
        "overridden as a run's: --validation.examples 64, --validation.temperature 1.",
        epilog="Also as a run's command: --module MODULE, --run-dir FOLDER (for the records and the result).",
        allow_abbrev=False,
        exit_on_error=False,
    )
    parser.add_argument(
        "--model",
        metavar="FOLDER",
        help="the policy, instead of the config's model: a run's folder (its newest policy; --config is not needed then), or a "
        "hub folder, such as a run's policy/step-100",
    )
    parser.add_argument(
        "--endpoint",
        metavar="URL",
        help="the policy is served by a vLLM server, such as http://host:8000/v1; several of one model with commas",
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


def _prepare(options: argparse.Namespace, command: Command) -> list[Any]:
    """Check everything before a process is spawned, and make the folders.

    Returns:
        One or two ``tools.evaluate.Candidate``.

    Raises:
        ConfigError: what can't be evaluated, by option or field.
    """
    from torchtitan.experiments.rl.config.resume import save_config
    from torchtitan.experiments.rl.config.run_folder import make_run_folder
    from torchtitan.experiments.rl.tools import evaluate as measure

    find_model(command)
    config = measure.evaluated_config(
        load_config(command), tasks=options.tasks, attempts=options.attempts
    )
    check_whole_policy(options, config)

    endpoints = [
        None
        if options.endpoint is None
        else served_by(options, options.endpoint, "--endpoint", config)
    ]
    configs = [config]
    if options.against is not None:
        is_url = options.against.startswith(("http://", "https://"))
        endpoints.append(
            served_by(options, options.against, "--against", config) if is_url else None
        )
        model = (
            config.model
            if is_url
            else replace(
                config.model, hf_assets_path=model_folder(options.against, field="--against")
            )
        )
        configs.append(replace(config, model=model))
    plans = [
        measure.checked_plan(config, endpoint)
        for config, endpoint in zip(configs, endpoints, strict=True)
    ]
    folder = Path(
        make_run_folder(
            command.run_dir, config.output_dir, f"evaluate-{command.config_name}", keep=True
        )
    )
    models = list(map(measure.Candidate, configs, plans, endpoints, [folder, folder / "against"]))
    for measured in models:
        measured.run_dir.mkdir(exist_ok=True)
        save_config(measured.run_dir, measured.config)
    return models


def summarized(config_name: str | None, models: list[Any], results: list[Any]) -> dict[str, Any]:
    """What ``--json`` prints: for each model ``metrics`` as a run's validation reports them, and ``tasks`` with intervals."""
    from torchtitan.experiments.rl.tools.evaluate import paired, task_figures

    shown: list[dict[str, Any]] = []
    for model, result in zip(models, results, strict=False):
        tasks = {}
        for task, plan in model.schedules.items():
            result.examples[task].sort(key=lambda example: (len(example.example), example.example))
            figures = task_figures(
                result.examples[task], attempts=plan.attempts, pass_reward=plan.pass_reward
            )
            tasks[task] = {"attempts": plan.attempts, "temperature": plan.temperature} | figures
        shown.append(
            {
                "model": model.label,
                "folder": str(model.run_dir),
                "metrics": result.metrics,
                "tasks": tasks,
            }
        )
    comparison = None
    if len(results) == 2:
        first, second = (result.examples for result in results)
        comparison = {task: paired(first[task], second[task]) for task in first}
    return {"config": config_name, "models": shown, "comparison": comparison}


if __name__ == "__main__":
    run_command(main)
