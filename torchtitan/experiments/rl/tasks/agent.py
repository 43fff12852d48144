"""Agents as tasks: programs that ask a model over HTTP, as OpenAI's or Anthropic's clients do.

An agent is a method (`AgentTask`) or a command (`agent_command_task`). The gateway answers its
calls, and makes turns of them (`gateway/rollout.py`).
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
from torchtitan.experiments.rl.frozen import read_only
from torchtitan.experiments.rl.gateway.request import WISHES
from torchtitan.experiments.rl.gateway.rollout import (
    AUXILIARY,
    POLICY,
    AgentRollout,
    BranchingSession,
)
from torchtitan.experiments.rl.gateway.rules import Notices
from torchtitan.experiments.rl.gateway.server import Endpoint, Gateway, gateway_at
from torchtitan.experiments.rl.generation.references import ModelReference
from torchtitan.experiments.rl.printable import shown
from torchtitan.experiments.rl.process import foreign
from torchtitan.experiments.rl.rollouts.json_values import json_value
from torchtitan.experiments.rl.rollouts.policy import ModelClient, PolicyClient, PolicySession
from torchtitan.experiments.rl.rollouts.types import DataSample, RolloutGroup, RolloutStatus
from torchtitan.experiments.rl.rubrics.rubric import RewardFn, Rubric
from torchtitan.experiments.rl.tasks.questions import fill, row_task
from torchtitan.experiments.rl.tasks.task import Task

logger = logging.getLogger(__name__)

ANY_ADDRESS = "0.0.0.0"
"""Address of a server that listens at every address of its host."""


class AgentTask(Task):
    """Task whose rollouts an agent runs. A subclass defines ``run_agent``.

    ``env.max_turns`` is the maximum number of calls of a rollout (`AgentRollout` says which count),
    ``env.max_rollout_tokens`` the maximum number of tokens of each of its conversations, and
    ``env.rollout_timeout_s`` its time limit.

    Example::

        from torchtitan.experiments.rl.tasks import *

        class Solver(AgentTask):
            async def run_agent(self, sample, endpoint):
                question = {"role": "user", "content": sample.env_input["question"]}
                reply = await endpoint.client().chat.completions.create(
                    model=endpoint.model, messages=[question]
                )
                return reply.choices[0].message.content

        task = Solver.Config(
            dataset=RowDataset.Config(rows=MemoryRows([{"question": "6 * 7?", "answer": "42"}])),
            rubric=Rubric.Config(reward_fns=[right_answer]),
        )
    """

    in_lockstep = False

    @dataclass(kw_only=True, slots=True)
    class Config(Task.Config):
        algorithm: Algorithm.Config = field(default_factory=GRPO.Config)
        dataset: Dataset.Config = field(default_factory=RowDataset.Config)
        max_sampled_tokens: PositiveInt | None = None
        """Number of tokens, of all calls of a rollout together, from which on no further call
        begins; None for no such limit. Calls that have begun may exceed it."""
        models: dict[str, str | ModelReference] = field(default_factory=dict)
        """Models by the name that the agent asks for: "policy"; "auxiliary", the policy in calls
        that are not trained; or a frozen model. A name that is not here is the policy."""
        noise: dict[str, str] = field(default_factory=dict)
        """Regular expressions by name. Text that one matches in a system message is left out of the
        prompt: a line that changes with every call would make each call a conversation of its
        own."""
        refused_fields: list[str] = field(default_factory=list)
        """Names of wishes (WISHES in gateway/request.py), such as "response_format" and
        "tool_choice". A request with one of these fields is refused, and not only counted."""
        listen: NonEmptyStr = "127.0.0.1"
        """Address at which agents reach the model. "0.0.0.0" is every address of the host, for
        agents elsewhere: whoever has a rollout's key may use it."""

        def validate(self, *, field: str, policy_path: str | None = None) -> None:
            super(AgentTask.Config, self).validate(field=field, policy_path=policy_path)
            if self.env.max_answer_tokens is not None:
                cure = "an agent's messages are its own: leave it out, and have the agent cut them"
                raise ConfigError(
                    f"{field}.env.max_answer_tokens", self.env.max_answer_tokens, cure
                )
            for name, model in self.models.items():
                if isinstance(model, ModelReference):
                    model.validate(field=f"{field}.models.{name}")
                elif model not in (POLICY, AUXILIARY):
                    raise ConfigError(
                        f"{field}.models.{name}",
                        model,
                        f'want "{POLICY}", "{AUXILIARY}" (the policy, not trained), a FrozenModel '
                        "or a HostedModel",
                    )
            for name in self.refused_fields:
                if name not in WISHES:
                    cure = f"want some of {', '.join(WISHES)}"
                    raise ConfigError(f"{field}.refused_fields", name, cure)
            for name, pattern in self.noise.items():
                try:
                    re.compile(pattern)
                except re.error as error:
                    cure = f"no regular expression: {error}"
                    raise ConfigError(f"{field}.noise.{name}", pattern, cure) from None

    config: Config

    def __init__(self, config: Config, *, name: str, context: BuildContext):
        if type(self).run_agent is AgentTask.run_agent:
            raise TypeError(
                f"{type(self).__name__} runs no agent: define run_agent(sample, endpoint)"
            )
        super().__init__(config, name=name, context=context)
        self._gateway: Gateway | None = None
        self._frozen: dict[str, ModelClient] = {}
        self._notices = Notices(name)

    async def run_agent(self, sample: DataSample, endpoint: Endpoint) -> Any:  # noqa: ANN401 - the user's
        """Run the agent on an example, and return what it answers.

        Reward functions ``fn(answer, example)`` get the answer, or the text of the last turn if it
        is None. Whatever this raises makes the rollout an ERROR. An override that is a plain
        function runs in a thread.

        Args:
            endpoint: address and key of the model, for this rollout alone.
        """
        raise NotImplementedError(f"{type(self).__name__}.run_agent")

    async def setup(self, policy: PolicyClient) -> None:
        """Connect to the frozen models, and start the server if no other task has.

        Raises:
            RunError: nothing can listen at the address, or a part of the task failed.
        """
        await super().setup(policy)
        self._frozen = {
            name: policy.frozen(model)
            for name, model in self.config.models.items()
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
        """Release the server."""
        gateway = self._gateway
        self._gateway = None
        if gateway is not None:
            await gateway.release()

    async def make_envs(self, sample: DataSample, n: int) -> list[Any]:
        """Return ``n`` rollouts whose turns the gateway fills."""
        config = self.config
        group = GroupPrompts()
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
                notices=self._notices,
            )
            for _ in range(n)
        ]

    async def run_rollout(self, env: Any, policy: Any) -> None:  # noqa: ANN401 - of `make_envs`
        """Run the agent until it returns, with a key that opens this rollout alone."""
        rollout: AgentRollout = env
        session: BranchingSession = policy
        assert self._gateway is not None, "the task is set up"
        gateway = self._gateway
        rollout.open(session)
        name = socket.gethostname() if self.config.listen == ANY_ADDRESS else None
        endpoint = gateway.admit(rollout, name=name)
        failure = None
        try:
            answer = await ask(self.run_agent, rollout.sample, endpoint, timeout_s=None)
            rollout.answer = read_only(answer)
        except UserCodeError as error:
            failure = error
        except RecursionError:
            failure = UserCodeError(
                f"{type(self).__name__}.run_agent returned a value that contains itself, or is "
                "nested too deep"
            )
        finally:
            gateway.forget(endpoint.key)
        rollout.ended(failure)
        if rollout.status is RolloutStatus.ERROR and not rollout.was_asked:
            rollout.error = f"{rollout.error}{_proxy_in_the_way(endpoint.url)}"

    async def score_rewards(self, group: RolloutGroup, *, rubric: Rubric | None = None) -> None:
        """Have the rubric score the rollouts, then keep what JSON holds of the agents' answers."""
        await super().score_rewards(group, rubric=rubric)
        for rollout in group.rollouts:
            answer = rollout.answer
            if isinstance(answer, CommandResult):
                answer = asdict(answer)
            rollout.amend(answer=json_value(answer))

    def _frozen_session(self, sample: DataSample, name: str, seed: int) -> PolicySession:
        """Open a session with a frozen model.

        All sessions of an example have one id, and with it one group, so that the router prefers a
        replica of a hosted model that has the example's prompt in its cache.
        """
        return self._frozen[name].session(
            rollout_id=f"{self.name}/{sample.sample_id}/0",
            seed=seed,
            sampling=self.config.sampling,
            stop_token_ids=self.renderer.get_stop_token_ids(),
        )


def _proxy_in_the_way(url: str) -> str:
    """Return the end of an error that names the proxy through which clients ask for the URL.

    Empty if there is none.
    """
    host = str(urlsplit(url).hostname)
    proxies = getproxies()
    proxy = proxies.get("http") or proxies.get("all")
    if proxy is None or proxy_bypass(host):
        return ""
    return (
        "; its calls may have gone to the proxy of HTTP_PROXY: use endpoint.client(), or add "
        f"{host} to NO_PROXY"
    )


KEPT_OUTPUT = 16_384
"""Number of bytes of a command's output that are kept, from its end; and as many of its errors."""
END_S = 0.5
"""Seconds that a command has to end by itself after SIGTERM, which `docker run` hands on to its
container."""


@dataclass(kw_only=True, slots=True, frozen=True)
class CommandResult:
    """Result of a command, which reward functions ``fn(result, row)`` get."""

    folder: Path
    """Folder in which the command ran, as it left it. It is removed once the rollout is scored."""
    exit_code: int
    """Exit code; below 0, the signal that ended the command."""
    output: str
    """End of what the command printed to stdout."""
    errors: str
    """End of what the command printed to stderr."""


class AgentCommandTask(AgentTask):
    """Task whose agent is a command that runs in a folder made from the row.

    The folder has ``row.json`` and the files of the row's column "files", by path. An example that
    is not a dict stands for the row ``{"input": example}``. The environment has the endpoint, the
    task's ``variables`` and those of the row's column "variables". The command's processes end with
    the rollout, and with the process that runs it.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(AgentTask.Config):
        command: Annotated[list[str], MinLen(1), Cure('write ["python", "agent.py"]')]
        """Program and arguments, in which {column} stands for the row's value."""
        variables: dict[str, str] = field(default_factory=dict)
        """Environment variables of the command."""
        check_exit: bool = True
        """True if an exit code other than 0 makes the rollout an ERROR. If False, reward functions
        see the code."""
        max_processes: Changeable[PositiveInt] = 32
        """Maximum number of commands that run at once in a process; other rollouts wait."""

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
        self._running_commands = asyncio.Semaphore(config.max_processes)
        self._folders: set[Path] = set()
        """Folders that exist."""
        self._started_in = Path.cwd()
        self._temporary = tempfile.gettempdir()  # of the run, and removed with it

    async def run_agent(self, sample: DataSample, endpoint: Endpoint) -> CommandResult:
        """Run the command in a folder of its own, which is removed if that fails.

        Raises:
            RuntimeError: the command's exit code is not 0, and ``check_exit`` is set.
            TypeError: a column of the row has no texts by name.
            ValueError: a file of the row is outside of the folder.
        """
        row = sample.env_input
        if not isinstance(row, dict):
            row = {"input": row}
        async with self._running_commands:
            folder = await asyncio.to_thread(_make_folder, row, self._temporary)
            self._folders.add(folder)
            try:
                variables = endpoint.variables() | self.config.variables | _texts(row, "variables")
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

    async def run_rollout(self, env: Any, policy: Any) -> None:  # noqa: ANN401 - of `make_envs`
        """Run the command, and remove its folder at once if the rollout failed.

        No reward function sees such a rollout, and another attempt at it replaces the answer.
        """
        rollout: AgentRollout = env
        await super().run_rollout(rollout, policy)
        if rollout.status.is_error() and isinstance(rollout.answer, CommandResult):
            await self._remove(rollout.answer.folder)

    def _script(self, part: str, folder: Path) -> str:
        """Return a part of the command, as a whole path if it names a script of the run's.

        A script is named from the folder in which the run was started, and runs in another. A file
        of the row comes first.
        """
        script = self._started_in / part
        if part.startswith("/") or not script.is_file() or (folder / part).exists():
            return part
        return str(script)

    async def score_rewards(self, group: RolloutGroup, *, rubric: Rubric | None = None) -> None:
        """Have the rubric score the rollouts, and remove the commands' folders."""
        results = [
            rollout.answer
            for rollout in group.rollouts
            if isinstance(rollout.answer, CommandResult)
        ]
        try:
            await super().score_rewards(group, rubric=rubric)
        finally:
            for result in results:
                await self._remove(result.folder)

    async def close(self) -> None:
        """Remove the folders that are left, and release the server."""
        for folder in list(self._folders):
            await self._remove(folder)
        await super().close()

    async def _remove(self, folder: Path) -> None:
        self._folders.discard(folder)
        await asyncio.to_thread(_remove_folder, folder)


def agent_command_task(
    data: Any,  # noqa: ANN401 - see row_task
    command: list[str],
    *reward_fns: Callable[..., Any] | RewardFn,
    **fields: Any,  # noqa: ANN401 - typed by the config
) -> AgentCommandTask.Config:
    """Return the config of an AgentCommandTask.

    Args:
        data: rows in a form that ``row_task`` takes.
        command: program and arguments, such as ``["python", "agent.py"]``. The path of a script is
            from the folder in which the run is started.
        reward_fns: functions ``fn(result, row)`` of a CommandResult, or RewardFn.
        fields: fields of AgentCommandTask.Config, such as ``group_size``; and ``validation`` and
            ``split``, as ``row_task`` takes them.

    Raises:
        ConfigError: the data is in another form.

    Example::

        from torchtitan.experiments.rl.tasks import agent_command_task

        def solved(result, row):
            return float((result.folder / "answer.txt").read_text().strip() == row["answer"])

        # agent.py finds the model by the variables OPENAI_BASE_URL and OPENAI_API_KEY.
        rows = [{"question": "6 * 7?", "answer": "42"}]
        task = agent_command_task(rows, ["python", "agent.py", "{question}"], solved)
    """
    return row_task(AgentCommandTask.Config, data, *reward_fns, command=command, **fields)


def _path() -> str:
    """Return the PATH of commands, in which ``python`` is the run's own."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def _make_folder(row: dict[str, Any], parent: str) -> Path:
    """Make a folder in ``parent`` with the row and its files.

    Raises:
        ValueError: a file would be outside of the folder.
    """
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
    """Return the texts by name in a column of the row; none if the row lacks it.

    Raises:
        TypeError: the column has something else.
    """
    texts = row.get(column) or {}
    if not isinstance(texts, dict) or not all(
        isinstance(text, str | int | float) for text in texts.values()
    ):
        raise TypeError(
            f"the row's column {column!r} is {shown(texts)}, want texts by name, or nothing"
        )
    return {name: str(text) for name, text in texts.items()}


def _remove_folder(folder: Path) -> None:
    """Remove a folder, also if a folder in it was made read-only, as Go does with its modules."""
    shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():
        chmod = ["chmod", "-R", "u+rwx", str(folder)]  # follows no link
        subprocess.run(chmod, stderr=subprocess.DEVNULL, check=False)
        shutil.rmtree(folder, ignore_errors=True)
        if folder.exists():
            logger.warning(
                "%s can't be removed: what the command left in it is not the run's", folder
            )


async def _run_command(
    command: list[str], folder: Path, variables: dict[str, str]
) -> CommandResult:
    """Run a command to its end.

    Every process that it has started ends with it, and with this process, however that ends.
    """
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
            # Nothing that was started may stay, also if the rollout is cancelled more than once.
            await asyncio.shield(asyncio.create_task(_end_processes(process, mark)))
            # With a limit: something may hold a pipe open all the same.
            await asyncio.wait(ends, timeout=END_S)
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
    """Return the last `KEPT_OUTPUT` bytes of a stream as text, whatever its length."""
    kept = b""
    while read := await stream.read(1 << 16):
        kept = (kept + read)[-KEPT_OUTPUT:]
    return kept.decode(errors="replace")


async def _end_processes(process: asyncio.subprocess.Process, mark: str) -> None:
    """End a command's process group, and the processes with its mark that have left the group."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), END_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
    await asyncio.to_thread(foreign.kill_marked, mark)
