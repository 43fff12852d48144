"""Fills the roles of a run with processes, and fills a role again when its process dies.

When a process dies, at whatever moment, its role is disconnected at once, so that its work goes
elsewhere, and the role is filled again. The run ends when more processes of a role die than the
config allows. A process under guard, a rank of the trainer, is not replaced: the run ends with it,
and may go on from a checkpoint.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from torchtitan.experiments.rl.compat.monarch import (
    ProcessDeath,
    original,
    process_death_behind,
)
from torchtitan.experiments.rl.errors import PeerGone, RunError, cause_of
from torchtitan.experiments.rl.fleet.hangs import HUNG, HangWatch, is_stopped
from torchtitan.experiments.rl.fleet.restarts import Restarts, deaths_logger
from torchtitan.experiments.rl.fleet.role import Role, SpawnedProcess
from torchtitan.experiments.rl.observability.console import Console
from torchtitan.experiments.rl.process.actor import ProcessIdentity
from torchtitan.experiments.rl.process.host import host_identity
from torchtitan.experiments.rl.process.lifetime import Lifetime, ProcessLost

logger = logging.getLogger(__name__)
T = TypeVar("T")

STOP_TIMEOUT_S = 60.0
"""Seconds that Monarch may take to clear away what is left of a process that has ended."""
DEATH_REPORTS_S = 15.0
"""Seconds to wait for the report of a death.

Monarch reports one on another host after some ten seconds, and its own actors of that process
first, in any order.
"""


IDENTIFY_S = 15.0
"""Seconds after which a process that is being started is asked once more who it is."""


class Supervisor:
    """Call `start` and `connect` for each role, and `close` before the processes are shut down."""

    def __init__(
        self,
        restarts: Restarts,
        console: Console,
        *,
        on_failure: Callable[[RunError], None],
    ):
        """Supervise nothing yet.

        Args:
            restarts: counts deaths. A run that is rebuilt goes on with the same.
            console: prints which roles are being started, which process hangs or died, and which
                is back.
            on_failure: called with the error of a role that is not filled again.
        """
        self.restarts = restarts
        self.roles: list[Role] = []
        """Roles that were started, in order."""
        self.failure: RunError | None = None
        """Reason why the run has to end."""
        self.lost: ProcessLost | None = None
        """Process under guard that died first."""
        self._console = console
        self._on_failure = on_failure
        self._hangs = HangWatch(restarts.config, on_hang=console.note)
        self._watches: set[asyncio.Task[None]] = set()
        self._guarded: list[tuple[Lifetime, Any]] = []
        self._failed = asyncio.Event()

    async def start(self, role: Role) -> Any:  # noqa: ANN401 - what the role's ``set_up`` returns
        """Spawn and set up a process for a role; again if it dies meanwhile.

        Returns:
            What the role's ``set_up`` returns.

        Raises:
            RunError: too many processes of the role died.
            Exception: whatever ``set_up`` raises.
        """
        with self._console.waits.wait(f"{role.name} to start"):
            return await self._fill(role, first=True)

    async def connect(self, role: Role) -> None:
        """Connect a role that was started, and from now on fill it again when its process dies.

        Raises:
            RunError: too many processes of the role died, or one is not what it should be.
        """
        await self._connect(role)
        self._run_beside(self._keep_filled(role))

    async def guard(self, name: str, actor: Any, mesh: Lifetime) -> None:  # noqa: ANN401
        """End the run when the process of ``actor`` dies. Return once it is watched.

            a rank dies  ->  the run fails, and its mesh ends  ->  the other ranks are killed

        Args:
            name: name of the process, for people.
            mesh: lifetime of the mesh that it belongs to. It ends with the first process of the
                mesh that dies, and all others are killed then.

        Raises:
            ProcessLost: the process has died already.
        """
        life = Lifetime(name)
        self._guarded.append((life, actor))
        self._run_beside(self._end_together(life, mesh))
        try:
            await self._watch(actor, life)
        except ProcessLost as lost:
            self._lose(lost)
            raise

    def processes(self) -> list[tuple[Lifetime, Any]]:
        """Return lifetime and actor of every process that fills a role or is under guard."""
        filled = [(role.process.life, role.process.actor) for role in self.roles]
        return [*self._guarded, *filled]

    async def unless_failed(self, work: Coroutine[Any, Any, T]) -> T:
        """Await ``work``, and cancel it when the run has to end: it may wait for a dead process.

        Raises:
            RunError: the run has to end; says why.
            Exception: whatever ``work`` raises.
        """
        working = asyncio.create_task(work)
        failed = asyncio.create_task(self._failed.wait())
        try:
            await asyncio.wait({working, failed}, return_when=asyncio.FIRST_COMPLETED)
            succeeded = working.done() and not working.cancelled() and working.exception() is None
            if self.failure is not None and not succeeded:
                raise self.failure
            return working.result()
        finally:
            failed.cancel()
            if not working.done():
                working.cancel()
                await asyncio.wait({working}, timeout=STOP_TIMEOUT_S)

    def end_run(self, error: RunError) -> None:
        """End the run for a reason that lies in no process of it."""
        logger.error("%s", error)
        self._fail(error)

    def died(self, death: ProcessDeath) -> None:
        """Handle Monarch's report of a death: the first news of one on another host."""
        for role in self.roles:
            if death.actor == role.spawned_as:
                role.process.life.report(death.cause)

    async def explained(self, error: Exception) -> Exception:
        """Return the death that ``error`` may follow from, or ``error`` if there is none.

        A process is gone for its peers before it is seen to have ended: its files are closed first.
        """
        death = process_death_behind(error)
        peer_gone = isinstance(original(error), PeerGone)
        if death is not None or peer_gone or any(life.ending for life, _ in self._guarded):
            with suppress(TimeoutError):
                await asyncio.wait_for(self._failed.wait(), DEATH_REPORTS_S)
        if self.failure is not None:
            return self.failure
        return error if death is None else RunError(f"a process of the run died: {death}")

    async def close(self) -> None:
        """Stop supervising. Running processes are left alone."""
        for watch in self._watches:
            watch.cancel()
        await asyncio.gather(*self._watches, return_exceptions=True)
        for life, _ in self.processes():
            life.close()

    async def _fill(self, role: Role, *, first: bool = False) -> Any:  # noqa: ANN401
        """Spawn a process for a role and set it up, until that succeeds.

        Args:
            first: True when the run starts, so that an error of the set-up is the run's. Later it
                counts as a death of the process.
        """
        while True:
            try:
                process = self._spawn(role)
            except Exception as error:
                if first:
                    raise
                logger.exception("spawning %s again", role.name)
                self._count(role, cause_of(error))
                continue
            try:
                await self._watch(process.actor, process.life, runs_user_code=role.runs_user_code)
                return await process.life.call(role.set_up(process))
            except ProcessLost as lost:
                self._bury(role, lost.cause)
            except Exception as error:
                if first:
                    raise
                logger.exception("setting %s up again", role.name)
                process.life.kill(cause_of(error))
                self._bury(role, cause_of(error))

    def _spawn(self, role: Role) -> SpawnedProcess:
        role.spawned_as = self.restarts.new_name(role.label)
        procs, actor = role.spawn(role.spawned_as)
        role.process = SpawnedProcess(procs=procs, actor=actor, life=Lifetime(role.name))
        if role not in self.roles:
            self.roles.append(role)
        return role.process

    async def _watch(self, actor: Any, life: Lifetime, *, runs_user_code: bool = False) -> None:  # noqa: ANN401
        """End ``life`` when the actor's process dies, at once if it is on this host, or hangs."""
        identity = await self._identify(actor, life)
        if identity.host == host_identity():
            life.watch(identity.pid, identity.output)
        if self._console.notes is not None:
            await life.call(actor.send_notes_to.call_one(self._console.notes))
        self._run_beside(
            self._hangs.watch(actor, life, stacks=identity.stacks, blocks=runs_user_code)
        )

    async def _identify(self, actor: Any, life: Lifetime) -> ProcessIdentity:  # noqa: ANN401
        """Return who answers as the actor, however long its process takes to start.

        Monarch 0.7.0 drops a call to a process that is killed in the milliseconds in which its
        actor is made, and reports the death under the name of an actor of its own. A later call to
        the same process is refused at once, so a process that is silent is asked again.

        Raises:
            ProcessLost: the process died.
        """
        asked = [asyncio.ensure_future(life.call(actor.identity.call_one()))]
        try:
            while True:
                answered, _ = await asyncio.wait(
                    asked, timeout=IDENTIFY_S, return_when=asyncio.FIRST_COMPLETED
                )
                if asked[0] in answered:
                    return asked[0].result()
                for answer in answered:
                    if answer.exception() is None:
                        return answer.result()
                    life.end("its process ended while it was started")
                    raise ProcessLost(life.name, await life.ended()) from answer.exception()
                asked.append(asyncio.ensure_future(life.call(actor.identity.call_one())))
        finally:
            for answer in asked:
                answer.cancel()

    async def _connect(self, role: Role) -> None:
        """Connect the process of a role, or the one that takes its place if it dies meanwhile."""
        while True:
            life = role.process.life
            try:
                await life.during(role.connect(role.process))
                return
            except ProcessLost as lost:
                await self._fill_again(role, lost.cause)
            except Exception as error:
                if process_death_behind(error) is None:
                    raise
                # A call to a process on another host is the first to see its death, and does not
                # say whose it was: `connect` calls the trainer too.
                with suppress(TimeoutError):
                    await asyncio.wait_for(life.ended(), DEATH_REPORTS_S)
                if life.cause is None:
                    raise
                await self._fill_again(role, life.cause)

    async def _keep_filled(self, role: Role) -> None:
        """Fill the role again whenever its process has died."""
        try:
            while True:
                await self._fill_again(role, await role.process.life.ended())
                await self._connect(role)
                self._console.note(f"{role.name} is back")
        except Exception as error:  # noqa: BLE001 - whatever it is, the run ends with it
            explained = await self.explained(error)
            if not isinstance(explained, RunError):
                logger.exception("making %s again", role.name)
                explained = RunError(f"{role.name} can't be made again: {cause_of(error)}")
            self._fail(explained)

    async def _fill_again(self, role: Role, cause: str) -> None:
        """Replace the process of a role, which died of ``cause``."""
        self._bury(role, cause)
        await self._fill(role)

    def _bury(self, role: Role, cause: str) -> None:
        """Take work away from the dead process of a role, and have Monarch forget it.

        Raises:
            RunError: the role may not be filled again.
        """
        role.disconnect()
        self._count(role, cause)
        self._run_beside(self._clear_away(role.process))

    def _count(self, role: Role, cause: str) -> None:
        """Count one more death of a role.

        Raises:
            RunError: the role may not be filled again.
        """
        which = self.restarts.count(role.label, role.name, cause)
        self._console.note(f"{role.name} died: {cause}; made again ({which})")

    async def _clear_away(self, process: SpawnedProcess) -> None:
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await process.procs.stop()
        except Exception as error:  # noqa: BLE001 - the process is dead all the same
            logger.info("clearing away %s: %s", process.life.name, error)

    async def _end_together(self, life: Lifetime, mesh: Lifetime) -> None:
        """Kill a process when its mesh ends, and end the mesh and the run when the process dies."""
        with suppress(ProcessLost):  # it is the first of the mesh to die
            cause = await life.during(mesh.ended())
            # A rank alone waits for the others, and may write files meanwhile.
            life.kill(f"ended with {cause}")
        cause = await life.ended()
        deaths_logger.info("%s died: %s", life.name, cause)
        first = self._lose(ProcessLost(life.name, cause))
        mesh.end(f"{first.name}: {first.cause}")

    def _lose(self, lost: ProcessLost) -> ProcessLost:
        """End the run because a process under guard died.

        Returns:
            The process that died first.
        """
        if self.lost is None and lost.cause.startswith(HUNG):
            # Of ranks that hang in a collective one may be stopped, and the others wait for it.
            stopped = [life.name for life, _ in self._guarded if is_stopped(life.pid)]
            if stopped:
                lost = ProcessLost(stopped[0], f"{HUNG}stopped by a signal")
        if self.lost is None:
            self.lost = lost
        self._fail(self.lost)
        return self.lost

    def _fail(self, error: RunError) -> None:
        if self.failure is None:
            self.failure = error
        self._failed.set()
        self._on_failure(error)

    def _run_beside(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._watches.add(task)
        task.add_done_callback(self._watches.discard)
