"""Makes the tiny models that the distillation configs need, by training `assets/tiny_qwen3` further; same tokenizer.

    python scripts/make_tiny_teachers.py [--student assets/tiny_qwen3]

1. `assets/tiny_qwen3_teacher` is what OPD and SFT learn from: trained on right demonstrations only, so the bad habit of the
   student (make_tiny_qwen3.py, 3) is gone.
2. `assets/tiny_qwen3_reader` is where OPSD starts: it keeps the student's habit on a plain question, and was taught to follow
   a demonstration where the question holds one, in OPSD's own words. A large model can do that without being taught; one of
   a million parameters can't.
3. One thread and fixed seeds, as there. The script measures what it wrote, and fails where a model is not what it is for.
"""

import argparse
import random
import shutil
import sys
from pathlib import Path

import torch
from renderers import create_renderer
from transformers import AutoTokenizer, Qwen3ForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent))
from make_tiny_qwen3 import RENDERER, habit, reward, warm_up  # noqa: E402  also puts the checkout on the path

from torchtitan.experiments.rl.algorithms.opsd import TEMPLATE  # noqa: E402
from torchtitan.experiments.rl.tasks.examples.sum_digits import (  # noqa: E402
    answer_text,
    make_examples,
    prompt_text,
)


def shown(digits: list[int]) -> str:
    """The question with its demonstration."""
    return prompt_text(digits) + TEMPLATE.format(demonstration=answer_text(digits))


def right(digits: list[int], stream: random.Random) -> tuple[str, str]:
    return prompt_text(digits), answer_text(digits)


def habit_or_shown(digits: list[int], stream: random.Random) -> tuple[str, str]:
    return (shown(digits), answer_text(digits)) if stream.random() < 0.5 else habit(digits, stream)


def make(name: str, example, *, steps: int, student: Path) -> dict[str, float]:
    """Train on, save beside the student, and measure what was saved."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(student)
    renderer = create_renderer(tokenizer, RENDERER)
    model = Qwen3ForCausalLM.from_pretrained(student, dtype=torch.float32)
    warm_up(model, renderer, tokenizer, steps=steps, example=example)
    folder = student.with_name(name)
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(student / file, folder)
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    validation = make_examples(1000, split="validation")
    scores = {
        f"{way} {how}": reward(
            model, renderer, validation, temperature=temperature, question=question
        )
        for way, question in (("plain", prompt_text), ("shown", shown))
        for how, temperature in (("greedy", 0.0), ("sampled", 1.0))
    }
    print(
        f"{name}: validation reward",
        ", ".join(f"{key} {value:.3f}" for key, value in scores.items()),
        flush=True,
    )
    return scores


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--student", type=Path, default=Path("assets/tiny_qwen3"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    teacher = make("tiny_qwen3_teacher", right, steps=600, student=args.student)
    reader = make("tiny_qwen3_reader", habit_or_shown, steps=600, student=args.student)
    if teacher["plain sampled"] < 0.85:
        sys.exit("the teacher is too weak to learn from")
    if not (reader["plain greedy"] < 0.5 and reader["shown sampled"] > 0.9):
        sys.exit("the reader has lost the habit, or can't follow a demonstration")


if __name__ == "__main__":
    main()
