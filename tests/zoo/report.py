"""Runs the cases against honest runs, and says which hold."""

import functools
import gc
from collections.abc import Iterator
from dataclasses import dataclass

from tests.zoo import children, scene
from tests.zoo.cases import Case, cases
from tests.zoo.checks import Streams, problems
from tests.zoo.misbehaviour import Kind


@dataclass
class Result:
    name: str
    problems: list[str]
    seconds: float


def run_cases(*, pattern: str = "", every: int = 1, at_once: int = 2) -> Iterator[Result]:
    """
    Args:
        pattern: only cases whose name holds it.
        every: only each so manieth case.
    """
    scene.warm_up()
    gc.collect()
    gc.freeze()  # a child that collects would otherwise copy every page of its parent
    try:
        chosen = {case.name: case for case in list(cases())[::every] if pattern in case.name}
        variants = {case.place.variant: case for case in chosen.values()}
        honest = {}
        for name, value, _ in children.run_forked(
            [(v, functools.partial(_honest, c)) for v, c in variants.items()], at_once=at_once
        ):
            if isinstance(value, Exception):
                raise RuntimeError(f"the honest run {name!r} failed: {value}")
            honest[name] = value
        work = [
            (case.name, functools.partial(_case, case, *honest[case.place.variant]))
            for case in chosen.values()
        ]
        for name, value, seconds in children.run_forked(work, at_once=at_once):
            yield Result(name, [str(value)] if isinstance(value, Exception) else value, seconds)
    finally:
        gc.unfreeze()  # what is frozen at exit counts as leaked


def _honest(case: Case) -> tuple[Streams, list[float]]:
    """What an honest run of the case's variant trains: the place is there, and its method does what it should."""

    def install(stage: scene.Stage) -> None:
        case.place.install(stage, Kind(change=lambda answer, *args: answer))
        stage.config.steps = 10  # every example

    sight = scene.run(install)
    if sight.error is not None or sight.loop_stopped is not None:
        raise AssertionError(f"{sight.error!r} {sight.loop_stopped!r}")
    return {
        key: scene.streams_of(samples)[:1] for key, samples in sight.trained.items()
    }, sight.losses


def _case(case: Case, honest: Streams, losses: list[float]) -> list[str]:
    def install(stage: scene.Stage) -> None:
        case.place.install(stage, case.kind)
        if case.late:
            stage.limit_bad()
        if case.blocks_loop:
            stage.bad.max_retries = 0  # a retry blocks again: seconds

    return list(problems(case, scene.run(install), honest, losses))
