"""Who runs where: every process has its cores or GPUs, decided before anything is spawned."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan.experiments.rl.config.placement import Placement, ProvisionConfig, plan_placement
from torchtitan.experiments.rl.errors import ConfigError


def place(device, available, *, trainer=1, replicas=1, tensor_parallel=1) -> Placement:
    return plan_placement(
        device=device,
        trainer_ranks=trainer,
        replicas=replicas,
        tensor_parallel_degree=tensor_parallel,
        available=list(available),
    )


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
    placement = place("cpu", cores, trainer=trainer, replicas=replicas)
    assert (placement.trainer, placement.generators) == (trainer_cores, generator_cores)


@given(cores=st.integers(1, 64), trainer=st.integers(1, 8), replicas=st.integers(1, 8))
def test_every_process_has_cores_and_the_two_sides_meet_only_on_one_core(cores, trainer, replicas):
    placement = place("cpu", range(cores), trainer=trainer, replicas=replicas)
    assert len(placement.trainer) == trainer and len(placement.generators) == replicas
    assert all(placement.trainer) and all(placement.generators)
    ours, theirs = ({core for share in side for core in share} for side in (placement.trainer, placement.generators))
    assert ours | theirs <= set(range(cores))
    if cores > 1:
        assert not ours & theirs
    for side in (placement.trainer, placement.generators):
        sizes = [len(share) for share in side]
        assert max(sizes) - min(sizes) <= 1


def test_gpus_are_exclusive_trainer_first_and_replicas_get_as_many_as_they_are_parallel():
    placement = place("cuda", range(8), trainer=2, replicas=3, tensor_parallel=2)
    assert placement.trainer == ((0,), (1,))
    assert placement.generators == ((2, 3), (4, 5), (6, 7))


def test_gpus_that_are_not_needed_stay_free():
    placement = place("cuda", [4, 5, 6, 7], trainer=1, replicas=1)
    assert (placement.trainer, placement.generators) == (((4,),), ((5,),))


def test_too_few_gpus_name_what_is_needed_what_there_is_and_what_to_lower():
    with pytest.raises(ConfigError, match=r"needs 6 GPUs and this host has 4; lower trainer.ranks") as error:
        place("cuda", range(4), trainer=2, replicas=2, tensor_parallel=2)
    assert "\n" not in str(error.value)


def test_own_cores_are_found_when_none_are_named(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {6, 4})
    placement = plan_placement(device="cpu", trainer_ranks=1, replicas=1, tensor_parallel_degree=1)
    assert (placement.trainer, placement.generators) == (((6,),), ((4,),))


@pytest.mark.parametrize("gpu", [False, True])
def test_auto_takes_a_gpu_where_there_is_one(monkeypatch, gpu):
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpu)
    assert ProvisionConfig(device="auto").resolve() == ("cuda" if gpu else "cpu")
    assert ProvisionConfig(device="cpu").resolve() == "cpu"


def test_cuda_without_a_gpu_is_a_config_error(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match="torch sees no GPU here; use cpu or auto"):
        ProvisionConfig(device="cuda").resolve()
