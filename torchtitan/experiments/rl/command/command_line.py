"""From the words of a command line to a config; every mistake is one line.

    rl-train   --config NAME --run-dir FOLDER   --steps 50 --trainer.optimizer.lr 1e-5
               own options, of the command      overrides, of the config's fields

*Words* are all that stands behind the command's name, as the shell has split it.
"""

import argparse
import contextlib
import difflib
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from torchtitan.experiments.rl.command.hub import adapter_folder, command_of_run, model_folder
from torchtitan.experiments.rl.errors import ConfigError, MissingError, user_code
from torchtitan.experiments.rl.observability.console import typed_command
from torchtitan.experiments.rl.process.setup import add_import_folder

DEFAULT_MODULE = "torchtitan.experiments.rl.config_registry"

_VALUED_RUN_OPTIONS = ("--resume", "--init-from", "--push-to-hub")
RUN_OPTIONS = (*_VALUED_RUN_OPTIONS, "--dry-run", "--list")
"""Own options of ``rl-train`` that every other command which takes a config refuses."""
TRAINING_OPTIONS = (*RUN_OPTIONS, "--init-adapter", "--gpus")
"""Own options of ``rl-train`` that evaluate and play refuse: they train nothing, and ask one model.
"""
MERGE = (
    "whole models are asked here, and it would be left out: `{} ADAPTER --to FOLDER` merges it "
    "into its base for --model FOLDER"
)
"""End of an error about an adapter given to a tool that trains nothing. ``{}`` is the words that
start ``rl-export``."""
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(kw_only=True, slots=True)
class Command:
    """Command of a run, taken apart: its own options, and the overrides of the config's fields."""

    config_name: str | None
    """Name of the config function; None if a run's own is taken, or configs are listed."""
    module: str
    """Module that has the config functions."""
    list_configs: bool
    """True if the command only prints the configs of the module."""
    dry_run: bool
    """True if the command passes the checks and starts nothing."""
    run_dir: str | None
    """Folder for a new run; None for one that is made in the config's ``output_dir``."""
    resume: str | None
    """Run folder or checkpoint to go on from, or "auto"; None for a new run."""
    init_from: str | None
    """Run folder or checkpoint whose weights a new run begins with."""
    model: str | None = None
    """Folder of the model, or name of a model of the hub; None for the config's own."""
    push_to_hub: str | None = None
    """Model of the hub to which the final policy is uploaded."""
    gpus: int | None = None
    """Number of GPUs to divide between trainer and generators; None for the config's division."""
    overrides: list[str] = field(default_factory=list)
    """Words that set fields of the config. A resumed run's own stand before those of this command.
    """
    words: list[str] = field(default_factory=list)
    """All words of the command, as they were typed."""
    whole_model_rate: float | None = None
    """Learning rate of the named config before the overrides, if it trains the whole model;
    ``load_config`` sets it."""
    started_in: str = ""
    """Folder in which the run was started whose command this one takes; "" if it takes none's."""

    def find_modules_of(self, folder: str) -> None:
        """Import modules from the folder that a run was started in; "" is unknown."""
        self.started_in = folder
        if folder:
            add_import_folder(Path(folder))

    @contextlib.contextmanager
    def naming_the_runs_folder(self) -> Iterator[None]:
        """Add to the block's error about a missing file the folder that the run was started in."""
        try:
            yield
        except MissingError as error:
            if self.started_in in ("", os.getcwd()):
                raise
            cure = f"{error.cure} (the run was started in {self.started_in}: run the command there)"
            raise MissingError(error.field, error.value, cure, lines=error.lines) from error

    def words_in(self, run_dir: str, *, resumes: bool) -> list[str]:
        """Return the words of the command that does in ``run_dir`` what this one would do.

        Args:
            resumes: True if the run goes on with an earlier one. ``--resume auto`` may find none.
        """
        words = _without_options(self.words, ["--run-dir", "--resume", "--init-from"])
        if self.init_from is not None:
            words += ["--init-from", os.path.abspath(self.init_from)]
        if not resumes:
            return [*words, "--run-dir", run_dir]
        named = run_dir if self.resume in (None, "auto") else os.path.abspath(self.resume)
        return [*words, "--resume", named]

    def tool_words(self) -> list[str]:
        """Return the words by which a tool takes the config of this command.

        A tool resumes nothing, so the config of a resumed run is named, with the run's overrides.
        """
        if self.resume in (None, "auto"):
            return _without_options(self.words, ["--run-dir", *_VALUED_RUN_OPTIONS])
        named = ["--config", str(self.config_name)]
        if self.module != DEFAULT_MODULE:
            named += ["--module", self.module]
        if self.gpus is not None:
            named += ["--gpus", str(self.gpus)]
        return [*named, *self.overrides]


def _without_options(words: Sequence[str], options: Sequence[str]) -> list[str]:
    """Return the words less ``--dry-run`` and some options with their values."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for option in options:
        parser.add_argument(option)
    return [word for word in parser.parse_known_args(words)[1] if word != "--dry-run"]


def parse_command(words: list[str]) -> Command:
    """Split the command's own options from the overrides.

    ``--help`` without a config explains both and exits.

    Raises:
        ConfigError: an own option lacks its value, contradicts another, or is missing.
    """
    parser = _parser_of_run()
    known, overrides = own_options(parser, words)
    _check_contradictions(known)
    needs_config = not known.list_configs and known.resume in (None, "auto")
    if needs_config and known.config_name is None:
        if {"-h", "--help"} & set(overrides):
            parser.print_help()
            sys.exit(0)
        raise ConfigError("--config", None, "name a config; --list prints them")
    if known.run_dir == "":
        cure = "must not be empty; leave it out for a new folder in output_dir"
        raise ConfigError("--run-dir", "", cure)
    # Of two overrides of a field the last counts, so what is typed goes last.
    if known.init_adapter is not None:
        overrides = [*_adapter_overrides(known.init_adapter), *overrides]
    if known.size is not None:
        overrides = ["--size", known.size, *overrides]
    return Command(
        config_name=known.config_name,
        module=known.module,
        list_configs=known.list_configs,
        dry_run=known.dry_run,
        run_dir=known.run_dir,
        resume=known.resume,
        init_from=known.init_from,
        model=known.model,
        push_to_hub=known.push_to_hub,
        gpus=known.gpus,
        overrides=overrides,
        words=words,
    )


def _check_contradictions(known: argparse.Namespace) -> None:
    """Refuse two own options that say different things.

    Raises:
        ConfigError: names one of them.
    """
    for option, value in (("--run-dir", known.run_dir), ("--init-from", known.init_from)):
        if known.resume is not None and value is not None:
            cure = "a resumed run has its own: leave this or --resume out"
            raise ConfigError(option, value, cure)
    if known.init_adapter is not None and known.init_from is not None:
        cure = "the adapters begin as --init-adapter's: leave one of them out"
        raise ConfigError("--init-from", known.init_from, cure)


def _adapter_overrides(given: str) -> list[str]:
    """Return the overrides that ``--init-adapter`` stands for.

    They say what the adapter's folder says, so a resumed run takes them from its saved command.

    Raises:
        ConfigError: the folder holds no adapters that can be trained.
    """
    from torchtitan.experiments.rl.models.lora import adapter_sizes  # torch: seconds

    folder = adapter_folder(given)
    rank, alpha = adapter_sizes(folder, field="--init-adapter")
    return [
        "--trainer.lora.rank",
        str(rank),
        "--trainer.lora.alpha",
        str(alpha),
        "--trainer.lora.init-from",
        str(folder),
    ]


def _parser_of_run() -> argparse.ArgumentParser:
    """Return the parser of the own options of ``rl-train``."""
    parser = argparse.ArgumentParser(
        prog=typed_command("train"),
        description="Reinforcement learning of a language model. Any field of the config can be "
        "overridden: --steps 50, --trainer.optimizer.lr 1e-5, --tasks.sum-digits.group-size 16; "
        "--config NAME --help lists them all.",
        add_help=False,
        allow_abbrev=False,
        exit_on_error=False,
    )
    add = parser.add_argument
    add("--config", dest="config_name", metavar="NAME", help="a named config; --list prints them")
    add(
        "--module",
        default=DEFAULT_MODULE,
        help="module whose functions are the configs (default: %(default)s)",
    )
    add(
        "--model",
        metavar="NAME",
        help="a folder in hub format, or a model of the hub, which is downloaded: Qwen/Qwen3-0.6B",
    )
    add(
        "--gpus",
        metavar="N",
        type=int,
        help="divide N GPUs between trainer and generators, by modelled costs (--dry-run says how)",
    )
    # It goes on among the overrides: it belongs to the config, and to the saved command of a run.
    add(
        "--size",
        metavar="NAME",
        help="of the model, for configs that have several: 0.6b, 1.7b, 4b, 8b, 14b, 32b",
    )
    add(
        "--list",
        dest="list_configs",
        action="store_true",
        help="print the configs with a line each",
    )
    add("--dry-run", action="store_true", help="print what the config amounts to; start nothing")
    add("--run-dir", metavar="FOLDER", help="folder of this run (default: OUTPUT_DIR/NAME-TIME)")
    add(
        "--resume",
        metavar="FOLDER|auto",
        help="go on with the run in FOLDER from its newest checkpoint, or from FOLDER if it is "
        "one; --config is not needed. "
        "auto: the newest run of --config in its output_dir, or a new run",
    )
    add(
        "--init-from",
        metavar="FOLDER",
        help="start a new run with the weights of another run's checkpoint",
    )
    add(
        "--init-adapter",
        metavar="FOLDER",
        help="train adapters, with the rank and alpha of this PEFT folder or of this run's newest "
        "policy, and begin with those",
    )
    add(
        "--push-to-hub",
        metavar="NAME",
        help="at the end upload the policy to this model of the hub",
    )
    return parser


def starting_line(command: Command) -> str:
    """Return what a command prints within a second: the imports that follow take some more."""
    what = command.resume if command.resume not in (None, "auto") else command.config_name
    return f"starting    {what} (imports, then checks)"


def own_options(
    parser: argparse.ArgumentParser, words: list[str] | None, *, refused: Sequence[str] = ()
) -> tuple[argparse.Namespace, list[str]]:
    """Return the options of ``parser``, and the other words.

    Args:
        words: words of the command line; None for those of this process.
        refused: options that may not be among the other words, as a word of their own or with "=".

    Raises:
        ConfigError: an option lacks its value, or is refused.
    """
    try:
        known, rest = parser.parse_known_args(words)
    except argparse.ArgumentError as error:
        raise ConfigError(str(error.argument_name), None, error.message) from None
    for index, word in enumerate(rest):
        option, equals, value = word.partition("=")
        if option in refused:
            if not equals and index + 1 < len(rest):
                value = rest[index + 1]
            why = "is of a run's command, and means nothing here"
            if option == "--init-adapter":
                why = MERGE.format(typed_command("export"))
            raise ConfigError(option, value or None, why)
    return known, rest


def parse_with_own(
    parser: argparse.ArgumentParser, words: list[str] | None
) -> tuple[argparse.Namespace, Command]:
    """Return the options of evaluate or play, and a run's command made of the other words.

    Both take ``--config``, or a run as ``--model``, whose saved command then stands for it.

    Args:
        words: words of the command line; None for those of this process.
    """
    parser.add_argument(
        "--config", metavar="NAME", help="a named config; it gives tasks, sampling and engine"
    )
    parser.add_argument(
        "--endpoint-model",
        metavar="NAME",
        help="what the server calls the model (default: its only one)",
    )
    parser.add_argument(
        "--endpoint-key-env",
        metavar="NAME",
        help="environment variable that holds the server's key",
    )
    known, rest = own_options(parser, words, refused=TRAINING_OPTIONS)
    saved = None if known.config is not None else command_of_run(known.model)
    if saved is not None:
        named = ["--config", saved.config_name, "--module", saved.module, *saved.overrides]
    elif known.config is not None:
        named = ["--config", known.config]
    else:
        listing = f"{typed_command('train')} --list"
        cure = f"name a config, or a run as --model; {listing} prints the configs"
        raise ConfigError("--config", None, cure)
    command = parse_command([*named, *rest])
    command.model = known.model
    if saved is not None:
        command.find_modules_of(saved.folder)
    return known, command


def served_by(options: argparse.Namespace, url: str, field: str, config: Any) -> Any:
    """Return the ``FrozenModel`` of a server, by the options of ``parse_with_own``.

    Args:
        field: option that names ``url``.
    """
    from torchtitan.experiments.rl.generation.endpoint import served_model

    return served_model(
        url,
        field=field,
        name=options.endpoint_model,
        key_env=options.endpoint_key_env,
        tokenizer_path=config.model.hf_assets_path,
    )


def find_model(command: Command) -> None:
    """Add the folder that ``--model`` names to the overrides. A model of the hub is downloaded."""
    if command.model is not None:
        path = ["--model.hf-assets-path", model_folder(command.model)]
        no_flavor = ["--model.flavor", "None"]  # the config's is another model's
        command.overrides = [*no_flavor, *command.overrides, *path]


def check_whole_policy(options: argparse.Namespace, config: Any) -> None:
    """Refuse a config whose policy begins with adapters, for tools that ask the model of a folder.

    The adapters of a run are in the policy that it has saved, whatever it began with.

    Raises:
        ConfigError: ``trainer.lora.init_from`` is set, and would be left out.
    """
    lora = config.trainer.lora
    if (
        options.config is None
        or options.endpoint is not None
        or lora is None
        or lora.init_from is None
    ):
        return
    cure = f"{MERGE.format(typed_command('export'))} --trainer.lora.init-from None"
    raise ConfigError("trainer.lora.init_from", lora.init_from, cure)


def config_functions(module_name: str) -> dict[str, Callable[[], Any]]:
    """Return the config functions of a registry, by name.

    They are the public functions that the module, or a module of its package, defines and that need
    no argument.

    Raises:
        ConfigError: no such module, or one that can't be imported.
    """
    module = _import(module_name)
    return {
        name: function
        for name, function in vars(module).items()
        if inspect.isfunction(function)
        and f"{function.__module__}.".startswith(f"{module.__name__}.")
        and not name.startswith("_")
        and not _needs_arguments(function)
    }


def _needs_arguments(function: Callable[..., Any]) -> bool:
    return any(
        parameter.default is parameter.empty and parameter.kind not in _VARIADIC
        for parameter in inspect.signature(function).parameters.values()
    )


def config_groups(module_name: str) -> dict[str, list[str]]:
    """Return the module's GROUPS: titles, and names of configs that it has. May be empty."""
    groups = getattr(_import(module_name), "GROUPS", {})
    functions = config_functions(module_name)
    if not isinstance(groups, dict):
        return {}
    return {
        str(title): [name for name in names if name in functions] for title, names in groups.items()
    }


def load_config(command: Command) -> Any:
    """Build the named config and apply the overrides.

    Raises:
        ConfigError: unknown config or field, a value of the wrong type, or a config function that
            fails or returns something other than a RunConfig.
    """
    functions = config_functions(command.module)
    name = str(command.config_name)
    if name not in functions:
        near = difflib.get_close_matches(name, functions, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigError("--config", name, f"{hint}--list prints the configs of {command.module}")
    overrides, size = _without_size(command.overrides)
    sized = [other for other, function in functions.items() if _takes_size(function)]
    if size is not None and name not in sized:
        others = " and ".join(sized) or "no config"
        cure = f"{name} has one size; {others} of {command.module} take others"
        raise ConfigError("--size", size, cure)
    arguments = {} if size is None else {"size": size}
    with user_code("--config", name, "the config function failed"), _name_removed_fields(name):
        config = functions[name](**arguments)
    # Imported here: --help without a config needs none of it, and the import takes seconds.
    from torchtitan.experiments.rl.config.run_config import RunConfig

    if not isinstance(config, RunConfig):
        if inspect.iscoroutine(config):
            config.close()  # else Python warns that it was never awaited
        code = functions[name].__code__
        cure = (
            f"the config function ({code.co_filename}:{code.co_firstlineno}) returned a "
            f"{type(config).__name__}"
        )
        raise ConfigError("--config", name, f"{cure}; return a RunConfig")
    from torchtitan.experiments.rl.command.options import override

    command.whole_model_rate = None if config.trainer.lora else config.trainer.optimizer.lr
    return _validated_on_the_rest(override(config, overrides), overrides)


def _takes_size(function: Callable[..., Any]) -> bool:
    return "size" in inspect.signature(function).parameters


def _validated_on_the_rest(config: Any, overrides: Sequence[str]) -> Any:
    """Return the config, with the rows that a dataset leaves as the validation set of its task.

    A task keeps a validation set that the config names, and has none if an override says None.
    """
    from torchtitan.experiments.rl.command.overrides import option_name, replaced, split
    from torchtitan.experiments.rl.data.dataset import Dataset

    said = {override.name for override in split(overrides)}
    for name, task in config.tasks.items() if isinstance(config.tasks, dict) else ():
        keys = ("tasks", name, "validation")
        is_unset = getattr(task, "validation", ...) is None and option_name(keys) not in said
        if is_unset and isinstance(task.dataset, Dataset.Config):
            config = replaced(config, keys, task.dataset.rest())
    return config


def _without_size(words: list[str]) -> tuple[list[str], str | None]:
    """Split the last ``--size`` from the other overrides."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--size")
    known, others = parser.parse_known_args(words)
    return others, known.size


def _import(name: str) -> ModuleType:
    """Import the module that ``--module`` names.

    Raises:
        ConfigError: the name is no module's, there is no such module, or it can't be imported.
    """
    stem = name.replace("\\", "/").removesuffix(".py").strip("./").replace("/", ".")
    words_of_stem = stem.split(".")
    if name != stem or not all(map(str.isidentifier, words_of_stem)):
        hint = f", such as {stem}" if all(map(str.isidentifier, words_of_stem)) else ""
        raise ConfigError(
            "--module", name, f"is no module's name; write it as in an import statement{hint}"
        )
    try:
        with user_code("--module", name, "it can't be imported"):
            return importlib.import_module(name)
    except ConfigError as error:
        absent = error.__cause__
        if (
            not isinstance(absent, ModuleNotFoundError)
            or not absent.name
            or not f"{name}.".startswith(f"{absent.name}.")
        ):
            raise
        raise ConfigError(
            "--module", name, "no such module; is its folder on PYTHONPATH?"
        ) from None


@contextlib.contextmanager
def _name_removed_fields(config_name: str) -> Iterator[None]:
    """Name the cure if the config function that the block calls sets a field that is gone."""
    try:
        yield
    except (TypeError, AttributeError) as error:
        from torchtitan.experiments.rl.command.options import GONE

        for option, cure in GONE.items():
            name = option.replace("-", "_")
            field = name.rpartition(".")[2]  # Python's error names it without its path
            if f"'{field}'" in str(error):
                raise ConfigError("--config", config_name, f"{name} {cure}") from error
        raise
