"""Configs whose rewards a judge decides."""

from torchtitan.experiments.rl.config.run_config import RunConfig
from torchtitan.experiments.rl.config_registry.debug import TINY_TEACHER, rl_grpo_qwen3_debug
from torchtitan.experiments.rl.generation.judge import Judge
from torchtitan.experiments.rl.generation.references import HostedModel
from torchtitan.experiments.rl.generation.vllm_engine import VLLMEngineConfig
from torchtitan.experiments.rl.rollouts.policy import SamplingConfig
from torchtitan.experiments.rl.tasks.sum_digits_judged.rubric import JudgedSumDigitsRubric


def rl_judge_qwen3_debug() -> RunConfig:
    """As rl_grpo_qwen3_debug, with rewards from a tiny judge that the run hosts."""
    config = rl_grpo_qwen3_debug()
    config.steps = 40
    judge = Judge.Config(
        model=HostedModel(path=TINY_TEACHER, engine=VLLMEngineConfig(max_model_len=256, cpu_kv_cache_gib=0.25)),
        sampling=SamplingConfig(temperature=0.0, max_tokens=8),
    )
    config.tasks["sum_digits"].rubric = JudgedSumDigitsRubric.Config(judge=judge)
    return config
