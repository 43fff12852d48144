"""Restarts the supervised processes of a run when they end, as often as the config allows.

Such a process is a part: a generator, a hosted model's replica, a weight reader or a rollout worker. The supervisor spawns a
part on its host, sets it up, connects it, and then watches it. When its process ends, at whatever moment, its work goes
elsewhere at once, and the supervisor spawns the part again. The run ends when more processes of a part end than the config
allows. Clients of generators (``Replicas``) and the weight update (``WeightReaders``) are told of each part that comes or
goes.

``HangWatch`` notices processes that hang, says where, and kills them: from then on they are dead like others. A process hangs
in one of two ways. It does not answer: it is stopped, or its event loop is blocked. Or it answers, and its working thread has
been at one piece of work for too long: a step of the engine, a collective of the trainer. A pause of this process says
nothing about the others: when the whole run was suspended, or this event loop was blocked, all limits start from zero.
"""

import asyncio
import contextlib
import logging
import os
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import psutil
from monarch.actor import ProcMesh

from torchtitan.experiments.rl.compat.monarch import (
    ProcessDeath,
    ask,
    original,
    process_death_behind,
)
from torchtitan.experiments.rl.config.run_config import SupervisionConfig
from torchtitan.experiments.rl.errors import PeerGone, RunError, cause_of
from torchtitan.experiments.rl.generation.client import GeneratorClient
from torchtitan.experiments.rl.observability.console import Console
from torchtitan.experiments.rl.process.host import host_identity
from torchtitan.experiments.rl.process.lifetime import Lifetime, ProcessLost, Pulse
from torchtitan.experiments.rl.user_code.endpoint import STACK_SIGNAL, ProcessIdentity
from torchtitan.experiments.rl.weights.reader import Fetched

logger = logging.getLogger(__name__)
deaths_logger = logger.getChild("deaths")
"""Logger of deaths and hangs, which the report lists by this logger's name."""

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
        on_hang: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ):
        """``on_hang`` is called with a line for people. ``clock`` gives seconds."""
        self._config, self._on_hang, self._clock = config, on_hang, clock
        self._last = self._limits_start = clock()

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
                silent_s = now - max(asked, self._limits_start)
                stopped = is_stopped(life.pid)
                if silent_s > SILENT_S and not told and (stopped or not slow):
                    told = True
                    why = (
                        "it is stopped by a signal"
                        if stopped
                        else "its host is busy, stopped or out of reach"
                    )
                    self._on_hang(f"{life.name} has not answered for {silent_s:.0f} s: {why}")
                if silent_s > self._limit_s(slow and not stopped):
                    return (
                        f"{'stopped by a signal' if stopped else 'no answer'} for {silent_s:.0f} s",
                        slow,
                    )
        finally:
            answer.cancel()

    def _overdue(self, pulse: Pulse, now: float) -> tuple[str | None, bool]:
        seconds = min(pulse.seconds, now - self._limits_start)
        late = bool(pulse.doing) and seconds > self._limit_s(pulse.slow)
        return f"{pulse.doing} for {seconds:.0f} s" if late else None, pulse.slow

    def _limit_s(self, slow: bool) -> float:
        return self._config.slow_work_s if slow else self._config.stall_s

    def _now(self) -> float:
        """The time. Recognises that this process was paused."""
        now = self._clock()
        if now - self._last > PAUSE_S:
            logger.info(
                "this process was paused for %.0f s: the limits of the others start from zero",
                now - self._last,
            )
            self._limits_start = now
        self._last = now
        return now

    async def _kill(self, life: Lifetime, hang: str, stacks: str) -> None:
        text = await stacks_of(life, stacks)
        deaths_logger.info(
            "%s hangs: %s; its threads: %s", life.name, hang, text or "a stopped process can't say"
        )
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


T = TypeVar("T")
STOP_TIMEOUT_S = 60.0
"""For Monarch to clear away what is left of a process that has ended."""
DEATH_REPORTS_S = 15.0
"""Monarch reports a death on another host after some ten seconds, and its own actors of that process first, in any order."""


@dataclass(kw_only=True, slots=True)
class PartProcess:
    """One incarnation of a part."""

    procs: ProcMesh
    actor: Any
    """Of that process alone."""
    life: Lifetime


@dataclass(kw_only=True, slots=True, eq=False)
class Part:
    name: str
    """What people call it: "generator 1"."""
    spawn: Callable[[str], tuple[ProcMesh, Any]]
    """Spawns the process and the actor in it, which Monarch is to know by the name that it gets."""
    connect: Callable[[PartProcess], Awaitable[None]]
    """Proves that it is up to date, and has it take work."""
    disconnect: Callable[[], None]
    """Has it take no more work: what it was doing is done elsewhere, or when it is connected again."""
    set_up: Callable[[PartProcess], Awaitable[Any]] = lambda process: process.actor.setup.call_one()
    """Makes the actor ready to be connected."""
    host: int = 0
    """Where its processes run: as in ``Place``."""
    blocks: bool = False
    """User code may hold up its event loop."""
    process: PartProcess = field(init=False)
    """The incarnation that lives or lived last. The supervisor sets it when it starts the part."""
    spawned_as: str = field(default="", init=False)
    """The name by which Monarch knows that incarnation: the label and its number, "generator_1_2"."""

    @property
    def label(self) -> str:
        """The name in metrics and in Monarch: "generator_1"."""
        return re.sub(r"\W", "_", self.name).strip("_")


class Restarts:
    def __init__(self, config: SupervisionConfig, clock: Callable[[], float] = time.monotonic):
        """
        Args:
            clock: tells the time in seconds.
        """
        self.config = config
        self._clock = clock
        self.counts: Counter[str] = Counter()
        """How often each part was restarted, by its label in metrics."""
        self._spawned: Counter[str] = Counter()
        self._deaths: dict[str, list[tuple[float, str]]] = {}
        """When, and a sentence that says which process and why, by the label of the part; of the last ``window_s``."""

    def new_name(self, label: str) -> str:
        """Of the part's next process, with its number from 1 on. Monarch may report the death of an earlier one much later."""
        self._spawned[label] += 1
        return f"{label}_{self._spawned[label]}"

    def count(self, label: str, process: str, cause: str) -> str:
        """One more death of the part ``label``.

        Args:
            process: what people call the process that ended: "generator 1".

        Returns:
            How many of the restarts that are allowed this is, such as "1 of 3".

        Raises:
            RunError: it may not be restarted.
        """
        now, allowed = self._clock(), self.config.max_restarts
        died = f"{process} died: {cause}"
        deaths_logger.info("%s", died)
        before = [
            death for death in self._deaths.get(label, []) if death[0] > now - self.config.window_s
        ]
        deaths = self._deaths[label] = [*before, (now, died)]
        if len(deaths) > allowed:
            raise RunError(
                f"{'; '.join(died for _, died in deaths)} (supervision.max_restarts = {allowed})"
            )
        self.counts[label] += 1
        return f"{len(deaths)} of {allowed}"


class Supervisor:
    """``start`` each part, ``connect`` each, ``close`` before the parts are shut down."""

    def __init__(
        self,
        restarts: Restarts,
        console: Console,
        *,
        on_failure: Callable[[RunError], None],
    ):
        """
        Args:
            restarts: counts the deaths; a run that is built again goes on with the same.
            console: says which parts are being started, when a process hangs, when a part has died, and when it is back.
            on_failure: called with the error of a part that is not replaced.
        """
        self.restarts, self._console, self._on_failure = restarts, console, on_failure
        self._hangs = HangWatch(restarts.config, on_hang=console.note)
        self.parts: list[Part] = []
        self._beside: set[asyncio.Task[None]] = set()
        self._guarded: list[tuple[Lifetime, Any]] = []
        self._failed = asyncio.Event()
        self.failure: RunError | None = None
        """Why the run has to end."""
        self.lost: ProcessLost | None = None
        """The guarded process that ended first."""

    async def start(self, part: Part) -> Any:
        """Spawn a part and set it up; again if its process ends meanwhile. Returns what ``set_up`` returns.

        Raises:
            RunError: it ended too often.
            Exception: what ``set_up`` raises.
        """
        with self._console.waits.wait(f"{part.name} to start"):
            return await self._make(part, first=True)

    async def connect(self, part: Part) -> None:
        """Connect a part that was started, and from now on restart it when its process ends.

        Raises:
            RunError: it ended too often, or is not what it should be.
        """
        await self._connect(part)
        self._run_beside(self._keep(part))

    async def guard(self, name: str, actor: Any, mesh: Lifetime) -> None:
        """End the run, and ``mesh``, when the process of ``actor`` ends: without it the run is built again, or not at all.

        Returns when it is watched. With ``mesh`` every process of it that is guarded ends.

        Raises:
            ProcessLost: it has ended already.
        """
        life = Lifetime(name)
        self._guarded.append((life, actor))

        async def wait() -> None:
            cause = await life.ended()
            deaths_logger.info("%s died: %s", name, cause)
            lost = self._lose(ProcessLost(name, cause))
            mesh.end(f"{lost.name}: {lost.cause}")

        async def end_with_mesh() -> None:
            life.kill(
                f"ended with {await mesh.ended()}"
            )  # a rank alone waits for the others, and may write files meanwhile

        self._run_beside(wait())
        self._run_beside(end_with_mesh())
        try:
            await self._watch(actor, life)
        except ProcessLost as lost:
            self._lose(lost)
            raise

    def processes(self) -> list[tuple[Lifetime, Any]]:
        """Every process of a part or under guard, and its actor."""
        return [*self._guarded, *((part.process.life, part.process.actor) for part in self.parts)]

    async def unless_failed(self, work: Coroutine[Any, Any, T]) -> T:
        """What ``work`` returns or raises. It is cancelled when the run has to end: it may wait for a process that has ended.

        Raises:
            RunError: why the run has to end.
        """
        working, failed = asyncio.create_task(work), asyncio.create_task(self._failed.wait())
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
        """The run can't go on, for a reason that no part of it has."""
        logger.error("%s", error)
        self._fail(error)

    def _fail(self, error: RunError) -> None:
        self.failure = self.failure or error
        self._failed.set()
        self._on_failure(error)

    def died(self, death: ProcessDeath) -> None:
        """Monarch reports the death of an actor. That of a process which is not watched is learned here."""
        for part in self.parts:
            if death.actor == part.spawned_as:
                part.process.life.report(death.cause)

    async def explained(self, error: Exception) -> Exception:
        """``error``, or what names the process that has died if ``error`` may follow from that.

        A process is gone for its peers before it is seen to have ended: its files are closed first.
        """
        death = process_death_behind(error)
        if (
            death is not None
            or isinstance(original(error), PeerGone)
            or any(life.ending for life, _ in self._guarded)
        ):
            with suppress(TimeoutError):
                await asyncio.wait_for(self._failed.wait(), DEATH_REPORTS_S)
        if self.failure is not None:
            return self.failure
        return error if death is None else RunError(f"a process of the run died: {death}")

    async def close(self) -> None:
        """Restart nothing from now on. What lives goes on living."""
        for task in self._beside:
            task.cancel()
        await asyncio.gather(*self._beside, return_exceptions=True)
        for life, _ in self.processes():
            life.close()

    async def _make(self, part: Part, *, first: bool = False) -> Any:
        """Spawn the part and set it up, until that succeeds. What the first set-up raises is raised."""
        while True:
            part.spawned_as = self.restarts.new_name(part.label)
            try:
                procs, actor = part.spawn(part.spawned_as)
                process = part.process = PartProcess(
                    procs=procs, actor=actor, life=Lifetime(part.name)
                )
                if part not in self.parts:
                    self.parts.append(part)
                await self._watch(actor, process.life, blocks=part.blocks)
                return await process.life.call(part.set_up(process))
            except ProcessLost as lost:
                self._count(part, lost.cause)
            except Exception as error:
                if first:
                    raise
                logger.exception("setting %s up again", part.name)
                part.process.life.kill(cause_of(error))
                self._count(part, cause_of(error))

    async def _watch(self, actor: Any, life: Lifetime, *, blocks: bool = False) -> None:
        """Have ``life`` end when the actor's process does, at once where it is on this host, or when it hangs."""
        identity: ProcessIdentity = await life.call(actor.identity.call_one())
        if identity.host == host_identity():
            life.watch(identity.pid, identity.output)
        if self._console.notes is not None:
            await life.call(actor.send_notes_to.call_one(self._console.notes))
        self._run_beside(self._hangs.watch(actor, life, stacks=identity.stacks, blocks=blocks))

    async def _connect(self, part: Part) -> None:
        while True:
            try:
                return await part.process.life.during(part.connect(part.process))
            except ProcessLost as lost:
                await self._replace(part, lost.cause)

    async def _keep(self, part: Part) -> None:
        """Restart the part whenever its process has ended."""
        try:
            while True:
                await self._replace(part, await part.process.life.ended())
                await self._connect(part)
                self._console.note(f"{part.name} is back")
        except Exception as error:
            explained = await self.explained(error)
            if not isinstance(explained, RunError):
                logger.exception("making %s again", part.name)
                explained = RunError(f"{part.name} can't be made again: {cause_of(error)}")
            self._fail(explained)

    async def _replace(self, part: Part, cause: str) -> None:
        """The process of a part has ended for ``cause``: spawn and set up another."""
        part.disconnect()
        self._count(part, cause)
        await self._make(part)

    def _lose(self, lost: ProcessLost) -> ProcessLost:
        """Returns the process that ended first."""
        if self.lost is None and lost.cause.startswith(HUNG):
            # Of ranks that hang in a collective one may be stopped, and the others wait for it.
            stopped = [life.name for life, _ in self._guarded if is_stopped(life.pid)]
            lost = ProcessLost(stopped[0], f"{HUNG}stopped by a signal") if stopped else lost
        self.lost = self.lost or lost
        self._fail(self.lost)
        return self.lost

    def _count(self, part: Part, cause: str) -> None:
        """One more death of the part. Monarch is to forget the process.

        Raises:
            RunError: it may not be restarted.
        """
        which = self.restarts.count(part.label, part.name, cause)
        self._console.note(f"{part.name} died: {cause}; made again ({which})")
        self._run_beside(self._clear_away(part.process))

    async def _clear_away(self, process: PartProcess) -> None:
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await process.procs.stop()
        except Exception as error:  # it is dead all the same
            logger.info("clearing away %s: %s", process.life.name, error)

    def _run_beside(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._beside.add(task)
        task.add_done_callback(self._beside.discard)


class Replicas:
    """Of the policy and of each hosted model, by the name of the model; the policy's is ""."""

    def __init__(self, clients: Mapping[str, GeneratorClient]):
        self._clients = clients
        self._live: dict[tuple[str, int], PartProcess] = {}
        self._workers: list[PartProcess] = []

    async def admit(self, model: str, index: int, process: PartProcess) -> None:
        """This process's client sends requests to a replica from now on. Then ``announce`` it.

        Raises:
            ProcessLost: its process ended first.
        """
        await self._clients[model].admit(index, process.actor, process.life)

    async def announce(self, model: str, index: int, process: PartProcess) -> None:
        """The workers' clients send requests to it too."""
        self._live[model, index] = process
        for worker in list(self._workers):
            with suppress(ProcessLost):  # of the worker; the next one is told when it starts
                await worker.life.call(worker.actor.admit.call_one(model, index, process.actor))

    def lose(self, model: str, index: int) -> None:
        """A replica is gone, for every client."""
        self._live.pop((model, index), None)
        self._clients[model].lose(index)
        for worker in self._workers:
            worker.actor.lose.broadcast(model, index)

    async def tell(self, worker: PartProcess) -> None:
        """A worker is there: it learns of the replicas that live, and of all changes from now on."""
        self._workers.append(worker)
        for (model, index), process in list(self._live.items()):
            await worker.actor.admit.call_one(model, index, process.actor)

    def forget(self, worker: PartProcess | None) -> None:
        self._workers = [other for other in self._workers if other is not worker]


def first_generators(trainer_hosts: set[str], generator_hosts: Sequence[str]) -> list[int]:
    """Of each host that needs a reader, the first replica there: not all that the trainer holds is in that host's memory."""
    return [
        index
        for index, host in enumerate(generator_hosts)
        if trainer_hosts != {host} and host not in generator_hosts[:index]
    ]


READERS_AT_ONCE = 4
"""That read a version from one host. By RDMA they share its network, and more would take as much longer. By TCP a reader is
slower than that: four take no longer than one."""


class WeightReaders:
    """Implements weights.sync.HostCopies over parts that may be lost and restarted.

    Each host reads from one that has the version, and then others read from it. With one trainer host::

        trainer's host   -> 4 hosts        60 hosts are reached in three rounds: 4, then 20, then 100 at most
        these and it     -> 4 hosts each
    """

    def __init__(self, hosts: Iterable[str], trainer_hosts: int = 1):
        """
        Args:
            hosts: their names, as people know them.
            trainer_hosts: that divide the trainer. Each reader reads its part from each.
        """
        self._ready = {host: asyncio.Event() for host in hosts}
        self._trainers_readers = READERS_AT_ONCE * trainer_hosts
        self._processes: dict[str, PartProcess] = {}
        self._fetched: Counter[str] = Counter()
        self.lost = 0

    async def admit(self, host: str, process: PartProcess) -> None:
        """``Part.connect`` of a host's reader."""
        self._processes[host] = process
        self._ready[host].set()

    def lose(self, host: str) -> None:
        """``Part.disconnect``. What it held is gone, except for engines that have mapped it."""
        self._ready[host].clear()
        self.lost += 1

    async def fetch(self, version: int) -> None:
        """See HostCopies. Waits for a reader that is restarting, and asks it again.

        Raises:
            RunError: a trainer host can't be read.
        """
        sources: asyncio.Queue[tuple[str, Lifetime]] = asyncio.Queue()
        """Hosts that have the version, once for each reader that may read from them now; "": the trainer's."""
        for _ in range(self._trainers_readers):
            sources.put_nowait(("", Lifetime("trainer")))  # whose end its own supervision sees
        await asyncio.gather(*(self._fetch(host, version, sources) for host in self._ready))

    def take_fetched_bytes(self) -> dict[str, int]:
        taken, self._fetched = dict.fromkeys(self._ready, 0) | self._fetched, Counter()
        return taken

    async def _fetch(
        self, host: str, version: int, sources: "asyncio.Queue[tuple[str, Lifetime]]"
    ) -> None:
        serves = len(self._ready) > self._trainers_readers
        while True:
            await self._ready[host].wait()
            process = self._processes[host]
            source, life = await sources.get()
            if life.cause is not None:
                continue
            try:
                answer = life.during(ask(process.actor.fetch, version, source, serves))
                fetched: Fetched = await process.life.call(answer)
            except RunError:
                if process.life.cause is not None:
                    sources.put_nowait((source, life))
                    if self._processes[host] is process:
                        self._ready[host].clear()  # before its supervisor learns of it
                elif not source:
                    raise
                continue  # a reader that can't be read is none to read from
            sources.put_nowait((source, life))
            if fetched.source:
                for _ in range(READERS_AT_ONCE):
                    sources.put_nowait((fetched.source, process.life))
            self._fetched[host] += fetched.nbytes
            if fetched.nbytes:
                taken = f"{fetched.nbytes} bytes in {fetched.seconds:.2f} s from {source or 'the trainer'}"
                logger.info("%s fetched version %d: %s", host, version, taken)
            return
