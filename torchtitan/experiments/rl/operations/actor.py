"""The Controller actor: runs a run to its end. If the trainer dies, it builds the run again from its newest checkpoint."""

import asyncio
import logging
import time
from pathlib import Path
from typing import Any

from monarch.actor import Actor

from torchtitan.experiments.rl.checkpointing.folder import checkpoints, newest_valid, step_of
from torchtitan.experiments.rl.compat.monarch import process_death
from torchtitan.experiments.rl.config.plan import RunPlan
from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.hosts.pool import HostPool
from torchtitan.experiments.rl.observability.console import RunSummary, near
from torchtitan.experiments.rl.operations.assembly import Run
from torchtitan.experiments.rl.operations.checkpoints import Resumed, cut_back, resume
from torchtitan.experiments.rl.operations.context import RunContext
from torchtitan.experiments.rl.operations.notes import print_notes
from torchtitan.experiments.rl.process.lifetime import ProcessLost
from torchtitan.experiments.rl.process.setup import ENDS_THE_RUN, set_up_logging
from torchtitan.experiments.rl.user_code.endpoint import reported_endpoint

logger = logging.getLogger(__name__)

REDRAW_S = 1.0
"""Between two draws of the console: its live line shows seconds."""


class Controller(Actor):
    part = ""
    """See ``reported_endpoint``."""

    def __init__(
        self,
        plan: RunPlan,
        *,
        run_dir: str,
        config_name: str,
        hosts: HostPool | None = None,
        resume_from: Path | None = None,
        init_from: Path | None = None,
    ):
        """
        Args:
            plan: of the checked config; nothing here checks it again.
            hosts: where the run's processes are. None: on this host.
            resume_from: a verified checkpoint of the run in ``run_dir``, which goes on from it.
            init_from: a verified checkpoint of another run; this one begins with its weights.
        """
        self._checkpoint, self._init_from = resume_from, init_from
        self._steps_before = 0 if resume_from is None else step_of(resume_from)
        self._context = RunContext(plan, Path(run_dir), hosts=hosts)
        self._console, self._config_name = self._context.console, config_name
        self._stopped_by: str | None = None
        self._built = self._new_run(None)

    @reported_endpoint
    async def run(self) -> RunSummary:
        """Build everything, train, close everything; again from the newest checkpoint if the trainer dies.

        The summary is printed before the processes are stopped: nothing of it depends on them any more.

        Raises:
            Exception: whatever ended the run early, after the summary was printed and every process stopped.
        """
        started = time.perf_counter()
        self._loop = asyncio.get_running_loop()
        drawing = asyncio.create_task(self._draw())
        notes = print_notes(self._console)
        failure: BaseException | None
        try:
            set_up_logging(self._context.run_dir, "controller")
            if self._checkpoint is not None:
                self._built = self._new_run(self._read(self._checkpoint))
            self._print_header()
            failure = await self._run_to_its_end()
            while isinstance(failure, ProcessLost) and self._stopped_by is None:
                await self._built.close()
                self._built = self._new_run(await self._state_after(failure))
                failure = await self._run_to_its_end() if self._stopped_by is None else None
        except Exception as error:
            logger.exception("the run failed", extra=ENDS_THE_RUN)
            failure = error
        if isinstance(failure, ProcessLost):  # while the run was being stopped
            self._console.note(f"{failure}; what follows the last checkpoint is lost")
            failure = None
        drawing.cancel()
        stopped_by = self._stopped_by or self._built.ended_early
        if failure is not None:
            stopped_by = stopped_by or f"an error ({type(failure).__name__})"
        seconds = time.perf_counter() - started
        summary = self._built.summary(
            wall_time_s=seconds, stopped_by=stopped_by, checkpoint=self._checkpoint
        )
        summary.steps_before = self._steps_before
        self._console.summary(summary)
        faults = await self._built.close()
        notes.cancel()
        failure = failure or next(iter(faults), None)
        if failure is not None:
            raise failure
        return summary

    @reported_endpoint
    async def request_stop(self, reason: str) -> None:
        """End the run after the step it is in, or at once while it is being built."""
        self._stopped_by = reason
        self._built.stop()

    def __supervise__(self, failure: Any) -> bool:
        """Monarch calls this for each actor of a process that died. True: the controller runs on."""
        self._loop.call_soon_threadsafe(
            lambda death: self._built.supervisor.died(death), process_death(failure)
        )
        return True

    def _new_run(self, resumed: Resumed | None) -> Run:
        return Run(self._context, resumed=resumed, init_from=self._init_from)

    async def _run_to_its_end(self) -> BaseException | None:
        """Run it, and have its files whole. Returns what ended them early, unless someone asked for that."""
        failure: BaseException | None = None
        try:
            await self._built.run()
        except asyncio.CancelledError as cancelled:
            failure = cancelled if self._stopped_by is None else None
        except Exception as error:
            failure = error
        faults = await self._built.settle()
        if isinstance(failure, ProcessLost) and self._built.writes_checkpoint:
            return RunError(
                f"{failure}, and the run can't go on: a checkpoint is still being written"
            )
        return failure or next(iter(faults), None)

    async def _state_after(self, lost: ProcessLost) -> Resumed | None:
        """What the run goes on with after its trainer died; None: it begins again. The run's files are cut back to that.

        Raises:
            RunError: the trainer died too often, or nothing can be gone on with.
        """
        which = self._context.restarts.count("trainer", lost.name, lost.cause)
        try:
            resumed = await asyncio.to_thread(self._newest)
        except RunError as error:
            raise RunError(f"{lost}, and the run can't go on: {error}") from error
        step = 0 if resumed is None else resumed.state.step
        how = (
            "begins again, for it has no checkpoint"
            if resumed is None
            else f"goes on from step {step}"
        )
        steps = self._built.steps_done - step
        self._console.note(
            f"{lost}; the run {how}; {steps} step{'s' * (steps != 1)} lost ({which})"
        )
        return resumed

    def _newest(self) -> Resumed | None:
        """The newest valid checkpoint of the run, read; None if it has taken none. Blocks: it reads every file."""
        if not checkpoints(self._context.run_dir):
            self._checkpoint = None
            cut_back(self._context.run_dir, {})
            return None
        self._checkpoint, refused = newest_valid(self._context.run_dir)
        for reason in refused:
            logger.warning("%s", reason)
        return self._read(self._checkpoint)

    def _read(self, checkpoint: Path) -> Resumed:
        return resume(checkpoint, run_dir=self._context.run_dir, config=self._context.config)

    async def _draw(self) -> None:
        """Keep the console up to date."""
        while True:
            self._console.draw()
            await asyncio.sleep(REDRAW_S)

    def _print_header(self) -> None:
        config, plan = self._context.config, self._context.plan
        self._console.header(
            self._context.run_dir,
            config=self._config_name,
            model=f"{near(config.model.hf_assets_path)} ({plan.sizes.parameters / 1e6:,.1f}M parameters)",
            sizes={
                "steps": config.steps,
                "rollouts a step": plan.rollouts_per_step,
                "off-policy steps": config.max_offpolicy_steps,
                "trainer ranks": config.trainer.ranks,
                "generators": config.generator.replicas,
            },
        )
