"""Compares what trainer, engine and transformers compute of a real model in float32: SmolLM2-135M-Instruct, or another.

    python scripts/get_model.py smollm2
    python benchmarks/real_model_fidelity.py [--count 200] [--model FOLDER] [--trained-by transformers]

1. The engine samples replies of at most 32 tokens to prompts of five kinds, at temperature 1. Trainer and transformers score
   what it sampled: differences of each token's log-probability.
2. One optimizer step on 32 of these replies with random advantages, by the learner and by a plain loop of transformers and
   torch's AdamW. AdamW's eps is 1 here: with a small one the first step is the sign of the gradient, which rounding flips where
   the gradient is nearly 0. Compared is the change of all weights: the norm of the difference, by that of the change.
3. The learner exports its policy; transformers and the engine load the folder and score the replies of 2 again.

Prints each figure, and exits with 1 where one is beyond its limit.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
MODEL = ROOT / "outputs" / "models" / "SmolLM2-135M-Instruct"
MAX_TOKENS, LONGEST, OF_STEP = 32, 256, 32
LIMIT, LIMIT_OF_STEP = 1e-4, 1e-3
LR = 1.0


def prompts(tokenizer: Any, count: int) -> list[list[int]]:
    """Token ids of ``count`` prompts."""
    random = np.random.default_rng(0)
    words = "Anna Bernd Clara David Emil Fatima Gustav Hanna Igor Jana".split()

    def text(index: int) -> str:
        a, b = (int(number) for number in random.integers(1, 100, 2))
        names = ", ".join(random.choice(words, 4, replace=False))
        kinds = (
            f"What is {a} + {b}?",
            f"Sort these names by alphabet: {names}.",
            f"Write one sentence about the number {a}.",
            f"{names.split(', ')[0]} has {a} apples and buys {b} more. How many are there? Answer in \\boxed{{}}.",
            f"Write a function in Python that multiplies by {a}.",
        )
        return kinds[index % len(kinds)]

    found = []
    for index in range(count):
        message = {"role": "user", "content": text(index)}
        chat = tokenizer.apply_chat_template([message], add_generation_prompt=True, tokenize=False)
        found.append(tokenizer.encode(chat, add_special_tokens=False))
    return found


def engine(model: Path, asked: Path, answers: Path) -> None:
    """In a process of its own: sample a reply to each prompt, or score each text, and write what came."""
    from torchtitan.experiments.rl.generation.engine import (
        GenerateRequest,
        GenerateResult,
        ScoreRequest,
        ScoreResult,
    )
    from torchtitan.experiments.rl.generation.vllm.engine import VLLMEngineConfig
    from torchtitan.experiments.rl.rollouts.policy import SamplingConfig

    given = np.load(asked, allow_pickle=True).item()
    made = VLLMEngineConfig(max_model_len=LONGEST, cpu_kv_cache_gib=1.0).build(
        model_path=str(model), device="cpu"
    )
    for index, ids in enumerate(given["ids"]):
        tokens = np.asarray(ids, np.int32)
        if given["score"]:
            made.add(ScoreRequest(request_id=index, token_ids=tokens))
        else:
            sampling = SamplingConfig(max_tokens=MAX_TOKENS)
            made.add(
                GenerateRequest(
                    request_id=index,
                    prompt_token_ids=tokens,
                    sampling=sampling,
                    seed=index,
                    stop_token_ids=given["stop"],
                )
            )
    found: dict[int, tuple[Any, Any]] = {}
    while made.busy:
        for result in made.step():
            if isinstance(result, GenerateResult):
                found[result.request_id] = (result.completion.token_ids, result.completion.logprobs)
            else:
                assert isinstance(result, ScoreResult), result
                found[result.request_id] = (None, result.logprobs)
    np.save(
        answers,
        np.array([found[index] for index in range(len(given["ids"]))], dtype=object),
        allow_pickle=True,
    )


def run_engine(
    model: Path, ids: list[Any], folder: Path, *, score: bool, stop: int = 0
) -> list[tuple[Any, Any]]:
    np.save(
        folder / "asked.npy",
        np.array({"ids": ids, "score": score, "stop": [stop]}, dtype=object),
        allow_pickle=True,
    )
    words = [sys.executable, __file__, "--engine", str(folder / "asked.npy"), "--model", str(model)]
    run = subprocess.run(
        [*words, "--answers", str(folder / "answers.npy")], capture_output=True, text=True
    )
    if run.returncode:
        sys.exit(run.stdout[-2000:] + run.stderr[-4000:])
    return [tuple(entry) for entry in np.load(folder / "answers.npy", allow_pickle=True)]


def compare(model: Path, trained_by: Any, count: int, folder: Path) -> bool:
    """Print every figure; whether all are within their limits."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    from torchtitan.experiments.rl.batching.batcher import Batcher
    from torchtitan.experiments.rl.envs.chat_template import PLAIN, set_template
    from torchtitan.experiments.rl.models.policy import ModelConfig
    from torchtitan.experiments.rl.process.setup import set_up_process
    from torchtitan.experiments.rl.training.config import OptimizerConfig, TrainerConfig
    from torchtitan.experiments.rl.training.learner import Learner
    from torchtitan.experiments.rl.training.trainer import init_process_group
    from torchtitan.experiments.rl.types import TrainingSample

    set_up_process()
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(model)
    if tokenizer.chat_template is None:  # of a base model
        set_template(tokenizer, PLAIN)
    asked = prompts(tokenizer, count)
    replies = run_engine(model, asked, folder, score=False, stop=tokenizer.eos_token_id)
    texts = [
        np.array([*prompt, *reply], np.int32)
        for prompt, (reply, _) in zip(asked, replies, strict=True)
    ]
    sampled = [slice(len(prompt), len(text)) for prompt, text in zip(asked, texts, strict=True)]
    theirs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    # SmolLM2's folder names <|im_end|> as padding too, and transformers gives the embedding of the padding no gradient.
    theirs.get_input_embeddings().padding_idx = None

    def by_transformers(policy: Any, text: np.ndarray) -> Any:
        """Log-probability of each token, differentiable; 0 of the first."""
        tokens = torch.from_numpy(text.astype(np.int64))[None]
        logits = policy(tokens).logits[0, :-1].float()
        scores = logits.log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
        return torch.cat([scores.new_zeros(1), scores])

    init_process_group(device="cpu", rank=0, world_size=1, url=f"file://{folder}/store")
    config = TrainerConfig(optimizer=OptimizerConfig(lr=LR, eps=1.0))
    config.lr_scheduler.warmup_steps = 0
    learner = Learner(
        config,
        model=ModelConfig(hf_assets_path=str(model), trained_by=trained_by),
        device="cpu",
        max_seq_len=LONGEST,
        total_steps=10,
        run_dir=str(folder),
    )
    good = True

    def report(what: str, differences: list[np.ndarray], limit: float) -> None:
        nonlocal good
        joined = np.abs(np.concatenate(differences))
        good &= bool(joined.max() <= limit)
        print(
            f"{what:<46} largest {joined.max():.1e}, mean {joined.mean():.1e}, of {len(joined):,} (limit {limit:.0e})",
            flush=True,
        )

    ours = [learner.score(text)[part] for text, part in zip(texts, sampled, strict=True)]
    with torch.no_grad():
        reference = [
            by_transformers(theirs, text).numpy()[part]
            for text, part in zip(texts, sampled, strict=True)
        ]
    engines = [logprobs for _, logprobs in replies]
    sides = {"trainer": ours, "engine": engines, "transformers": reference}
    for left, right in (
        ("trainer", "engine"),
        ("trainer", "transformers"),
        ("engine", "transformers"),
    ):
        pairs = zip(sides[left], sides[right], strict=True)
        report(f"log-probabilities, {left} - {right}", [a - b for a, b in pairs], LIMIT)

    random = np.random.default_rng(1)
    advantages = random.normal(size=OF_STEP)
    samples = []
    for index in range(OF_STEP):
        mask = np.zeros(len(texts[index]), bool)
        mask[sampled[index]] = True
        logprobs = np.zeros(len(mask), np.float32)
        logprobs[mask] = engines[index]
        samples.append(
            TrainingSample(
                token_ids=texts[index],
                loss_mask=mask,
                generator_logprobs=logprobs,
                policy_versions=np.where(mask, 0, -1).astype(np.int32),
                advantages=np.where(mask, advantages[index], 0).astype(np.float32),
                task_name="fidelity",
                rollout_id=str(index),
            )
        )
    before = {name: tensor.detach().clone() for name, tensor in theirs.state_dict().items()}
    plan = Batcher.Config(row_length=LONGEST, rows_per_microbatch=4).build().plan(samples, 1)
    learner.forward_backward(plan.microbatches[0], 0)
    norm = learner.optim_step()["train/grad_norm"]
    optimizer = torch.optim.AdamW(
        theirs.parameters(), lr=LR, betas=config.optimizer.betas, eps=1.0, weight_decay=0.0
    )
    tokens = sum(int(sample.loss_mask.sum()) for sample in samples)
    for index in range(OF_STEP):
        ratio = (
            by_transformers(theirs, texts[index])[sampled[index]] - torch.from_numpy(engines[index])
        ).exp()
        (-advantages[index] * ratio.sum() / tokens).backward()
    their_norm = float(
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), config.optimizer.max_norm)
    )
    optimizer.step()
    print(f"gradient norm: trainer {norm:.6f}, transformers {their_norm:.6f}")
    after, apart, change = theirs.state_dict(), 0.0, 0.0
    for name, tensor in learner.hub_tensors.items():
        value = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        apart += float((value.detach() - after[name]).double().square().sum())
        change += float((after[name] - before[name]).double().square().sum())
    report(
        "change of the weights by the step, relative",
        [np.array([(apart / change) ** 0.5])],
        LIMIT_OF_STEP,
    )

    exported = learner.save_final(1)
    assert exported is not None
    loaded = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    ours = [learner.score(text) for text in texts[:OF_STEP]]
    with torch.no_grad():
        again = [by_transformers(loaded, text).numpy() for text in texts[:OF_STEP]]
    report(
        "exported folder, trainer - transformers",
        [a - b for a, b in zip(ours, again, strict=True)],
        LIMIT,
    )
    scored = run_engine(exported, texts[:OF_STEP], folder, score=True)
    report(
        "exported folder, trainer - engine",
        [a - b for a, (_, b) in zip(ours, scored, strict=True)],
        LIMIT,
    )
    learner.close()
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, default=MODEL)
    libraries = ("auto", "torchtitan", "transformers")
    parser.add_argument("--trained-by", choices=libraries, default="auto")
    parser.add_argument("--count", type=int, default=200, help="prompts")
    parser.add_argument("--engine", type=Path, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--answers", type=Path, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine is not None:
        engine(args.model, args.engine, args.answers)
        return 0
    if not (args.model / "config.json").is_file():
        sys.exit(f"{args.model} is not there: python scripts/get_model.py smollm2")
    print(f"{args.model.name}, {args.count} replies; load {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory() as temporary:
        return 0 if compare(args.model, args.trained_by, args.count, Path(temporary)) else 1


if __name__ == "__main__":
    sys.exit(main())
