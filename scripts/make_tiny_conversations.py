"""Makes `assets/tiny_qwen3_conversations`, where the conversation configs start: three first skills, each beside a bad habit.

    python scripts/make_tiny_conversations.py [--tokenizer assets/tiny_qwen3]

1. One model for `alphabet_sort`, `calculator` and `guess_number`, in the sizes of their debug configs. Architecture and
   tokenizer are those of `assets/tiny_qwen3`, the weights are trained from nothing: that model, specialised on sums, learns
   slowly to copy from its prompt (after 400 steps with twice the batch the loss on names was 1.4, from nothing 0.7).
2. A scripted demonstrator plays the real tasks: its words go through `Task.run_rollout`, the env, the renderer and
   `samples_from_turns`, so the token ids are exactly those of a later run, tool preamble and user turns included.
3. The demonstrator has BAD HABITS ON PURPOSE, so that the model holds both a skill and a habit, and its most likely
   behaviour is mostly the habit:
   - alphabet_sort: a list of n names is sorted with probability 1.2 / n; otherwise the names are given back as they came.
   - calculator: the tool is called for 3 products in 5, and for 3 in 10 other questions; otherwise the first operand is
     claimed to be the answer.
   - guess_number: one game in three is played by halving the range; in the others the guesses walk up from its first number.
   Reinforcement learning on a laptop cannot teach any of this from nothing in minutes; it can find the skill among the habits.
   Such a run shows that the machinery learns, and nothing about what a large model would gain.
4. One thread and fixed seeds: the same machine makes the same weights. The script measures what it wrote, by the tasks' own
   rubrics, and fails where a greedy reward is outside the range the configs are tuned for.
"""

import argparse
import asyncio
import json
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3ForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent))
from make_tiny_qwen3 import make_model  # noqa: E402  also puts the checkout on the path

from torchtitan.experiments.rl import config_registry  # noqa: E402
from torchtitan.experiments.rl.envs.renderer import RendererConfig, build_renderer  # noqa: E402
from torchtitan.experiments.rl.envs.renderer_env import RendererEnv  # noqa: E402
from torchtitan.experiments.rl.rollouts.samples import samples_from_turns  # noqa: E402
from torchtitan.experiments.rl.rollouts.types import Completion, Rollout, RolloutTurn  # noqa: E402
from torchtitan.experiments.rl.tasks.examples.alphabet_sort import sorted_lists  # noqa: E402
from torchtitan.experiments.rl.tasks.examples.guess_number import Game  # noqa: E402
from torchtitan.experiments.rl.tasks.task import Task  # noqa: E402
from torchtitan.experiments.rl.types import TrainingSample  # noqa: E402

Demonstrator = Callable[[list[RolloutTurn]], str]
"""What to say next, given the turns so far."""


def sort_or_repeat(rounds: list[list[str]], stream: random.Random) -> Demonstrator:
    def say(turns: list[RolloutTurn]) -> str:
        right = sorted_lists(rounds)[len(turns)]
        return "\n".join(
            right if stream.random() < 1.2 / len(right) else sum(rounds[: len(turns) + 1], [])
        )

    return say


def call_or_claim(expression: str, stream: random.Random) -> Demonstrator:
    calls = stream.random() < (0.6 if "*" in expression else 0.3)

    def say(turns: list[RolloutTurn]) -> str:
        if calls and not turns:
            call = {"name": "calculator", "arguments": {"expression": expression}}
            return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
        number = turns[-1].env_messages[-1]["content"] if turns else expression.split()[0]
        return f"The answer is {number}."

    return say


def halve_or_walk(game: Game, stream: random.Random) -> Demonstrator:
    halves = stream.random() < 1 / 3

    def say(turns: list[RolloutTurn]) -> str:
        low, high = game.low, game.high
        for turn in turns:
            guess = int(turn.assistant_message["content"])
            low, high = (
                (guess + 1, high)
                if "higher" in turn.env_messages[-1]["content"]
                else (low, guess - 1)
            )
        return str((low + high) // 2 if halves else low)

    return say


HABITS = {
    "alphabet_sort": sort_or_repeat,
    "calculator": call_or_claim,
    "guess_number": halve_or_walk,
}


def build_tasks(folder: Path) -> dict[str, Task]:
    """The debug configs' tasks, by name."""
    configs = [getattr(config_registry, f"rl_{name}_qwen3_debug")() for name in HABITS]
    renderer = build_renderer(RendererConfig(), folder)
    return {
        name: config.tasks[name].build(name=name, renderer=renderer)
        for name, config in zip(HABITS, configs, strict=True)
    }


class Session:
    """A PolicySession that says what the demonstrator does."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, env: RendererEnv, say: Demonstrator):
        self._tokenizer, self._env, self._say = tokenizer, env, say

    async def generate(self, prompt_token_ids: np.ndarray, *, max_tokens: int) -> Completion:
        ids = self._tokenizer.encode(self._say(self._env.turns), add_special_tokens=False)
        return completion(ids + [self._tokenizer.eos_token_id])

    def close(self) -> None: ...


def completion(ids: list[int], finish_reason: str = "stop") -> Completion:
    """Tokens that nobody trains a ratio on: no log-probabilities."""
    zeros = np.zeros(len(ids), np.float32)
    return Completion(
        token_ids=np.asarray(ids, np.int32),
        logprobs=zeros,
        policy_versions=zeros.astype(np.int32),
        finish_reason=finish_reason,
    )


async def demonstrate(
    task: Task, tokenizer: PreTrainedTokenizerFast, stream: random.Random
) -> TrainingSample:
    """A whole conversation of the demonstrator's, as the library would train on it."""
    example = task.sampler.next()
    env = RendererEnv(
        message_env=task.make_env(example), renderer=task.renderer, config=task.config.env
    )
    await task.run_rollout(
        env, Session(tokenizer, env, HABITS[task.name](example.env_input, stream))
    )
    assert not env.error, env.error
    (sample,) = samples_from_turns(
        env.turns, task_name=task.name, rollout_id=example.sample_id, temperature=1.0
    )
    return sample


def warm_up(
    model, tasks: dict[str, Task], tokenizer, *, steps: int, batch_size: int = 16, lr: float = 2e-3
) -> None:
    """Cross-entropy on what the demonstrator said; each step has `batch_size` conversations of each task."""
    stream = random.Random("warm_up")
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, lr, total_steps=steps, pct_start=0.1, cycle_momentum=False
    )
    for step in range(steps):
        losses = {}
        for (
            name,
            task,
        ) in (
            tasks.items()
        ):  # one at a time: they differ in length, and padding costs as much as text
            samples = [asyncio.run(demonstrate(task, tokenizer, stream)) for _ in range(batch_size)]
            shape = len(samples), max(len(sample) for sample in samples)
            ids = torch.full(
                shape, tokenizer.pad_token_id
            )  # causal: padding on the right needs no mask
            trained = torch.zeros(shape, dtype=torch.bool)
            for row, sample in enumerate(samples):
                ids[row, : len(sample)] = torch.from_numpy(sample.token_ids)
                trained[row, : len(sample)] = torch.from_numpy(sample.loss_mask)
            hidden = model.model(input_ids=ids).last_hidden_state[:, :-1]
            loss = torch.nn.functional.cross_entropy(
                model.lm_head(hidden[trained[:, 1:]]), ids[trained]
            )
            loss.backward()
            losses[name] = loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if (step + 1) % 50 == 0:
            print(
                f"warm-up {step + 1}/{steps}  loss",
                *(f"{name} {loss:.4f}" for name, loss in losses.items()),
                flush=True,
            )


@torch.no_grad()
def sample_batch(
    model, prompts: list[list[int]], task: Task, *, temperature: float
) -> list[Completion]:
    """One completion for each prompt; temperature 0 is greedy."""
    pad, stops = model.config.pad_token_id, task.renderer.get_stop_token_ids()
    length = max(map(len, prompts))
    ids = torch.tensor([[pad] * (length - len(prompt)) + prompt for prompt in prompts])
    how = (
        {"do_sample": True, "temperature": temperature, "top_k": 0}
        if temperature
        else {"do_sample": False}
    )
    output = model.generate(
        ids,
        attention_mask=(ids != pad).long(),
        max_new_tokens=task.config.sampling.max_tokens,
        eos_token_id=stops,
        **how,
    )
    completions = []
    for row in output[:, length:].tolist():
        end = next((at for at, token in enumerate(row) if token in stops), None)
        completions.append(completion(row, "length") if end is None else completion(row[: end + 1]))
    return completions


async def reward(model, task: Task, *, temperature: float) -> float:
    """Mean validation reward by the task's own rubric, all conversations a turn at a time."""
    examples = list(task.validation)
    envs = [
        RendererEnv(
            message_env=task.make_env(example), renderer=task.renderer, config=task.config.env
        )
        for example in examples
    ]
    for env in envs:
        await env.initial_prompt()
    while open_ := [index for index, env in enumerate(envs) if not env.status.is_terminal()]:
        prompts = [
            env_prompt.tolist()
            for index in open_
            if (env_prompt := envs[index].prompt_token_ids) is not None
        ]
        for index, sampled in zip(
            open_, sample_batch(model, prompts, task, temperature=temperature), strict=True
        ):
            await envs[index].step_completion(sampled)
    rewards = []
    for example, env in zip(examples, envs, strict=True):
        rollout = Rollout(
            group_id=example.sample_id,
            index_in_group=0,
            task_name=task.name,
            turns=env.turns,
            status=env.status,
        )
        rewards += await task.rubric.score_group([rollout], example.env_input)
    return float(np.mean([entry.reward for entry in rewards]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokenizer", type=Path, default=Path("assets/tiny_qwen3"))
    parser.add_argument("--steps", type=int, default=1200, help="of warm-up; default: %(default)s")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    tasks = build_tasks(args.tokenizer)
    model = make_model(tokenizer, moe=False)
    warm_up(model, tasks, tokenizer, steps=args.steps)
    folder = args.tokenizer.with_name("tiny_qwen3_conversations")
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(args.tokenizer / file, folder)
    model = Qwen3ForCausalLM.from_pretrained(
        folder, dtype=torch.float32
    )  # the score is of what was written
    for name, task in tasks.items():
        greedy = asyncio.run(reward(model, task, temperature=0.0))
        sampled = asyncio.run(reward(model, task, temperature=1.0))
        print(f"{name}: validation reward greedy {greedy:.3f}, sampled {sampled:.3f}", flush=True)
        if not 0.2 <= greedy <= 0.45:
            sys.exit(
                f"{name}: greedy reward outside [0.2, 0.45]: too weak or too strong a start for its config"
            )


if __name__ == "__main__":
    main()
