"""Each part that a run builds in its own process is built once before anything is spawned, and refused by its field."""

import pytest

from tests.unit.command_line import DEBUG, DRY_OR_NOT

# ---- what a run builds


USER_MODULE = """
import sys
from torchtitan.experiments.rl.config_registry import rl_grpo_qwen3_debug
from torchtitan.experiments.rl.data.sampler import SampleStrategy
from torchtitan.experiments.rl.data.task_mix import TaskMix
from torchtitan.experiments.rl.rollouts.filters import Filter
from torchtitan.experiments.rl.algorithms import GRPO
from torchtitan.experiments.rl.tasks import *

class Rows(Dataset):
    def __len__(self): return 3
    def __getitem__(self, i): return DataSample(sample_id=str(i), env_input=i)
class Own(Task):
    def make_env(self, sample): ...
SHORT = RendererEnvConfig(max_rollout_tokens=128)
{classes}
def made():
    config = rl_grpo_qwen3_debug()
    task = config.tasks["sum_digits"]
    {changes}
    return config
"""

PARTS = {
    "dataset raises": (
        "class Bad(Dataset):\n    def __init__(self, config): raise OSError('disk')\n"
        "    def __len__(self): return 1\n    def __getitem__(self, i): ...",
        "task.dataset = Bad.Config()",
        "tasks.sum_digits.dataset = 'Bad': it can't be built: OSError: disk (",
    ),
    "dataset exits": (
        "class Bad(Rows):\n    def __init__(self, config): sys.exit(1)",
        "task.dataset = Bad.Config()",
        "tasks.sum_digits.dataset = 'Bad': it can't be built: SystemExit: 1 (",
    ),
    "validation raises": (
        "class Bad(Rows):\n    def __init__(self, config): 1 / 0",
        "task.validation = Bad.Config()",
        "tasks.sum_digits.validation = 'Bad': it can't be built: ZeroDivisionError",
    ),
    "dataset of no length": (
        "class Bad(Rows):\n    def __len__(self): return 'many'",
        "task.dataset = Bad.Config()",
        "tasks.sum_digits.dataset = 'Bad': its __len__ failed: TypeError",
    ),
    "dataset without examples": (
        "class Bad(Rows):\n    def __len__(self): return 0",
        "task.dataset = Bad.Config()",
        "error: tasks.sum_digits.dataset = ",
        "has no examples",
    ),
    "dataset that can't be read": (
        "class Bad(Rows):\n    def __getitem__(self, i): return {}['row']",
        "task.dataset = Bad.Config()",
        "tasks.sum_digits.dataset = 'Bad': its __getitem__ failed: KeyError: 'row' (",
    ),
    "dataset of something else": (
        "class Bad(Rows):\n    def __getitem__(self, i): return {'question': i}",
        "task.dataset = Bad.Config()",
        "tasks.sum_digits.dataset = 'Bad': its __getitem__ returned a dict, want a DataSample",
    ),
    "validate raises": (
        "import dataclasses\n"
        "class Bad(Rows):\n    @dataclasses.dataclass(kw_only=True, slots=True)\n    class Config(Dataset.Config):\n"
        "        def validate(self, *, field): raise RuntimeError('unsure')",
        "task.dataset = Bad.Config()",
        "tasks.sum_digits = 'SumDigitsTask': its validate failed: RuntimeError: unsure (",
    ),
    "two reward functions of one name": (
        "async def right(rollout, answer): return 1.0",
        "task.rubric = Rubric.Config(reward_fns=[RewardFn(right, takes='rollout'), RewardFn(right, takes='rollout')])",
        "error: tasks.sum_digits.rubric.reward_fns = ['right', 'right']: two functions named 'right'",
    ),
    "no reward function has a weight": (
        "async def right(rollout, answer): return 1.0",
        "task.rubric = Rubric.Config(reward_fns=[RewardFn(right, weight=0, takes='rollout')])",
        "error: tasks.sum_digits.rubric.reward_fns = ['right']: every weight is 0",
    ),
    "rubric raises": (
        "class Bad(Rubric):\n    def register_funcs(self): raise ImportError('judge')",
        "task.rubric = Bad.Config()",
        "tasks.sum_digits.rubric = 'Bad': it can't be built: Bad.register_funcs: ImportError: judge (",
    ),
    "algorithm exits": (
        "class Bad(GRPO):\n    def __init__(self, config): sys.exit('no')",
        "task.algorithm = Bad.Config()",
        "tasks.sum_digits.algorithm = 'Bad': it can't be built: SystemExit: no (",
    ),
    "sampler raises": (
        "class Bad(SampleStrategy):\n"
        "    def __init__(self, config, *, dataset, seed): dataset.shuffle()\n    def next(self): ...",
        "task.sampler = Bad.Config()",
        "tasks.sum_digits.sampler = 'Bad': it can't be built: AttributeError",
    ),
    "sampler that gives nothing": (
        "class Bad(SampleStrategy):\n    def next(self): ...",
        "task.sampler = Bad.Config()",
        "tasks.sum_digits.sampler = 'Bad': its next returned a NoneType, want a DataSample",
    ),
    "abstract sampler": (
        "",
        "task.sampler = SampleStrategy.Config()",
        "tasks.sum_digits.sampler = 'SampleStrategy': it can't be built: TypeError",
    ),
    "task without an env": (
        "class Bad(Task): pass",
        "config.tasks = {'t': Bad.Config(algorithm=GRPO.Config(), dataset=Rows.Config(), env=SHORT)}",
        "tasks.t = 'Bad': it can't be built: TypeError: Bad makes no env",
    ),
    "task raises": (
        "class Bad(Own):\n"
        "    def __init__(self, config, **others):\n        super().__init__(config, **others); self.pool.fill()",
        "config.tasks = {'t': Bad.Config(algorithm=GRPO.Config(), dataset=Rows.Config(), env=SHORT)}",
        "tasks.t = 'Bad': it can't be built: AttributeError: 'Bad' object has no attribute 'pool' (",
    ),
    "task that takes a renderer": (
        "class Bad(Own):\n    def __init__(self, config, *, name, renderer, seed=0): ...",
        "config.tasks = {'t': Bad.Config(algorithm=GRPO.Config(), dataset=Rows.Config(), env=SHORT)}",
        "tasks.t = 'Bad': it can't be built: TypeError: Bad is built from a context, which holds "
        "renderer, vocab_size and seed: build(name=..., context=BuildContext(...)), "
        "__init__(self, config, *, name, context)",
    ),
    "filter that takes the context and raises": (
        "class Bad(Filter):\n"
        "    def __init__(self, config, *, context): raise LookupError(str(context.vocab_size))\n"
        "    def matches(self, group): ...",
        "config.pre_batch_filters = [Bad.Config()]",
        "pre_batch_filters[0] = 'Bad': it can't be built: LookupError: 768 (",
    ),
    "algorithm that takes the context and raises": (
        "class Bad(GRPO):\n"
        "    def __init__(self, config, *, context): raise LookupError(str(context.vocab_size))",
        "task.algorithm = Bad.Config()",
        "tasks.sum_digits.algorithm = 'Bad': it can't be built: LookupError: 768 (",
    ),
    "filter raises": (
        "class Bad(Filter):\n    def __init__(self, config): raise LookupError('table')\n    def matches(self, group): ...",
        "config.pre_batch_filters = [Bad.Config()]",
        "pre_batch_filters[0] = 'Bad': it can't be built: LookupError: table (",
    ),
    "abstract filter": (
        "class Bad(Filter): pass",
        "config.post_batch_filters = [Bad.Config()]",
        "post_batch_filters[0] = 'Bad': it can't be built: TypeError",
    ),
    "mix of other tasks": (
        "class Bad(TaskMix):\n    def next(self): return 'nothing'",
        "config.task_mix = Bad.Config()",
        "task_mix = 'Bad': its next gave 'nothing', which is no task",
    ),
    "mix that exits": (
        "class Bad(TaskMix):\n    def next(self): raise SystemExit(3)",
        "config.task_mix = Bad.Config()",
        "task_mix = 'Bad': its next failed: SystemExit: 3 (",
    ),
    "no such renderer": (
        "",
        "config.renderer.name = 'qwen9'",
        "error: renderer.name = 'qwen9': not a renderer",
    ),
    "renderer of another family": (
        "",
        "config.renderer.name = 'llama-3'",
        "error: renderer.",
        "llama-3",
    ),
    "a value whose repr fails": (
        "class Value:\n    def __repr__(self): raise ValueError",
        "config.steps = Value()",
        "error: steps = <Value>: must be a whole number",
    ),
}


@pytest.mark.parametrize(
    "classes, changes, parts", [(c, x, parts) for c, x, *parts in PARTS.values()], ids=PARTS
)
@DRY_OR_NOT
def test_what_a_run_builds_is_built_before_it_starts(
    refused, config_module, classes, changes, parts, dry_run
):
    name, file = config_module(USER_MODULE.format(classes=classes, changes=changes))
    err = refused("--module", name, "--config", "made", *dry_run)
    for part in parts:
        assert part in err
        if part.endswith("("):
            assert f"({file}:" in err


def test_parts_are_built_also_for_a_plan_without_the_models_folder(refused, config_module):
    classes, changes, part = PARTS["no reward function has a weight"]
    text = USER_MODULE.format(classes=classes, changes=changes).replace(
        "rl_grpo_qwen3_debug", "rl_grpo_qwen3_0_6b"
    )
    name, _ = config_module(text)
    assert part in refused(
        "--module", name, "--config", "made", "--dry-run", "--model.hf-assets-path", "/nowhere"
    )


def test_a_dataset_without_end_is_walked_without_a_table(command, config_module):
    name, _ = config_module(
        USER_MODULE.format(
            classes="class Endless(Rows):\n    def __len__(self): return 10**12\n"
            "    def __getitem__(self, i): return DataSample(sample_id=str(i), env_input=[1, 2])",
            changes="task.dataset = Endless.Config(); task.validation = Endless.Config()",
        )
    )
    code, _, err = command("--module", name, "--config", "made", "--dry-run")
    assert code == 0 and err == ""


def test_a_dataset_that_makes_its_examples_at_once_has_a_limit(refused):
    err = refused(*DEBUG, "--tasks.sum-digits.dataset.count", "1000000000000", "--dry-run")
    assert (
        "tasks.sum_digits.dataset.count = 1000000000000: must be at least 1 and at most 10000000"
        in err
    )
    assert "write a Dataset that makes each when it is asked for" in err
