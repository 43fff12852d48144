"""The plan of a run on GPUs is compared with numbers worked out by hand from the models' cards."""

import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from tests.fakes.engine import ScriptedEngineConfig
from tests.fakes.gpus import fake_gpus
from torchtitan.experiments.rl import config_registry
from torchtitan.experiments.rl.algorithms import OPD
from torchtitan.experiments.rl.command import machine
from torchtitan.experiments.rl.command.briefing import learning_rate_warning
from torchtitan.experiments.rl.command.checks import check, plan_run
from torchtitan.experiments.rl.command.command_line import (
    DEFAULT_MODULE,
    config_functions,
    load_config,
    parse_command,
)
from torchtitan.experiments.rl.command.gpu_split import split_of
from torchtitan.experiments.rl.config.run_config import RunConfig
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.generation.references import HostedModel
from torchtitan.experiments.rl.models.decoder import RowShapes
from torchtitan.experiments.rl.models.lora import LoRA
from torchtitan.experiments.rl.plan.costs import GPU_KINDS
from torchtitan.experiments.rl.plan.placement import Place, hosts_of, needed_gpus
from torchtitan.experiments.rl.plan.plan import GIB, RunPlan, shared_weights
from torchtitan.experiments.rl.training.config import Compile

FLOPS, BANDWIDTH = 989e12 * 0.4, 3.35e12 * 0.6
"""Operations and bytes of memory a second and GPU: an H100's published peaks, and the shares that are assumed to be reached."""
ON_GPUS = [
    name
    for name in config_functions(DEFAULT_MODULE)
    if name.startswith("rl_grpo_qwen3_") and "debug" not in name
]


def least_gib(gb: int) -> float:
    """Return the memory that torch finds on the smallest kind of GPU of ``gb`` GB."""
    return min(kind.gib for kind in GPU_KINDS if kind.gb == gb)


def plan_of(name: str) -> RunPlan:
    config = getattr(config_registry, name)()
    return plan_run(config, device="cuda", available=list(range(needed_gpus(config))))


@pytest.mark.parametrize("name", ON_GPUS)
def test_a_configs_docstring_names_as_many_gpus_as_it_takes_and_its_plan_fits_them(name):
    config, said = getattr(config_registry, name)(), getattr(config_registry, name).__doc__
    gpus, size = re.search(r"on (\d+) GPUs?(?: of (\d+) GB)?", said).groups()
    assert needed_gpus(config) == int(gpus)
    assert plan_of(name).gpu_gib < least_gib(int(size or 80))


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
    assert plan.sizes.parameters == parameters
    # float32 weights, gradients and two moments, each rank an equal part; in each layer, cosines and sines for heads of 128.
    state = 16 * parameters / ranks + 4 * layers * 8192 * 2 * 128
    inputs = 2 * 8192 * layers * width / tensor
    layer = (2 * width * queries + 2 * width * keys + 3 * width * feed_forward) / tensor
    matrix = 151_936 * width / tensor
    # bfloat16 copies of the head and a layer, the head's gradient in float32, a chunk's product and the gradient of its logits
    # in bfloat16, three times the values of one row of 8,192 tokens.
    head = (
        2 * (matrix + layer)
        + 4 * matrix
        + 2 * (matrix + 1024 * 151_936 / tensor)
        + 3 * 2 * 8192 * width
    )
    assert plan.trainer_memory.head == pytest.approx(head, rel=1e-3)
    # The reduction of the head's gradient in float32, a layer's copy and gradient, all its values, two feed-forward gradients.
    values = 4 * width + 3 * (queries + keys) + 6 * feed_forward
    at_work = 4 * matrix + 2 * 2 * layer + 2 * 8192 * values / tensor
    assert plan.trainer_memory.layer == pytest.approx(at_work, rel=1e-3)
    assert plan.trainer_gib == pytest.approx(
        (state + inputs + max(head, at_work)) / GIB + 1 + 4.5, rel=1e-3
    )


@pytest.mark.parametrize(
    "name, ranks, gathered",
    [("rl_grpo_qwen3_30b_a3b", 4, 128), ("rl_grpo_qwen3_30b_a3b_16", 8, 16)],
)
def test_a_mixture_is_planned_by_its_active_parameters_and_the_experts_that_a_rank_gathers(
    name, ranks, gathered
):
    """48 layers of 128 experts of 768 at a width of 2,048, of which a token takes 8; 32 heads of 128, 4 of keys."""
    plan = plan_of(name)
    expert, vocabulary = 3 * 2048 * 768, 151_936 * 2048
    dense = 2 * 2048 * 4096 + 2 * 2048 * 512 + 2048 * 128
    assert plan.sizes.parameters == pytest.approx(
        48 * (dense + 128 * expert) + 2 * vocabulary, rel=1e-4
    )
    assert (
        plan.sizes.active_parameters
        == plan.sizes.parameters - 48 * 120 * expert
        == pytest.approx(3.35e9, rel=0.01)
    )
    assert f"{plan.sizes.active_parameters / 1e6:,.1f}M active" in plan.lines()[0]
    assert plan.trainer_memory.state == pytest.approx(
        16 * plan.sizes.parameters / ranks + 4 * 48 * 8192 * 2 * 128, rel=1e-6
    )
    # bfloat16 copies of two layers, and the first one's gradient in bfloat16 and float32; what is computed again of a token:
    # 4 of the width, 3 of queries and keys, 4 of its experts' width, and 4 of their tokens; two gradients of experts' width.
    layer, width = dense + gathered * expert, 8 * 768
    again = 2 * 8192 * (4 * 2048 + 3 * (4096 + 512) + 4 * width + 4 * 8 * 2048 + 2 * width)
    assert plan.trainer_memory.layer == pytest.approx(
        max(10 * layer, 4 * vocabulary + 4 * layer) + again, rel=1e-3
    )
    operations = 8 * (plan.sizes.active_parameters - vocabulary) + 9 * 2 * 4096 * 48 * 2048
    assert plan.balance.train_s == pytest.approx(
        operations * 512 * 4096 / (ranks * FLOPS), rel=1e-3
    )


def test_a_step_of_the_8b_by_hand_and_the_side_that_takes_longer():
    costs = plan_of("rl_grpo_qwen3_8b").balance
    parameters, tokens = 8_190_735_360, 512 * 4096
    # Two operations for each parameter that a token is multiplied with, that is all but the embedding's: forward, again, and
    # twice backward. Attention has 2 products, again 2, and 5: each of 2 x 4,096 operations in each of 36 layers for each of
    # the 2,048 places that a token sees on average.
    operations = 8 * (parameters - 151_936 * 4096) + 9 * 2 * 4096 * 36 * 2048
    assert costs.train_s == pytest.approx(operations * tokens / (4 * FLOPS), rel=1e-5)
    # 128 rollouts at once on each of four generators: 3,072 steps that read 2 bytes a parameter, and of each sequence, 2,560
    # tokens long on average, the keys and values: 36 layers x 2 x 1,024 x 2 bytes. A step takes a millisecond besides, and for
    # each sequence 10 us and two operations a parameter. Prompts of 1,024 tokens.
    read = 2 * parameters + 128 * 2560 * 36 * 2 * 1024 * 2
    step = read / BANDWIDTH + 1e-3 + 128 * (1e-5 + 2 * parameters / FLOPS)
    prompts = 2 * parameters * 128 * 1024 / FLOPS
    assert costs.generate_s == pytest.approx(3072 * step + prompts, rel=1e-3)
    assert "bottleneck     the generators" in costs.line()
    lopsided = config_registry.rl_grpo_qwen3_8b()
    for ranks, side in ((1, "the trainer"), (7, "the generators")):
        lopsided.trainer.ranks, lopsided.generator.replicas = ranks, 8 - ranks
        line = plan_run(lopsided, device="cuda", available=list(range(8))).balance.line()
        assert line.startswith(f"bottleneck     {side}: ")


def test_a_step_of_a_small_model_takes_what_its_host_needs_to_launch_it():
    # 256 rows of 8,192 tokens, each of which passes 28 layers three times: the H100 would compute
    # a row in two thirds of the time.
    costs = plan_of("rl_grpo_qwen3_0_6b").balance
    assert costs.train_s == pytest.approx(256 * 3 * 28 * 2.6e-3, rel=1e-6)


def test_the_plan_prints_degrees_shapes_and_the_bottleneck():
    lines = plan_of("rl_grpo_qwen3_14b").lines()
    assert (
        "4 trainer rank(s) (2 data-parallel x 2 tensor-parallel), 2 generator(s) of 2" in lines[4]
    )
    assert (
        lines[-3]
        == "shapes         of a microbatch, in rows x tokens: 1 x 2048, 1 x 4096, 1 x 8192"
    )
    assert lines[-1].startswith("bottleneck ")
    debug = plan_run(config_registry.rl_grpo_qwen3_debug()).lines()
    assert [line.split()[0] for line in debug[-3:]] == ["memory", "shared", "disk"], (
        "the cost model has no numbers for CPU cores"
    )


def test_shapes_are_a_quarter_a_half_and_all_of_a_row_in_whole_blocks():
    assert RowShapes.of(8, 500).shapes == ((8, 128), (8, 256), (8, 512))
    assert RowShapes.of(1, 512).shapes == ((1, 128), (1, 256), (1, 512))


def test_the_page_on_clusters_lists_each_config_as_it_is_planned():
    page = Path(__file__).parents[2] / "docs/clusters.md"
    rows = dict(
        re.findall(r"^\| `(rl_grpo_qwen3_\w+)` \| (.*) \|$", page.read_text(), re.MULTILINE)
    )
    assert list(rows) == ON_GPUS
    for name, row in rows.items():
        plan, size = (
            plan_of(name),
            re.search(r"GPUs?( of \d+ GB)?", getattr(config_registry, name).__doc__)[1] or "",
        )
        config = plan.config
        tensor, engine = (
            config.trainer.parallelism.tensor_parallel_degree,
            config.generator.engine.tensor_parallel_degree,
        )
        gpus = needed_gpus(config)
        ranks = f"{config.trainer.ranks}{f' in {tensor}s' if tensor > 1 else ''}"
        generators = f"{config.generator.replicas}{f' of {engine}' if engine > 1 else ''}"
        ratio = plan.balance.train_s / plan.balance.generate_s
        costs = f"{ratio:.1f} : 1" if ratio > 1 else f"1 : {1 / ratio:.1f}"
        costs = "shared" if plan.shared_gpu is not None else costs
        assert row == f"{gpus}{size} | {ranks} | {generators} | {costs}"


def lacking(name: str, field: str) -> list[str]:
    """What this host lacks of GPUs for a config."""
    found = [str(lack) for lack in machine.shortages(plan_of(name), "outputs", field="output_dir")]
    return [lack for lack in found if lack.startswith(field)]


def test_a_dry_run_says_how_many_gpus_this_host_lacks(monkeypatch):
    fake_gpus(monkeypatch, 8, memory_gib=200)
    monkeypatch.setattr(machine, "gpu_host_lacks", lambda several_hosts: [])
    assert lacking("rl_grpo_qwen3_8b", "provision.device") == []
    assert lacking("rl_grpo_qwen3_32b_64", "provision.device") == [
        "provision.device = 'cuda': the run needs 64 GPUs and this host has 8: --provision.job slurm or "
        "kubernetes asks for 8 whole hosts of 8"
    ]


def test_a_host_keeps_two_versions_of_what_its_ranks_publish_and_of_what_its_weight_reader_fetches():
    held = partial(shared_weights, nbytes=100.0, copies=1)
    # One host has everything, and its generators map the trainer's own buffers.
    assert held(trainer_hosts=[0, 0], generator_hosts=[0, 0]) == {0: 200}
    # The trainer's host keeps the whole, and so does the reader of each other host, for however many engines.
    assert held(trainer_hosts=[0, 0], generator_hosts=[0, 1, 1, 2]) == {0: 200, 1: 200, 2: 200}
    # Two hosts publish a half each. Generators beside the second half need a reader for the first.
    assert held(trainer_hosts=[0, 0, 1, 1], generator_hosts=[1, 2]) == {0: 100, 1: 200, 2: 200}
    # Two copies of the model: the first is published, and the second one's host fetches it.
    assert held(trainer_hosts=[0, 0, 1, 1], copies=2, generator_hosts=[0, 1]) == {0: 200, 1: 200}


def test_the_plan_counts_the_weights_in_each_hosts_memory():
    config = config_registry.rl_grpo_qwen3_32b_32()
    plan = plan_run(config)
    # 32.76 billion parameters in bfloat16, twice. Two hosts train and two generate.
    both = 2 * 2 * 32_762_123_264
    assert plan.shared_weights == {0: both / 2, 1: both / 2, 2: both, 3: both}
    assert (
        "shared memory  two versions of the weights: 61.02 GiB on hosts 0-1, 122.05 GiB on hosts 2-3"
        in plan.lines()
    )


def test_versions_that_stay_on_the_trainers_gpus_take_a_ranks_share_of_one_there_and_no_memory_of_the_host():
    before = plan_of("rl_grpo_qwen3_8b")
    assert (
        not before.weights_on_devices
        and sum(before.shared_weights.values()) == 2 * 2 * 8_190_735_360
    )
    for weights in ("device", "auto"):
        config = config_registry.rl_grpo_qwen3_8b()
        config.generator.weights = weights
        plan = plan_run(config, device="cuda", available=list(range(8)))
        own = 2 * 8_190_735_360 / 4  # bfloat16, on four ranks
        assert (
            plan.weights_on_devices
            and plan.trainer_memory.published == own
            and not any(plan.shared_weights.values())
        )
        assert plan.trainer_gib == pytest.approx(before.trainer_gib + own / GIB)
        (line,) = [line for line in plan.lines() if line.startswith("versions")]
        assert (
            line
            == "versions       one of the weights, on the trainer's own devices: 3.81 GiB a rank"
        )
        assert not any(line.startswith("shared memory") for line in plan.lines())
    # An engine that sleeps on the trainer's GPU leaves it there.
    asleep = shared(kv_cache_gib=4.0, sleep=True)
    asleep.generator.weights = "device"
    memory = plan_run(asleep, device="cuda", available=[0]).trainer_memory
    assert (
        memory.published == 2 * 596_049_920
        and memory.idle == memory.state + memory.fixed + memory.published
    )


@pytest.mark.parametrize(
    "name, visible, cause",
    [
        ("rl_grpo_qwen3_32b_32", "", "trainer and generators are on hosts 0-3"),
        ("rl_grpo_qwen3_8b", "MIG-a,MIG-b", "CUDA_VISIBLE_DEVICES names slices of GPUs"),
    ],
)
def test_versions_stay_on_devices_only_where_every_engine_can_read_them(
    monkeypatch, name, visible, cause
):
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    config = getattr(config_registry, name)()
    config.generator.weights = "auto"
    here = None if not visible else list(range(needed_gpus(config)))
    assert not plan_run(config, device="cuda", available=here).weights_on_devices
    config.generator.weights = "device"
    with pytest.raises(
        ConfigError, match=f"^generator.weights = 'device': {cause}.*: set it to \"host\"$"
    ):
        plan_run(config, device="cuda", available=here)


def test_an_engine_that_reads_the_hosts_memory_only_is_refused_the_trainers_devices():
    class Own(ScriptedEngineConfig):
        reads_devices = False

    config = config_registry.rl_grpo_qwen3_debug()
    config.generator.weights, config.generator.engine = "device", Own()
    with pytest.raises(
        ConfigError, match="generator.weights = 'device': Own reads the host's memory only"
    ):
        plan_run(config, device="cpu", available=[0, 1])


def shared(**fields) -> RunConfig:
    config = config_registry.rl_grpo_qwen3_0_6b_1gpu()
    config.max_offpolicy_steps = 0
    config.generator.engine = replace(config.generator.engine, **fields)
    return config


def test_trainer_and_engine_on_one_gpu_by_hand():
    config = shared()
    plan = plan_run(config, device="cuda", available=[0])
    assert plan.placement.trainer == plan.placement.generators == (Place(0, (0,)),)
    parameters = 596_049_920
    engine = 2 * parameters / GIB + 3 + 2.6  # bfloat16 weights, keys and values, vLLM's own
    assert plan.gpu_gib == pytest.approx(plan.trainer_gib + engine) and plan.gpu_gib < 22.0
    memory = plan.trainer_memory
    assert memory.total == memory.tensors + 2 * GIB + GIB  # the allocator's cache, CUDA's own
    (line,) = [line for line in plan.lines() if line.startswith("shared GPUs")]
    assert f"= {plan.gpu_gib:.1f} GiB a GPU, both all the time" in line
    # With a cache of 16 GiB both do not fit 24 GB, and do where the engine sleeps: the trainer then keeps its state alone.
    assert plan_run(shared(kv_cache_gib=16.0), device="cuda", available=[0]).gpu_gib > 22 + 8
    asleep = plan_run(shared(kv_cache_gib=8.0, sleep=True), device="cuda", available=[0])
    memory = asleep.trainer_memory
    generating = (memory.state + memory.fixed + 2 * parameters) / GIB + 8 + 2.6
    assert (
        asleep.gpu_gib == pytest.approx(max(generating, asleep.trainer_gib + 2.6))
        and asleep.gpu_gib < 22.0
    )
    (line,) = [line for line in asleep.lines() if line.startswith("shared GPUs")]
    assert f"trainer {asleep.trainer_gib:.1f} + engine asleep 2.6 in a step" in line


@pytest.mark.parametrize(
    "ranks, replicas, degree, gpus, generators",
    [
        (2, 2, 1, 2, [(0,), (1,)]),
        (4, 2, 2, 4, [(0, 1), (2, 3)]),
        (1, 3, 1, 3, [(0,), (1,), (2,)]),
        (4, 1, 2, 4, [(0, 1)]),
    ],
)
def test_engines_that_share_gpus_begin_at_the_trainers_first(
    ranks, replicas, degree, gpus, generators
):
    config = shared(tensor_parallel_degree=degree)
    config.trainer.ranks, config.generator.replicas = ranks, replicas
    assert needed_gpus(config) == gpus
    placement = plan_run(config, device="cuda", available=list(range(gpus))).placement
    assert [place.devices for place in placement.trainer] == [(rank,) for rank in range(ranks)]
    assert [place.devices for place in placement.generators] == generators


def test_hosted_models_get_gpus_that_neither_side_has():
    config = shared()
    config.tasks["sum_digits"].algorithm = OPD.Config(
        teacher=HostedModel(path="nowhere", engine=config.generator.engine)
    )
    placement = plan_run(config, device="cuda", available=[0, 1]).placement
    assert placement.hosted == ((Place(0, (1,)),),) and needed_gpus(config) == 2


@pytest.mark.parametrize(
    "change, error",
    [
        (lambda c: setattr(c, "max_offpolicy_steps", 1), "max_offpolicy_steps = 1: set it to 0"),
        (
            lambda c: setattr(c.provision, "share_gpus", False),
            "generator.engine.sleep = True: frees memory for",
        ),
        (
            lambda c: setattr(c.generator.engine, "kv_cache_gib", None),
            "generator.engine.kv_cache_gib = None: name it",
        ),
    ],
)
def test_what_can_not_share_or_sleep_is_refused(change, error):
    config = shared(sleep=True)
    change(config)
    with pytest.raises(ConfigError, match=error):
        check(config)
        plan_run(config, device="cuda", available=[0, 1])


@pytest.mark.parametrize("gib, fits", [(23.5, True), (22, True), (21, False), (16, False)])
def test_a_gpu_too_small_for_both_is_refused_by_what_they_take(monkeypatch, gib, fits):
    """An RTX 4090 has 23.5 GiB, an L4 and an A10 have 22."""
    fake_gpus(monkeypatch, 1, memory_gib=gib)
    found = " ".join(lacking("rl_grpo_qwen3_0_6b_1gpu", "provision.device"))
    said = f"trainer rank and engine take about 21.4 GiB and a GPU here has {gib:.1f}"
    assert fits != (said in found)


@pytest.mark.parametrize("gib, fits", [(23.5, True), (22, False)])
def test_four_gib_of_keys_and_values_beside_the_trainer_need_more_than_an_l4(
    monkeypatch, gib, fits
):
    """As the config had it: 22.4 GiB."""
    fake_gpus(monkeypatch, 1, memory_gib=gib)
    plan = plan_run(shared(kv_cache_gib=4.0), device="cuda", available=[0])
    found = [str(lack) for lack in machine.shortages(plan, "outputs", field="output_dir")]
    assert fits != any("lower generator.engine.kv_cache_gib" in lack for lack in found)
    assert "of 24 GB (RTX 4090: 23.5 GiB) or more" in plan.gpu_line()


@pytest.mark.parametrize("weights, cached", [("host", 2.0), ("device", 4.5), ("auto", 4.5)])
def test_memory_in_segments_that_can_not_grow_is_planned_as_an_allocator_without_a_bound_keeps_it(
    weights, cached
):
    config = shared()
    config.generator.weights = weights
    memory = plan_run(config, device="cuda", available=[0]).trainer_memory
    assert memory.cached == cached * GIB


@pytest.mark.parametrize(
    "checkpointing, allocated, reserved",
    [("none", 15.9, 19.9), ("selective", 13.1, 17.0), ("full", 11.3, 15.4)],
)
def test_the_plan_holds_what_an_h100_took(checkpointing, allocated, reserved):
    """docs/gpu.md: Qwen3-0.6B, rows of 4,096 tokens, peak GiB of tensors and of the allocator."""
    config = config_registry.rl_grpo_qwen3_0_6b()
    config.batcher.row_length = 4096
    config.trainer.activation_checkpoint = checkpointing
    memory = plan_run(config, device="cuda", available=list(range(8))).trainer_memory
    assert memory.tensors / GIB == pytest.approx(allocated, rel=0.05)
    assert reserved <= (memory.tensors + memory.cached) / GIB
    page = (Path(__file__).parents[2] / "docs/gpu.md").read_text()
    (row,) = [line for line in page.splitlines() if line.startswith("| peak memory of tensors")]
    assert str(allocated) in row and str(reserved) in row


def test_8_bit_floats_need_a_gpu_that_has_them_and_torchao(monkeypatch):
    plan = plan_of("rl_grpo_qwen3_8b")
    lacks = {
        (8, 0): "trainer.compile.float8 = 'rowwise': needs GPUs of capability 8.9",
        (9, 0): "pip install torchao",
    }
    for recipe in ("rowwise", "off"):
        config = replace(
            plan.config, trainer=replace(plan.config.trainer, compile=Compile(float8=recipe))
        )
        for capability, lack in lacks.items():  # it is not among the packages of CPU hosts
            fake_gpus(monkeypatch, 8, capability=capability)
            found = machine.shortages(replace(plan, config=config), "outputs", field="output_dir")
            found = [str(lack) for lack in found if lack.field == "trainer.compile.float8"]
            assert [lack in text for text in found] == [True] * (recipe != "off")


@pytest.mark.parametrize(
    "name, gpus, ranks, replicas",
    [
        ("8b", 8, 3, 5),
        ("8b", 16, 6, 10),
        ("1_7b", 8, 2, 6),
        ("0_6b", 2, 1, 1),
        ("14b", 16, 8, 4),
        ("32b_32", 64, 20, 22),
    ],
)
def test_gpus_are_divided_so_that_neither_side_waits_more_than_it_must(name, gpus, ranks, replicas):
    config = getattr(config_registry, f"rl_grpo_qwen3_{name}")()
    assert split_of(config, gpus, gpu_gib=80e9 / GIB) == [
        "--trainer.ranks",
        str(ranks),
        "--generator.replicas",
        str(replicas),
    ]


@pytest.mark.parametrize(
    "name, gpus, gib, said",
    [
        ("8b", 1, 80, "the trainer takes 2 of 80 GiB, a generator 1: at least --gpus 3, or"),
        ("32b", 8, 74.5, "at least --gpus"),
        ("14b", 3, 80, "at least --gpus"),
        ("32b", 8, 1, "the trainer takes more than 64 of 1 GiB: lower batcher.row_length"),
        ("0_6b_1gpu", 4, 80, "leave one out"),
    ],
)
def test_gpus_that_no_division_fits_are_refused(name, gpus, gib, said):
    with pytest.raises(ConfigError, match=f"--gpus = {gpus}: .*{said}"):
        split_of(getattr(config_registry, f"rl_grpo_qwen3_{name}")(), gpus, gpu_gib=gib)


def test_more_gpus_than_a_host_has_are_planned_on_whole_hosts():
    """16 of them are two hosts of 8; an engine and a tensor-parallel group stay on one."""
    config = config_registry.rl_grpo_qwen3_8b()
    config.trainer.ranks, config.generator.replicas = 6, 10
    plan = plan_run(config, device="cuda", available=list(range(16)))
    assert plan.hosts == 2
    assert [(place.host, place.devices) for place in plan.placement.trainer] == [
        (0, (rank,)) for rank in range(6)
    ]
    generators = [(place.host, *place.devices) for place in plan.placement.generators]
    assert generators == [(0, 6), (0, 7), *((1, gpu) for gpu in range(8))]
    (asked,) = (
        str(lack)
        for lack in machine.shortages(plan, "outputs", field="output_dir")
        if lack.field == "provision.device"
    )
    assert "the run needs 16 GPUs" in asked and asked.endswith(
        "--provision.job slurm or kubernetes asks for 2 whole hosts of 8"
    )
    config.generator.replicas = 6
    plan = plan_run(config, device="cuda", available=list(range(12)))
    asked = "".join(str(lack) for lack in machine.shortages(plan, "outputs", field="output_dir"))
    assert "2 whole hosts of 8, of whose 16 GPUs it uses 12" in asked
    assert plan_of("rl_grpo_qwen3_8b").hosts == 1


def test_a_host_that_has_more_gpus_itself_is_one(monkeypatch):
    fake_gpus(monkeypatch, 16)
    assert hosts_of(range(16), "cuda") == [list(range(16))]
    assert hosts_of(range(20), "cuda") == [list(range(8)), list(range(8)), list(range(4))]


@pytest.mark.parametrize(
    "name, gb",
    [
        ("0_6b_1gpu", 24),
        ("8b", 48),
        ("32b", 141),
    ],  # as README and docs/gpu.md say of the first and the last
)
def test_the_plan_names_the_smallest_gpu_that_fits(name, gb):
    plan = plan_of(f"rl_grpo_qwen3_{name}")
    (line,) = [line for line in plan.lines() if line.startswith("GPUs ")]
    assert f"of {gb} GB (" in line
    needed = max(plan.gpu_gib, plan.engine_gpu_gib)
    assert needed <= least_gib(gb)
    assert all(needed > kind.gib for kind in GPU_KINDS if kind.gb < gb)


def test_the_plan_estimates_the_seconds_of_a_step():
    def step(plan):
        return next(line for line in plan.lines() if line.startswith("a step "))

    plan = plan_of("rl_grpo_qwen3_8b")
    seconds = max(plan.balance.train_s, plan.balance.generate_s)
    assert f"about {seconds:,.0f} s on H100s" in step(plan) and "at the same time" in step(plan)
    assert "in turn" in step(plan_of("rl_grpo_qwen3_0_6b_1gpu"))


@pytest.mark.parametrize(
    "rate, lora, said",
    [
        (1e-6, True, "adapters (trainer.lora) want about 10 times as much"),
        (1e-5, True, None),
        (1e-6, False, None),
    ],
)
def test_adapters_with_a_rate_below_that_of_adapters_are_warned_of(rate, lora, said):
    config = config_registry.rl_grpo_qwen3_8b()
    config.trainer.lora = LoRA.Config(rank=16) if lora else None
    config.trainer.optimizer.lr = rate
    warning = learning_rate_warning(config, 8_000_000_000)
    assert (
        warning is None
        if said is None
        else said in warning and "--trainer.optimizer.lr 1e-05" in warning
    )


@pytest.mark.parametrize(
    "words, warned",
    [
        (["--trainer.lora.rank", "8"], True),
        (["--trainer.lora.rank", "8", "--trainer.optimizer.lr", "0.03"], False),
        ([], False),
    ],
)
def test_adapters_at_the_rate_of_the_configs_full_training_are_warned_of_whatever_the_rate(
    words, warned
):
    command = parse_command(["--config", "rl_grpo_qwen3_debug", *words])
    config = load_config(command)
    warning = learning_rate_warning(config, 2_000_000, whole_model_rate=command.whole_model_rate)
    assert ("about 10 times as much" in (warning or "")) == warned
