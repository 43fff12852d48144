"""What the plan says of a run on GPUs, against numbers worked out by hand from the models' cards."""

import re
from functools import partial
from pathlib import Path

import pytest

from torchtitan.experiments.rl import config_registry
from torchtitan.experiments.rl.config import machine
from torchtitan.experiments.rl.config.balance import BANDWIDTH, FLOPS
from torchtitan.experiments.rl.config.checks import needed_gpus, plan_run
from torchtitan.experiments.rl.config.command_line import DEFAULT_MODULE, config_functions
from torchtitan.experiments.rl.config.memory import shared_weights
from torchtitan.experiments.rl.config.plan import GIB, RunPlan
from torchtitan.experiments.rl.config.provision import ProvisionConfig
from torchtitan.experiments.rl.hosts.jobs import SlurmJob
from torchtitan.experiments.rl.models.row_shapes import RowShapes

ON_GPUS = [name for name in config_functions(DEFAULT_MODULE) if name.startswith("rl_grpo_qwen3_") and "debug" not in name]


def plan_of(name: str) -> RunPlan:
    config = getattr(config_registry, name)()
    return plan_run(config, device="cuda", available=list(range(needed_gpus(config))))


@pytest.mark.parametrize("name", ON_GPUS)
def test_a_configs_docstring_names_as_many_gpus_as_it_takes_and_its_plan_fits_them(name):
    config, said = getattr(config_registry, name)(), getattr(config_registry, name).__doc__
    gpus, size = re.search(r"on (\d+) GPUs(?: of (\d+) GB)?", said).groups()
    assert needed_gpus(config) == int(gpus)
    assert plan_of(name).trainer_gib < float(size or 80) * 1e9 / GIB


# Parameters, layers, width, query width, key width, feed-forward width, of the model cards; ranks, and how many share a layer.
MODELS = {
    "rl_grpo_qwen3_8b": (8_190_735_360, 36, 4096, 32 * 128, 8 * 128, 12288, 4, 1),
    "rl_grpo_qwen3_14b": (14_768_307_200, 40, 5120, 40 * 128, 8 * 128, 17408, 4, 2),
    "rl_grpo_qwen3_32b": (32_762_123_264, 64, 5120, 64 * 128, 8 * 128, 25600, 6, 1),
    "rl_grpo_qwen3_32b_64": (32_762_123_264, 64, 5120, 64 * 128, 8 * 128, 25600, 32, 4),
}


@pytest.mark.parametrize("name, numbers", MODELS.items())
def test_memory_of_a_trainer_rank_by_hand(name, numbers):
    parameters, layers, width, queries, keys, feed_forward, ranks, tensor = numbers
    plan = plan_of(name)
    assert plan.parameters == parameters
    # float32 weights, gradients and two moments, each rank an equal part.
    state = 16 * parameters / ranks
    # bfloat16 copies of two layers and a gradient, and its float32 sum: 3 x 2 + 4 bytes.
    layer = 2 * width * queries + 2 * width * keys + 3 * width * feed_forward
    gathered = 10 * layer / tensor
    # The head of 151,936 words: copy and gradient in bfloat16, two of float32; float32 logits of 1,024 tokens, three times.
    head = (12 * 151_936 * width + 12 * 1024 * 151_936) / tensor
    # One row of 8,192 tokens: each layer's input, and all of one layer.
    values = 4 * width + 3 * (queries + keys) + keys + queries + 4 * feed_forward
    activations = 2 * 8192 * (layers * width + values) / tensor
    assert plan.trainer_gib == pytest.approx((state + gathered + head + activations) / GIB + 2, rel=1e-3)


def test_a_step_of_the_8b_by_hand_and_the_side_that_takes_longer():
    costs = plan_of("rl_grpo_qwen3_8b").balance
    parameters, tokens = 8_190_735_360, 512 * 4096
    assert costs.train_s == pytest.approx(8 * parameters * tokens / (4 * FLOPS))
    # 128 rollouts at once on each of four generators: 3,072 steps that read 2 bytes a parameter, and of each sequence, 2,560
    # tokens long on average, the keys and values: 36 layers x 2 x 1,024 x 2 bytes. Prompts of 1,024 tokens.
    read = 2 * parameters + 128 * 2560 * 36 * 2 * 1024 * 2
    prompts = 2 * parameters * 128 * 1024 / FLOPS
    assert costs.generate_s == pytest.approx(3072 * read / BANDWIDTH + prompts)
    assert "bottleneck     even" in costs.line()
    assert plan_of("rl_grpo_qwen3_0_6b").balance.line().startswith("bottleneck     the generators: ")
    lopsided = config_registry.rl_grpo_qwen3_8b()
    lopsided.trainer.ranks, lopsided.generator.replicas = 1, 7
    line = plan_run(lopsided, device="cuda", available=list(range(8))).balance.line()
    assert line.startswith("bottleneck     the trainer: ") and " : 1 (" in line


def test_the_plan_prints_degrees_shapes_and_the_bottleneck():
    lines = plan_of("rl_grpo_qwen3_14b").lines()
    assert "4 trainer rank(s) (2 data-parallel x 2 tensor-parallel), 2 generator(s) of 2" in lines[4]
    assert lines[-2] == "shapes         4 of rows x tokens: 1 x 128, 1 x 2048, 1 x 4096, 1 x 8192"
    assert lines[-1].startswith("bottleneck ")
    debug = plan_run(config_registry.rl_grpo_qwen3_debug()).lines()
    assert [line.split()[0] for line in debug[-3:]] == ["memory", "shared", "disk"], (
        "the cost model has no numbers for CPU cores"
    )


def test_shapes_are_a_quarter_a_half_and_all_of_a_row_in_whole_blocks():
    assert RowShapes.of(8, 500).shapes == ((1, 128), (8, 128), (8, 256), (8, 512))
    assert RowShapes.of(1, 512).shapes == ((1, 128), (1, 256), (1, 512))


def test_the_page_on_clusters_lists_each_config_as_it_is_planned():
    page = Path(__file__).parents[2] / "docs/clusters.md"
    rows = dict(re.findall(r"^\| `(rl_grpo_qwen3_\w+)` \| (.*) \|$", page.read_text(), re.MULTILINE))
    assert list(rows) == ON_GPUS
    for name, row in rows.items():
        plan, size = plan_of(name), re.search(r"GPUs( of \d+ GB)?", getattr(config_registry, name).__doc__)[1] or ""
        tensor, engine = plan.trainer_tensor_parallel_degree, plan.tensor_parallel_degree
        gpus = plan.trainer_ranks + plan.generator_replicas * engine
        ranks = f"{plan.trainer_ranks}{f' in {tensor}s' if tensor > 1 else ''}"
        generators = f"{plan.generator_replicas}{f' of {engine}' if engine > 1 else ''}"
        costs = plan.balance.line().partition("generators = ")[2].removesuffix(" (config/balance.py)")
        assert row == f"{gpus}{size} | {ranks} | {generators} | {costs}"


def test_a_dry_run_says_how_many_gpus_this_host_lacks(monkeypatch):
    monkeypatch.setattr(machine, "visible_gpus", lambda: [0, 1, 2])
    assert machine.missing_gpus(3) == []
    (problem,) = machine.missing_gpus(64)
    assert str(problem) == (
        "provision.device = 'cuda': the run needs 64 GPUs and this host has 3: run it where they are, or on other hosts "
        "(provision.job)"
    )


def test_a_host_keeps_two_versions_of_what_its_ranks_publish_and_of_what_its_weight_reader_fetches():
    held = partial(shared_weights, nbytes=100.0, copies=1)
    # One host has everything, and its generators map the trainer's own buffers.
    assert held(trainer_hosts=[0, 0], generator_hosts=[0, 0]) == {0: 200}
    # The trainer's host keeps the whole, and so does the reader of each other host, for however many engines.
    assert held(trainer_hosts=[0, 0], generator_hosts=[0, 1, 1, 2]) == {0: 200, 1: 200, 2: 200}
    # Two hosts publish a half each. Generators beside the second half need a reader too.
    assert held(trainer_hosts=[0, 0, 1, 1], generator_hosts=[1, 2]) == {0: 100, 1: 300, 2: 200}
    # Two copies of the model: the first is published, and the second one's host fetches it.
    assert held(trainer_hosts=[0, 0, 1, 1], copies=2, generator_hosts=[0, 1]) == {0: 200, 1: 200}


def test_the_plan_counts_the_weights_in_each_hosts_memory():
    config = config_registry.rl_grpo_qwen3_32b_32()
    config.provision = ProvisionConfig(device="cuda", job=SlurmJob())
    plan = plan_run(config)
    # 32.76 billion parameters in bfloat16, twice. Two hosts train and two generate.
    both = 2 * 2 * 32_762_123_264
    assert plan.shared_weights == {0: both / 2, 1: both / 2, 2: both, 3: both}
    assert "shared memory  two versions of the weights: 61.02 GiB on hosts 0-1, 122.05 GiB on hosts 2-3" in plan.lines()
