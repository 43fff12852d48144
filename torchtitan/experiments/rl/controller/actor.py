"""The Controller actor: runs a run to its end.

If the trainer dies, the Controller attempts the run again from its newest checkpoint.
"""

import asyncio
import logging
import time
from pathlib import Path
from typing import Any

from monarch.actor import Actor

from torchtitan.experiments.rl.checkpointing.folder import checkpoints, newest_valid, step_of
from torchtitan.experiments.rl.checkpointing.run_files import cut_back
from torchtitan.experiments.rl.compat.monarch import ProcessDeath, process_death
from torchtitan.experiments.rl.controller.run import Run
from torchtitan.experiments.rl.errors import RunError, cause_of
from torchtitan.experiments.rl.fleet.context import RunContext
from torchtitan.experiments.rl.fleet.notes import print_notes
from torchtitan.experiments.rl.hosts.pool import HostPool
from torchtitan.experiments.rl.observability.console import RunSummary, near
from torchtitan.experiments.rl.plan.plan import RunPlan
from torchtitan.experiments.rl.process.actor import reported_endpoint
from torchtitan.experiments.rl.process.lifetime import ProcessLost
from torchtitan.experiments.rl.process.logs import ENDS_THE_RUN, set_up_logging
from torchtitan.experiments.rl.watch.checkpoints import Resumed, resume

logger = logging.getLogger(__name__)

REDRAW_S = 1.0
"""Seconds between two draws of the console, whose live line shows seconds."""


class Controller(Actor):
    """Owner of the run's processes, its tasks and its loops. The command calls `run`."""

    process_name = ""
    """Prefix of errors (``process/actor.py``). It is empty: the controller's are the run's."""

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
        """Start nothing yet.

        Args:
            plan: plan of the checked config, which nothing here checks again.
            hosts: hosts of the run's processes; None for this host alone.
            resume_from: verified checkpoint of the run in ``run_dir``, which goes on from it.
            init_from: verified checkpoint of another run; this one begins with its weights.
        """
        self._context = RunContext(plan, Path(run_dir), hosts=hosts)
        self._console = self._context.console
        self._config_name = config_name
        self._checkpoint = resume_from
        """Checkpoint that the current attempt began from."""
        self._init_from = init_from
        self._steps_before = 0 if resume_from is None else step_of(resume_from)
        """Number of steps that the run had when this command resumed it."""
        self._stopped_by: str | None = None
        """Name of what asked the run to end, such as "SIGINT"; None while nothing has."""
        self._run = self._new_run(None)
        """Current attempt. `run` replaces it if there is a checkpoint to go on from."""

    @reported_endpoint
    async def run(self) -> RunSummary:
        """Set everything up, train and close everything; again if the trainer dies.

        The summary is printed before the processes are stopped: nothing of it depends on them.

        Raises:
            Exception: whatever ended the run early, after the summary was printed and every
                process was stopped.
        """
        started = time.perf_counter()
        self._loop = asyncio.get_running_loop()
        drawing = asyncio.create_task(self._draw())
        notes = print_notes(self._console)
        try:
            failure = await self._run_to_the_end()
        except Exception as error:
            logger.exception("the run failed", extra=ENDS_THE_RUN)
            failure = error
        drawing.cancel()
        if isinstance(failure, ProcessLost):
            # The run was asked to stop before: otherwise another attempt would have followed.
            self._console.note(f"{failure}; what follows the last checkpoint is lost")
            failure = None
        stopped_by = self._stopped_by or self._run.ended_early
        if failure is not None and stopped_by is None:
            stopped_by = f"an error ({type(failure).__name__})"
        summary = self._run.summary(
            wall_time_s=time.perf_counter() - started,
            stopped_by=stopped_by,
            checkpoint=self._checkpoint,
        )
        summary.steps_before = self._steps_before
        self._console.summary(summary)
        faults = await self._run.close()
        notes.cancel()
        if failure is None and faults:
            failure = faults[0]
        if failure is not None:
            raise failure
        return summary

    @reported_endpoint
    async def request_stop(self, reason: str) -> None:
        """End the run after the step that is being taken, or at once during the set-up."""
        self._stopped_by = reason
        self._run.stop()

    def __supervise__(self, failure: Any) -> bool:  # noqa: ANN401 - Monarch's
        """Hear from Monarch that a process died. Return True: the controller runs on."""
        self._loop.call_soon_threadsafe(self._process_died, process_death(failure))
        return True

    def _process_died(self, death: ProcessDeath) -> None:
        self._run.fleet.supervisor.died(death)

    async def _run_to_the_end(self) -> BaseException | None:
        """Attempt the run until it ends by itself, is stopped or fails.

        Returns:
            What ended it early; None if it ended by itself or was stopped.
        """
        set_up_logging(self._context.run_dir, "controller")
        if self._checkpoint is not None:
            self._run = self._new_run(self._read(self._checkpoint))
        else:  # an earlier start may have left files of steps that no checkpoint has
            cut_back(self._context.run_dir, {})
        self._print_header()
        failure = await self._run_attempt()
        while isinstance(failure, ProcessLost) and self._stopped_by is None:
            await self._run.close()
            self._run = self._new_run(await self._state_after(failure))
            if self._stopped_by is not None:  # `request_stop` came meanwhile
                return None
            failure = await self._run_attempt()
        return failure

    def _new_run(self, resumed: Resumed | None) -> Run:
        return Run(self._context, resumed=resumed, init_from=self._init_from)

    async def _run_attempt(self) -> BaseException | None:
        """Run the current attempt to its end, and have it write its files to the end.

        Returns:
            What ended it early; None if it ended by itself or was stopped.
        """
        failure: BaseException | None = None
        try:
            await self._run.run()
        except asyncio.CancelledError as cancelled:
            failure = cancelled if self._stopped_by is None else None
        except Exception as error:  # noqa: BLE001 - whatever it is, the files are closed first
            failure = error
        faults = await self._run.settle()
        if isinstance(failure, ProcessLost) and self._run.writes_checkpoint:
            # `settle` has given up waiting for it, and the next attempt would begin without it.
            return RunError(
                f"{failure}, and the run can't go on: a checkpoint is still being written"
            )
        if failure is None and faults:
            failure = faults[0]
        return failure

    async def _state_after(self, lost: ProcessLost) -> Resumed | None:
        """Cut the run's files back to its newest checkpoint after its trainer died, and read that.

        Returns:
            The checkpoint; None if the run begins again because it has none.

        Raises:
            RunError: the trainer died too often, or no checkpoint is valid.
        """
        restart = self._context.restarts.count("trainer", lost.name, lost.cause)
        try:
            resumed = await asyncio.to_thread(self._newest)
        except RunError as error:
            raise RunError(f"{lost}, and the run can't go on: {error}") from error
        step = 0
        how = "begins again, for it has no checkpoint"
        if resumed is not None:
            step = resumed.state.step
            how = f"goes on from step {step}"
        steps_lost = self._run.steps_done - step
        plural = "" if steps_lost == 1 else "s"
        self._console.note(f"{lost}; the run {how}; {steps_lost} step{plural} lost ({restart})")
        return resumed

    def _newest(self) -> Resumed | None:
        """Return the newest valid checkpoint of the run; None if it has taken none.

        Blocks: it reads every file of the checkpoint.
        """
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
        """Keep the console up to date. An error ends that, and not the run."""
        try:
            while True:
                self._console.draw()
                await asyncio.sleep(REDRAW_S)
        except Exception as error:
            logger.exception("the status can't be drawn any more: %s", cause_of(error))

    def _print_header(self) -> None:
        config = self._context.config
        plan = self._context.plan
        parameters = f"{plan.sizes.parameters / 1e6:,.1f}M parameters"
        self._console.header(
            self._context.run_dir,
            config=self._config_name,
            model=f"{near(config.model.hf_assets_path)} ({parameters})",
            sizes={
                "steps": config.steps,
                "rollouts a step": plan.rollouts_per_step,
                "off-policy steps": config.max_offpolicy_steps,
                "trainer ranks": config.trainer.ranks,
                "generators": config.generator.replicas,
            },
        )
