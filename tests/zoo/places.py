"""Places: every method and function of a user that the library calls. Each says which rollouts a culprit there hurts, what the
culprit is called, and how it is put into a run."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from tests.zoo import world
from tests.zoo.misbehaviour import Kind, meddled, misbehaving
from torchtitan.experiments.rl.algorithms import OPD, Echo
from torchtitan.experiments.rl.generation.references import FrozenModel
from torchtitan.experiments.rl.losses import CustomRLLoss
from torchtitan.experiments.rl.rubrics.rubric import RewardFn

Scope = Literal["rollout", "group", "run"]
"""Whom a culprit hurts: rollouts 2 and 3 of task "bad"; all of task "bad"; or all, which ends the run."""

Install = Callable[[Any, Kind], None]
"""Puts the kind into a Stage (`scene.py`)."""


@dataclass(kw_only=True, frozen=True)
class Place:
    scope: Scope
    culprit: str
    """Words that one line of error holds, each with its alternatives: "CulpritEnv reset|step". Neither case nor underscores
    matter."""
    install: Install
    waits: bool = False
    """An async function: it may hang."""
    block_s: float | None = 0.5
    """Longer than its limit. None: blocking is no case here."""
    named_in_log: bool = False
    """Its failures undo nothing: a line of the log names them."""
    variant: str = "plain"
    """Runs that are compared with the honest run of the same variant."""
    tags: frozenset[str] = field(default_factory=frozenset)


def always(*args: Any, **kwargs: Any) -> bool:
    return True


def is_bad(task_or_config: Any) -> bool:
    return task_or_config.name == "bad"


def of_bad_rollout(self_or_rollout: Any, *args: Any, **kwargs: Any) -> bool:
    rollout = args[0] if args and hasattr(args[0], "index_in_group") else self_or_rollout
    return rollout.task_name == "bad" and rollout.index_in_group >= 2


def of_bad_group(self: Any, group: Any) -> bool:
    return group.task_name == "bad"


def of_bad_session(session: Any, *args: Any, **kwargs: Any) -> bool:
    session = getattr(session, "_session", session)  # what a turn loop is given may be wrapped
    return session.task_name == "bad" and session.index >= 2


def env(method: str, *, plain: bool = False) -> Place:
    def install(stage: Any, kind: Kind) -> None:
        base = world.UncountedEnv if method == "close" else world.HonestEnv
        when = world.count_close if method == "close" else always
        culprit = misbehaving(base, method, kind, name="CulpritEnv", when=when, plain=plain)
        members: dict[str, Any] = {"env_class": culprit}
        if (
            method == "__init__"
        ):  # all envs are culprits: nobody can close those that were made before one that failed
            members["env_of"] = lambda self, sample, index: culprit(sample, index, self.name)
        else:
            stage.bad_rollout_limit_s = 3.0  # the step's limit is the one to be met
        stage.bad_task(type("CulpritsTask", (world.HonestTask,), members))

    # An env is made by its task: that is what the library calls.
    culprit = "CulpritsTask make_envs" if method == "__init__" else f"CulpritEnv {method}"
    return Place(
        scope="group" if method == "__init__" else "rollout",
        culprit=culprit,
        install=install,
        waits=not plain,
        block_s=0.3,
        named_in_log=method == "close",
    )


def task(method: str, *, scope: Scope, when: Callable[..., bool] = always, **options: Any) -> Place:
    def install(stage: Any, kind: Kind) -> None:
        base = world.HonestTask
        if method == "make_env":  # Task.make_envs is what calls it
            base = type("PlainTask", (base,), {"make_envs": world.Task.make_envs})
        stage.bad_task(misbehaving(base, method, kind, name="CulpritTask", when=when))

    return Place(
        scope=scope,
        culprit=f"CulpritTask {method}",
        install=install,
        waits=method != "make_env",
        **options,
    )


def reward(*, group_level: bool = False, plain: bool = False, isolate: bool = False) -> Place:
    def install(stage: Any, kind: Kind) -> None:
        honest = world.honest_rewards if group_level else world.honest_reward
        when = (lambda rollouts, env_input: True) if group_level else of_bad_rollout
        culprit = meddled(honest, kind, when=when, plain=plain)
        culprit.__name__ = culprit.__qualname__ = "culprit_reward"
        entries = [
            RewardFn(culprit, group_level=group_level, isolate=isolate, takes="rollout"),
            RewardFn(world.honest_reward, takes="rollout"),
        ]
        entries.append(RewardFn(world.honest_rewards, group_level=True, takes="rollout"))
        stage.bad.rubric = world.HonestRubric.Config(reward_fns=entries, timeout_s=world.LIMIT_S)

    return Place(
        scope="group" if group_level else "rollout",
        culprit="culprit_reward",
        install=install,
        waits=not plain,
    )


def rubric(method: str, *, scope: Scope = "group") -> Place:
    def install(stage: Any, kind: Kind) -> None:
        culprit: Any = misbehaving(
            world.HonestRubric, method, kind, name="CulpritRubric", when=always
        )
        stage.bad.rubric = culprit.Config(
            reward_fns=[RewardFn(world.honest_reward, takes="rollout")]
        )

    # What register_funcs gives is checked function by function: the error may name the function.
    culprit = (
        "CulpritRubric|reward register_funcs|function"
        if method == "register_funcs"
        else f"CulpritRubric {method}"
    )
    return Place(
        scope=scope,
        culprit=culprit,
        install=install,
        waits=method in ("setup", "score_group"),
        block_s=1.2,
    )


def algorithm(method: str, *, scope: Scope, when: Callable[..., bool]) -> Place:
    def install(stage: Any, kind: Kind) -> None:
        culprit: Any = misbehaving(
            world.HonestAlgorithm, method, kind, name="CulpritAlgorithm", when=when
        )
        stage.bad.algorithm = culprit.Config()

    # Streams are complete, and checked against each other, only after score_group: that may be where score_rollout is caught.
    culprit = f"CulpritAlgorithm {method}" + ("|score_group" if method == "score_rollout" else "")
    return Place(
        scope=scope, culprit=culprit, install=install, waits=method != "score_group", block_s=1.2
    )


def filters(slot: str) -> Place:
    def install(stage: Any, kind: Kind) -> None:
        culprit: Any = misbehaving(
            world.HonestFilter, "matches", kind, name="CulpritFilter", when=of_bad_group
        )
        setattr(stage.config, slot, [culprit.Config()])

    return Place(scope="run", culprit="CulpritFilter", install=install, block_s=1.2)


def sampler(method: str) -> Place:
    def install(stage: Any, kind: Kind) -> None:
        stage.bad.sampler = misbehaving(
            world.HonestSampler, method, kind, name="CulpritSampler", when=always
        ).Config()

    return Place(scope="run", culprit=f"CulpritSampler {method}", install=install, block_s=1.2)


def mix(method: str) -> Place:
    def install(stage: Any, kind: Kind) -> None:
        stage.config.task_mix = misbehaving(
            world.HonestMix, method, kind, name="CulpritMix", when=always
        ).Config()

    return Place(scope="run", culprit=f"CulpritMix {method}", install=install, block_s=1.2)


def dataset(method: str) -> Place:
    def install(stage: Any, kind: Kind) -> None:
        culprit: Any = misbehaving(
            world.HonestDataset, method, kind, name="CulpritDataset", when=always
        )
        stage.bad.dataset = culprit.Config(task_name="bad")

    # The library may say "the dataset's len" as well as "__len__".
    return Place(
        scope="run",
        culprit=f"CulpritDataset {method.strip('_')}|item",
        install=install,
        block_s=1.2,
    )


def honest_loss(tokens: Any) -> Any:
    return -tokens.advantages * (tokens.logprobs - tokens.generator_logprobs).exp()


def loss() -> Place:
    def install(stage: Any, kind: Kind) -> None:
        culprit = meddled(honest_loss, kind, when=always)
        culprit.__name__ = culprit.__qualname__ = "culprit_loss"
        stage.config.trainer.loss.rl = CustomRLLoss.Config(function=culprit)

    return Place(
        scope="run", culprit="culprit_loss", install=install, variant="custom loss", block_s=None
    )


def renderer(method: str) -> Place:
    def install(stage: Any, kind: Kind) -> None:
        # Shared by both tasks: it misbehaves where the conversation is of "bad".
        def when(self: Any, subject: Any, *args: Any, **kwargs: Any) -> bool:
            prompt = {
                "parse_response": kwargs.get("prompt_ids"),
                "bridge_to_next_turn": subject,
            }.get(method)
            return "bad question" in (
                str(subject) if prompt is None else stage.tokenizer.decode(prompt)
            )

        stage.replace_renderer(method, kind, when)

    return Place(scope="group", culprit="renderer", install=install, block_s=None)


def engine(method: str) -> Place:
    def install(stage: Any, kind: Kind) -> None:
        stage.session_class = misbehaving(
            world.HonestSession, method, kind, name="CulpritSession", when=of_bad_session
        )

    # What a generator answers comes from another process, which has no class to be named.
    return Place(
        scope="rollout",
        culprit="generator|completion|CulpritSession",
        install=install,
        waits=True,
        block_s=None,
    )


def teacher() -> Place:
    def install(stage: Any, kind: Kind) -> None:
        stage.bad.algorithm = OPD.Config(
            teacher=FrozenModel(name="teacher", base_url="http://localhost:1/v1")
        )
        calls = {"count": 0}

        def when(self: Any, token_ids: Any) -> bool:
            calls["count"] += 1
            return calls["count"] > 1  # the first asks whether it can be reached

        stage.policy_class = misbehaving(
            world.HonestPolicy, "score", kind, name="CulpritPolicy", when=when
        )

    return Place(
        scope="group",
        culprit="OPD|teacher",
        install=install,
        waits=True,
        block_s=None,
        variant="opd",
    )


def echo_keep() -> Place:
    def honest_keep(rollout: Any, turn: Any) -> bool:
        return True

    def install(stage: Any, kind: Kind) -> None:
        culprit = meddled(honest_keep, kind, when=of_bad_rollout)
        culprit.__name__ = culprit.__qualname__ = "culprit_keep"
        stage.bad.algorithm = Echo.Config(alpha={"user": 0.1}, keep=culprit)

    return Place(
        scope="rollout",
        culprit="Echo score_rollout|keep",
        install=install,
        variant="echo",
        block_s=1.2,
    )


PLACES: dict[str, Place] = {
    "env.reset": env("reset"),
    "env.reset, plain": env("reset", plain=True),
    "env.step_message": env("step_message"),
    "env.step_message, plain": env("step_message", plain=True),
    "env.metadata": env("metadata"),
    "env.close": env("close"),
    "env.close, plain": env("close", plain=True),
    "env.__init__": env("__init__", plain=True),
    "task.make_env": task("make_env", scope="group", block_s=1.2),
    "task.make_envs": task("make_envs", scope="group", block_s=1.2),
    "task.run_rollout": task(
        "run_rollout",
        scope="rollout",
        when=lambda self, env, policy: of_bad_session(policy),
        block_s=1.2,
    ),
    "task.setup": task("setup", scope="run", block_s=1.2),
    "task.close": task(
        "close", scope="run", when=world.note_closing, named_in_log=True, block_s=1.2
    ),
    "reward function": reward(),
    "reward function, plain": reward(plain=True),
    "reward function, group": reward(group_level=True),
    "reward function, group, plain": reward(group_level=True, plain=True),
    "rubric.score_group": rubric("score_group"),
    "rubric.setup": rubric("setup", scope="run"),
    "rubric.register_funcs": rubric("register_funcs", scope="run"),
    "algorithm.setup": algorithm("setup", scope="run", when=always),
    "algorithm.score_rollout": algorithm(
        "score_rollout", scope="rollout", when=lambda self, rollout: of_bad_rollout(rollout)
    ),
    "algorithm.score_group": algorithm("score_group", scope="group", when=always),
    "echo.keep": echo_keep(),
    "filter.matches, pre": filters("pre_batch_filters"),
    "filter.matches, post": filters("post_batch_filters"),
    "sampler.next": sampler("next"),
    "sampler.observe": sampler("observe"),
    "mix.next": mix("next"),
    "mix.observe": mix("observe"),
    "dataset.__len__": dataset("__len__"),
    "dataset.__getitem__": dataset("__getitem__"),
    "loss": loss(),
    "renderer.render": renderer("render"),
    "renderer.parse_response": renderer("parse_response"),
    "renderer.bridge_to_next_turn": renderer("bridge_to_next_turn"),
    "engine.generate": engine("generate"),
    "teacher.score": teacher(),
}
