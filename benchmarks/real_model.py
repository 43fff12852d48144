"""SmolLM2-135M-Instruct on sums, by `make real`'s config and by TRL's GRPOTrainer: seconds per step, and to a held-out 0.75.

    python scripts/get_model.py smollm2
    .venv/bin/pip install --no-deps --target .benchmarks -r requirements/benchmarks.txt
    python benchmarks/real_model.py [--steps 12] [--repeats 1] [--synchronous]

As benchmarks/end_to_end.py, whose sides these are: the same sums, prompt tokens, reward, temperature, optimizer and rollouts a
step, float32. A step of TRL's takes most of a minute on two cores.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
from end_to_end import Subject, main  # noqa: E402

from torchtitan.experiments.rl.config.run_config import RunConfig  # noqa: E402
from torchtitan.experiments.rl.config_registry.smollm2 import (  # noqa: E402
    last_number_is_answer,
    rl_sums_smollm2,
    sums,
)


def questions(config: RunConfig) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    training, held_out = (
        [(row["question"], str(row["answer"])) for row in rows] for rows in sums()
    )
    return training, held_out


if __name__ == "__main__":
    subject = Subject(
        script=__file__,
        config=rl_sums_smollm2,
        questions=questions,
        correct=lambda reply, answer: last_number_is_answer(reply, {"answer": int(answer)}),
        steps=12,
        goal=0.75,
        every=3,
        first=2,
        at_least=10,
    )
    main(subject, (__doc__ or "").partition("\n")[0])
