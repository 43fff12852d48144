"""From words to a plan: every mistake is one line that names field, value and cure, and nothing is started."""

import functools
import io
import math
import re
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.fakes.models import SMOLLM2, broken_folder, edit_config, write_model
from tests.unit.command_line import DEBUG, assert_one_line
from torchtitan.experiments.rl import config_registry, simulate
from torchtitan.experiments.rl.command.checks import plan_run
from torchtitan.experiments.rl.command.command_line import (
    DEFAULT_MODULE,
    config_functions,
    load_config,
    parse_command,
)
from torchtitan.experiments.rl.config.run_config import RunConfig
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.plan.plan import GIB
from torchtitan.experiments.rl.train import main, summary_of
from torchtitan.experiments.rl.training.config import Compile

# ---- every named config


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch):
    """Beside other tests a disk may be so slow that the command warns of it."""
    monkeypatch.setattr(
        "torchtitan.experiments.rl.command.machine.checkpoint_seconds", lambda plan, folder: 1.0
    )


@pytest.fixture(scope="module")
def smollm2_shapes(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "smollm2", SMOLLM2)


@pytest.mark.parametrize("name", config_functions(DEFAULT_MODULE))
def test_every_named_config_has_a_plan_and_a_line_of_description(
    command, name, smollm2_shapes, monkeypatch
):
    monkeypatch.setattr(
        "torchtitan.experiments.rl.config_registry.smollm2.SMOLLM2", str(smollm2_shapes)
    )
    # What other programs hold of this host's memory is no matter of a config.
    monkeypatch.setattr(
        "torchtitan.experiments.rl.command.machine.memory_gib", lambda: (2048.0, 2048.0)
    )
    code, out, err = command("--config", name, "--dry-run")
    assert code == 0 and err == ""
    assert [
        line.split()[0] for line in out.splitlines()[:6]
    ] == "model steps off-policy batch processes memory".split()
    assert config_functions(DEFAULT_MODULE)[name].__doc__
    for _, load in printed_commands(out):
        assert load().tasks.keys() == config_functions(DEFAULT_MODULE)[name]().tasks.keys()


def printed_commands(out: str) -> list[tuple[str, Callable[[], RunConfig]]]:
    """Commands that a dry run prints, each with what reads its words and loads its config."""
    found: list[tuple[str, Callable[[], RunConfig]]] = []
    for line in out.splitlines():
        started = re.search(r"-m torchtitan\.experiments\.rl\.(train|simulate) (.*)", line)
        if started is None:
            continue
        name, text = started.groups()
        words = shlex.split(text.removesuffix(" &").partition("   (simulated")[0])
        command = parse_command(words) if name == "train" else simulate.parse_options(words)[1]
        found.append((name, functools.partial(load_config, command)))
    return found


def test_every_command_that_a_dry_run_prints_is_accepted(command, tmp_path):
    words = ["--config", "rl_grpo_qwen3_32b_32", "--provision.job", "slurm", "--steps", "7"]
    of_the_run = ["--run-dir", str(tmp_path / "run"), "--push-to-hub", "my/model", "--dry-run"]
    for others in (of_the_run, ["--resume", "auto", "--output-dir", str(tmp_path), "--dry-run"]):
        code, out, _ = command(*words, *others)
        assert code == 0
        commands = printed_commands(out)
        assert [name for name, _ in commands] == ["train", "simulate", "simulate"]
        assert [load().steps for _, load in commands] == [7, 7, 7]


def test_a_resumed_runs_config_is_named_to_a_tool_with_the_runs_overrides():
    given = parse_command(["--resume", "outputs/run", "--steps", "9", "--dry-run"])
    resumed = replace(
        given, config_name="rl_grpo_qwen3_8b", overrides=["--seed", "3", *given.overrides]
    )
    words = ["--config", "rl_grpo_qwen3_8b", "--seed", "3", "--steps", "9"]
    assert resumed.tool_words() == words
    assert simulate.parse_options(resumed.tool_words())[1].overrides == words[2:]


def test_list_prints_each_config_once_with_its_line(command):
    code, out, _ = command("--list")
    assert code == 0
    lines = [line.split() for line in out.splitlines() if line.startswith("  ")]
    assert sorted(line[0] for line in lines) == sorted(config_functions(DEFAULT_MODULE)) and all(
        len(line) > 3 for line in lines
    )
    assert [line for line in lines if not line[-1].endswith(".")] == [], (
        "no line is cut in mid-sentence"
    )
    titles = [line for line in out.splitlines() if not line.startswith("  ")]
    assert titles == list(config_registry.GROUPS), "every config is in a group"
    assert out.splitlines()[:2] == [
        titles[0],
        next(line for line in out.splitlines() if "rl_grpo_qwen3_debug " in line),
    ]


@pytest.mark.parametrize(
    "doc, shown",
    [
        ("One. Two.\n    Three.", "One. Two."),
        ("One. It goes\n    on here. And on.", "One. It goes on here."),
        ("One, of 0.5B\n\n    Two.", "One, of 0.5B"),
        ("", ""),
    ],
)
def test_the_line_of_a_config_is_its_docstrings_first_to_the_end_of_the_sentence(doc, shown):
    assert summary_of(doc) == shown


@pytest.mark.parametrize("size", config_registry.SIZES)
@pytest.mark.parametrize("name", ["rl_math_qwen3", "rl_questions_qwen3"])
def test_a_config_of_several_sizes_has_the_plan_of_each(command, name, size):
    code, out, err = command("--config", name, "--size", size, "--dry-run")
    assert (code, err) == (0, "")
    assert f"weights        assets/hf/Qwen3-{size.upper()}\n" in out
    config, other = (
        load_config(parse_command(["--config", name, *words])) for words in (["--size", size], [])
    )
    assert config.tasks == other.tasks


def test_a_size_belongs_to_the_config_and_is_refused_where_there_is_one_alone(refused):
    words = ["--config", "rl_math_qwen3", "--size", "8b"]
    resumed = parse_command(words)
    assert load_config(resumed) == load_config(parse_command([*words[:2], *resumed.overrides])), (
        "command.json keeps overrides"
    )
    assert "--size = '7b': want one of 0.6b, 1.7b" in refused(
        "--config", "rl_math_qwen3", "--size", "7b"
    )
    alone = refused("--config", "rl_grpo_qwen3_8b", "--size", "4b")
    assert (
        "--size = '4b': rl_grpo_qwen3_8b has one size; rl_math_qwen3 and rl_questions_qwen3 of"
        in alone
    )


def test_help_names_our_options_and_a_configs_help_its_fields(command, capsys):
    for arguments, word in (
        (["--help"], "--dry-run"),
        ([*DEBUG, "--help"], "--tasks.sum-digits.group-size"),
        ([*DEBUG, "--help"], "Gibberish."),
    ):
        with pytest.raises(SystemExit) as end:
            main(arguments)
        assert not end.value.code and word in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "destinations"),
    [
        ([], "metrics.jsonl, tensorboard"),
        (["--metrics.wandb"], "metrics.jsonl, tensorboard, wandb (offline)"),
        (["--metrics.no-jsonl", "--metrics.no-tensorboard"], "nowhere"),
    ],
)
def test_the_plan_names_where_metrics_go(command, words, destinations):
    assert f"metrics        {destinations}\n" in command(*DEBUG, *words, "--dry-run")[1]


def test_a_part_that_may_be_left_out_is_made_by_its_option_alone_and_taken_out_by_none():
    words = ["--trainer.compile", "--trainer.lora.rank", "4"]
    config = load_config(parse_command([*DEBUG, *words]))
    assert config.trainer.compile == Compile() and config.trainer.lora.rank == 4
    again = load_config(parse_command([*DEBUG, *words, "--trainer.lora", "None"]))
    assert again.trainer.lora is None and again.trainer.compile is not None


def test_fields_of_a_field_that_may_be_none_are_options_like_others(command):
    code, _, err = command(
        *DEBUG,
        "--tasks.sum-digits.validation.count",
        "40",
        "--trainer.lr-scheduler.total-steps",
        "None",
        "--dry-run",
    )
    assert code == 0 and err == ""


# ---- mistakes


PARALLEL = ["--trainer.parallelism.tensor-parallel-degree"]

MISTAKES = {
    "no config": ([], "--config"),
    "option without a value": (["--config"], "--config", "expected one argument"),
    "unknown config": (
        ["--config", "rl_grpo_qwen3_debg"],
        "rl_grpo_qwen3_debg",
        "did you mean rl_grpo_qwen3_debug?",
    ),
    "unknown module": (
        [*DEBUG, "--module", "nowhere.configs"],
        "--module",
        "nowhere.configs",
        "PYTHONPATH",
    ),
    "unknown field": ([*DEBUG, "--stepz", "3"], "--stepz", "perhaps you meant --steps"),
    "unknown task": ([*DEBUG, "--tasks.nothing.group-size", "3"], "--tasks.nothing.group-size"),
    "wrong type": ([*DEBUG, "--steps", "three"], "--steps", "'three'"),
    "a number with a point for a whole one": (
        [*DEBUG, "--steps", "5.0"],
        "--steps = '5.0': must be a whole number",
    ),
    "a text without quotes": (
        [*DEBUG, "--output-dir", "my", "runs"],
        "--output-dir = 'my runs': takes one word, and 'runs' follows: a text with spaces stands",
    ),
    "unknown field of a list's entry": (
        [*DEBUG, "--pre-batch-filters.0.moed", "enforce"],
        "no option --pre-batch-filters.0.moed; perhaps you meant --pre-batch-filters.0.mode",
    ),
    "a task without a dataset": (
        [*DEBUG, "--tasks.sum-digits.dataset", "None"],
        "--tasks.sum-digits.dataset = 'None': it is set by its fields",
    ),
    "wrong choice": ([*DEBUG, "--provision.device", "tpu"], "--provision.device", "tpu", "'cpu'"),
    "word too many": ([*DEBUG, "extra"], "extra"),
    "missing folder": (
        [*DEBUG, "--model.hf-assets-path", "/nowhere"],
        "model.hf_assets_path",
        "'/nowhere'",
        "no such folder",
    ),
    "unknown flavor": ([*DEBUG, "--model.flavor", "9B"], "model.flavor", "'9B'", "0.6B"),
    "groups per step": (
        [*DEBUG, "--groups-per-step", "8"],
        "--groups-per-step = '8': is gone: set rollouts_per_step to groups * group_size",
    ),
    "group of one": (
        [*DEBUG, "--tasks.sum-digits.group-size", "1"],
        "group_size = 1",
        "use 2 or more",
    ),
    "generator longer than the model": (
        [*DEBUG, "--generator.engine.max-model-len", "4096"],
        "generator.engine.max_model_len = 4096",
        "2048 positions",
    ),
    "rollout longer than a row": (
        [*DEBUG, "--tasks.sum-digits.env.max-rollout-tokens", "1000"],
        "tasks.sum_digits.env.max_rollout_tokens = 1000",
        "batcher.row_length is 512",
    ),
    "rollout longer than the generator's": (
        [*DEBUG, "--tasks.sum-digits.env.max-rollout-tokens", "500"],
        "tasks.sum_digits.env.max_rollout_tokens = 500",
        "generator.engine.max_model_len is 256",
    ),
    "truncated sampling": (
        [*DEBUG, "--tasks.sum-digits.sampling.top-p", "0.9"],
        "sampling.top_p = 0.9",
        "biases the ratio",
    ),
    "greedy training": (
        [*DEBUG, "--tasks.sum-digits.sampling.temperature", "0"],
        "sampling.temperature = 0.0",
        "above 0",
    ),
    "no steps": ([*DEBUG, "--steps", "0"], "steps = 0", "at least 1"),
    "negative bound": (
        [*DEBUG, "--max-offpolicy-steps", "-1"],
        "max_offpolicy_steps = -1",
        "at least 0",
    ),
    "no learning rate": (
        [*DEBUG, "--trainer.optimizer.lr", "nan"],
        "trainer.optimizer.lr = nan",
        "above 0",
    ),
    "gradients turned round": (
        [*DEBUG, "--trainer.optimizer.max-norm", "-1"],
        "trainer.optimizer.max_norm = -1.0",
        "above 0",
    ),
    "copies that do not divide the ranks": (
        [
            *DEBUG,
            "--trainer.ranks",
            "2",
            "--trainer.parallelism.data-parallel-replicate-degree",
            "3",
        ],
        "trainer.parallelism.data_parallel_replicate_degree = 3",
        "trainer.ranks = 2",
    ),
    "tensor-parallel ranks that do not divide the ranks": (
        [*DEBUG, "--trainer.ranks", "3", "--trainer.parallelism.tensor-parallel-degree", "2"],
        "trainer.parallelism.tensor_parallel_degree = 2",
        "must divide trainer.ranks = 3",
    ),
    "degrees of fewer ranks than there are": (
        [
            *DEBUG,
            "--trainer.ranks",
            "8",
            *PARALLEL,
            "2",
            "--trainer.parallelism.data-parallel-shard-degree",
            "2",
        ],
        "trainer.parallelism.data_parallel_shard_degree = 2",
        "the product of the degrees is 4 and trainer.ranks = 8",
    ),
    "degrees of more ranks than there are": (
        [
            *DEBUG,
            "--trainer.ranks",
            "2",
            *PARALLEL,
            "2",
            "--trainer.parallelism.data-parallel-replicate-degree",
            "2",
        ],
        "trainer.parallelism.tensor_parallel_degree = 2",
        "the product of the degrees is 0 and trainer.ranks = 2",
    ),
    "heads that can't be shared out": (
        [*DEBUG, "--trainer.ranks", "4", *PARALLEL, "4"],
        "trainer.parallelism.tensor_parallel_degree = 4",
        "must divide the model's 2 key and value heads",
    ),
    "heads that rows' parts can't share out": (
        [*DEBUG, "--trainer.ranks", "4", "--trainer.parallelism.context-parallel-degree", "4"],
        "trainer.parallelism.context_parallel_degree = 4",
        "must divide the model's 2 key and value heads",
    ),
    "rows in parts, and tensors": (
        [
            *DEBUG,
            "--trainer.ranks",
            "4",
            "--trainer.parallelism.context-parallel-degree",
            "2",
            *PARALLEL,
            "2",
        ],
        "trainer.parallelism.context_parallel_degree = 2",
        "the two are not tried together",
    ),
    "exchanges through memory that ranks can't name": (
        [*DEBUG, "--trainer.compile.async-tensor-parallel"],
        "trainer.compile.async_tensor_parallel = True",
        "each trainer process sees one GPU",
    ),
    "8-bit floats by the name that they had": (
        [*DEBUG, "--trainer.float8", "rowwise"],
        "--trainer.float8 = 'rowwise': is --trainer.compile.float8 now",
    ),
    "8-bit floats with adapters": (
        [*DEBUG, "--trainer.compile.float8", "rowwise", "--trainer.lora.rank", "4"],
        "trainer.compile.float8 = 'rowwise': is not tried with trainer.lora",
    ),
    "a serving of adapters by the name that it had": (
        [*DEBUG, "--generator.adapter", "merged"],
        "--generator.adapter = 'merged': is --trainer.lora.serve now",
    ),
    "a part with a value of its own": (
        [*DEBUG, "--trainer.compile", "True"],
        "--trainer.compile = 'True': it is set by its fields: --trainer.compile.float8",
    ),
    "mixture of experts in a dense folder": (
        [*DEBUG, "--model.flavor", "qwen3/30B-A3B"],
        "model.flavor = 'qwen3/30B-A3B'",
        "choose the flavor of this folder",
    ),
    "compiled where rows decide what is compiled": (
        [*DEBUG, "--trainer.compile"],
        "trainer.compile = Compile(",
        "on a CPU each step would compile again",
    ),
    "offload to where everything is": (
        [*DEBUG, "--trainer.enable-cpu-offload"],
        "trainer.enable_cpu_offload = True",
        "set it to False",
    ),
    "no copies": (
        [*DEBUG, "--trainer.parallelism.data-parallel-replicate-degree", "0"],
        "replicate_degree = 0",
        "at least 1",
    ),
    "more memory than there is": (
        [*DEBUG, "--generator.engine.gpu-memory-utilization", "1.5"],
        "generator.engine.gpu_memory_utilization = 1.5",
        "at most 1",
    ),
    "no cache": (
        [*DEBUG, "--generator.engine.cpu-kv-cache-gib", "0"],
        "cpu_kv_cache_gib = 0.0",
        "above 0",
    ),
    "an adapter that nothing trains": (
        [*DEBUG, "--tasks.sum-digits.adapter", "math"],
        "tasks.sum_digits.adapter = 'math'",
        "set trainer.lora.rank",
    ),
    "an adapter that names no folder": (
        [*DEBUG, "--tasks.sum-digits.adapter", "a/b"],
        "tasks.sum_digits.adapter",
        "letters",
    ),
    "a task beside adapters of others": (
        [
            "--config",
            "rl_mixed_qwen3_debug",
            "--tasks.sum-digits.adapter",
            "math",
            "--trainer.lora.rank",
            "4",
        ],
        "tasks.sum_digits_distilled.adapter = ''",
        "name one for each task",
    ),
    "whole models of several adapters": (
        [
            *DEBUG,
            "--tasks.sum-digits.adapter",
            "math",
            "--trainer.lora.rank",
            "4",
            "--trainer.lora.serve",
            "merged",
        ],
        "trainer.lora.serve = 'merged'",
        "serve them",
    ),
    "a rank that vLLM has no room for": (
        [*DEBUG, "--trainer.lora.rank", "600"],
        "trainer.lora.rank = 600",
        "set trainer.lora.serve = merged",
    ),
    "negative temperature": (
        [*DEBUG, "--validation.temperature", "-1"],
        "validation.temperature = -1.0",
        "at least 0",
    ),
}


@pytest.mark.parametrize("words", MISTAKES.values(), ids=MISTAKES)
@pytest.mark.parametrize("dry_run", [False, True], ids=["run", "dry run"])
def test_a_mistake_is_one_line_and_exit_code_2(command, words, dry_run):
    arguments, *parts = words
    code, out, err = command(*(["--dry-run"] if dry_run else []), *arguments)
    assert code == 2 and out == ""
    assert_one_line(err, *parts)


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_an_overrides_mistake_is_named_whatever_the_terminal_can_show(
    monkeypatch, command, encoding
):
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO(), encoding=encoding))
    code, _, err = command(*DEBUG, "--stepz", "3")
    assert code == 2
    assert_one_line(err, "no option --stepz; perhaps you meant --steps")


def test_run_folder_that_holds_files_is_refused(command, tmp_path):
    (tmp_path / "metrics.jsonl").write_text("{}")
    code, _, err = command(*DEBUG, "--run-dir", str(tmp_path))
    assert code == 2
    assert_one_line(err, "--run-dir", str(tmp_path), "name a new folder")
    assert (tmp_path / "metrics.jsonl").read_text() == "{}"


def test_dry_run_makes_no_folder(command, tmp_path):
    code, _, _ = command(
        *DEBUG,
        "--dry-run",
        "--run-dir",
        str(tmp_path / "run"),
        "--output-dir",
        str(tmp_path / "out"),
    )
    assert code == 0 and list(tmp_path.iterdir()) == []


# ---- the model's folder


FOLDERS = {
    "no config": (
        lambda folder: (folder / "config.json").unlink(),
        "no readable config.json",
        "FileNotFoundError",
    ),
    "a config that is no JSON": (
        lambda folder: (folder / "config.json").write_text("{"),
        "no readable config.json",
    ),
    "another architecture": (
        edit_config(architectures=["MambaForCausalLM"]),
        "its architecture 'MambaForCausalLM' can't be trained here: transformers builds a Qwen3ForCausalLM by the model_type",
    ),
    "half a config": (
        edit_config(num_attention_heads=None),
        "config.json has no 'num_attention_heads'",
    ),
    "no weights": (
        lambda folder: (folder / "model.safetensors").unlink(),
        "has no weights",
        "download the whole model",
    ),
    "no tokenizer": (
        lambda folder: [file.unlink() for file in folder.glob("tokenizer*")],
        "has no tokenizer",
    ),
}


@pytest.mark.parametrize("change, parts", [(c, p) for c, *p in FOLDERS.values()], ids=FOLDERS)
def test_a_folder_that_is_no_model_is_refused_by_name(command, tmp_path, change, parts):
    folder = broken_folder(tmp_path, change)
    for words in ([], ["--dry-run"]):
        code, _, err = command(*DEBUG, "--model.hf-assets-path", folder, *words)
        assert code == 2
        assert_one_line(err, "model.hf_assets_path", folder, *parts)


def test_a_named_architecture_can_be_planned_before_its_weights_are_there(command):
    code, out, err = command(
        "--config", "rl_grpo_qwen3_0_6b", "--dry-run", "--model.hf-assets-path", "/nowhere"
    )
    assert code == 0 and err == ""
    assert "596.0M parameters" in out and "before a run   model.hf_assets_path = '/nowhere'" in out


# ---- the plan, by hand


def test_plan_of_the_debug_config_by_hand():
    config = config_registry.rl_grpo_qwen3_debug()
    plan = plan_run(config)
    # A layer of width 128: q and o are 128 x 128, k and v 128 x 64, three mlp matrices 128 x 384, norms of 2 x 32 and 2 x 128.
    layer = 2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 384 + 2 * 32 + 2 * 128
    parameters = 4 * layer + 768 * 128 + 128  # tied head
    assert plan.sizes.parameters == parameters == 886_144
    # 256 rollouts in groups of 8, of at most 128 tokens each, in microbatches of 8 rows of 512.
    assert plan.rollouts_per_step == 256 and plan.lines()[1].endswith("each on 256 rollouts")
    assert "; 512 rollouts open at most" in plan.lines()[2]
    assert (plan.tokens_per_step, plan.microbatches_per_rank) == (32_768, 8)
    assert plan.processes == 2
    # float32: weights, gradients and two moments; in each layer, cosines and sines of 512 places for heads of 32.
    state = 4 * 4 * parameters + 4 * 4 * 2 * 512 * 32
    # 4 times 128; queries of 128 and keys of 64 before and after, values of 64, attention's 128; four times 384.
    values = 4 * 128 + 2 * (128 + 64) + 64 + 128 + 4 * 384
    tokens, matrix, logits = 8 * 512, 768 * 128, 128 * 768
    # Copies of the head and a layer; gradient; logits of a chunk and their gradient; three times the tokens' last values.
    head = 4 * (matrix + layer) + 4 * matrix + 8 * logits + 3 * 128 * tokens * 4
    # The tied head's copy and gradient; two layers' copies, a gradient and its sum; two feed-forward gradients.
    at_work = 2 * 4 * matrix + 4 * 4 * layer + 2 * 384 * tokens * 4
    held = plan.trainer_memory
    assert (held.state, held.activations) == (state, 4 * values * tokens * 4)
    assert held.head == pytest.approx(head, rel=1e-3)
    assert held.layer == pytest.approx(at_work, rel=1e-3)
    assert plan.trainer_gib == pytest.approx(held.total / GIB) and held.fixed == 0
    assert plan.generator_gib == pytest.approx(4 * parameters / GIB + 0.25)  # weights and a cache


def test_tensor_parallel_ranks_get_the_same_rows():
    config = config_registry.rl_grpo_qwen3_debug()
    config.trainer.ranks, config.trainer.parallelism.tensor_parallel_degree = 4, 2
    assert plan_run(config).microbatches_per_rank == 4  # 8 on one rank, shared by 2


def test_ranks_share_the_state_and_the_work():
    config = config_registry.rl_grpo_qwen3_debug()
    config.trainer.ranks, config.generator.replicas = 2, 3
    plan = plan_run(config)
    assert (plan.processes, plan.microbatches_per_rank) == (5, 4)


def test_a_step_may_exceed_its_rollouts_by_less_than_a_group():
    config = config_registry.rl_grpo_qwen3_debug()
    config.tasks["sum_digits"].group_size = 7
    plan = plan_run(config)
    # 36 groups are 252 rollouts and too few, and 37 are 259; 73 are 511, and a 74th begins.
    assert plan.tokens_per_step == 259 * 128 and plan.open_rollouts == 518
    config = config_registry.rl_opd_qwen3_debug()
    config.tasks["sum_digits"].group_size = 7
    # Rollouts that nothing compares come to 255, and a group of 7 may be the last.
    assert plan_run(config).tokens_per_step == 262 * 128


def test_plan_counts_the_gpus_of_parallel_replicas():
    config = config_registry.rl_grpo_qwen3_14b()
    plan = plan_run(config, device="cuda", available=list(range(8)))
    engine = config.generator.engine
    processes = config.trainer.ranks + config.generator.replicas * engine.tensor_parallel_degree
    assert plan.processes == processes == 8
    assert plan.generator_gib == engine.gpu_memory_utilization
    assert math.isfinite(plan.trainer_gib) and "takes 90% of its GPU's memory" in plan.lines()[5]
    with pytest.raises(ConfigError, match="needs 8 GPUs and this host has 7"):
        plan_run(config, device="cuda", available=list(range(7)))


# ---- a registry of the user's own


def test_configs_of_another_module_are_found_by_import_alone(command, tmp_path, monkeypatch):
    (tmp_path / "my_configs.py").write_text(
        "from torchtitan.experiments.rl.config_registry import rl_grpo_qwen3_debug\n"
        "def _private(): ...\n"
        "def needs(argument): ...\n"
        "def quick():\n"
        "    'Three steps.'\n"
        "    config = rl_grpo_qwen3_debug()\n"
        "    config.steps = 3\n"
        "    return config\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert command("--module", "my_configs", "--list")[1].split() == ["quick", "Three", "steps."]
    code, out, _ = command("--module", "my_configs", "--config", "quick", "--dry-run")
    assert code == 0 and "steps          3," in out


@pytest.mark.parametrize(
    ("line", "cure"),
    [
        (
            "config.groups_per_step = 3",
            "groups_per_step is gone: set rollouts_per_step to groups * group_size",
        ),
        (
            "replace(config, groups_per_step=3)",
            "groups_per_step is gone: set rollouts_per_step to groups * group_size",
        ),
        (
            "replace(config.trainer, async_tensor_parallel=True)",
            "trainer.async_tensor_parallel is --trainer.compile.async-tensor-parallel now",
        ),
    ],
)
def test_a_config_that_sets_a_field_that_is_gone_is_told_what_to_set(
    command, tmp_path, monkeypatch, line, cure
):
    (tmp_path / "old_configs.py").write_text(
        "from dataclasses import replace\n"
        "from torchtitan.experiments.rl.config_registry import rl_grpo_qwen3_debug\n"
        f"def old():\n    config = rl_grpo_qwen3_debug()\n    {line}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "old_configs", raising=False)
    code, _, err = command("--module", "old_configs", "--config", "old", "--dry-run")
    assert code == 2 and err.count(cure) == 1


def test_an_error_inside_a_users_module_is_not_hidden_as_a_missing_module(
    command, tmp_path, monkeypatch
):
    (tmp_path / "broken_configs.py").write_text("import a_package_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    code, out, err = command("--module", "broken_configs", "--list")
    assert code == 2 and out == ""
    place = f"{tmp_path}/broken_configs.py:1"
    assert_one_line(
        err,
        "--module = 'broken_configs'",
        "ModuleNotFoundError",
        "'a_package_that_is_not_there'",
        place,
    )
