"""The command that runs a config in virtual time, ``rl-simulate``.

    python -m torchtitan.experiments.rl.simulate --config NAME [--gpus N] [--lengths ...]

Exit codes: 0 done; 1 an invariant of the run did not hold; 2 the config can't be simulated; 130
Ctrl-C.
"""

import argparse
import logging
import re
import sys
import time
from pathlib import Path

from torchtitan.experiments.rl.command.command_line import (
    RUN_OPTIONS,
    Command,
    find_model,
    load_config,
    own_options,
    parse_command,
)
from torchtitan.experiments.rl.errors import ConfigError, RunError
from torchtitan.experiments.rl.observability.console import near, typed_command
from torchtitan.experiments.rl.printable import printable_line
from torchtitan.experiments.rl.process.entry import of_command, run_command
from torchtitan.experiments.rl.process.logs import quiet_libraries
from torchtitan.experiments.rl.process.setup import set_up_process


@of_command()
def main(arguments: list[str] | None) -> int:
    log = logging.getLogger("torchtitan.experiments.rl")
    level = log.level
    log.setLevel(logging.ERROR)  # a simulated run warns of thousands of restarts and drops
    try:
        options, command, failures = parse_options(sys.argv[1:] if arguments is None else arguments)
        return _simulate(options, command, failures)
    except RunError as error:
        print(f"error: {printable_line(str(error))}", file=sys.stderr)
        return 1
    finally:
        log.setLevel(level)


def parse_options(arguments: list[str]) -> tuple[argparse.Namespace, Command, float]:
    """Return the command's own options, those of a run's command, and failures a day.

    Raises:
        ConfigError: an option lacks its value, or can't be read.
    """
    options, words = own_options(_parser(), arguments, refused=RUN_OPTIONS)
    per_day = re.fullmatch(r"(\d+(?:\.\d+)?)/day", options.failures)
    if per_day is None:
        raise ConfigError("--failures", options.failures, "want a number a day, such as 3/day")
    return options, parse_command(words), float(per_day[1])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=typed_command("simulate"),
        description="What a config will do on N GPUs, before they are paid for: the real "
        "controller in virtual time, with simulated engines, trainer and hosts. docs/scale.md says "
        "what is left out.",
        epilog="Also as a run's command: --config, --module, --gpus, --run-dir, and any field "
        "(--steps 200, --seed 0).",
        allow_abbrev=False,
        exit_on_error=False,
    )
    add = parser.add_argument
    add(
        "--lengths",
        default="lognormal:",
        metavar="RUN|lognormal:...",
        help="turns, tokens and env times: of a run that was recorded, or (default) "
        "lognormal:mean=512,sigma=0.8,tail=0,times=8,prompt=200,turns=1,env_s=0",
    )
    add("--device", default="H100", help="A100, H100 (default) or H200")
    add(
        "--failures",
        default="0/day",
        metavar="N/day",
        help="deaths of hosts, of all together (default: none)",
    )
    add(
        "--hosts-at-once",
        type=int,
        default=1,
        metavar="N",
        help="hosts that die together (default: 1)",
    )
    add("--repair-s", type=float, default=600.0, help="until there is a host again (default: 600)")
    add(
        "--survive",
        action="store_true",
        help="a generator's host that dies does not end the run, as it does today",
    )
    add(
        "--sweep",
        metavar="FIELDS",
        help="replicas, max_offpolicy_steps or both: short runs, the best first",
    )
    return parser


def _simulate(options: argparse.Namespace, command: Command, failures_per_day: float) -> int:
    """Simulate a run, or the short runs of a sweep, and print what came of it."""
    set_up_process()
    with quiet_libraries():
        from torchtitan.experiments.rl.command.resume import save_config
        from torchtitan.experiments.rl.command.run_folder import make_run_folder
        from torchtitan.experiments.rl.plan.costs import DEVICES
        from torchtitan.experiments.rl.simulation import study
        from torchtitan.experiments.rl.simulation.lengths import lengths_of
        from torchtitan.experiments.rl.simulation.result import describe
        from torchtitan.experiments.rl.simulation.run import Failures

        find_model(command)
        config = load_config(command)
    if options.device not in DEVICES:
        raise ConfigError("--device", options.device, f"want one of {', '.join(DEVICES)}")
    failures = Failures(
        per_day=failures_per_day,
        hosts=options.hosts_at_once,
        end_run=not options.survive,
        repair_s=options.repair_s,
    )
    setting = study.Setting(
        config=config, lengths=lengths_of(options.lengths), device=options.device, failures=failures
    )
    engines = config.generator.replicas * config.generator.engine.tensor_parallel_degree
    gpus = command.gpus or config.trainer.ranks + engines
    if command.gpus is not None:
        # A number that the command line names stays; the other one takes what is left.
        trainer_share = config.trainer.ranks / (config.trainer.ranks + engines)
        if "--trainer.ranks" in command.overrides:
            trainer_share = config.trainer.ranks / gpus
        elif "--generator.replicas" in command.overrides:
            trainer_share = 1 - engines / gpus
        setting = setting.divided(gpus, trainer_share)
    if options.sweep is not None:
        print("\n".join(study.sweep(setting, options.sweep.split(","), gpus)))
        return 0
    setting.rates()  # raises if the config can't run, before a folder is made
    name = f"simulate-{command.config_name}"
    run_dir = Path(make_run_folder(command.run_dir, config.output_dir, name, keep=True))
    save_config(run_dir, setting.config)
    start = time.monotonic()
    print(
        f"simulated      {command.config_name} on {gpus:,} {options.device}: "
        f"{setting.config.trainer.ranks} trainer ranks, "
        f"{setting.config.generator.replicas} replicas, {setting.config.steps} steps. "
        "No GPU has run it."
    )
    result = setting.run(run_dir)
    print("\n".join(describe(result)))
    print(f"folder         {near(run_dir)}, in {time.monotonic() - start:.0f} s")
    print(f"see it         {typed_command('report')} {near(run_dir)}")
    return 0


if __name__ == "__main__":
    run_command(main)
