"""Who runs where: every process has its cores or GPUs, decided before anything is spawned."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan.experiments.rl.config.run_config import ProvisionConfig, RunConfig
from torchtitan.experiments.rl.config_registry import rl_grpo_qwen3_debug
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.plan import placement
from torchtitan.experiments.rl.plan.placement import Place, Placement
from torchtitan.experiments.rl.process.host import mask_of, visible_gpus
from torchtitan.experiments.rl.process.setup import launch_environment


def sized(*, trainer=1, replicas=1, tensor_parallel=1) -> RunConfig:
    config = rl_grpo_qwen3_debug()
    config.trainer.ranks, config.generator.replicas = trainer, replicas
    config.generator.engine.tensor_parallel_degree = tensor_parallel
    return config


def place(device, available, **sizes) -> Placement:
    return placement.place(sized(**sizes), device, hosts=[list(available)])


def shares(placement: Placement):
    """Devices of trainer ranks and of generators, all on this host."""
    sides = (placement.trainer, placement.generators)
    assert {where.host for side in sides for where in side} == {0}
    return tuple(tuple(where.devices for where in side) for side in sides)


@pytest.mark.parametrize(
    "cores, trainer, replicas, trainer_cores, generator_cores",
    [
        ([0, 1], 1, 1, ((1,),), ((0,),)),
        ([0, 1], 2, 2, ((1,), (1,)), ((0,), (0,))),
        ([3], 1, 1, ((3,),), ((3,),)),
        ([0, 1, 2, 3], 1, 2, ((2, 3),), ((0,), (1,))),
        (range(8), 2, 1, ((4, 5), (6, 7)), ((0, 1, 2, 3),)),
        ([0, 2, 5], 1, 1, ((2, 5),), ((0,),)),
        (range(8), 3, 3, ((4,), (5, 6), (7,)), ((0,), (1, 2), (3,))),
    ],
)
def test_cores_are_shared_out_evenly_the_trainers_apart_from_the_generators(
    cores, trainer, replicas, trainer_cores, generator_cores
):
    placed = place("cpu", cores, trainer=trainer, replicas=replicas)
    assert shares(placed) == (trainer_cores, generator_cores)


@given(cores=st.integers(1, 64), trainer=st.integers(1, 8), replicas=st.integers(1, 8))
def test_every_process_has_cores_and_the_two_sides_meet_only_on_one_core(cores, trainer, replicas):
    placed = place("cpu", range(cores), trainer=trainer, replicas=replicas)
    assert len(placed.trainer) == trainer and len(placed.generators) == replicas
    assert all(map(all, ([len(share) for share in side] for side in shares(placed))))
    ours, theirs = ({core for share in side for core in share} for side in shares(placed))
    assert ours | theirs <= set(range(cores))
    if cores > 1:
        assert not ours & theirs
    for side in shares(placed):
        sizes = [len(share) for share in side]
        assert max(sizes) - min(sizes) <= 1


def test_gpus_are_exclusive_trainer_first_and_replicas_get_as_many_as_they_are_parallel():
    placed = place("cuda", range(8), trainer=2, replicas=3, tensor_parallel=2)
    assert shares(placed) == (((0,), (1,)), ((2, 3), (4, 5), (6, 7)))


def test_gpus_that_are_not_needed_stay_free():
    placed = place("cuda", [4, 5, 6, 7], trainer=1, replicas=1)
    assert shares(placed) == (((4,),), ((5,),))


def test_too_few_gpus_name_what_is_needed_what_there_is_and_what_to_lower():
    with pytest.raises(
        ConfigError, match=r"needs 6 GPUs and this host has 4; lower trainer.ranks"
    ) as error:
        place("cuda", range(4), trainer=2, replicas=2, tensor_parallel=2)
    assert "\n" not in str(error.value)


def test_own_cores_are_found_when_none_are_named(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {6, 4})
    assert shares(placement.place(sized(), "cpu")) == (((6,),), ((4,),))


@pytest.mark.parametrize("gpu", [False, True])
def test_auto_takes_a_gpu_where_there_is_one(monkeypatch, gpu):
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpu)
    assert ProvisionConfig(device="auto").resolve() == ("cuda" if gpu else "cpu")
    assert ProvisionConfig(device="cpu").resolve() == "cpu"


def test_cuda_without_a_gpu_is_a_config_error(monkeypatch):
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match="torch sees no GPU here; use cpu or auto"):
        ProvisionConfig(device="cuda").resolve()


def test_cuda_with_a_cpu_build_of_torch_is_a_config_error_that_names_the_build(monkeypatch):
    monkeypatch.setattr("torch.version.cuda", None)
    monkeypatch.setattr("torch.__version__", "2.13.0+cpu")
    wanted = "torch 2.13.0\\+cpu here is a build without CUDA; install requirements/gpu.txt"
    with pytest.raises(ConfigError, match=wanted) as error:
        ProvisionConfig(device="cuda").resolve()
    assert "\n" not in str(error.value)


# ---- the mask of the process that launches the others


MASKS = {
    None: "2,3",
    "4,5,6,7": "6,7",
    " 7, 6 ,5,4": "5,4",
    "0,3,5,1,-1,2": "5,1",
    "GPU-a,GPU-b,GPU-c,GPU-d": "GPU-c,GPU-d",
    "MIG-a,MIG-b,MIG-c,MIG-d": "MIG-c,MIG-d",
}


@pytest.mark.parametrize("mask, expected", MASKS.items())
def test_a_gpu_is_named_to_a_process_as_the_parents_own_mask_names_it(monkeypatch, mask, expected):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask) if mask else monkeypatch.delenv(
        "CUDA_VISIBLE_DEVICES", raising=False
    )
    assert mask_of((2, 3)) == expected
    assert launch_environment((2, 3), "cuda")["CUDA_VISIBLE_DEVICES"] == expected


def test_a_gpu_that_the_parent_does_not_see_is_given_to_no_process(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    with pytest.raises(
        ValueError, match="CUDA_VISIBLE_DEVICES='4,5' shows 2 GPUs, and none of index 2"
    ):
        mask_of((1, 2))


def test_slices_of_a_gpu_are_counted_by_the_mask_because_cuda_shows_a_process_only_one(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-a,MIG-b,MIG-c")
    assert visible_gpus() == [0, 1, 2]
    assert placement.place(sized(), "cuda").generators == (Place(0, (1,)),)
    with pytest.raises(
        ConfigError, match="generator.engine.tensor_parallel_degree = 2.*slices of GPUs"
    ):
        placement.place(sized(tensor_parallel=2), "cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a")
    assert visible_gpus() == [0]
