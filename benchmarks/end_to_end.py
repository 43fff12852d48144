"""Our demo against TRL's GRPOTrainer: seconds per step, and seconds to a held-out reward of 0.9, on the same two cores.

    .venv/bin/pip install --no-deps --target .benchmarks -r requirements/benchmarks.txt
    python benchmarks/end_to_end.py [--steps 60] [--repeats 3] [--synchronous]

1. Both train assets/tiny_qwen3 on digit sums: the same training examples, prompt tokens, reward, held-out examples, 256
   rollouts a step in groups of 8, at most 8 new tokens, AdamW with one learning rate, betas, warm-up and linear decay, gradient
   norm 1, no KL term, float32.
2. Ours is the command, `--config rl_grpo_qwen3_debug`, asynchronous by one step unless --synchronous. TRL's side is GRPOTrainer
   with transformers' generate (its vLLM mode asks for a GPU), synchronous, all 256 rollouts in one batch.
3. The sides take turns, each in processes of its own. Time runs from the start of the first step: imports, engine and model are
   left out.
4. A step's seconds are the mean from the sixth step on, without evaluations: TRL's come between its steps and are left out, and
   ours, which run beside its steps, are off in a run of their own. Not the median: asynchronous steps alternate between short
   and long ones, and the median is of either kind.
5. The held-out reward is that of greedy completions, every 10 steps. Seconds to it are of a run with evaluations, ours included
   and TRL's left out.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from torchtitan.experiments.rl.config.run_config import RunConfig  # noqa: E402
from torchtitan.experiments.rl.config_registry import rl_grpo_qwen3_debug  # noqa: E402

PACKAGES = ROOT / ".benchmarks"


@dataclass(frozen=True)
class Subject:
    """What both sides train, of a task that shows a prompt and takes one reply."""

    script: str
    """The file that calls ``main``: TRL's side runs it in a process of its own."""
    config: Callable[[], RunConfig]
    questions: Callable[[RunConfig], tuple[list[tuple[str, str]], list[tuple[str, str]]]]
    """What the user says and the right answer, of the examples to train on and of those held out."""
    correct: Callable[[str, str], bool]
    """Whether a reply has the right answer."""
    steps: int
    goal: float
    """Held-out reward."""
    every: int
    """Steps from one evaluation to the next."""
    first: int
    """So many steps at the start compile, fill caches and wait for the first rollouts: their seconds are left out."""
    at_least: float
    """What the ratio of seconds a step should be."""
    module: str = ""
    """Module of benchmarks/ that has the config, if not the registry."""
    system: str = ""
    """System message before each question; none if empty."""


@dataclass
class Seen:
    """What one run showed."""

    step_s: list[float] = field(default_factory=list)
    rewards: list[tuple[int, float, float]] = field(default_factory=list)
    """Step, seconds since the first step began, held-out reward."""

    def seconds_a_step(self, subject: Subject) -> float:
        return statistics.mean(self.step_s[subject.first :] or self.step_s)

    def seconds_to_goal(self, subject: Subject) -> float | None:
        return next(
            (seconds for _, seconds, reward in self.rewards if reward >= subject.goal), None
        )


def ours(subject: Subject, args: argparse.Namespace, folder: Path) -> Seen:
    """Run the command without evaluations for the seconds of its steps, and with them for the rest."""
    alone = run_command(subject, args, folder, "alone", str(args.steps + 1))
    return replace(
        run_command(subject, args, folder, "evaluated", str(subject.every)), step_s=alone.step_s
    )


def run_command(
    subject: Subject, args: argparse.Namespace, folder: Path, run: str, every: str
) -> Seen:
    """Run the command; read its metrics."""
    words = [
        "--config",
        subject.config.__name__,
        "--steps",
        str(args.steps),
        "--run-dir",
        str(folder / run),
    ]
    words += ["--validation.every", every]
    words += ["--module", subject.module] if subject.module else []
    words += ["--max-offpolicy-steps", "0"] if args.synchronous else []
    with (folder / "output").open("w") as output:
        subprocess.run(
            [sys.executable, "-m", "torchtitan.experiments.rl.train", *words],
            cwd=ROOT,
            check=True,
            env=os.environ | {"PYTHONPATH": str(ROOT / "benchmarks")},
            stdout=output,
            stderr=output,
        )
    records = [
        json.loads(line) for line in (folder / run / "metrics.jsonl").read_text().splitlines()
    ]
    seen, now = Seen(), 0.0
    for record in records:
        if record["step"]:
            seen.step_s.append(record["time/step_s"])
            now += record["time/step_s"]
        if record["step"] and "validation/reward" in record:
            # Reported with the step that ends after it, so this time is an upper bound.
            seen.rewards.append((record["step"], now, record["validation/reward"]))
    return seen


def theirs(subject: Subject, args: argparse.Namespace, folder: Path) -> Seen:
    """Run TRL's side in a process of its own."""
    command = [
        sys.executable,
        subject.script,
        "--steps",
        str(args.steps),
        "--trl",
        str(folder / "seen.json"),
    ]
    environment = os.environ | {
        "PYTHONPATH": str(PACKAGES),
        "WANDB_DISABLED": "true",
        "OMP_NUM_THREADS": str(os.cpu_count()),
    }
    with (folder / "output").open("w") as output:
        subprocess.run(
            command, cwd=folder, check=True, env=environment, stdout=output, stderr=output
        )
    return Seen(**json.loads((folder / "seen.json").read_text()))


def run_trl(subject: Subject, steps: int, path: Path) -> None:
    """TRL's side: train, and write what was seen."""
    from renderers import Message

    from torchtitan.experiments.rl.envs.renderer import build_renderer

    config = subject.config()
    model = str(ROOT / config.model.hf_assets_path)
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    (task,) = config.tasks.values()
    assert config.rollouts_per_step is not None
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    renderer = build_renderer(config.renderer, model)

    def rows(questions: list[tuple[str, str]]) -> list[dict[str, str]]:
        made = []
        for question, answer in questions:
            messages: list[Message] = [{"role": "user", "content": question}]
            if subject.system:
                messages.insert(0, {"role": "system", "content": subject.system})
            ids = renderer.render_ids(messages, add_generation_prompt=True)
            text = tokenizer.decode(ids)
            assert tokenizer(text, add_special_tokens=False)["input_ids"] == ids, (
                "both sides have the same prompt tokens"
            )
            made.append({"prompt": text, "answer": answer})
        return made

    def correct(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
        return [
            float(subject.correct(text, right))
            for text, right in zip(completions, answer, strict=True)
        ]

    training, held_out = (rows(questions) for questions in subject.questions(config))
    optimizer = config.trainer.optimizer
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        reward_funcs=correct,
        train_dataset=Dataset.from_list(training),
        processing_class=tokenizer,
        args=GRPOConfig(
            output_dir=str(path.parent / "trl"),
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=config.rollouts_per_step,
            num_generations=task.group_size,
            max_completion_length=task.sampling.max_tokens,
            temperature=task.sampling.temperature,
            beta=0.0,
            learning_rate=optimizer.lr,
            adam_beta1=optimizer.betas[0],
            adam_beta2=optimizer.betas[1],
            adam_epsilon=optimizer.eps,
            weight_decay=optimizer.weight_decay,
            max_grad_norm=optimizer.max_norm,
            lr_scheduler_type="linear",
            warmup_steps=config.trainer.lr_scheduler.warmup_steps,
            max_steps=steps,
            logging_steps=steps,
            save_strategy="no",
            report_to="none",
            gradient_checkpointing=False,
            dataloader_num_workers=0,
        ),
    )
    seen = Seen()

    class Clock(TrainerCallback):
        """Seconds of each step, without those of the evaluations."""

        began = now = 0.0

        def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            self.began = self.began or time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            ended = time.perf_counter()
            seen.step_s.append(ended - self.began)
            self.now += ended - self.began
            if state.global_step % subject.every == 0:
                seen.rewards.append((state.global_step, self.now, self.evaluate(others["model"])))
            self.began = time.perf_counter()

        @torch.no_grad()
        def evaluate(self, model: Any) -> float:
            batch = tokenizer(
                [row["prompt"] for row in held_out],
                return_tensors="pt",
                padding=True,
                add_special_tokens=False,
            )
            tokens = model.generate(
                **batch, do_sample=False, max_new_tokens=task.sampling.max_tokens
            )
            texts = tokenizer.batch_decode(
                tokens[:, batch["input_ids"].shape[1] :], skip_special_tokens=True
            )
            return statistics.mean(correct(texts, [row["answer"] for row in held_out]))

    trainer.add_callback(Clock())
    trainer.train()
    path.write_text(json.dumps(asdict(seen)))


def main(subject: Subject, description: str) -> None:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--steps", type=int, default=subject.steps)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--synchronous", action="store_true", help="ours waits for its rollouts too, as TRL does"
    )
    parser.add_argument("--trl", type=Path, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.trl is not None:
        return run_trl(subject, args.steps, args.trl)
    if not (PACKAGES / "trl").is_dir():
        sys.exit(
            f"TRL is missing: .venv/bin/pip install --no-deps --target {PACKAGES.name} -r requirements/benchmarks.txt"
        )
    sides = {"ours": ours, "TRL": theirs}
    runs: dict[str, list[Seen]] = {name: [] for name in sides}
    print(f"load {os.getloadavg()[0]:.1f} at the start; {args.steps} steps a run")
    print(
        f"{'':<8}{'seconds a step':>16}{f'seconds to {subject.goal}':>18}  held-out reward by step"
    )
    with tempfile.TemporaryDirectory() as temporary:
        for repeat in range(args.repeats):
            for name, side in sides.items():
                folder = Path(temporary) / f"{name}-{repeat}"
                folder.mkdir()
                try:
                    seen = side(subject, args, folder)
                except subprocess.CalledProcessError:
                    sys.exit((folder / "output").read_text()[-4000:])
                runs[name].append(seen)
                to_goal = seen.seconds_to_goal(subject)
                reached_in = "not reached" if to_goal is None else f"{to_goal:.1f}"
                rewards = " ".join(f"{step}: {reward:.2f}" for step, _, reward in seen.rewards)
                print(
                    f"{name:<8}{seen.seconds_a_step(subject):>16.3f}{reached_in:>18}  {rewards}",
                    flush=True,
                )
    medians = {
        name: statistics.median(seen.seconds_a_step(subject) for seen in found)
        for name, found in runs.items()
    }
    print(
        f"TRL / ours: {medians['TRL'] / medians['ours']:.2f} in seconds a step (at least {subject.at_least:g})"
    )
    goals = {
        name: [seen.seconds_to_goal(subject) for seen in found] for name, found in runs.items()
    }
    reached = {
        name: [seconds for seconds in found if seconds is not None] for name, found in goals.items()
    }
    if all(len(reached[name]) == args.repeats for name in sides):
        ratio = statistics.median(reached["TRL"]) / statistics.median(reached["ours"])
        print(
            f"TRL / ours: {ratio:.2f} in seconds to {subject.goal} (at least {subject.at_least:g})"
        )
    else:
        print(
            "runs that reached the goal: "
            + ", ".join(f"{len(reached[name])} of {args.repeats} {name}" for name in sides)
        )


def digit_sums(config: RunConfig) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """The examples of rl_grpo_qwen3_debug."""
    from torchtitan.experiments.rl.tasks.examples.sum_digits import (
        answer_text,
        make_examples,
        prompt_text,
    )

    task: Any = config.tasks["sum_digits"]
    training = make_examples(task.dataset.count, split="train", seed=task.dataset.seed)
    held_out = make_examples(
        config.validation.examples, split="validation", seed=task.validation.seed
    )
    asked = [
        [(prompt_text(digits), answer_text(digits)) for digits in found]
        for found in (training, held_out)
    ]
    return asked[0], asked[1]


if __name__ == "__main__":
    demo = Subject(
        script=__file__,
        config=rl_grpo_qwen3_debug,
        questions=digit_sums,
        correct=lambda reply, answer: reply.strip() == answer,
        steps=60,
        goal=0.9,
        every=10,
        first=5,
        at_least=3,
    )
    main(demo, __doc__.partition("\n")[0])
