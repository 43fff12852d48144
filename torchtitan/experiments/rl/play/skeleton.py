"""A session as a test of the task."""

from collections.abc import Mapping, Sequence

from torchtitan.experiments.rl.rollouts.types import RolloutGroup

TEMPLATE = '''"""A session of play: task {task!r} of {config}, example {example} of its dataset."""

from {module} import {config}
from torchtitan.experiments.rl.envs.renderer import build_renderer
from torchtitan.experiments.rl.tasks.scripted_policy import ScriptedPolicy

REPLIES = {replies}
"""By rollout, turn by turn."""


async def test_{name}_rewards_this_session():
    config = {config}(){overrides}
    renderer = build_renderer(config.renderer, config.model.hf_assets_path)
    task = config.tasks[{task!r}].build(name={task!r}, renderer=renderer, seed=config.seed)
    policy = ScriptedPolicy(config.model.hf_assets_path, lambda rollout, turn: REPLIES[rollout][turn])
    group = await task.run_group(task.dataset[{example}], policy, group_id="play", seed=config.seed, group_size={size})
    await task.score_rewards(group)
    assert [rollout.status.value for rollout in group.rollouts] == {statuses}
    assert [rollout.reward for rollout in group.rollouts] == {rewards}
'''


def skeleton(
    group: RolloutGroup,
    replies: Mapping[int, Sequence[str]],
    *,
    module: str,
    config: str,
    example: int,
    overrides: Sequence[str],
) -> str:
    """The text of a test file that runs the session again. ``overrides`` of the command line are named in it, not applied."""
    return TEMPLATE.format(
        task=group.task_name,
        name="".join(c if c.isalnum() else "_" for c in group.task_name),
        module=module,
        config=config,
        example=example,
        size=len(group.rollouts),
        replies=[list(replies.get(index, [])) for index in range(len(group.rollouts))],
        overrides=f"  # played with {' '.join(overrides)}" if overrides else "",
        statuses=[rollout.status.value for rollout in group.rollouts],
        rewards=[rollout.reward for rollout in group.rollouts],
    )
