"""Kinds that make sense in one place: wrong types and values of its answer, changes of what it is given, sharing."""

from tests.zoo.own.algorithms import ECHO_KEEP, SCORE_GROUP_CREDIT, SCORE_ROLLOUT
from tests.zoo.own.engines import BRIDGE, ENGINE, PARSE, RENDER, TEACHER
from tests.zoo.own.envs import ENV_RESET, ENV_STEP, MAKE_ENV, MAKE_ENVS, RUN_ROLLOUT
from tests.zoo.own.makers import Own, wrong_types
from tests.zoo.own.parts import GETITEM, LENGTH, LOSS, MATCHES, MIX_NEXT, OBSERVE, SAMPLE
from tests.zoo.own.rewards import REGISTER_FUNCS, REWARD, REWARDS, SCORE_GROUP

OWN: dict[str, Own] = {
    "env.reset": ENV_RESET,
    "env.reset, plain": wrong_types(),
    "env.step_message": ENV_STEP,
    "env.step_message, plain": wrong_types(),
    "task.make_env": MAKE_ENV,
    "task.make_envs": MAKE_ENVS,
    "task.run_rollout": RUN_ROLLOUT,
    "reward function": REWARD,
    "reward function, plain": wrong_types("a number", "None"),
    "reward function, group": REWARDS,
    "rubric.score_group": SCORE_GROUP,
    "rubric.register_funcs": REGISTER_FUNCS,
    "algorithm.score_rollout": SCORE_ROLLOUT,
    "algorithm.score_group": SCORE_GROUP_CREDIT,
    "echo.keep": ECHO_KEEP,
    "filter.matches, pre": MATCHES,
    "filter.matches, post": MATCHES,
    "sampler.next": SAMPLE,
    "sampler.observe": OBSERVE,
    "mix.next": MIX_NEXT,
    "mix.observe": OBSERVE,
    "dataset.__len__": LENGTH,
    "dataset.__getitem__": GETITEM,
    "loss": LOSS,
    "renderer.render": RENDER,
    "renderer.parse_response": PARSE,
    "renderer.bridge_to_next_turn": BRIDGE,
    "engine.generate": ENGINE,
    "teacher.score": TEACHER,
}
