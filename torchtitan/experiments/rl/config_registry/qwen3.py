"""Configs of Qwen3 from the hub, on GPUs."""

from collections.abc import Callable
from typing import Any

from torchtitan.experiments.rl.algorithms import GRPO
from torchtitan.experiments.rl.batching.batcher import Batcher
from torchtitan.experiments.rl.config.run_config import ProvisionConfig, RunConfig
from torchtitan.experiments.rl.data.rows import RowDataset
from torchtitan.experiments.rl.envs.renderer import RendererConfig
from torchtitan.experiments.rl.envs.renderer_env import RendererEnvConfig
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.generation.config import GeneratorConfig
from torchtitan.experiments.rl.generation.vllm.engine import VLLMEngineConfig
from torchtitan.experiments.rl.hosts.slurm import SlurmJob
from torchtitan.experiments.rl.models.policy import ModelConfig
from torchtitan.experiments.rl.rollouts.policy import SamplingConfig
from torchtitan.experiments.rl.rollouts.recorder import RolloutRecorder
from torchtitan.experiments.rl.rubrics.rubric import Rubric
from torchtitan.experiments.rl.tasks.answers import right_answer
from torchtitan.experiments.rl.tasks.examples.math import MathRubric, MathTask
from torchtitan.experiments.rl.tasks.examples.reasoning_gym import (
    PuzzleGenerator,
    ReasoningGymDataset,
    ReasoningGymTask,
)
from torchtitan.experiments.rl.tasks.examples.sum_digits import SumDigitsDataset, SumDigitsTask
from torchtitan.experiments.rl.tasks.questions import QuestionTask
from torchtitan.experiments.rl.tasks.task import Task
from torchtitan.experiments.rl.training.config import (
    Compile,
    OptimizerConfig,
    Parallelism,
    TrainerConfig,
)

HUB_FOLDER = "assets/hf"
"""Folder of the real models, relative to where the command runs.

torchtitan's download script writes them there.
"""


def rl_grpo_qwen3_0_6b() -> RunConfig:
    """Qwen3-0.6B on 8 GPUs: one trains, seven generate. --gpus 2 divides two."""
    return _qwen3("0.6B", trainer_ranks=1, replicas=7)


def rl_grpo_qwen3_0_6b_1gpu() -> RunConfig:
    """Qwen3-0.6B on 1 GPU of 24 GB, which trainer and generator share."""
    config = _qwen3("0.6B", trainer_ranks=1, replicas=1)
    config.provision.share_gpus = True
    config.generator.engine = VLLMEngineConfig(
        dtype="bfloat16", max_model_len=4096, max_num_seqs=64, kv_cache_gib=3.0
    )
    config.rollouts_per_step = 128
    return config


def rl_grpo_qwen3_1_7b() -> RunConfig:
    """Qwen3-1.7B on 4 GPUs: one trains, three generate."""
    return _qwen3("1.7B", trainer_ranks=1, replicas=3)


def rl_grpo_qwen3_4b() -> RunConfig:
    """Qwen3-4B on 8 GPUs: three train, five generate."""
    return _qwen3("4B", trainer_ranks=3, replicas=5)


def rl_grpo_qwen3_8b() -> RunConfig:
    """Qwen3-8B on 8 GPUs of 80 GB: four train, four generate."""
    return _qwen3("8B", trainer_ranks=4, replicas=4)


def rl_grpo_qwen3_14b() -> RunConfig:
    """Qwen3-14B on 8 GPUs of 80 GB: four train, in pairs; two generators of two."""
    return _qwen3(
        "14B",
        trainer_ranks=4,
        trainer_tensor_parallel_degree=2,
        replicas=2,
        tensor_parallel_degree=2,
    )


def rl_grpo_qwen3_14b_16() -> RunConfig:
    """Qwen3-14B on 16 GPUs of 80 GB, 2 hosts of Slurm: eight train, four generators of two."""
    return _on_hosts(_qwen3("14B", trainer_ranks=8, replicas=4, tensor_parallel_degree=2))


def rl_grpo_qwen3_32b() -> RunConfig:
    """Qwen3-32B on 8 GPUs of 141 GB: six train, one generator of two."""
    return _qwen3("32B", trainer_ranks=6, replicas=1, tensor_parallel_degree=2)


def rl_grpo_qwen3_32b_32() -> RunConfig:
    """Qwen3-32B on 32 GPUs of 80 GB, 4 hosts of Slurm: 16 train, in fours; 8 generators of two."""
    return _on_hosts(
        _qwen3(
            "32B",
            trainer_ranks=16,
            trainer_tensor_parallel_degree=4,
            replicas=8,
            tensor_parallel_degree=2,
        )
    )


def rl_grpo_qwen3_32b_64() -> RunConfig:
    """Qwen3-32B on 64 GPUs of 80 GB, 8 hosts of Slurm: 32 train, in fours; 16 generators of two."""
    return _on_hosts(
        _qwen3(
            "32B",
            trainer_ranks=32,
            trainer_tensor_parallel_degree=4,
            replicas=16,
            tensor_parallel_degree=2,
        )
    )


def rl_grpo_qwen3_30b_a3b() -> RunConfig:
    """Qwen3-30B-A3B, a mixture of experts, on 8 GPUs of 141 GB: 4 train, 2 generators of two."""
    return _qwen3("30B-A3B", trainer_ranks=4, replicas=2, tensor_parallel_degree=2)


def rl_grpo_qwen3_30b_a3b_16() -> RunConfig:
    """Qwen3-30B-A3B on 16 GPUs of 80 GB, 2 hosts of Slurm: 8 train, 4 generators of two.

    The trainer ranks divide the experts.
    """
    return _on_hosts(
        _qwen3(
            "30B-A3B",
            trainer_ranks=8,
            expert_parallel_degree=8,
            replicas=4,
            tensor_parallel_degree=2,
        )
    )


def rl_questions_qwen3(size: str = "0.6b") -> RunConfig:
    """Your own questions: name the data. Qwen3-0.6B on 2 GPUs; or --size.

    README's "Your own data" shows how. A reply is right if its answer equals the column `answer`,
    or if a reward function of yours says so.
    """
    questions = QuestionTask.Config(
        group_size=16,
        template="{question}\n\n"
        'End your reply with the line "Answer: ...", which holds nothing but the answer.',
        # The answer's line may be cut in two, so a reply that was cut off is wrong.
        rubric=Rubric.Config(reward_fns=[right_answer], truncation_reward=0.0),
        sampling=SamplingConfig(max_tokens=512),
    )
    return _of_size(size, questions=questions)


def rl_math_qwen3(size: str = "1.7b") -> RunConfig:
    """Grade-school word problems (GSM8K, from the hub). Qwen3-1.7B on 4 GPUs; or --size."""
    gsm8k: dict[str, Any] = {
        "path": "openai/gsm8k",
        "name": "main",
        "demonstration_column": "answer",
    }
    math = MathTask.Config(
        group_size=16,
        dataset=RowDataset.Config(**gsm8k),
        validation=RowDataset.Config(split="test", **gsm8k),
        rubric=MathRubric.Config(answer_marker="####"),
    )
    return _of_size(size, math=math)


def rl_reasoning_gym_qwen3_1_7b() -> RunConfig:
    """Four kinds of puzzles of reasoning_gym, mixed, with Qwen3-1.7B on 4 GPUs."""
    generators = {
        "chain_sum": PuzzleGenerator(config={"max_terms": 6, "max_digits": 4}),
        "leg_counting": PuzzleGenerator(),
        "spell_backward": PuzzleGenerator(),
        "letter_counting": PuzzleGenerator(weight=0.5),
    }
    puzzles = ReasoningGymTask.Config(
        algorithm=GRPO.Config(),
        group_size=16,
        dataset=ReasoningGymDataset.Config(generators=generators, count=100_000),
        validation=ReasoningGymDataset.Config(generators=generators, count=256, seed=1_000_000),
    )
    return _of_size("1.7b", puzzles=puzzles)


def _on_hosts(config: RunConfig) -> RunConfig:
    """Take as many hosts of 8 GPUs from Slurm as the run needs (docs/clusters.md)."""
    config.provision.job = SlurmJob()
    return config


def _of_size(size: str, **tasks: Task.Config) -> RunConfig:
    """Return the GRPO config of a size with other tasks.

    Raises:
        ConfigError: there is no config of that size.
    """
    if size not in SIZES:
        raise ConfigError(
            "--size",
            size,
            f"want one of {', '.join(SIZES)}; --model takes any model, --gpus any number of GPUs",
        )
    config = SIZES[size]()
    config.tasks = tasks
    return config


def _qwen3(
    flavor: str,
    *,
    trainer_ranks: int,
    replicas: int,
    trainer_tensor_parallel_degree: int = 1,
    tensor_parallel_degree: int = 1,
    expert_parallel_degree: int = 1,
) -> RunConfig:
    """Return the config of a real model on GPUs, in bfloat16 with float32 master weights.

    The sums of its task are longer than the demo's.

    Args:
        trainer_tensor_parallel_degree: trainer ranks that share each layer.
        tensor_parallel_degree: GPUs of a generator.
        expert_parallel_degree: trainer ranks that divide the experts.
    """
    return RunConfig(
        tasks={
            "sum_digits": SumDigitsTask.Config(
                algorithm=GRPO.Config(),
                group_size=16,
                dataset=SumDigitsDataset.Config(min_digits=10, max_digits=40),
                validation=SumDigitsDataset.Config(
                    split="validation", count=256, seed=1, min_digits=10, max_digits=40
                ),
                env=RendererEnvConfig(max_turns=1, max_rollout_tokens=4096),
                sampling=SamplingConfig(max_tokens=3072),
            )
        },
        # Thinking takes several times the tokens: docs/tasks.md says which limits to raise with it.
        renderer=RendererConfig(name="qwen3", enable_thinking=False),
        model=ModelConfig(hf_assets_path=f"{HUB_FOLDER}/Qwen3-{flavor}", flavor=f"qwen3/{flavor}"),
        trainer=TrainerConfig(
            ranks=trainer_ranks,
            parallelism=Parallelism(
                tensor_parallel_degree=trainer_tensor_parallel_degree,
                expert_parallel_degree=expert_parallel_degree,
            ),
            optimizer=OptimizerConfig(lr=1e-6),
            mixed_precision_param="bfloat16",
            activation_checkpoint="full",
            compile=Compile(),
        ),
        generator=GeneratorConfig(
            replicas=replicas,
            engine=VLLMEngineConfig(
                dtype="bfloat16", max_model_len=4096, tensor_parallel_degree=tensor_parallel_degree
            ),
        ),
        batcher=Batcher.Config(row_length=8192, rows_per_microbatch=1),
        steps=200,
        rollouts_per_step=512,
        max_offpolicy_steps=2,
        # One Python thread serves some 1,300 turns a second (docs/scale.md). The engines of 4
        # GPUs ask for fewer.
        rollout_workers=(trainer_ranks + replicas * tensor_parallel_degree) // 4,
        recorder=RolloutRecorder.Config(fraction=1 / 16),
        provision=ProvisionConfig(device="cuda"),
    )


SIZES: dict[str, Callable[[], RunConfig]] = {
    "0.6b": lambda: _qwen3("0.6B", trainer_ranks=1, replicas=1),
    "1.7b": rl_grpo_qwen3_1_7b,
    "4b": rl_grpo_qwen3_4b,
    "8b": rl_grpo_qwen3_8b,
    "14b": rl_grpo_qwen3_14b,
    "32b": rl_grpo_qwen3_32b,
}
"""Config function of each name that ``--size`` takes."""
