"""How busy each process of the run was in a step, for its metrics: who waits for whom."""

import asyncio
import logging
from collections.abc import Iterable
from typing import Any

from torchtitan.experiments.rl.compat.monarch import ask
from torchtitan.experiments.rl.process.lifetime import Lifetime

logger = logging.getLogger(__name__)

ANSWER_S = 1.0
"""A process that takes longer has no metrics in that step: the next step must not wait for it."""


async def lap_usage(processes: Iterable[tuple[Lifetime, Any]]) -> dict[str, float]:
    """Metrics of each process since the last call: ``perf/generator_0/busy`` and so on.

    Args:
        processes: the life and the actor (WatchedActor) of each.
    """

    async def usage_of(life: Lifetime, actor: Any) -> dict[str, float]:
        try:
            usage = await asyncio.wait_for(life.call(ask(actor.usage)), ANSWER_S)
        except Exception as error:  # it has died, or is busy: others see to that
            logger.info("%s gave no usage: %s", life.name, error)
            return {}
        name = "_".join(life.name.split())
        return {f"perf/{name}/{what}": value for what, value in usage.items()}

    answers = await asyncio.gather(*(usage_of(*process) for process in processes))
    return {name: value for answer in answers for name, value in answer.items()}
