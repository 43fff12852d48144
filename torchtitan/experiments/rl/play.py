"""The command that lets a person be the policy of a task, ``rl-play``.

    python -m torchtitan.experiments.rl.play --config NAME --task T [--example N] [overrides]

Exit codes: 0 the rollouts ended, or the person left; 1 a rollout failed; 2 the config
can't be played.
"""

import argparse
import functools
import sys
from pathlib import Path

from torchtitan.experiments.rl.command.command_line import (
    Command,
    check_whole_policy,
    find_model,
    load_config,
    parse_with_own,
    served_by,
    starting_line,
)
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.observability.console import typed_command, write_line
from torchtitan.experiments.rl.printable import printable_line
from torchtitan.experiments.rl.process.entry import of_command, run_command
from torchtitan.experiments.rl.process.logs import quiet_libraries
from torchtitan.experiments.rl.process.setup import set_up_process
from torchtitan.experiments.rl.process.temporary import TemporaryFolder


@of_command()
def main(arguments: list[str] | None) -> int:
    options, command = parse_with_own(_parser(), arguments)
    if options.rollouts < 1:
        raise ConfigError("--rollouts", options.rollouts, "must be at least 1")
    if arguments is None:
        write_line(sys.stdout, printable_line(starting_line(command)))
    set_up_process()
    with command.naming_the_runs_folder():
        return _play(options, command)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=typed_command("play"),
        description="Be the policy of a task in the terminal: see the prompts as the model does, "
        "answer, and see the rewards, the tokens and what would be trained. The play is saved "
        "as a record. Fields of the config can be overridden.",
        epilog="Also as a run's command: --module MODULE, --run-dir FOLDER (for the record).",
        allow_abbrev=False,
        exit_on_error=False,
    )
    parser.add_argument(
        "--model",
        metavar="FOLDER",
        help="what /model asks, on a generator that is started then: a run's folder (its newest "
        "policy; --config is not needed then), or a hub folder",
    )
    parser.add_argument("--task", metavar="T", help="one of its tasks (default: the first)")
    parser.add_argument(
        "--example", type=int, default=0, help="index in the task's dataset (default 0)"
    )
    parser.add_argument(
        "--rollouts",
        type=int,
        default=1,
        help="rollouts of the group; you answer each, in turn (default 1)",
    )
    parser.add_argument(
        "--scripted",
        action="append",
        default=[],
        metavar="TEXT",
        help="a line that is entered for you; may be repeated",
    )
    parser.add_argument(
        "--endpoint",
        metavar="URL",
        help="/model asks a vLLM server, such as http://host:8000/v1; several of one model with "
        "commas",
    )
    return parser


def _play(options: argparse.Namespace, command: Command) -> int:
    """Play one group, and print and save what came of it."""
    with quiet_libraries():
        from monarch.actor import shutdown_context

        from torchtitan.experiments.rl.command import checks
        from torchtitan.experiments.rl.command.run_folder import make_run_folder
        from torchtitan.experiments.rl.tools.play import (
            Player,
            answering_model,
            play,
            result_lines,
            save,
            was_left,
        )

        find_model(command)
        config = load_config(command)
        check_whole_policy(options, config)
        task = options.task or next(iter(config.tasks))
        if task not in config.tasks:
            raise ConfigError("--task", task, f"name one of {', '.join(config.tasks)}")
        checks.check(config)
        server = None
        if options.endpoint is not None:
            server = served_by(options, options.endpoint, "--endpoint", config)

    @functools.cache
    def folder() -> Path:
        name = f"play-{task}"
        return Path(make_run_folder(command.run_dir, config.output_dir, name, keep=True))

    player = Player(
        config.model.hf_assets_path,
        scripted=options.scripted,
        model=lambda: answering_model(config, server, folder),
    )
    temporary = TemporaryFolder()
    try:
        group = play(config, task, player, example=options.example, rollouts=options.rollouts)
    except IndexError:
        raise ConfigError("--example", options.example, "the dataset has no such example") from None
    finally:
        if player.serves_a_model:
            with quiet_libraries():
                shutdown_context().get()
        temporary.remove()
    if player.left and not player.replies:
        print("left: nothing was answered, and nothing is saved")
        return 0
    print("\n".join(result_lines(group, player)))
    save(group, config, folder())
    print(f"saved       {printable_line(str(folder()))}: the record")
    failed = [
        rollout for rollout in group.rollouts if rollout.status.is_error() and not was_left(rollout)
    ]
    return 1 if failed else 0


if __name__ == "__main__":
    run_command(main)
