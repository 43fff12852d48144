"""Notices processes of the run that hang, says where, and kills them: from then on they are dead processes like others.

A look at a process can find two things. It does not answer: it is stopped, or its event loop is blocked. Or it answers, and its
working thread has been at one piece of work for too long: a step of the engine, a collective of the trainer. A pause of this
process says nothing about the others: when the whole run was suspended, or this event loop was blocked, all limits start anew.
"""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from torchtitan.experiments.rl.compat.monarch import ask
from torchtitan.experiments.rl.config.run_config import SupervisionConfig
from torchtitan.experiments.rl.process.heartbeat import Pulse
from torchtitan.experiments.rl.process.lifetime import Lifetime, ProcessLost
from torchtitan.experiments.rl.user_code.watched import STACK_SIGNAL

logger = logging.getLogger(__name__)

HUNG = "hung: "
"""Begins the cause of death of a process that was killed because it hung."""

LOOK_S = 2.0
PAUSE_S = 8.0
"""Every watch asks for the time at least every LOOK_S. If nobody did for so long, this process was paused."""
SILENT_S = 15.0
"""After so long without an answer people are told who is silent."""
STACK_S = 2.0
"""A process that runs writes its stacks within milliseconds."""
STACK_CHARACTERS = 20_000


class HangWatch:
    def __init__(
        self,
        config: SupervisionConfig,
        *,
        on_hang: Callable[[str], None] = lambda line: None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """``on_hang`` is called with a line for people. ``clock`` gives seconds."""
        self._config, self._on_hang, self._clock = config, on_hang, clock
        self._last = self._started_anew = clock()

    async def watch(self, actor: Any, life: Lifetime, *, stacks: str, blocks: bool = False) -> None:
        """Return when the process has ended, by itself or killed here.

        Args:
            stacks: as in ProcessIdentity.
            blocks: user code may hold up its event loop.
        """
        slow = True  # it is being set up
        while life.cause is None:
            try:
                hang, slow = await self._look(actor, life, slow=slow or blocks)
            except ProcessLost:
                return
            except Exception as error:  # it will fail at its work too, if it is broken
                logger.info("%s gave no pulse: %s", life.name, error)
                hang = None
            if hang is not None and life.cause is None:
                return await self._kill(life, hang, stacks)
            await asyncio.sleep(LOOK_S)

    async def _look(self, actor: Any, life: Lifetime, *, slow: bool) -> tuple[str | None, bool]:
        """How the process hangs, or None; and whether what it does now may take long."""
        asked, told = self._now(), False
        answer = asyncio.ensure_future(life.call(ask(actor.pulse)))
        try:
            while True:
                await asyncio.wait({answer}, timeout=LOOK_S)
                now = self._now()
                if answer.done():
                    if told and not answer.cancelled() and answer.exception() is None:
                        self._on_hang(f"{life.name} answers again after {now - asked:.0f} s")
                    return self._overdue(answer.result(), now)
                silent_s = now - max(asked, self._started_anew)
                stopped = is_stopped(life.pid)
                if silent_s > SILENT_S and not told and (stopped or not slow):
                    told = True
                    why = "it is stopped by a signal" if stopped else "its host is busy, stopped or out of reach"
                    self._on_hang(f"{life.name} has not answered for {silent_s:.0f} s: {why}")
                if silent_s > self._limit_s(slow and not stopped):
                    return f"{'stopped by a signal' if stopped else 'no answer'} for {silent_s:.0f} s", slow
        finally:
            answer.cancel()

    def _overdue(self, pulse: Pulse, now: float) -> tuple[str | None, bool]:
        seconds = min(pulse.seconds, now - self._started_anew)
        late = bool(pulse.doing) and seconds > self._limit_s(pulse.slow)
        return f"{pulse.doing} for {seconds:.0f} s" if late else None, pulse.slow

    def _limit_s(self, slow: bool) -> float:
        return self._config.slow_work_s if slow else self._config.stall_s

    def _now(self) -> float:
        """The time. Recognises that this process was paused."""
        now = self._clock()
        if now - self._last > PAUSE_S:
            logger.info("this process was paused for %.0f s: the limits of every other start anew", now - self._last)
            self._started_anew = now
        self._last = now
        return now

    async def _kill(self, life: Lifetime, hang: str, stacks: str) -> None:
        text = await stacks_of(life, stacks)
        logger.info("%s hangs: %s; its threads: %s", life.name, hang, text or "a stopped process can't say")
        where = "its stack is in logs/controller.jsonl" if text else "no stack could be had"
        self._on_hang(f"{life.name} hangs: {hang}; {where}")
        life.kill(f"{HUNG}{hang}")


def is_stopped(pid: int | None) -> bool:
    """Whether a process of this host is stopped, as by SIGSTOP. False where that can't be known."""
    with contextlib.suppress(psutil.Error):
        return pid is not None and psutil.Process(pid).status() == psutil.STATUS_STOPPED
    return False


async def stacks_of(life: Lifetime, stacks: str) -> str:
    """The stack of each Python thread of a process; "" if it can't be had: it is stopped, or on another host."""
    if life.pid is None or is_stopped(life.pid):
        return ""
    try:
        os.kill(life.pid, STACK_SIGNAL)
        await asyncio.sleep(STACK_S)
        return Path(stacks).read_text(errors="replace")[-STACK_CHARACTERS:]
    except OSError:
        return ""
