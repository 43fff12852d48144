"""Notices processes that hang, says where they hang, and kills them.

A process hangs in one of two ways:

    no answer      it is stopped by a signal, or its event loop is blocked
    overdue        it answers, and its working thread has been at one piece of work for too long,
                   such as a step of the engine or a collective of the trainer

A pause of this process says nothing about the others. When the whole run was suspended, or this
event loop was blocked, all limits start from zero.
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

from torchtitan.experiments.rl.compat.monarch import call_actor
from torchtitan.experiments.rl.config.run_config import SupervisionConfig
from torchtitan.experiments.rl.fleet.restarts import deaths_logger
from torchtitan.experiments.rl.process.actor import STACK_SIGNAL
from torchtitan.experiments.rl.process.heartbeat import Pulse
from torchtitan.experiments.rl.process.lifetime import Lifetime, ProcessLost

logger = logging.getLogger(__name__)

HUNG = "hung: "
"""Beginning of the cause of death of a process that was killed because it hung."""
LOOK_S = 2.0
"""Seconds between two looks at a process, and between two looks at the clock."""
PAUSE_S = 8.0
"""Seconds without a look at the clock after which this process was paused."""
SILENT_S = 15.0
"""Seconds without an answer after which people are told which process is silent."""
STACK_S = 2.0
"""Seconds that a running process gets to write its stacks, which takes it milliseconds."""
STACK_CHARACTERS = 20_000
"""Maximum length of the stacks in the log."""


class _Hang(Exception):
    """A process that hangs. The message says how, and for how long."""


class HangWatch:
    """Watches any number of processes. Call `watch` for each."""

    def __init__(
        self,
        config: SupervisionConfig,
        *,
        on_hang: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ):
        """Watch with the limits of a config.

        Args:
            on_hang: called with each line about silent and hanging processes.
            clock: returns the time in seconds.
        """
        self._config = config
        self._on_hang = on_hang
        self._clock = clock
        self._last_look: float | None = None
        """Time of the last look; None before the first, which may come minutes after the start."""
        self._limits_start = clock()

    async def watch(
        self,
        actor: Any,  # noqa: ANN401 - Monarch's
        life: Lifetime,
        *,
        stacks: str,
        blocks: bool = False,
    ) -> None:
        """Return when the process has ended, by itself or killed here.

        Args:
            stacks: file of its stacks (see ProcessIdentity).
            blocks: True if user code may hold up its event loop.
        """
        slow = True  # the process is being set up
        while life.cause is None:
            try:
                pulse = await self._pulse(actor, life, patient=slow or blocks)
                slow = pulse.slow
                self._check_progress(pulse)
            except ProcessLost:
                return
            except _Hang as hang:
                if life.cause is None:
                    await self._kill(life, str(hang), stacks)
                return
            except Exception as error:  # noqa: BLE001 - a broken process fails at its work too
                logger.info("%s gave no pulse: %s", life.name, error)
            await asyncio.sleep(LOOK_S)

    async def _pulse(self, actor: Any, life: Lifetime, *, patient: bool) -> Pulse:  # noqa: ANN401
        """Ask a process what it does, and return its answer.

        Args:
            patient: True if the process may take long to answer. One that is stopped will not.

        Raises:
            _Hang: it did not answer within its limit.
        """
        asked = self._now()
        was_reported = False
        answer = asyncio.ensure_future(life.call(call_actor(actor.pulse)))
        try:
            while True:
                await asyncio.wait({answer}, timeout=LOOK_S)
                now = self._now()
                if answer.done():
                    pulse: Pulse = answer.result()
                    if was_reported:
                        self._on_hang(f"{life.name} answers again after {now - asked:.0f} s")
                    return pulse
                silent_s = now - max(asked, self._limits_start)
                stopped = is_stopped(life.pid)
                waits_longer = patient and not stopped
                if silent_s > SILENT_S and not waits_longer and not was_reported:
                    was_reported = True
                    why = "its host is busy, stopped or out of reach"
                    if stopped:
                        why = "it is stopped by a signal"
                    self._on_hang(f"{life.name} has not answered for {silent_s:.0f} s: {why}")
                if silent_s > self._limit_s(waits_longer):
                    how = "stopped by a signal" if stopped else "no answer"
                    raise _Hang(f"{how} for {silent_s:.0f} s")
        finally:
            answer.cancel()

    def _check_progress(self, pulse: Pulse) -> None:
        """Raise if a process that answers has been at one piece of work for too long.

        Raises:
            _Hang: names the work.
        """
        seconds = min(pulse.seconds, self._now() - self._limits_start)
        if pulse.doing and seconds > self._limit_s(pulse.slow):
            raise _Hang(f"{pulse.doing} for {seconds:.0f} s")

    def _limit_s(self, slow: bool) -> float:
        return self._config.slow_work_s if slow else self._config.stall_s

    def _now(self) -> float:
        """Return the time, and start all limits from zero if this process was paused before."""
        now = self._clock()
        paused_s = 0.0 if self._last_look is None else now - self._last_look
        if paused_s > PAUSE_S:
            logger.info(
                "this process was paused for %.0f s: the limits of the others start from zero",
                paused_s,
            )
            self._limits_start = now
        self._last_look = now
        return now

    async def _kill(self, life: Lifetime, hang: str, stacks: str) -> None:
        text = await stacks_of(life, stacks)
        deaths_logger.info(
            "%s hangs: %s; its threads: %s", life.name, hang, text or "its stacks can't be had"
        )
        where = "its stack is in logs/controller.jsonl" if text else "no stack could be had"
        self._on_hang(f"{life.name} hangs: {hang}; {where}")
        life.kill(f"{HUNG}{hang}")


def is_stopped(pid: int | None) -> bool:
    """Return True if a process of this host is known to be stopped, as by SIGSTOP."""
    if pid is None:
        return False
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    return False


async def stacks_of(life: Lifetime, stacks: str) -> str:
    """Return the stack of each Python thread of a process.

    Returns:
        The text; "" if it can't be had, because the process is stopped or on another host.
    """
    if life.pid is None or is_stopped(life.pid):
        return ""
    try:
        os.kill(life.pid, STACK_SIGNAL)
        await asyncio.sleep(STACK_S)
        return Path(stacks).read_text(errors="replace")[-STACK_CHARACTERS:]
    except OSError:
        return ""
