"""Agents as tasks: any program that speaks to a model over HTTP, as OpenAI's or Anthropic's clients do.

class Solver(AgentTask):
    async def run_agent(self, sample, endpoint):
        client = endpoint.client()
        ...
        return answer

task = Solver.Config(dataset=..., rubric=..., algorithm=GRPO.Config())
task = agent_command_task("rows.jsonl", ["python", "agent.py"], reward)
"""

import asyncio
import contextlib
import functools
import json
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, BinaryIO
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from annotated_types import MinLen

from torchtitan.experiments.rl.algorithms.base import Algorithm
from torchtitan.experiments.rl.algorithms.grpo import GRPO
from torchtitan.experiments.rl.ask.call import ask
from torchtitan.experiments.rl.bounds import Changeable, Cure, NonEmptyStr, PositiveInt
from torchtitan.experiments.rl.configurable import BuildContext
from torchtitan.experiments.rl.data.dataset import Dataset
from torchtitan.experiments.rl.data.rows import RowDataset
from torchtitan.experiments.rl.envs.prompt import GroupPrompts
from torchtitan.experiments.rl.errors import ConfigError, RunError, UserCodeError
from torchtitan.experiments.rl.gateway.request import WISHES
from torchtitan.experiments.rl.gateway.server import Endpoint, Gateway, gateway_at
from torchtitan.experiments.rl.gateway.session import AUXILIARY, POLICY, AgentRollout, Sampler
from torchtitan.experiments.rl.generation.references import ModelReference
from torchtitan.experiments.rl.printable import shown
from torchtitan.experiments.rl.process import foreign
from torchtitan.experiments.rl.rollouts.json_values import json_value
from torchtitan.experiments.rl.rollouts.policy import ModelClient, PolicyClient, PolicySession
from torchtitan.experiments.rl.rollouts.types import DataSample, RolloutGroup, RolloutStatus
from torchtitan.experiments.rl.rubrics.rubric import RewardFn
from torchtitan.experiments.rl.tasks.questions import fill, row_task
from torchtitan.experiments.rl.tasks.task import Task

logger = logging.getLogger(__name__)

ANY_ADDRESS = "0.0.0.0"


class AgentTask(Task):
    """Subclass it and define ``run_agent``.

    ``env.max_turns`` is how many answers a rollout may have, ``env.max_rollout_tokens`` how long each of its conversations may
    be, ``env.rollout_timeout_s`` how long it may take.
    """

    in_lockstep = False

    @dataclass(kw_only=True, slots=True)
    class Config(Task.Config):
        algorithm: Algorithm.Config = field(default_factory=GRPO.Config)
        dataset: Dataset.Config = field(default_factory=RowDataset.Config)
        max_sampled_tokens: PositiveInt | None = None
        """That all calls of a rollout may sample together; None: as many as its calls give."""
        models: dict[str, str | ModelReference] = field(default_factory=dict)
        """What the names of models that the agent asks for stand for: "policy"; "auxiliary", the policy in calls that are not
        trained; or a frozen model. A name that is not here is the policy."""
        noise: dict[str, str] = field(default_factory=dict)
        """Regular expressions by name. What one matches in a system message is left out before anything else is done with it: a
        line that changes with every call would make each call another conversation."""
        refused_fields: list[str] = field(default_factory=list)
        """Fields that a request is refused for, of those that are only wishes otherwise, such as "response_format" and
        "tool_choice": they ask for what a grammar or another prompt would give (WISHES in gateway/request.py)."""
        listen: NonEmptyStr = "127.0.0.1"
        """Address that agents reach the model at. "0.0.0.0" is every address of the host, for agents elsewhere: who has a
        rollout's key may use it."""

        def validate(self, *, field: str, policy_path: str | None = None) -> None:
            super(AgentTask.Config, self).validate(field=field, policy_path=policy_path)
            for name, stands_for in self.models.items():
                if isinstance(stands_for, ModelReference):
                    stands_for.validate(field=f"{field}.models.{name}")
                elif stands_for not in (POLICY, AUXILIARY):
                    cure = f'want "{POLICY}", "{AUXILIARY}" (the policy, not trained), a FrozenModel or a HostedModel'
                    raise ConfigError(f"{field}.models.{name}", stands_for, cure)
            for name in self.refused_fields:
                if name not in WISHES:
                    raise ConfigError(
                        f"{field}.refused_fields", name, f"want some of {', '.join(WISHES)}"
                    )
            for name, pattern in self.noise.items():
                try:
                    re.compile(pattern)
                except re.error as error:
                    raise ConfigError(
                        f"{field}.noise.{name}", pattern, f"no regular expression: {error}"
                    ) from None

    config: Config

    def __init__(self, config: Config, *, name: str, context: BuildContext):
        if type(self).run_agent is AgentTask.run_agent:
            raise TypeError(
                f"{type(self).__name__} runs no agent: define run_agent(sample, endpoint)"
            )
        super().__init__(config, name=name, context=context)
        self._gateway: Gateway | None = None
        self._frozen: dict[str, ModelClient] = {}

    async def run_agent(self, sample: DataSample, endpoint: Endpoint) -> Any:
        """One rollout, from its example to what the agent answers: reward functions ``fn(answer, example)`` get it. None: they
        get the text of the last turn. What it raises makes the rollout an ERROR. A plain function runs in a thread."""
        raise NotImplementedError(f"{type(self).__name__}.run_agent")

    async def setup(self, policy: PolicyClient) -> None:
        """See Task. Starts the server where no other task of this process has."""
        await super().setup(policy)
        models = self.config.models.items()
        self._frozen = {
            name: policy.frozen(model)
            for name, model in models
            if isinstance(model, ModelReference)
        }
        gateway = gateway_at(self.config.listen)
        try:
            await gateway.acquire()
        except OSError as error:
            cure = 'want an address of this host, such as "127.0.0.1", or "0.0.0.0" for all of them'
            raise RunError(
                f"tasks.{self.name}.listen = {self.config.listen!r}: {error}; {cure}"
            ) from error
        self._gateway = gateway

    async def close(self) -> None:
        """See Task."""
        gateway, self._gateway = self._gateway, None
        if gateway is not None:
            await gateway.release()

    async def make_envs(self, sample: DataSample, n: int) -> list[Any]:
        """One rollout each, of which the gateway fills the turns."""
        config, group = self.config, GroupPrompts()
        models = {
            name: name if isinstance(model, ModelReference) else model
            for name, model in config.models.items()
        }
        return [
            AgentRollout(
                sample,
                renderer=self.renderer,
                config=config.env,
                max_sampled_tokens=config.max_sampled_tokens,
                models=models,
                frozen=functools.partial(self._frozen_session, sample),
                noise=config.noise,
                group=group,
                refused_fields=config.refused_fields,
            )
            for _ in range(n)
        ]

    async def run_rollout(self, env: Any, policy: Any) -> None:
        """Run the agent, with a key that opens this rollout alone, until it returns."""
        rollout: AgentRollout = env
        sampler: Sampler = policy
        assert self._gateway is not None, "the task is set up"
        gateway = self._gateway
        rollout.open(sampler)
        name = socket.gethostname() if self.config.listen == ANY_ADDRESS else None
        endpoint = gateway.admit(rollout, name=name)
        failure = None
        try:
            rollout.answer = await ask(self.run_agent, rollout.sample, endpoint, timeout_s=None)
        except UserCodeError as error:
            failure = error
        finally:
            gateway.forget(endpoint.key)
        rollout.ended(failure)
        if rollout.status is RolloutStatus.ERROR and not rollout.was_asked:
            rollout.error = f"{rollout.error}{_proxy_in_the_way(endpoint.url)}"

    async def score_rewards(self, group: RolloutGroup) -> None:
        """See Task. What agents returned may be anything; from then on it is what JSON holds of it."""
        await super().score_rewards(group)
        for rollout in group.rollouts:
            answer = rollout.answer
            if isinstance(answer, CommandResult):
                answer = asdict(answer)
            rollout.amend(answer=json_value(answer))

    def _frozen_session(self, sample: DataSample, name: str, seed: int) -> PolicySession:
        return self._frozen[name].session(
            rollout_id=f"{self.name}/{sample.sample_id}/0",
            seed=seed,
            sampling=self.config.sampling,
            stop_token_ids=self.renderer.get_stop_token_ids(),
        )


def _proxy_in_the_way(url: str) -> str:
    """Return the end of an error that names the proxy which clients of this process ask for the URL; "" if there is none."""
    host = str(urlsplit(url).hostname)
    proxies = getproxies()
    proxy = proxies.get("http") or proxies.get("all")
    if proxy is None or proxy_bypass(host):
        return ""
    return f"; its calls may have gone to the proxy of HTTP_PROXY: use endpoint.client(), or add {host} to NO_PROXY"


KEPT_OUTPUT = 16_384
"""Characters of a command's output that are kept, from its end; and so many of its errors."""
END_S = 0.5
"""What a command has to end by itself after SIGTERM: `docker run` hands it on to its container."""


@dataclass(kw_only=True, slots=True, frozen=True)
class CommandResult:
    """What a reward function gets of a command: ``fn(result, row)``."""

    folder: Path
    """Where it ran, as it left it. Removed when the rollout has been scored."""
    exit_code: int
    """Below 0: the signal that ended it."""
    output: str
    """The end of what it printed."""
    errors: str
    """The end of what it printed to stderr."""


class AgentCommandTask(AgentTask):
    """A command that runs in a folder made from the row.

    The folder has ``row.json`` (an example that is no row is its "input") and the files of the row's column "files", by path.
    The environment has the endpoint, the task's ``variables`` and those of the row's column "variables". The command's
    processes end with the rollout, and with the process that runs it.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(AgentTask.Config):
        command: Annotated[list[str], MinLen(1), Cure('write ["python", "agent.py"]')]
        """In each part {column} stands for the row's value."""
        variables: dict[str, str] = field(default_factory=dict)
        check_exit: bool = True
        """Whether a rollout is an ERROR where the command's exit code is not 0. False: reward functions see the code."""
        max_processes: Changeable[PositiveInt] = 32
        """Commands that run at once in a process; other rollouts wait."""

        def validate(self, *, field: str, policy_path: str | None = None) -> None:
            super(AgentCommandTask.Config, self).validate(field=field, policy_path=policy_path)
            program = self.command[0]
            if not shutil.which(program, path=_path()):
                raise ConfigError(
                    f"{field}.command",
                    program,
                    "no such program on PATH: install it, or give its path",
                )

    config: Config

    def __init__(self, config: Config, *, name: str, context: BuildContext):
        super().__init__(config, name=name, context=context)
        self._places = asyncio.Semaphore(config.max_processes)
        self._folders: set[Path] = set()
        self._started_in = Path.cwd()
        self._temporary = tempfile.gettempdir()  # of the run, and removed with it

    async def run_agent(self, sample: DataSample, endpoint: Endpoint) -> CommandResult:
        """See AgentTask."""
        row = (
            sample.env_input if isinstance(sample.env_input, dict) else {"input": sample.env_input}
        )
        async with self._places:
            folder = await asyncio.to_thread(_make_folder, row, self._temporary)
            self._folders.add(folder)
            result = None
            try:
                variables = endpoint.variables() | self.config.variables | _texts(row, "variables")
                # A script is named from where the run was started, and runs in the folder.
                command = [self._script(fill(part, row), folder) for part in self.config.command]
                result = await _run_command(command, folder, variables)
                if result.exit_code and self.config.check_exit:
                    last = (result.errors or result.output).strip()[-300:]
                    raise RuntimeError(
                        f"{self.config.command[0]} exited with {result.exit_code}: {last}"
                    )
                return result
            except BaseException:
                await self._remove(folder)
                raise

    def _script(self, part: str, folder: Path) -> str:
        named = self._started_in / part
        return (
            str(named)
            if "/" not in part[:1] and named.is_file() and not (folder / part).exists()
            else part
        )

    async def score_rewards(self, group: RolloutGroup) -> None:
        """See Task. The folders are removed then."""
        results = [
            rollout.answer
            for rollout in group.rollouts
            if isinstance(rollout.answer, CommandResult)
        ]
        try:
            await super().score_rewards(group)
        finally:
            for result in results:
                await self._remove(result.folder)

    async def close(self) -> None:
        """See Task."""
        for folder in list(self._folders):
            await self._remove(folder)
        await super().close()

    async def _remove(self, folder: Path) -> None:
        self._folders.discard(folder)
        await asyncio.to_thread(_remove_folder, folder)


def agent_command_task(
    data: Any, command: list[str], *reward_fns: Callable[..., Any] | RewardFn, **fields: Any
) -> AgentCommandTask.Config:
    """The config of an AgentCommandTask.

    Args:
        data: as for ``row_task``, also ``validation`` and ``split`` among the fields.
        command: such as ``["python", "agent.py"]``; a script's path is from where the run is started.
        reward_fns: functions ``fn(result, row)`` of a CommandResult, or RewardFn.
        fields: of AgentCommandTask.Config, such as ``group_size``.

    Raises:
        ConfigError: the data is none of these.
    """
    return row_task(AgentCommandTask.Config, data, *reward_fns, command=command, **fields)


def _path() -> str:
    """Where commands are looked for: ``python`` is the run's own."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def _make_folder(row: dict[str, Any], parent: str) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="agent-", dir=parent))
    try:
        (folder / "row.json").write_text(json.dumps(row, default=str))
        for name, text in _texts(row, "files").items():
            file = (folder / name).resolve()
            if not file.is_relative_to(folder.resolve()):
                raise ValueError(f"files: {name!r} is outside the command's folder")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
    except BaseException:
        _remove_folder(folder)
        raise
    return folder


def _texts(row: dict[str, Any], column: str) -> dict[str, str]:
    """Raises TypeError: they are no texts by name."""
    texts = row.get(column) or {}
    if not isinstance(texts, dict) or not all(
        isinstance(text, str | int | float) for text in texts.values()
    ):
        raise TypeError(
            f"the row's column {column!r} is {shown(texts)}, want texts by name, or nothing"
        )
    return {name: str(text) for name, text in texts.items()}


def _remove_folder(folder: Path) -> None:
    """Also where a folder in it was made read-only, as Go does with its modules."""
    shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():
        subprocess.run(
            ["chmod", "-R", "u+rwx", str(folder)], stderr=subprocess.DEVNULL, check=False
        )  # follows no link
        shutil.rmtree(folder, ignore_errors=True)
        if folder.exists():
            logger.warning(
                "%s can't be removed: what the command left in it is not the run's", folder
            )


async def _run_command(
    command: list[str], folder: Path, variables: dict[str, str]
) -> CommandResult:
    """Run it to its end; every process that it has started ends with it, and with this process, however that ends."""
    inherited = {name: os.environ[name] for name in foreign.INHERITED if name in os.environ}
    places = {"PATH": _path(), "HOME": str(folder), "TMPDIR": str(folder)}
    mark = await asyncio.to_thread(foreign.new_mark)
    async with _opened_pipe() as (stdout, output_end), _opened_pipe() as (stderr, errors_end):
        with output_end, errors_end:
            process = await asyncio.create_subprocess_exec(
                *foreign.marked(command, mark),
                cwd=folder,
                env=inherited | places | variables | foreign.variables_of(mark),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output_end,
                stderr=errors_end,
                start_new_session=True,
            )
        ends = [asyncio.create_task(_end_of(stream)) for stream in (stdout, stderr)]
        try:
            await process.wait()
        finally:
            # Also where the rollout is cancelled, and cancelled again: nothing that was started may stay.
            await asyncio.shield(asyncio.create_task(_end_processes(process, mark)))
            await asyncio.wait(
                ends, timeout=END_S
            )  # a pipe that something holds open all the same is not waited for
            output, errors = (end.result() if end.done() else "" for end in ends)
            for end in ends:
                end.cancel()
    assert process.returncode is not None
    return CommandResult(folder=folder, exit_code=process.returncode, output=output, errors=errors)


@contextlib.asynccontextmanager
async def _opened_pipe() -> AsyncIterator[tuple[asyncio.StreamReader, BinaryIO]]:
    """Open a pipe, and close its reading end after the block.

    A pipe that asyncio opens for a process (``subprocess.PIPE``) has Python 3.11 wait, after the
    process has ended, for whatever else holds the pipe open, such as a child of the process.

    Yields:
        The reading end, and the end that the process writes to.
    """
    reading, writing = os.pipe()
    stream = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(reading, "rb", 0)
    )
    try:
        yield stream, os.fdopen(writing, "wb", 0)
    finally:
        transport.close()


async def _end_of(stream: asyncio.StreamReader) -> str:
    """The end of what is printed, whatever its length."""
    kept = b""
    while read := await stream.read(1 << 16):
        kept = (kept + read)[-KEPT_OUTPUT:]
    return kept.decode(errors="replace")


async def _end_processes(process: asyncio.subprocess.Process, mark: str) -> None:
    """End a command's process group, and what has left the group: it has the mark."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), END_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
    await asyncio.to_thread(foreign.kill_marked, mark)
