"""Who runs a group: workers are given groups by load, and their answers are the local runner's."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest

from torchtitan.experiments.rl.config.checks import checked_plan
from torchtitan.experiments.rl.controller.group_runner import GroupResult, Measurement, WorkerRunner
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.rollouts.policy import SamplingConfig
from torchtitan.experiments.rl.rollouts.types import Completion, DataSample, Rollout, RolloutGroup, RolloutTurn

SAMPLE = DataSample(sample_id="0", env_input=None)


class StubWorkers:
    """A mesh whose workers note what they are asked and answer when told."""

    def __init__(self, workers: int):
        self.asked = [[] for _ in range(workers)]
        self.released = asyncio.Event()

    def slice(self, *, procs):
        async def run(request):
            self.asked[procs].append(request)
            await self.released.wait()
            return GroupResult(group=group_of(request.group_id, tokens=3), event_loop_lag_s=procs / 10)

        return SimpleNamespace(run=SimpleNamespace(call_one=run))


def group_of(group_id: str, *, tokens: int) -> RolloutGroup:
    completion = Completion(
        token_ids=np.ones(tokens, np.int32),
        logprobs=np.zeros(tokens, np.float32),
        policy_versions=np.zeros(tokens, np.int32),
        finish_reason="stop",
    )
    turn = RolloutTurn(
        prompt_messages=[],
        prompt_token_ids=np.ones(1, np.int32),
        prompt_role_ids=np.full(1, -1, np.int8),
        prompt_is_content=np.zeros(1, bool),
        completion=completion,
        assistant_message={"role": "assistant", "content": ""},
    )
    rollout = Rollout(group_id=group_id, index_in_group=0, task_name="sums", turns=[turn])
    return RolloutGroup(group_id=group_id, task_name="sums", data_sample=SAMPLE, rollouts=[rollout])


def task(group_size: int):
    return SimpleNamespace(name="sums", config=SimpleNamespace(group_size=group_size))


async def test_a_group_goes_to_the_worker_with_the_fewest_open_rollouts():
    mesh, policy = StubWorkers(2), SimpleNamespace(version=7, generated_tokens=0)
    runner = WorkerRunner(mesh, 2, policy)
    sizes = [4, 1, 1, 1, 1, 1]  # after the group of four, the other worker gets the next four
    work = [asyncio.create_task(runner.run(task(size), SAMPLE, group_id=str(i))) for i, size in enumerate(sizes)]
    await asyncio.sleep(0)
    assert [[request.group_id for request in asked] for asked in mesh.asked] == [["0", "5"], ["1", "2", "3", "4"]]
    assert {request.policy_version for asked in mesh.asked for request in asked} == {7}
    mesh.released.set()
    for group in await asyncio.gather(*work):
        assert group.failure is None and len(group.rollouts) == 1
    assert policy.generated_tokens == 18 and runner._open == [0, 0]
    assert runner.lap_lag_s() == 0.1 and runner.lap_lag_s() == 0.0


async def test_cancelled_group_frees_its_place():
    mesh = StubWorkers(1)
    runner = WorkerRunner(mesh, 1, SimpleNamespace(version=0, generated_tokens=0))
    work = asyncio.create_task(runner.run(task(4), SAMPLE, group_id="a"))
    await asyncio.sleep(0)
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)
    assert runner._open == [0]


async def test_measured_group_carries_its_sampling_and_size():
    mesh = StubWorkers(1)
    mesh.released.set()
    runner = WorkerRunner(mesh, 1, SimpleNamespace(version=0, generated_tokens=0))
    sampling = SamplingConfig(temperature=0.0)
    group = await runner.measure(task(4), SAMPLE, group_id="v", sampling=sampling, group_size=2)
    (request,) = mesh.asked[0]
    assert group.group_id == "v" and request.measurement == Measurement(sampling=sampling, group_size=2)


def test_workers_of_a_synchronous_run_are_refused():
    from torchtitan.experiments.rl.config_registry import rl_grpo_qwen3_debug

    config = rl_grpo_qwen3_debug()
    config.rollout_workers, config.max_offpolicy_steps = 2, 0
    with pytest.raises(ConfigError, match="rollout_workers = 2: synchronous runs repeat bit for bit"):
        checked_plan(config)
