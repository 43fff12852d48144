"""Configs of the tiny models under assets/: minutes on two CPU cores."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from torchtitan.components.optimizer import LRSchedulersContainer
from torchtitan.experiments.rl.algorithms import GRPO, OPD, OPSD, SFT, Algorithm, Echo, MaxRL
from torchtitan.experiments.rl.batching.batcher import Batcher
from torchtitan.experiments.rl.config.run_config import ProvisionConfig, RunConfig
from torchtitan.experiments.rl.data.difficulty_pool import DifficultyPool
from torchtitan.experiments.rl.data.sampler import ShuffledCursor
from torchtitan.experiments.rl.envs.renderer_env import RendererEnvConfig
from torchtitan.experiments.rl.generation.config import GeneratorConfig
from torchtitan.experiments.rl.generation.judge import Judge
from torchtitan.experiments.rl.generation.references import HostedModel
from torchtitan.experiments.rl.generation.vllm.engine import VLLMEngineConfig
from torchtitan.experiments.rl.hosts.jobs import ProcessJob
from torchtitan.experiments.rl.models.policy import ModelConfig
from torchtitan.experiments.rl.rollouts.group_replay import GroupReplayConfig
from torchtitan.experiments.rl.rollouts.policy import SamplingConfig
from torchtitan.experiments.rl.tasks.agent import AgentCommandTask
from torchtitan.experiments.rl.tasks.demonstrations import DemonstrationTask
from torchtitan.experiments.rl.tasks.examples.alphabet_sort import (
    AlphabetSortDataset,
    AlphabetSortRubric,
    AlphabetSortTask,
)
from torchtitan.experiments.rl.tasks.examples.calculator import CalculatorDataset, CalculatorTask
from torchtitan.experiments.rl.tasks.examples.calculator_agent import (
    PROGRAM,
    ForkingCalculatorTask,
    VotedRubric,
)
from torchtitan.experiments.rl.tasks.examples.guess_number import (
    GuessNumberDataset,
    GuessNumberTask,
)
from torchtitan.experiments.rl.tasks.examples.sum_digits import (
    JudgedSumDigitsRubric,
    SumDigitsDataset,
    SumDigitsDemonstrations,
    SumDigitsRoundsTask,
    SumDigitsRubric,
    SumDigitsTask,
)
from torchtitan.experiments.rl.tasks.questions import QuestionTask
from torchtitan.experiments.rl.tasks.task import Task, ValidationConfig
from torchtitan.experiments.rl.training.config import OptimizerConfig, TrainerConfig
from torchtitan.experiments.rl.training.reference import ReferenceConfig

TINY_MODEL = str(Path(__file__).parents[4] / "assets" / "tiny_qwen3")
"""Folder of a Qwen3 of 1M parameters that can add some digits (scripts/make_tiny_qwen3.py)."""
TINY_MOE = TINY_MODEL + "_moe"
"""Folder of a model like TINY_MODEL that is a mixture of 8 experts."""
TINY_TEACHER = TINY_MODEL + "_teacher"
"""Folder of a model like TINY_MODEL whose demonstrations were all right.

scripts/make_tiny_teachers.py has trained it.
"""
TINY_READER = TINY_MODEL + "_reader"
"""Folder of a model like TINY_MODEL that follows a demonstration in its prompt."""
TINY_CONVERSATIONS = TINY_MODEL + "_conversations"
"""Folder of a model like TINY_MODEL that has begun to learn conversations.

scripts/make_tiny_conversations.py has trained it on alphabet_sort, calculator and guess_number.
"""


def rl_grpo_qwen3_debug() -> RunConfig:
    """Digit sums with the 1M-parameter model, minutes on two CPU cores: what `make demo` runs."""
    return RunConfig(
        tasks={
            "sum_digits": SumDigitsTask.Config(
                algorithm=GRPO.Config(),
                group_size=8,
                validation=SumDigitsDataset.Config(split="validation", count=256, seed=1),
                instruction="",
                rubric=SumDigitsRubric.Config(exact=True),
                env=RendererEnvConfig(max_turns=1, max_rollout_tokens=128),
                sampling=SamplingConfig(max_tokens=8),
            )
        },
        model=ModelConfig(hf_assets_path=TINY_MODEL),
        trainer=TrainerConfig(
            # A small model needs large steps at first. Near the end few groups have a gradient; the
            # decay and the slow second moment keep the steps small then.
            optimizer=OptimizerConfig(lr=1.5e-4, betas=(0.9, 0.99)),
            lr_scheduler=LRSchedulersContainer.Config(warmup_steps=10),
        ),
        # A quarter GiB is 131,072 tokens of the tiny model: twice 256 sequences of 256 tokens.
        generator=GeneratorConfig(
            engine=VLLMEngineConfig(max_model_len=256, cpu_kv_cache_gib=0.25)
        ),
        batcher=Batcher.Config(row_length=512, rows_per_microbatch=8),
        steps=100,
        rollouts_per_step=256,
        max_offpolicy_steps=1,
        validation=ValidationConfig(every=10, examples=256),
        provision=ProvisionConfig(device="cpu"),
    )


def rl_moe_qwen3_debug() -> RunConfig:
    """As rl_grpo_qwen3_debug, with a mixture of 8 experts of which a token takes 2."""
    return replace(rl_grpo_qwen3_debug(), model=ModelConfig(hf_assets_path=TINY_MOE))


def rl_grpo_qwen3_debug_hosts() -> RunConfig:
    """As rl_grpo_qwen3_debug, on three hosts, which are processes of this machine.

    Two of them train, two generate, and one runs rollouts.
    """
    config = rl_grpo_qwen3_debug()
    config.trainer.ranks = 2
    config.generator.replicas = 2
    config.rollout_workers = 1
    hosts: dict[str, Any] = {
        "trainer_hosts": (0, 1),
        "generator_hosts": (1, 2),
        "rollout_worker_hosts": (2,),
    }
    config.provision = ProvisionConfig(device="cpu", job=ProcessJob(hosts=3), **hosts)
    return config


def rl_max_rl_qwen3_debug() -> RunConfig:
    """As rl_grpo_qwen3_debug, by MaxRL: rare successes get larger advantages."""
    return _debug(60, sum_digits=_sum_digits(MaxRL.Config()))


def rl_opd_qwen3_debug() -> RunConfig:
    """On-policy distillation of digit sums from a tiny teacher that the run hosts."""
    return _debug(40, sum_digits=_sum_digits(OPD.Config(teacher=_tiny_teacher())))


def rl_opsd_qwen3_debug() -> RunConfig:
    """Self-distillation of digit sums: the policy sees the answer, and scores its own samples."""
    return replace(
        _debug(40, sum_digits=_sum_digits(OPSD.Config())),
        model=ModelConfig(hf_assets_path=TINY_READER),
    )


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
            rubric=AlphabetSortRubric.Config(exact=True),
            env=RendererEnvConfig(max_turns=2, max_rollout_tokens=256),
            sampling=SamplingConfig(max_tokens=32),
        ),
    )


def rl_calculator_qwen3_debug() -> RunConfig:
    """Arithmetic with a calculator tool, with the 1M-parameter model on two CPU cores."""
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


def rl_agent_calculator_qwen3_debug() -> RunConfig:
    """As rl_calculator_qwen3_debug, by an agent: a child process that asks the policy over HTTP."""
    config = rl_calculator_qwen3_debug()
    config.tasks = {
        "calculator": AgentCommandTask.Config(
            **_fields_of(config.tasks["calculator"]), command=PROGRAM
        )
    }
    return config


def rl_agent_forks_qwen3_debug() -> RunConfig:
    """As rl_agent_calculator_qwen3_debug, by an agent that forks: three branches vote."""
    config = rl_calculator_qwen3_debug()
    fields_of_task = _fields_of(config.tasks["calculator"], rubric=VotedRubric.Config())
    config.tasks = {"calculator": ForkingCalculatorTask.Config(**fields_of_task)}
    config.tasks["calculator"].env.max_turns = 1 + ForkingCalculatorTask.branches
    return config


def rl_guess_number_qwen3_debug() -> RunConfig:
    """Guessing a number in up to four turns, with the 1M-parameter model on two CPU cores."""
    sizes: dict[str, Any] = {"numbers": 15, "max_number": 99, "guesses": 4}
    return _conversation(
        40,
        guess_number=GuessNumberTask.Config(
            algorithm=GRPO.Config(),
            dataset=GuessNumberDataset.Config(**sizes),
            validation=GuessNumberDataset.Config(split="validation", count=256, seed=1, **sizes),
            exact=True,
            env=RendererEnvConfig(max_turns=4, max_rollout_tokens=256),
            sampling=SamplingConfig(max_tokens=8),
        ),
    )


def rl_difficulty_pool_qwen3_debug() -> RunConfig:
    """Digit sums, nine in ten too long for the tiny model: a difficulty pool finds the others."""
    config = _debug(150, sum_digits=_sum_digits(GRPO.Config()))
    config.rollouts_per_step = 128
    config.max_offpolicy_steps = 0
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
    """As rl_difficulty_pool_qwen3_debug, with a shuffled cursor, to compare the two.

    benchmarks/difficulty_pool.py does.
    """
    config = rl_difficulty_pool_qwen3_debug()
    config.tasks["sum_digits"].sampler = ShuffledCursor.Config()
    return config


def rl_questions_qwen3_debug() -> RunConfig:
    """Your own questions and reward function with the 1M-parameter model on two CPU cores."""
    env = RendererEnvConfig(max_turns=1, max_rollout_tokens=256)
    config = _debug(
        20, questions=QuestionTask.Config(env=env, sampling=SamplingConfig(max_tokens=16))
    )
    # A task of your own in its place has the default limit of a rollout, which is 1,024 tokens.
    config.batcher.row_length = 1024
    config.generator.engine = VLLMEngineConfig(max_model_len=1024)
    return config


def _debug(steps: int, **tasks: Task.Config) -> RunConfig:
    """Return rl_grpo_qwen3_debug with other tasks."""
    return replace(rl_grpo_qwen3_debug(), steps=steps, tasks=tasks)


def _conversation(steps: int, **tasks: Task.Config) -> RunConfig:
    """Return rl_grpo_qwen3_debug with tasks of several turns, and a model that has begun them."""
    config = _debug(steps, **tasks)
    config.model = ModelConfig(hf_assets_path=TINY_CONVERSATIONS)
    config.generator.engine.max_model_len = 384
    return config


def _fields_of(task: Task.Config, **changes: object) -> dict[str, Any]:
    """Return the fields of a task's config, for a task of another class."""
    return {field.name: getattr(task, field.name) for field in fields(Task.Config)} | changes


def _sum_digits(algorithm: Algorithm.Config) -> Task.Config:
    """Return rl_grpo_qwen3_debug's task with another algorithm."""
    return replace(rl_grpo_qwen3_debug().tasks["sum_digits"], algorithm=algorithm)


def _sum_digits_rounds(algorithm: Algorithm.Config) -> Task.Config:
    return SumDigitsRoundsTask.Config(algorithm=algorithm, group_size=8)


def _tiny_teacher() -> HostedModel:
    return HostedModel(
        path=TINY_TEACHER, engine=VLLMEngineConfig(max_model_len=256, cpu_kv_cache_gib=0.25)
    )


def rl_demonstrations_qwen3_debug() -> RunConfig:
    """Digit sums from a dataset of right answers and by GRPO, in one run: no teacher."""
    config = rl_grpo_qwen3_debug()
    config.steps = 40
    config.tasks["demonstrations"] = DemonstrationTask.Config(
        dataset=SumDigitsDemonstrations.Config(count=2_000, seed=2),
        group_size=8,
        env=RendererEnvConfig(max_rollout_tokens=128),
    )
    return config


def rl_replay_qwen3_debug() -> RunConfig:
    """As rl_grpo_qwen3_debug, with up to half of each step replayed from earlier steps."""
    return replace(
        rl_grpo_qwen3_debug(),
        steps=60,
        replay=GroupReplayConfig(fraction=0.5, capacity=64, max_age=4),
    )


def rl_judge_qwen3_debug() -> RunConfig:
    """As rl_grpo_qwen3_debug, with rewards from a tiny judge that the run hosts."""
    judge = Judge.Config(
        model=_tiny_teacher(), sampling=SamplingConfig(temperature=0.0, max_tokens=8)
    )
    task = replace(_sum_digits(GRPO.Config()), rubric=JudgedSumDigitsRubric.Config(judge=judge))
    return _debug(40, sum_digits=task)


def rl_opsd_ema_qwen3_debug() -> RunConfig:
    """As rl_opsd_qwen3_debug, for longer: an exponential mean of the policy scores the samples."""
    config = rl_opsd_qwen3_debug()
    config.steps = 150
    config.tasks["sum_digits"].algorithm = OPSD.Config(reference="trainer")
    # A mean over 50 steps is pulled along by its student: at step 150 both have lost what they had
    # learned. This one is slower.
    config.trainer.reference = ReferenceConfig(kind="ema", decay=0.998)
    return config
