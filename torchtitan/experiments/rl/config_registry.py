"""Named configs: each a function that composes a RunConfig. ``--list`` prints them, ``--config NAME`` runs one.

A registry of your own is any module with such functions, named by ``--module my_package.configs``.
"""

from pathlib import Path
from typing import Any

from torchtitan.components.optimizer import LRSchedulersContainer
from torchtitan.experiments.rl.algorithms import GRPO, OPD, OPSD, SFT, Algorithm, Echo, MaxRL
from torchtitan.experiments.rl.batching.batcher import Batcher
from torchtitan.experiments.rl.config.provision import ProvisionConfig
from torchtitan.experiments.rl.config.run_config import RunConfig
from torchtitan.experiments.rl.data.difficulty_pool import DifficultyPool
from torchtitan.experiments.rl.data.sampler import ShuffledCursor
from torchtitan.experiments.rl.envs.renderer_env import RendererEnvConfig
from torchtitan.experiments.rl.generation.config import GeneratorConfig
from torchtitan.experiments.rl.generation.references import HostedModel
from torchtitan.experiments.rl.generation.vllm_engine import VLLMEngineConfig
from torchtitan.experiments.rl.hosts.jobs import ProcessJob
from torchtitan.experiments.rl.models.policy import ModelConfig
from torchtitan.experiments.rl.rollouts.policy import SamplingConfig
from torchtitan.experiments.rl.rollouts.recorder import RolloutRecorder
from torchtitan.experiments.rl.tasks.alphabet_sort.task import AlphabetSortDataset, AlphabetSortTask
from torchtitan.experiments.rl.tasks.calculator.task import CalculatorDataset, CalculatorTask
from torchtitan.experiments.rl.tasks.guess_number.task import GuessNumberDataset, GuessNumberTask
from torchtitan.experiments.rl.tasks.math.task import MathDataset, MathTask
from torchtitan.experiments.rl.tasks.questions.task import QuestionTask
from torchtitan.experiments.rl.tasks.reasoning_gym.task import PuzzleGenerator, ReasoningGymDataset, ReasoningGymTask
from torchtitan.experiments.rl.tasks.sum_digits.task import SumDigitsDataset, SumDigitsTask
from torchtitan.experiments.rl.tasks.sum_digits_rounds.task import SumDigitsRoundsTask
from torchtitan.experiments.rl.tasks.task import Task
from torchtitan.experiments.rl.tasks.validation_config import ValidationConfig
from torchtitan.experiments.rl.tasks.verifiers.task import VerifiersDataset, VerifiersTask
from torchtitan.experiments.rl.training.config import OptimizerConfig, TrainerConfig
from torchtitan.experiments.rl.training.parallelism import Parallelism

TINY_MODEL = str(Path(__file__).parents[3] / "assets" / "tiny_qwen3")
TINY_TEACHER = TINY_MODEL + "_teacher"
"""As TINY_MODEL, trained on right demonstrations only (scripts/make_tiny_teachers.py)."""
TINY_READER = TINY_MODEL + "_reader"
"""As TINY_MODEL, and follows a demonstration where the prompt has one."""
TINY_CONVERSATIONS = TINY_MODEL + "_conversations"
"""As TINY_MODEL, with first skills in alphabet_sort, calculator and guess_number (scripts/make_tiny_conversations.py)."""
HUB_FOLDER = "assets/hf"
"""Folder of the real models, relative to where the command runs; torchtitan's download script writes them there."""


def rl_grpo_qwen3_debug() -> RunConfig:
    """Digit sums with the 1M-parameter model, minutes on two CPU cores: what `make demo` runs."""
    return RunConfig(
        tasks={
            "sum_digits": SumDigitsTask.Config(
                algorithm=GRPO.Config(),
                group_size=8,
                validation=SumDigitsDataset.Config(split="validation", count=256, seed=1),
                env=RendererEnvConfig(max_turns=1, max_rollout_tokens=128),
                sampling=SamplingConfig(max_tokens=8),
            )
        },
        model=ModelConfig(hf_assets_path=TINY_MODEL),
        trainer=TrainerConfig(
            # A small model needs large steps at first. Near the end few groups have a gradient; the decay and the slow second
            # moment keep the steps small then.
            optimizer=OptimizerConfig(lr=1.5e-4, betas=(0.9, 0.99)),
            lr_scheduler=LRSchedulersContainer.Config(warmup_steps=10),
        ),
        generator=GeneratorConfig(engine=VLLMEngineConfig(max_model_len=256)),
        batcher=Batcher.Config(row_length=512, rows_per_microbatch=8),
        steps=100,
        rollouts_per_step=256,
        max_offpolicy_steps=1,
        validation=ValidationConfig(every=10, examples=256),
        provision=ProvisionConfig(device="cpu"),
    )


def rl_grpo_qwen3_debug_hosts() -> RunConfig:
    """rl_grpo_qwen3_debug on three hosts, which are processes of this machine: two train, two generate, one runs rollouts."""
    config = rl_grpo_qwen3_debug()
    config.trainer.ranks, config.generator.replicas, config.rollout_workers = 2, 2, 1
    hosts: dict[str, Any] = {"trainer_hosts": (0, 1), "generator_hosts": (1, 2), "rollout_worker_hosts": (2,)}
    config.provision = ProvisionConfig(device="cpu", job=ProcessJob(hosts=3), **hosts)
    return config


def rl_max_rl_qwen3_debug() -> RunConfig:
    """As rl_grpo_qwen3_debug, by MaxRL: rare successes get larger advantages."""
    return _debug(60, sum_digits=_sum_digits(MaxRL.Config()))


def rl_opd_qwen3_debug() -> RunConfig:
    """On-policy distillation of digit sums from a tiny teacher that the run hosts."""
    return _debug(40, sum_digits=_sum_digits(OPD.Config(teacher=_tiny_teacher())))


def rl_opsd_qwen3_debug() -> RunConfig:
    """On-policy self-distillation of digit sums: the policy scores its own samples after seeing the right answer."""
    config = _debug(40, sum_digits=_sum_digits(OPSD.Config()))
    config.model = ModelConfig(hf_assets_path=TINY_READER)
    return config


def rl_sft_qwen3_debug() -> RunConfig:
    """Supervised learning of digit sums from what a tiny teacher answers."""
    return _debug(40, sum_digits=_sum_digits(SFT.Config(teacher=_tiny_teacher())))


def rl_echo_qwen3_debug() -> RunConfig:
    """Digit sums in two turns by Echo: GRPO, and cross-entropy on the env's messages."""
    return _debug(60, sum_digits_rounds=_sum_digits_rounds(Echo.Config(alpha={"user": 0.1})))


def rl_mixed_qwen3_debug() -> RunConfig:
    """Three tasks in one run, each by its own algorithm: GRPO, OPD and Echo."""
    return _debug(
        60,
        sum_digits=_sum_digits(GRPO.Config()),
        sum_digits_distilled=_sum_digits(OPD.Config(teacher=_tiny_teacher())),
        sum_digits_rounds=_sum_digits_rounds(Echo.Config(alpha={"user": 0.1})),
    )


def rl_alphabet_sort_qwen3_debug() -> RunConfig:
    """Sorting names over two user turns, with the 1M-parameter model on two CPU cores."""
    sizes: dict[str, Any] = {"min_rounds": 2, "max_rounds": 2, "min_names": 2, "max_names": 3}
    return _conversation(
        60,
        alphabet_sort=AlphabetSortTask.Config(
            algorithm=GRPO.Config(),
            dataset=AlphabetSortDataset.Config(**sizes),
            validation=AlphabetSortDataset.Config(split="validation", count=256, seed=1, **sizes),
            env=RendererEnvConfig(max_turns=2, max_rollout_tokens=256),
            sampling=SamplingConfig(max_tokens=32),
        ),
    )


def rl_calculator_qwen3_debug() -> RunConfig:
    """Arithmetic with a calculator tool that has to be called, with the 1M-parameter model on two CPU cores."""
    sizes: dict[str, Any] = {"max_operands": 2, "max_operand": 99}
    return _conversation(
        20,
        calculator=CalculatorTask.Config(
            algorithm=GRPO.Config(),
            dataset=CalculatorDataset.Config(**sizes),
            validation=CalculatorDataset.Config(split="validation", count=256, seed=1, **sizes),
            env=RendererEnvConfig(max_turns=3, max_rollout_tokens=384),
            sampling=SamplingConfig(max_tokens=40),
        ),
    )


def rl_guess_number_qwen3_debug() -> RunConfig:
    """A guessing game of up to four turns, rewarded at its end, with the 1M-parameter model on two CPU cores."""
    sizes: dict[str, Any] = {"numbers": 15, "max_number": 99, "guesses": 4}
    return _conversation(
        40,
        guess_number=GuessNumberTask.Config(
            algorithm=GRPO.Config(),
            dataset=GuessNumberDataset.Config(**sizes),
            validation=GuessNumberDataset.Config(split="validation", count=256, seed=1, **sizes),
            env=RendererEnvConfig(max_turns=4, max_rollout_tokens=256),
            sampling=SamplingConfig(max_tokens=8),
        ),
    )


def rl_difficulty_pool_qwen3_debug() -> RunConfig:
    """Digit sums, nine in ten too long for the 1M-parameter model: a difficulty pool finds the others."""
    config = _debug(150, sum_digits=_sum_digits(GRPO.Config()))
    config.rollouts_per_step, config.max_offpolicy_steps = 128, 0
    config.trainer.optimizer.lr = 1e-4
    config.validation.every = 5
    task = config.tasks["sum_digits"]
    task.dataset = SumDigitsDataset.Config(max_digits=41)
    task.env.max_rollout_tokens = 160
    # Many small groups: the pool sees more examples in the same number of rollouts.
    task.group_size = 4
    task.sampler = DifficultyPool.Config()
    return config


def rl_shuffled_cursor_qwen3_debug() -> RunConfig:
    """As rl_difficulty_pool_qwen3_debug, with a shuffled cursor: benchmarks/difficulty_pool.py compares the two."""
    config = rl_difficulty_pool_qwen3_debug()
    config.tasks["sum_digits"].sampler = ShuffledCursor.Config()
    return config


def rl_grpo_qwen3_0_6b() -> RunConfig:
    """Qwen3-0.6B on 2 GPUs: one trains, one generates."""
    return _qwen3("0.6B", trainer_ranks=1, replicas=1)


def rl_grpo_qwen3_1_7b() -> RunConfig:
    """Qwen3-1.7B on 4 GPUs: two train, two generate."""
    return _qwen3("1.7B", trainer_ranks=2, replicas=2)


def rl_grpo_qwen3_4b() -> RunConfig:
    """Qwen3-4B on 8 GPUs: four train, four generate."""
    return _qwen3("4B", trainer_ranks=4, replicas=4)


def rl_grpo_qwen3_8b() -> RunConfig:
    """Qwen3-8B on 8 GPUs of 80 GB: four train, four generate."""
    return _qwen3("8B", trainer_ranks=4, replicas=4)


def rl_grpo_qwen3_14b() -> RunConfig:
    """Qwen3-14B on 8 GPUs of 80 GB: four train, in pairs that share each layer; two generators of two."""
    return _qwen3("14B", trainer_ranks=4, trainer_tensor_parallel_degree=2, replicas=2, tensor_parallel_degree=2)


def rl_grpo_qwen3_14b_16() -> RunConfig:
    """Qwen3-14B on 16 GPUs of 80 GB: eight train, four generators of two. On two hosts of 8: docs/clusters.md."""
    return _qwen3("14B", trainer_ranks=8, replicas=4, tensor_parallel_degree=2)


def rl_grpo_qwen3_32b() -> RunConfig:
    """Qwen3-32B on 8 GPUs of 141 GB: six train, one generator of two."""
    return _qwen3("32B", trainer_ranks=6, replicas=1, tensor_parallel_degree=2)


def rl_grpo_qwen3_32b_32() -> RunConfig:
    """Qwen3-32B on 32 GPUs of 80 GB: sixteen train, in fours; eight generators of two (docs/clusters.md)."""
    return _qwen3("32B", trainer_ranks=16, trainer_tensor_parallel_degree=4, replicas=8, tensor_parallel_degree=2)


def rl_grpo_qwen3_32b_64() -> RunConfig:
    """Qwen3-32B on 64 GPUs of 80 GB: 32 train, in fours; sixteen generators of two (docs/clusters.md)."""
    return _qwen3("32B", trainer_ranks=32, trainer_tensor_parallel_degree=4, replicas=16, tensor_parallel_degree=2)


def rl_questions_qwen3() -> RunConfig:
    """Your own questions and reward function with Qwen3-0.6B on 2 GPUs: name both (README, "Your own data")."""
    config = rl_grpo_qwen3_0_6b()
    config.tasks = {"questions": QuestionTask.Config(group_size=16, sampling=SamplingConfig(max_tokens=512))}
    return config


def rl_questions_qwen3_debug() -> RunConfig:
    """Your own questions and reward function with the 1M-parameter model, to try them out on two CPU cores."""
    env = RendererEnvConfig(max_turns=1, max_rollout_tokens=256)
    return _debug(20, questions=QuestionTask.Config(env=env, sampling=SamplingConfig(max_tokens=16)))


def rl_math_qwen3_1_7b() -> RunConfig:
    """Grade-school word problems (GSM8K, from the hub) with Qwen3-1.7B on 4 GPUs."""
    gsm8k: dict[str, Any] = {"path": "openai/gsm8k", "name": "main", "answer_marker": "####"}
    train, test = MathDataset.Config(**gsm8k), MathDataset.Config(split="test", **gsm8k)
    return _qwen3_1_7b(math=MathTask.Config(algorithm=GRPO.Config(), group_size=16, dataset=train, validation=test))


def rl_reasoning_gym_qwen3_1_7b() -> RunConfig:
    """A mixture of four reasoning_gym puzzles with Qwen3-1.7B on 4 GPUs."""
    generators = {
        "chain_sum": PuzzleGenerator(config={"max_terms": 6, "max_digits": 4}),
        "leg_counting": PuzzleGenerator(),
        "spell_backward": PuzzleGenerator(),
        "letter_counting": PuzzleGenerator(weight=0.5),
    }
    train = ReasoningGymDataset.Config(generators=generators, count=100_000)
    test = ReasoningGymDataset.Config(generators=generators, count=256, seed=1_000_000)
    return _qwen3_1_7b(puzzles=ReasoningGymTask.Config(algorithm=GRPO.Config(), group_size=16, dataset=train, validation=test))


def rl_verifiers_qwen3_1_7b() -> RunConfig:
    """An environment of the verifiers package, its gsm8k as an example, with Qwen3-1.7B on 4 GPUs."""
    train, test = (VerifiersDataset.Config(environment="gsm8k", split=split) for split in ("train", "eval"))
    return _qwen3_1_7b(gsm8k=VerifiersTask.Config(algorithm=GRPO.Config(), group_size=16, dataset=train, validation=test))


def _debug(steps: int, **tasks: Task.Config) -> RunConfig:
    """rl_grpo_qwen3_debug with other tasks."""
    config = rl_grpo_qwen3_debug()
    config.steps, config.tasks = steps, tasks
    return config


def _conversation(steps: int, **tasks: Task.Config) -> RunConfig:
    """rl_grpo_qwen3_debug with tasks of several turns, and a model that was trained on them."""
    config = _debug(steps, **tasks)
    config.model = ModelConfig(hf_assets_path=TINY_CONVERSATIONS)
    config.generator.engine.max_model_len = 384
    return config


def _sum_digits(algorithm: Algorithm.Config) -> Task.Config:
    """rl_grpo_qwen3_debug's task by another algorithm."""
    task = rl_grpo_qwen3_debug().tasks["sum_digits"]
    task.algorithm = algorithm
    return task


def _sum_digits_rounds(algorithm: Algorithm.Config) -> Task.Config:
    return SumDigitsRoundsTask.Config(algorithm=algorithm, group_size=8)


def _tiny_teacher() -> HostedModel:
    return HostedModel(path=TINY_TEACHER, engine=VLLMEngineConfig(max_model_len=256))


def _qwen3_1_7b(**tasks: Task.Config) -> RunConfig:
    """rl_grpo_qwen3_1_7b with other tasks."""
    config = rl_grpo_qwen3_1_7b()
    config.tasks = tasks
    return config


def _qwen3(
    flavor: str,
    *,
    trainer_ranks: int,
    replicas: int,
    trainer_tensor_parallel_degree: int = 1,
    tensor_parallel_degree: int = 1,
) -> RunConfig:
    """A real model on GPUs, in bfloat16 with float32 master weights. Its sums are longer than the demo's."""
    return RunConfig(
        tasks={
            "sum_digits": SumDigitsTask.Config(
                algorithm=GRPO.Config(),
                group_size=16,
                dataset=SumDigitsDataset.Config(min_digits=10, max_digits=40),
                validation=SumDigitsDataset.Config(split="validation", count=256, seed=1, min_digits=10, max_digits=40),
                env=RendererEnvConfig(max_turns=1, max_rollout_tokens=4096),
                sampling=SamplingConfig(max_tokens=3072),
            )
        },
        model=ModelConfig(hf_assets_path=f"{HUB_FOLDER}/Qwen3-{flavor}", flavor=f"qwen3/{flavor}"),
        trainer=TrainerConfig(
            ranks=trainer_ranks,
            parallelism=Parallelism(tensor_parallel_degree=trainer_tensor_parallel_degree),
            optimizer=OptimizerConfig(lr=1e-6),
            mixed_precision_param="bfloat16",
            activation_checkpoint=True,
        ),
        generator=GeneratorConfig(
            replicas=replicas,
            engine=VLLMEngineConfig(dtype="bfloat16", max_model_len=4096, tensor_parallel_degree=tensor_parallel_degree),
        ),
        batcher=Batcher.Config(row_length=8192, rows_per_microbatch=1),
        steps=200,
        rollouts_per_step=512,
        max_offpolicy_steps=2,
        recorder=RolloutRecorder.Config(fraction=1 / 16),
        provision=ProvisionConfig(device="cuda"),
    )
