"""What asking over HTTP costs: an agent through the gateway against the same conversation as a MessageEnv, in turn.

    python benchmarks/gateway.py [--rollouts 64] [--turns 8] [--token-s 0.01] [--repeats 3]

A stub policy answers 64 tokens after 64 times --token-s, for as many rollouts as there are at once. The agents' clients share
one process of their own, as programs would; its CPU time is not counted, and takes a core's time all the same. Then histories
of up to 128 turns are matched with nothing else around.
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from pathlib import Path

import aiohttp
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from torchtitan.experiments.rl.algorithms import GRPO  # noqa: E402
from torchtitan.experiments.rl.config_registry import TINY_MODEL  # noqa: E402
from torchtitan.experiments.rl.configurable import BuildContext  # noqa: E402
from torchtitan.experiments.rl.envs.renderer import RendererConfig, build_renderer  # noqa: E402
from torchtitan.experiments.rl.gateway.chains import TurnTree  # noqa: E402
from torchtitan.experiments.rl.process.setup import set_up_process  # noqa: E402
from torchtitan.experiments.rl.rollouts.types import Completion  # noqa: E402
from torchtitan.experiments.rl.tasks import (  # noqa: E402
    AgentTask,
    EnvTask,
    MemoryRows,
    MessageEnv,
    RendererEnvConfig,
    ResetOutput,
    RowDataset,
    Rubric,
    StepOutput,
)

TOKENS = 64
FIRST = {"role": "user", "content": "How much is 12 + 34? " * 5}
NEXT = {"role": "user", "content": "And what is that, and 12 more? " * 4}


class StubPolicy:
    """Says 64 tokens, whatever it is asked; a session of it is itself."""

    version = 0

    def __init__(self, tokenizer, token_s: float):
        ids = tokenizer.encode("one more " * TOKENS, add_special_tokens=False)[: TOKENS - 1]
        end = tokenizer.encode("<|im_end|>", add_special_tokens=False)
        self.completion = Completion(
            token_ids=np.asarray(ids + end, np.int32),
            logprobs=np.full(TOKENS, -0.5, np.float32),
            policy_versions=np.zeros(TOKENS, np.int32),
            finish_reason="stop",
        )
        self.takes_s = TOKENS * token_s

    def session(self, **_):
        return self

    async def generate(self, prompt_token_ids, *, max_tokens):
        await asyncio.sleep(self.takes_s)
        return self.completion

    def close(self):
        pass


class Talk(MessageEnv):
    async def reset(self):
        return ResetOutput(messages=[FIRST])

    async def step_message(self, message):
        self.turns = getattr(self, "turns", 0) + 1
        return StepOutput(env_messages=[NEXT], done=self.turns == self.row["turns"])


class Agent(AgentTask):
    clients: asyncio.subprocess.Process
    waiting: dict[str, asyncio.Future]

    async def run_agent(self, sample, endpoint):
        self.waiting[endpoint.key] = asyncio.get_running_loop().create_future()
        self.clients.stdin.write(
            f"{endpoint.url} {endpoint.key} {sample.env_input['turns']}\n".encode()
        )
        await self.waiting[endpoint.key]


async def clients() -> None:
    """What the process of the clients does: a conversation for each line of stdin."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )

    async def converse(session, url, key, turns):
        messages = [FIRST]
        for _ in range(int(turns)):
            body = {"model": "policy", "messages": messages}
            async with session.post(
                f"{url}/chat/completions", json=body, headers={"x-api-key": key}
            ) as response:
                reply = json.loads(await response.read())
            messages += [reply["choices"][0]["message"], NEXT]
        print(key, flush=True)

    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
        asyncio.TaskGroup() as group,
    ):
        while line := await reader.readline():
            group.create_task(converse(session, *line.decode().split()))


async def measured(task, policy, rollouts: int, turns: int) -> tuple[float, float]:
    """CPU seconds of this process for a call, and rollouts a second."""
    cpu_s, began = time.process_time(), time.perf_counter()
    group = await task.run_group(task.dataset[0], policy, group_id="g", seed=0, group_size=rollouts)
    assert await task.score_group(group) is None, group.failure
    assert all(
        len(rollout.turns) == turns and len(rollout.samples) == 1 for rollout in group.rollouts
    )
    return (time.process_time() - cpu_s) / (rollouts * turns), rollouts / (
        time.perf_counter() - began
    )


async def compare(options) -> None:
    renderer = build_renderer(RendererConfig(), TINY_MODEL)
    policy = StubPolicy(renderer._tokenizer, options.token_s)
    same = {
        "dataset": RowDataset.Config(rows=MemoryRows([{"turns": options.turns}])),
        "rubric": Rubric.Config(reward_fns=[lambda completion, row: float(len(str(completion)))]),
        "algorithm": GRPO.Config(),
        "env": RendererEnvConfig(max_turns=options.turns, max_rollout_tokens=100_000),
    }
    env = EnvTask.Config(**same, message_env=Talk).build(
        name="env", context=BuildContext(renderer=renderer, vocab_size=1 << 31)
    )
    agent = Agent.Config(**same).build(
        name="agent", context=BuildContext(renderer=renderer, vocab_size=1 << 31)
    )
    agent.waiting = {}
    agent.clients = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "--clients", stdin=-1, stdout=-1
    )

    async def ends():
        while key := (await agent.clients.stdout.readline()).decode().strip():
            agent.waiting.pop(key).set_result(None)

    seen = asyncio.create_task(ends())
    for task in (env, agent):
        await task.setup(policy)
        await measured(task, policy, 8, options.turns)
    figures: dict[str, list[tuple[float, float]]] = {"env": [], "agent": []}
    for number in range(options.repeats):
        for task in (env, agent) if number % 2 == 0 else (agent, env):
            figures[task.name].append(await measured(task, policy, options.rollouts, options.turns))
    agent.clients.stdin.close()
    await agent.clients.wait()
    await seen
    await agent.close()
    medians = {
        name: [statistics.median(column) for column in zip(*rows, strict=True)]
        for name, rows in figures.items()
    }
    for name, rows in figures.items():
        cpu, rate = zip(*rows, strict=True)
        print(
            f"{name:5}  CPU a call {1e3 * medians[name][0]:.2f} ms ({1e3 * min(cpu):.2f} to {1e3 * max(cpu):.2f})",
            end=", ",
        )
        print(f"rollouts a second {medians[name][1]:.2f} ({min(rate):.2f} to {max(rate):.2f})")
    print(
        f"over HTTP a call takes {1e3 * (medians['agent'][0] - medians['env'][0]):.2f} ms of CPU more",
        end=", ",
    )
    print(f"rollouts a second are {medians['agent'][1] / medians['env'][1]:.3f} times the env's")


def matching(turns: int) -> tuple[float, float]:
    """CPU microseconds of the last call's match, and of all calls for each message that was new, of an append-only client."""
    tree, history, spent = TurnTree(), [], []
    for number in range(turns):
        asked = {"role": "user", "content": f"{number} " * 100}
        said = {"role": "assistant", "content": f"said {number} " * 50}
        history = json.loads(
            json.dumps([*history, asked])
        )  # as a server parses it: equal, and not the same
        began = time.thread_time_ns()
        match = tree.match((), history)
        tree.add(match, history[match.known :], said, number, extends=True)
        spent.append((time.thread_time_ns() - began) / 1e3)
        history.append(said)
    return spent[-1], sum(spent) / (2 * turns)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rollouts", type=int, default=64)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--token-s", type=float, default=0.01)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--clients", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.clients:
        asyncio.run(clients())
        return
    set_up_process()
    asyncio.run(compare(options))
    for turns in (32, 64, 128):
        last, new = map(statistics.median, zip(*(matching(turns) for _ in range(9)), strict=True))
        print(
            f"{turns:3} turns: the last call is matched in {last:.1f} us; all calls, {new:.1f} us for each new message"
        )


if __name__ == "__main__":
    main()
