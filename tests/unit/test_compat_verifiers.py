"""What this library takes from inside verifiers."""

import inspect
import signal

import pytest

verifiers = pytest.importorskip("verifiers")
datasets = pytest.importorskip("datasets")

from torchtitan.experiments.rl.compat.verifiers import (  # noqa: E402
    compares_rollouts,
    no_signal_handlers,
    replace_reward_functions,
)


def one(completion, **kwargs) -> float:
    return 1.0


def two(completion, **kwargs) -> float:
    return 2.0


def ranks(completions, **kwargs) -> list[float]:
    return [float(i) for i in range(len(completions))]


def environment(*rubrics) -> "verifiers.Environment":
    rows = datasets.Dataset.from_list([{"question": "?", "answer": "!"}])
    with no_signal_handlers():
        return verifiers.SingleTurnEnv(dataset=rows, rubric=verifiers.RubricGroup(list(rubrics)))


def test_making_an_environment_inside_leaves_signals_alone_and_outside_would_not():
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    environment(verifiers.Rubric(funcs=[one]))
    assert {number: signal.getsignal(number) for number in kept} == kept, "verifiers sets signal handlers in another module now"
    source = inspect.getsource(inspect.getmodule(verifiers.Environment))
    assert "signal.signal(" in source, "verifiers' environments leave signals alone: no_signal_handlers can go"


def test_every_reward_function_of_every_rubric_is_replaced_once():
    shared = verifiers.Rubric(funcs=[one])
    made = environment(shared, verifiers.Rubric(funcs=[two]), shared)
    seen = []

    def replace(function):
        seen.append(function.__name__)
        return lambda completion, **kwargs: 3.0

    replace_reward_functions(made, replace)
    mine = sorted(name for name in seen if name in ("one", "two"))
    assert mine == ["one", "two"], "verifiers keeps reward functions elsewhere than in Rubric.funcs, or rubrics elsewhere"


def test_a_function_of_the_whole_group_is_known():
    assert not compares_rollouts(environment(verifiers.Rubric(funcs=[one])))
    assert compares_rollouts(environment(verifiers.Rubric(funcs=[one]), verifiers.Rubric(funcs=[ranks])))
