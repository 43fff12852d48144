"""Roles are placed on hosts. Every expected placement is worked out by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan.experiments.rl import config_registry
from torchtitan.experiments.rl.command.checks import check, plan_run
from torchtitan.experiments.rl.config.run_config import ProvisionConfig
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.hosts.jobs import ProcessJob
from torchtitan.experiments.rl.plan import placement
from torchtitan.experiments.rl.plan.placement import Place

EIGHT = tuple(range(8))


def place(
    hosts,
    *,
    device="cuda",
    trainer=1,
    tensor_parallel=1,
    replicas=1,
    engine=1,
    workers=0,
    parameters=0,
    **roles,
):
    config = config_registry.rl_grpo_qwen3_debug()
    config.trainer.ranks, config.trainer.parallelism.tensor_parallel_degree = (
        trainer,
        tensor_parallel,
    )
    config.generator.replicas, config.generator.engine.tensor_parallel_degree = replicas, engine
    config.rollout_workers, config.provision = workers, ProvisionConfig(**roles)
    return placement.place(
        config, device, hosts=hosts, worker_cores=[(0, 1)] * len(hosts), parameters=parameters
    )


def gpus(places) -> list[tuple[int, tuple[int, ...]]]:
    return [(where.host, where.devices) for where in places]


def test_a_trainer_that_fits_one_host_is_on_one_and_engines_take_what_is_left():
    placed = place([EIGHT, EIGHT], trainer=6, replicas=4, engine=2)
    assert gpus(placed.trainer) == [(0, (gpu,)) for gpu in range(6)]
    assert gpus(placed.generators) == [(0, (6, 7)), (1, (0, 1)), (1, (2, 3)), (1, (4, 5))]


def test_a_larger_trainer_is_on_as_few_hosts_as_hold_it_in_equal_numbers():
    placed = place([EIGHT] * 4, trainer=12, replicas=2, engine=4)
    assert gpus(placed.trainer) == [(host, (gpu,)) for host in (0, 1) for gpu in range(6)]
    assert gpus(placed.generators) == [(2, (0, 1, 2, 3)), (2, (4, 5, 6, 7))]


def test_tensor_parallel_ranks_are_never_on_two_hosts():
    """12 ranks in fours: 6 a host would cut a group in two, so each of three hosts has 4."""
    placed = place([EIGHT] * 3, trainer=12, tensor_parallel=4, replicas=1)
    assert [where.host for where in placed.trainer] == [0] * 4 + [1] * 4 + [2] * 4
    with pytest.raises(
        ConfigError,
        match=r"trainer.ranks = 12: 2 hosts with 8, 8 GPUs can't hold them .* groups of 4",
    ):
        place([EIGHT] * 2, trainer=12, tensor_parallel=4, replicas=1)


def test_an_engine_that_fits_no_host_is_refused():
    with pytest.raises(
        ConfigError,
        match=r"tensor_parallel_degree = 4: no host has so many GPUs left \(2, 2\), and an engine",
    ):
        place([(0, 1, 2), (0, 1, 2)], trainer=2, replicas=1, engine=4, trainer_hosts=(0, 1))


def test_too_few_gpus_on_several_hosts_are_counted():
    with pytest.raises(ConfigError, match="the run needs 17 GPUs and the 2 hosts have 16"):
        place([EIGHT, EIGHT], trainer=16, replicas=1)


def test_a_config_may_name_the_hosts_of_each_role():
    roles = dict(trainer_hosts=(1, 2), generator_hosts=(0,), rollout_worker_hosts=(2, 0))
    placed = place([EIGHT] * 3, trainer=4, replicas=2, engine=2, workers=3, **roles)
    assert gpus(placed.trainer) == [(1, (0,)), (1, (1,)), (2, (0,)), (2, (1,))]
    assert gpus(placed.generators) == [(0, (0, 1)), (0, (2, 3))]
    assert placed.rollout_workers == (Place(2, (0, 1)), Place(0, (0, 1)), Place(2, (0, 1)))


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        (dict(trainer_hosts=(0, 2)), r"provision.trainer_hosts = \(0, 2\): must follow each other"),
        (dict(trainer_hosts=(0, 1, 2)), r"must divide trainer.ranks = 4"),
        (
            dict(generator_hosts=(3,)),
            r"provision.generator_hosts = \(3,\): the job has 3 host\(s\), counted from 0",
        ),
        (dict(generator_hosts=(1,), trainer_hosts=(1,)), "no host has so many GPUs left"),
    ],
)
def test_hosts_that_a_role_can_not_have_are_refused_in_one_line(roles, message):
    with pytest.raises(ConfigError, match=message) as error:
        place([EIGHT] * 3, trainer=4, replicas=3, engine=2, **roles)
    assert "\n" not in str(error.value)


def test_cores_of_a_host_are_divided_only_where_trainer_and_generators_share_it():
    roles = dict(trainer_hosts=(0, 1), generator_hosts=(1, 2))
    placed = place(
        [(0, 1), (2, 3), (4, 5)], device="cpu", trainer=2, replicas=2, workers=1, **roles
    )
    assert gpus(placed.trainer) == [(0, (0, 1)), (1, (3,))]
    assert gpus(placed.generators) == [(1, (2,)), (2, (4, 5))]


@given(
    hosts=st.lists(st.integers(1, 8), min_size=1, max_size=5),
    trainer=st.integers(1, 12),
    replicas=st.integers(1, 6),
    engine=st.integers(1, 4),
)
def test_no_gpu_has_two_processes_and_no_engine_two_hosts(hosts, trainer, replicas, engine):
    try:
        placed = place(
            [tuple(range(count)) for count in hosts],
            trainer=trainer,
            replicas=replicas,
            engine=engine,
        )
    except ConfigError:
        return
    taken = [
        (where.host, gpu)
        for where in (*placed.trainer, *placed.generators)
        for gpu in where.devices
    ]
    assert len(taken) == len(set(taken)) == trainer + replicas * engine
    assert all(gpu < hosts[host] for host, gpu in taken)
    counts = {
        host: sum(where.host == host for where in placed.trainer)
        for host, _ in gpus(placed.trainer)
    }
    assert len(set(counts.values())) == 1


def test_a_job_that_counts_its_hosts_gets_as_few_as_hold_the_run():
    """Sixteen train: two hosts of 8. Eight engines of two: two more."""
    config = config_registry.rl_grpo_qwen3_32b_32()
    check(config)
    plan = plan_run(config)
    assert plan.hosts == 4
    assert plan.placement.lines("cuda", submitted=True) == [
        "host 0         trainer 0-7 on GPUs 0-7; rollout workers 0,4",
        "host 1         trainer 8-15 on GPUs 0-7; rollout workers 1,5",
        "host 2         generator 0-3 on GPUs 0-7; rollout workers 2,6",
        "host 3         generator 4-7 on GPUs 0-7; rollout workers 3,7",
        "controller     the job's own command, on host 0",
    ]


def test_the_config_of_three_process_hosts_has_the_roles_that_it_says(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2, 3, 4, 5})
    config = config_registry.rl_grpo_qwen3_debug_hosts()
    check(config)
    assert plan_run(config).placement.lines("cpu")[:3] == [
        "host 0         trainer 0 with 2 threads",
        "host 1         trainer 1 with 1 thread; generator 0 with 1 thread",
        "host 2         generator 1 with 2 threads; rollout workers 0",
    ]


SHARE, APART = "all", "half"


@pytest.mark.parametrize(
    "parameters, share_cores, said",
    [(9_999_999, None, APART), (10_000_000, None, SHARE), (1, True, SHARE), (10**9, False, APART)],
)
def test_the_two_sides_have_as_many_threads_where_the_model_is_large_or_the_config_says_so(
    parameters, share_cores, said
):
    placed = place(
        [(0, 1, 2, 3)], device="cpu", trainer=2, parameters=parameters, share_cores=share_cores
    )
    ranks, engine = (((0, 1), (2, 3)), (0, 1, 2, 3)) if said is SHARE else (((2,), (3,)), (0, 1))
    assert gpus(placed.trainer) == [(0, cores) for cores in ranks] and gpus(placed.generators) == [
        (0, engine)
    ]
    assert any(
        line.startswith("cores  ") and "provision.share_cores" in line
        for line in placed.lines("cpu")
    )
    trainers = (
        "trainer 0-1 with 2 threads each" if said is SHARE else "trainer 0-1 with 1 thread each"
    )
    assert (
        placed.lines("cpu")[0]
        == f"host 0         {trainers}; generator 0 with {len(engine)} threads"
    )


def test_sides_on_hosts_of_their_own_have_all_cores_of_them_and_one_core_is_for_both():
    apart = place([(0, 1), (0, 1)], device="cpu", parameters=10**9)
    assert gpus(apart.trainer) == [(0, (0, 1))] and gpus(apart.generators) == [(1, (0, 1))]
    assert apart.lines("cpu")[:2] == [
        "host 0         trainer 0 with 2 threads",
        "host 1         generator 0 with 2 threads",
    ]
    assert not any(line.startswith("cores") for line in apart.lines("cpu")), "nothing is shared"
    one = place([(5,)], device="cpu")
    assert gpus(one.trainer) == gpus(one.generators) == [(0, (5,))]
    assert (
        one.lines("cpu")[0] == "host 0         trainer 0 with 1 thread; generator 0 with 1 thread"
    )


def test_process_hosts_share_the_cores_of_this_machine(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2, 3, 4})
    assert ProcessJob(hosts=2).devices("cpu", 2) == [[0, 1], [2, 3, 4]]
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {4, 7})
    assert ProcessJob(hosts=3).devices("cpu", 3) == [[4], [7], [4]]


def test_a_role_on_a_host_that_the_job_lacks_is_refused_before_anything_is_planned():
    config = config_registry.rl_grpo_qwen3_debug_hosts()
    config.provision.rollout_worker_hosts = (3,)
    with pytest.raises(
        ConfigError, match=r"provision.rollout_worker_hosts = \(3,\): the job has 3 host"
    ):
        check(config)
    config.provision.rollout_worker_hosts, config.provision.trainer_hosts = (), (1, 1)
    with pytest.raises(
        ConfigError, match=r"provision.trainer_hosts = \(1, 1\): names a host twice"
    ):
        check(config)
