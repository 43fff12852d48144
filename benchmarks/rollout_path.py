"""What the rollout path costs: CPU a turn beyond the renderer's own calls, and how long the event loop is held up.

    python benchmarks/rollout_path.py [--rollouts 512] [--turns 8] [--latency-s 0.05] [--record] [--profile]

A stub policy answers 512 rollouts at once, each with tool calls and then an answer, first at once, then after a random sleep
of up to --latency-s. All of it runs as in a run: Task.run_group, a rubric, GRPO, training samples. Calls of the renderer are
timed one by one, by the CPU time of their thread, and taken off the CPU time of the whole process.

Lag is how late a task that sleeps 10 ms wakes. Where others use the machine too, it grows by what they take; "own" is what
this process computed from one look to the next, the 10 ms included.
"""

import argparse
import asyncio
import cProfile
import pstats
import random
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from torchtitan.experiments.rl.algorithms import GRPO  # noqa: E402
from torchtitan.experiments.rl.config_registry import TINY_MODEL  # noqa: E402
from torchtitan.experiments.rl.configurable import BuildContext  # noqa: E402
from torchtitan.experiments.rl.envs.renderer import RendererConfig, build_renderer  # noqa: E402
from torchtitan.experiments.rl.process.setup import set_up_process  # noqa: E402
from torchtitan.experiments.rl.rollouts.recorder import RolloutRecorder  # noqa: E402
from torchtitan.experiments.rl.rollouts.types import Completion, RolloutStatus  # noqa: E402
from torchtitan.experiments.rl.rubrics.rubric import env_component  # noqa: E402
from torchtitan.experiments.rl.tasks import (  # noqa: E402
    DataSample,
    Dataset,
    MessageEnv,
    RendererEnvConfig,
    ResetOutput,
    Rubric,
    StepOutput,
    Task,
)
from torchtitan.experiments.rl.tasks.examples.calculator import CALCULATOR  # noqa: E402

INTERVAL_S = 0.01
CPU_LIMIT_S = 0.001
"""A turn."""
LAG_LIMIT_S = 0.05
GROUP_SIZE = 8


class TimedRenderer:
    """A renderer whose calls' CPU time is added up."""

    def __init__(self, renderer):
        self._renderer = renderer
        self.cpu_s, self.calls = 0.0, 0
        for name in ("render", "bridge_to_next_turn", "parse_response"):
            setattr(self, name, self._timed(getattr(renderer, name)))

    def __getattr__(self, name):
        return getattr(self._renderer, name)

    def _timed(self, method):
        def call(*args, **kwargs):
            began = time.thread_time()
            try:
                return method(*args, **kwargs)
            finally:
                self.cpu_s += time.thread_time() - began
                self.calls += 1

        return call


class StubPolicy:
    """Calls the tool in every turn but a rollout's last."""

    version = 0

    def __init__(self, tokenizer, *, turns: int, latency_s: float):
        call = 'I need to know.\n<tool_call>\n{"name": "calculator", "arguments": {"expression": "12 + 34"}}\n</tool_call>'
        self.completions = [
            self._completion(tokenizer, text) for text in [call] * (turns - 1) + ["It is 46."]
        ]
        self.latency_s, self.random = latency_s, random.Random(0)

    @staticmethod
    def _completion(tokenizer, text: str) -> Completion:
        ids = np.asarray(tokenizer.encode(text + "<|im_end|>", add_special_tokens=False), np.int32)
        return Completion(
            token_ids=ids,
            logprobs=np.full(len(ids), -0.5, np.float32),
            policy_versions=np.zeros(len(ids), np.int32),
            finish_reason="stop",
        )

    def session(self, **_):
        return StubSession(self)


class StubSession:
    def __init__(self, policy: StubPolicy):
        self._policy, self._replies = policy, iter(policy.completions)

    async def generate(self, prompt_token_ids, *, max_tokens):
        await asyncio.sleep(self._policy.random.uniform(0, self._policy.latency_s))
        return next(self._replies)

    def close(self):
        pass


class Questions(Dataset):
    def __len__(self):
        return 1000

    def __getitem__(self, index):
        return DataSample(sample_id=str(index), env_input=index)


class ToolEnv(MessageEnv):
    async def reset(self):
        return ResetOutput(
            messages=[{"role": "user", "content": "How much is 12 + 34? " * 5}], tools=[CALCULATOR]
        )

    async def step_message(self, message):
        answers = [
            {
                "role": "tool",
                "tool_call_id": call["id"],
                "name": "calculator",
                "content": "The result is 46. " * 8,
            }
            for call in message.get("tool_calls", [])
        ]
        return StepOutput(
            env_messages=answers, done=not answers, reward_components={"calls": len(answers)}
        )


class ToolTask(Task):
    def make_env(self, sample):
        return ToolEnv()


async def run(
    renderer, tokenizer, options, *, latency_s: float
) -> tuple[float, float, list[float], list[float]]:
    """CPU seconds a turn of the renderer and of the rest; lags, and this process's CPU time in each."""
    timed = TimedRenderer(renderer)
    task = ToolTask.Config(
        algorithm=GRPO.Config(),
        dataset=Questions.Config(),
        rubric=Rubric.Config(reward_fns=[env_component("calls")]),
        env=RendererEnvConfig(max_turns=options.turns, max_rollout_tokens=100_000),
        group_size=GROUP_SIZE,
    ).build(name="tools", context=BuildContext(renderer=timed, vocab_size=1 << 31))
    policy = StubPolicy(tokenizer, turns=options.turns, latency_s=latency_s)
    recorder = None
    if options.record:
        recorder = RolloutRecorder.Config().build(run_dir=Path(tempfile.mkdtemp()))

    async def one_group(number: int):
        group = await task.run_group(
            task.dataset[number], policy, group_id=f"tools-{number}", seed=0
        )
        assert await task.score_group(group) is None
        if recorder is not None:
            recorder.record(group, {})
        return group

    lags_s, own_s = [], []

    async def watch_lag():
        while True:
            before, cpu_before = time.monotonic(), time.process_time()
            await asyncio.sleep(INTERVAL_S)
            lags_s.append(max(0.0, time.monotonic() - before - INTERVAL_S))
            # what the loop did in time, as well as what made it late
            own_s.append(time.process_time() - cpu_before)

    watch = asyncio.create_task(watch_lag())
    await asyncio.sleep(0.1)
    lags_s.clear()
    own_s.clear()
    began = time.process_time()
    groups = await asyncio.gather(
        *(one_group(number) for number in range(options.rollouts // GROUP_SIZE))
    )
    await asyncio.sleep(2 * INTERVAL_S)
    cpu_s = time.process_time() - began
    watch.cancel()

    rollouts = [rollout for group in groups for rollout in group.rollouts]
    turns = sum(len(rollout.turns) for rollout in rollouts)
    assert (
        turns == options.rollouts * options.turns
        and len({len(rollout.samples) for rollout in rollouts}) == 1
    )
    assert {rollout.status for rollout in rollouts} == {RolloutStatus.COMPLETED}
    if recorder is not None:
        recorder.close()
        assert recorder.recorded == options.rollouts
    options.tokens = max(len(sample) for rollout in rollouts for sample in rollout.samples)
    return timed.cpu_s / turns, (cpu_s - timed.cpu_s) / turns, lags_s, own_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rollouts", type=int, default=512)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--latency-s", type=float, default=0.05)
    parser.add_argument(
        "--record", action="store_true", help="write every rollout to disk meanwhile"
    )
    parser.add_argument(
        "--profile", action="store_true", help="print where the time goes (profiling adds to it)"
    )
    options = parser.parse_args()
    set_up_process()
    renderer = build_renderer(RendererConfig(), TINY_MODEL)
    tokenizer = renderer._tokenizer

    profile = cProfile.Profile()
    for latency_s in (0.0, options.latency_s):
        if options.profile:
            profile.enable()
        renderer_s, path_s, lags, own = asyncio.run(
            run(renderer, tokenizer, options, latency_s=latency_s)
        )
        profile.disable()
        name = "answers at once" if latency_s == 0 else f"answers within {latency_s:g} s"
        print(
            f"{name}: {options.rollouts} rollouts of {options.turns} turns, {options.tokens:,} tokens each"
        )
        print(f"  renderer   {renderer_s * 1e3:6.3f} ms CPU a turn")
        print(f"  path       {path_s * 1e3:6.3f} ms CPU a turn, limit {CPU_LIMIT_S * 1e3:g}")
        for name, values in (("lag", lags), ("own", own)):
            p99 = np.quantile(values, 0.99)
            print(
                f"  {name}        {max(values) * 1e3:6.1f} ms at most, {p99 * 1e3:.1f} ms p99, limit {LAG_LIMIT_S * 1e3:g}"
            )
    if options.profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(45)


if __name__ == "__main__":
    main()
