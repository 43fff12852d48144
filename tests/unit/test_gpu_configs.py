"""Each hub config by its whole command, on hosts of several sizes: it reaches the first spawn, or one line says what lacks.

tests/fakes/gpus.py stands in for the GPUs, tests/fakes/models.py for the models.
"""

import itertools
import json
import re
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torchtitan.models.common.attention import FlexAttention

from tests.fakes.gpus import CAPABILITIES, fake_gpus
from tests.fakes.models import stub_model
from torchtitan.experiments.rl import config_registry, train
from torchtitan.experiments.rl.command import gate, machine
from torchtitan.experiments.rl.command.command_line import DEFAULT_MODULE, config_functions
from torchtitan.experiments.rl.config_registry import HUB_FOLDER
from torchtitan.experiments.rl.models.policy import decoder_config, policy_spec
from torchtitan.experiments.rl.plan.placement import needed_gpus
from torchtitan.experiments.rl.training.trainer import init_process_group

CONFIGS = {
    name: config
    for name in config_functions(DEFAULT_MODULE)
    if (config := getattr(config_registry, name)()).model.hf_assets_path.startswith(HUB_FOLDER)
}
HOSTS = {"1 x 24 GB": (1, 22), "1 x 80 GB": (1, 80), "8 x 80 GB": (8, 80)}
ON_ALL_HOSTS = [name for name in CONFIGS if name.startswith("rl_grpo_")]
"""The others are one of these with another task."""
LARGER_THAN_80_GB = ["rl_grpo_qwen3_30b_a3b", "rl_grpo_qwen3_32b"]
OWN_DATA = {
    "rl_questions_qwen3": [
        "--tasks.questions.dataset.path",
        "rows.jsonl",
        "--tasks.questions.rubric",
        "own.py:right",
    ],
    "rl_math_qwen3": [
        *("--tasks.math.dataset.path", "rows.jsonl", "--tasks.math.dataset.name", "None"),
        *("--tasks.math.validation.path", "rows.jsonl", "--tasks.math.validation.name", "None"),
    ],
}
"""Words for configs whose data is on the hub."""
OWN = """
def right(completion, example):
    return completion == example["answer"]
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A folder with the stub of every model that a config names."""
    folder = tmp_path_factory.mktemp("hub")
    for path, flavor in {
        (config.model.hf_assets_path, config.model.flavor) for config in CONFIGS.values()
    }:
        stub_model(folder / path, str(flavor))
    return folder


@pytest.fixture
def started(models, tmp_path, monkeypatch, capsys):
    """Runs the command up to the spawn, or to sbatch; gives the plan that it would start, or the error line."""
    (tmp_path / "rows.jsonl").write_text(
        (json.dumps({"question": "1 + 1?", "answer": "#### 2"}) + "\n") * 20
    )
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / HUB_FOLDER).parent.mkdir()
    (tmp_path / HUB_FOLDER).symlink_to(models / HUB_FOLDER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(machine, "PROBE_BYTES", 2**10)
    monkeypatch.setattr(
        machine.shutil, "disk_usage", lambda folder: SimpleNamespace(free=2**50, total=2**51)
    )
    monkeypatch.setattr(gate, "run_preflight", lambda *arguments: {})  # tests of the tasks have it
    plans, numbers = [], itertools.count()
    monkeypatch.setattr(train, "_run", lambda config, start, name: plans.append(start.plan) or 0)
    monkeypatch.setattr(train, "_submit", lambda config, start: plans.append(start.plan) or 0)

    def start(name, *words):
        # Two runs of a second would take the same folder.
        own = ["--output-dir", f"outputs/{next(numbers)}"]
        code = train.main(["--config", name, *own, *words, *OWN_DATA.get(name, [])])
        out, err = capsys.readouterr()
        if code == 0:
            return plans.pop()
        assert (code, plans, out) == (2, [], "")
        (line,) = err.splitlines()
        return line

    return start


def gpus_of(places) -> list[int]:
    return [gpu for place in places for gpu in place.devices]


def lacking(config, there: str) -> str:
    """The line of a host, or of hosts, that ``there`` says."""
    trainer, generator = config.trainer.ranks, config.generator
    degree = generator.engine.tensor_parallel_degree
    return (
        f"error: trainer.ranks = {trainer}: with {generator.replicas} generator replica(s) of {degree} GPU(s) the run needs "
        f"{needed_gpus(config)} GPUs and {there}; lower trainer.ranks, generator.replicas or "
        "generator.engine.tensor_parallel_degree"
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_reaches_the_spawn_or_names_the_gpus_that_it_needs_and_that_are_there(
    name, started, monkeypatch
):
    config, number = CONFIGS[name], list(CONFIGS).index(name)
    for index, (gpus, memory) in enumerate(HOSTS.values()):
        if gpus == 1 and name not in ON_ALL_HOSTS:
            continue
        fake_gpus(
            monkeypatch,
            gpus,
            memory_gib=memory,
            capability=CAPABILITIES[(number + index) % len(CAPABILITIES)],
        )
        found = started(name, "--provision.job", "this_host")
        if needed_gpus(config) > gpus:
            assert found == lacking(config, f"this host has {gpus}")
        elif name in LARGER_THAN_80_GB:
            takes = re.fullmatch(
                r"error: provision.device = 'cuda': a trainer rank takes about ([\d.]+) GiB and a GPU here has 80.0: lower "
                r"batcher.row_length, or name more GPUs \(--gpus\) \(--dry-run lists all that is missing\)",
                found,
            )
            assert takes and 80 < float(takes[1]) < 141, found
        else:
            assert found.device == "cuda" and found.config.trainer.ranks == config.trainer.ranks
            trainer, generators = map(
                gpus_of, (found.placement.trainer, found.placement.generators)
            )
            assert {*trainer, *generators} == {*range(needed_gpus(config))}
            assert bool({*trainer} & {*generators}) == config.provision.share_gpus


@pytest.mark.parametrize(
    "name", ["rl_grpo_qwen3_8b", "rl_grpo_qwen3_14b_16", "rl_grpo_qwen3_32b_32"]
)
def test_a_config_is_submitted_to_two_hosts_of_8_or_names_the_gpus_that_they_lack(name, started):
    config, words = CONFIGS[name], ["--provision.job", "slurm", "--provision.job.hosts", "2"]
    found = started(name, *words)
    if needed_gpus(config) > 16:
        assert found == lacking(config, "the 2 hosts have 16")
    else:
        assert found.device == "cuda" and found.hosts == 2
        ranks = [place.host for place in found.placement.trainer]
        assert ranks == [0] * len(ranks)  # no config of 16 GPUs or fewer has more than 8 ranks


@pytest.mark.parametrize(
    "name", [name for name, config in CONFIGS.items() if needed_gpus(config) > 8]
)
def test_a_config_of_more_than_8_gpus_is_submitted_to_hosts_of_8(name, started):
    found = started(name)
    assert found.device == "cuda" and found.hosts == needed_gpus(CONFIGS[name]) / 8


def test_rows_of_128k_are_planned_over_the_parts_of_8_ranks(started):
    """A row is longer than the 40,960 positions of the model, which are those of a sample."""
    parts = ["trainer.ranks", "trainer.parallelism.context-parallel-degree"]
    words = [
        "--gpus",
        "16",
        "--batcher.row-length",
        "131072",
        "--trainer.parallelism.tensor-parallel-degree",
        "1",
    ]
    words += [word for part in parts for word in (f"--{part}", "8")]
    plans = [
        started(
            "rl_grpo_qwen3_8b",
            *words,
            "--provision.job",
            "slurm",
            "--provision.job.hosts",
            "2",
            "--trainer.compile",
            "None",
        )
    ]
    words[3] = "65536"
    plans.append(
        started(
            "rl_grpo_qwen3_8b",
            *words,
            "--provision.job",
            "slurm",
            "--provision.job.hosts",
            "2",
            "--trainer.compile",
            "None",
        )
    )
    long, short = [plan.trainer_memory for plan in plans]
    assert any(
        line.startswith("shapes ") and line.endswith("1 x 131072") for line in plans[0].lines()
    )
    assert long.activations == 2 * short.activations and long.total < 80 * 2**30


def test_which_configs_start_on_which_hosts():
    fitting = {
        gpus: [name for name in CONFIGS if needed_gpus(CONFIGS[name]) <= gpus]
        for gpus in (1, 8, 16)
    }
    assert [name for name in CONFIGS if name not in fitting[16]] == [
        "rl_grpo_qwen3_32b_32",
        "rl_grpo_qwen3_32b_64",
    ]
    assert [name for name in fitting[16] if name not in fitting[8]] == [
        "rl_grpo_qwen3_14b_16",
        "rl_grpo_qwen3_30b_a3b_16",
    ]
    assert fitting[1] == ["rl_grpo_qwen3_0_6b_1gpu"]


@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
def test_the_trainer_takes_flex_attention_on_every_gpu(monkeypatch, capability):
    fake_gpus(monkeypatch, 1, capability=capability)
    with torch.device("meta"):
        for config in {config.model.flavor: config for config in CONFIGS.values()}.values():
            spec = policy_spec(config.model, device="cuda", max_seq_len=8192)
            decoder = decoder_config(spec)
            assert {type(layer.attention.inner_attention) for layer in decoder.layers} == {
                FlexAttention.Config
            }
        assert isinstance(spec.model.build().layers["0"].attention.inner_attention, FlexAttention)


@pytest.mark.parametrize(
    "url, interfaces",
    [
        ("file:///nowhere/store", {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}),
        (
            "tcp://192.0.2.7:1234",
            {"GLOO_SOCKET_IFNAME": "eth7"},
        ),  # NCCL looks for itself, InfiniBand too
    ],
)
def test_ranks_on_gpus_meet_over_nccl_and_keep_gloo_for_what_is_in_the_hosts_memory(
    monkeypatch, url, interfaces
):
    fake_gpus(monkeypatch, 1)
    seen = {}
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")  # so that it is as before when the test is over
        monkeypatch.delenv(name)
    prefix = "torchtitan.experiments.rl.training.trainer"
    monkeypatch.setattr(f"{prefix}.interface_towards", lambda host: {"192.0.2.7": "eth7"}[host])
    monkeypatch.setattr(f"{prefix}.socket.if_nameindex", lambda: [(1, "lo"), (2, "eth7")])
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: seen.update(device=device))
    monkeypatch.setattr(
        dist,
        "init_process_group",
        lambda backend, **options: seen.update(backend=backend, **options),
    )
    init_process_group(device="cuda", rank=3, world_size=4, url=url)
    assert seen.pop("timeout").total_seconds() == 1800
    assert seen == {
        "device": 0,
        "backend": "cpu:gloo,cuda:nccl",
        "init_method": url,
        "rank": 3,
        "world_size": 4,
    }
    found = {
        name: value
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
        if (value := machine.os.environ.get(name))
    }
    assert found == interfaces


def test_every_size_of_the_stub_is_its_models(models):
    sizes = {
        "0.6B": 0.596,
        "1.7B": 1.721,
        "4B": 4.022,
        "8B": 8.191,
        "14B": 14.768,
        "32B": 32.762,
    }  # 10**9, of the model cards
    for name, billions in sizes.items():
        file = models / HUB_FOLDER / f"Qwen3-{name}" / "model.safetensors"
        assert file.stat().st_size / 2e9 == pytest.approx(billions, rel=1e-3)
        assert file.stat().st_blocks * 512 < 2**20
        assert re.match(rb".{8}\{", file.open("rb").read(9), re.DOTALL)
