"""Runs Codex and Claude Code as agents against a scripted model, and checks that what was sampled is what would be trained.

    npm install --prefix /tmp/agents @openai/codex @anthropic-ai/claude-code
    node /tmp/agents/node_modules/@anthropic-ai/claude-code/install.cjs
    python scripts/agent_clients.py /tmp/agents/node_modules/.bin

Each is given a task, calls its shell twice, and answers. Needs node; no network but the loopback. The second command is for an
npm that runs no install scripts by itself.
"""

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from torchtitan.experiments.rl.config_registry import TINY_MODEL  # noqa: E402
from torchtitan.experiments.rl.envs.renderer import RendererConfig, build_renderer  # noqa: E402
from torchtitan.experiments.rl.observability.rollouts import calls_of  # noqa: E402
from torchtitan.experiments.rl.rollouts.types import Completion, Rollout  # noqa: E402
from torchtitan.experiments.rl.tasks import RendererEnvConfig, SamplingConfig, agent_command_task  # noqa: E402

COMMANDS = {
    "codex": [
        "sh", "-c",
        'exec codex exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox -m policy -c model_provider=run '
        '-c "model_providers.run={name=\'run\', base_url=\'$OPENAI_BASE_URL\', env_key=\'OPENAI_API_KEY\', '
        "wire_api='responses'}\" \"$TASK\"",
    ],
    "claude": ["sh", "-c", 'exec claude -p "$TASK" --model policy --allowedTools Bash'],
}  # fmt: skip
SHELLS = {
    "exec_command": lambda text: {"cmd": text},
    "shell_command": lambda text: {"command": text},
    "shell": lambda text: {"command": ["bash", "-c", text]},
    "Bash": lambda text: {"command": text, "description": "Run it"},
}
"""A shell's arguments, by the name of the tool."""
SCRIPT = ("echo 6 > six.txt", "cat six.txt")


class ScriptedShell:
    """Calls the shell with each line of SCRIPT, then answers. Where there is none, as in a call for a title, it says "ok"."""

    version = 0
    stops_at_texts = True

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer

    def session(self, **_: Any) -> "ScriptedShell":
        return self

    def branch(self, key: str) -> "ScriptedShell":
        return self

    async def generate(
        self, prompt_token_ids: np.ndarray, *, max_tokens: int, **_: Any
    ) -> Completion:
        prompt = self.tokenizer.decode(prompt_token_ids)
        shell = next((name for name in SHELLS if f'"name": "{name}"' in prompt), None)
        done = prompt.count("<tool_response>")
        text = "ok" if shell is None else "It is 6."
        if shell is not None and done < len(SCRIPT):
            call = {"name": shell, "arguments": SHELLS[shell](SCRIPT[done])}
            text = (
                f"<think>\nstep {done}\n</think>\n\n<tool_call>\n{json.dumps(call)}\n</tool_call>"
            )
        ids = np.asarray(
            self.tokenizer.encode(text + "<|im_end|>", add_special_tokens=False), np.int32
        )
        return Completion(
            token_ids=ids,
            logprobs=np.linspace(-1, 0, len(ids), dtype=np.float32),
            policy_versions=np.zeros(len(ids), np.int32),
            finish_reason="stop",
        )

    def close(self) -> None:
        pass


def six(result: Any, row: dict[str, Any]) -> float:
    """Whether the agent ran the script and told its end."""
    file = result.folder / "six.txt"
    return float(file.is_file() and file.read_text() == "6\n" and "It is 6." in result.output)


def report(name: str, rollout: Rollout) -> bool:
    """Print what became of a rollout; whether it is as it should be."""
    sampled = np.concatenate(
        [turn.completion.token_ids for turn in rollout.turns if not turn.untrained] or [np.zeros(0)]
    )
    trained = np.concatenate(
        [sample.token_ids[sample.loss_mask] for sample in rollout.samples] or [np.zeros(0)]
    )
    exact = sorted(sampled.tolist()) == sorted(trained.tolist()) and len(sampled) > 0
    print(
        f"{name}: {rollout.status.value}, reward {rollout.reward}, {len(rollout.turns)} turns, calls {rollout.calls}"
    )
    trains = f"{len(trained)} of {rollout.completion_tokens} sampled tokens, in {len(rollout.samples)} samples"
    print(f"  would train {trains}; exact: {exact}")
    print("\n".join(f"  {line}" for line in calls_of(rollout)))
    if rollout.error:
        print(f"  {rollout.error}")
    return exact and rollout.reward == 1.0 and len(rollout.turns) > len(SCRIPT)


async def run(names: list[str], folder: Path) -> bool:
    renderer = build_renderer(RendererConfig(), TINY_MODEL)
    good = True
    for name in names:
        task = agent_command_task(
            [{"input": name}],
            COMMANDS[name],
            six,
            variables={
                "PATH": f"{folder.resolve()}:/usr/local/bin:/usr/bin:/bin",
                "TASK": "Write 6 to six.txt and tell me.",
            },
            env=RendererEnvConfig(
                max_turns=20, max_rollout_tokens=500_000, rollout_timeout_s=120.0
            ),
            sampling=SamplingConfig(max_tokens=4096),
            max_retries=0,
            group_size=1,
            refused_fields=[
                "output_config"
            ],  # Claude Code asks for a title in a form, and goes on without
        ).build(name=name, renderer=renderer)
        policy: Any = ScriptedShell(renderer._tokenizer)
        await task.setup(policy)
        group = await task.run_group(task.dataset[0], policy, group_id=name, seed=0)
        await task.score_group(group)
        await task.close()
        good &= report(name, group.rollouts[0])
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where the commands codex and claude are")
    parser.add_argument("--only", choices=COMMANDS)
    options = parser.parse_args()
    return (
        0
        if asyncio.run(run([options.only] if options.only else list(COMMANDS), options.folder))
        else 1
    )


if __name__ == "__main__":
    sys.exit(main())
