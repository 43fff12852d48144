"""The work of ``rl-play``: a group of a task whose policy is a person, or a model for some turns.

play           runs the group and scores it
Player         the policy: shows prompts, reads what the person enters
ServedModel    the model that ``/model`` asks, on a generator that is started then
result_lines   rewards, and what would be trained
save           the record, as a run's
"""

import asyncio
import contextlib
import itertools
import re
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from monarch.actor import Actor, this_proc
from renderers import Message
from transformers import PreTrainedTokenizerBase

from torchtitan.experiments.rl.checkpointing.folder import OLD_POLICY_FOLDER, POLICY_FOLDER
from torchtitan.experiments.rl.command import checks
from torchtitan.experiments.rl.command.build import read_policy_tokenizer
from torchtitan.experiments.rl.command.reply_checks import REPLY
from torchtitan.experiments.rl.command.resume import save_config
from torchtitan.experiments.rl.compat.monarch import MONARCH_OUTPUT, printed_to, process_death
from torchtitan.experiments.rl.config.run_config import ProvisionConfig, RunConfig
from torchtitan.experiments.rl.errors import ConfigError, RunError
from torchtitan.experiments.rl.fleet.context import RunContext
from torchtitan.experiments.rl.fleet.fleet import Fleet
from torchtitan.experiments.rl.fleet.notes import print_notes
from torchtitan.experiments.rl.generation.client import GeneratorSession
from torchtitan.experiments.rl.generation.endpoint import EndpointClient
from torchtitan.experiments.rl.generation.engine import GenerateRequest, GenerateResult, Result
from torchtitan.experiments.rl.generation.judge import Reply
from torchtitan.experiments.rl.generation.references import FrozenModel
from torchtitan.experiments.rl.observability.console import Console, write_line
from torchtitan.experiments.rl.observability.rollouts import lines_of
from torchtitan.experiments.rl.plan.plan import RunPlan
from torchtitan.experiments.rl.printable import printable, printable_line
from torchtitan.experiments.rl.process.actor import cause_in, reported_endpoint
from torchtitan.experiments.rl.process.host import other_users_line
from torchtitan.experiments.rl.process.logs import set_up_logging
from torchtitan.experiments.rl.rollouts.policy import PolicySession, SamplingConfig
from torchtitan.experiments.rl.rollouts.records import decode_rollout, encode_rollout
from torchtitan.experiments.rl.rollouts.types import Completion, Rollout, RolloutGroup
from torchtitan.experiments.rl.tasks.scripted_policy import ScriptedPolicy, ScriptedSession
from torchtitan.experiments.rl.tools.evaluate import plan_of_generators
from torchtitan.experiments.rl.types import TrainingSample

HELP = """\
  your answer in one line, or several lines between a line <<< and a line >>>
  /model                        the model answers this turn; Ctrl-C stops it
  /scripted                     the reply that a config is checked with before a run
  /prompt                       the whole prompt again, as the model gets it
  /quit, Ctrl-C, Ctrl-D         end without an answer"""
CALL_HELP = """\
  /call NAME {"key": "value"}   a tool call, in the format of Qwen"""


def help_beside(prompt: str) -> str:
    """Return what may be entered: also /call, if the prompt describes the format that it writes."""
    return f"{HELP}\n{CALL_HELP}" if "<tool_call>" in prompt else HELP


class ModelAsked(Exception):
    """Raised if the person lets the model answer the turn."""


LEFT = "the person left"
"""Message of the error that ends a rollout whose person has left."""


class Left(RunError):
    """Raised if the person has left."""


class ModelServer(Actor):
    """Actor that keeps the generator, in a process of its own as in a run.

    It is an actor because Monarch tells the death of a process to the actor that spawned it.
    """

    process_name = ""
    """See ``reported_endpoint``."""

    def __init__(self, plan: RunPlan, run_dir: Path):
        self._console = Console(sys.stderr)
        context = RunContext(plan, run_dir, console=self._console)
        self._run_dir = run_dir
        # A failure needs no handler: the next request is answered with it.
        self._fleet = Fleet(context, on_failure=lambda failure: None)
        self._answers: dict[int, asyncio.Task[Any]] = {}
        """Requests in flight by ``request_id``."""

    @reported_endpoint
    async def start(self) -> None:
        """Spawn and connect the generator; stop what was spawned if that fails."""
        self._loop = asyncio.get_running_loop()
        set_up_logging(self._run_dir, "player")
        self._notes = print_notes(self._console)
        async with contextlib.AsyncExitStack() as on_error:
            on_error.push_async_callback(self._fleet.close)
            await self._fleet.supervisor.unless_failed(self._fleet.start_generators())
            on_error.pop_all()

    @reported_endpoint
    async def answer(self, request: GenerateRequest, *, tokens: int) -> GenerateResult | None:
        """Return the model's completion; None if ``withdraw`` ended the request."""
        sending = self._fleet.policy.send(request, tokens=tokens, last_replica=None)
        answering = asyncio.create_task(sending)
        self._answers[request.request_id] = answering
        try:
            await asyncio.wait([answering])
            return None if answering.cancelled() else answering.result()[0]
        finally:
            del self._answers[request.request_id]

    @reported_endpoint
    async def withdraw(self, request_id: int) -> None:
        """Abort a request that nobody waits for any more."""
        if request_id in self._answers:
            self._answers[request_id].cancel()

    @reported_endpoint
    async def end(self) -> None:
        """Stop the generator's process."""
        await self._fleet.close()
        self._notes.cancel()

    def __supervise__(self, failure: Any) -> bool:  # noqa: ANN401 - Monarch's, without types
        """See Controller.__supervise__."""
        self._loop.call_soon_threadsafe(self._fleet.supervisor.died, process_death(failure))
        return True


class ServedModel:
    """Model of the config, which a ``ModelServer`` serves from the first request on."""

    lockstep = False
    """See GeneratorClient."""

    def __init__(self, plan: RunPlan, folder: Callable[[], Path]):
        """Start nothing yet.

        Args:
            folder: makes the folder that the play is recorded in, for the logs.
        """
        self.stops_at_texts = plan.config.generator.engine.stops_at_texts
        self._plan = plan
        self._folder = folder
        self._ids = itertools.count()
        self._starting: asyncio.Task[Any] | None = None

    def session(
        self, *, rollout_id: str, seed: int, sampling: SamplingConfig, stop_token_ids: list[int]
    ) -> GeneratorSession:
        """See ModelClient.session."""
        return GeneratorSession(
            self, rollout_id=rollout_id, seed=seed, sampling=sampling, stop_token_ids=stop_token_ids
        )

    def next_id(self) -> int:
        return next(self._ids)

    async def send(
        self, request: GenerateRequest, *, tokens: int, last_replica: int | None, group: str
    ) -> tuple[Result | None, int]:
        """See ``generation.client.Sender``.

        Raises:
            RunError: the generator can't be started or has failed, or refuses the request. After a
                failed start the next request starts another.
        """
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())
        try:
            server = await asyncio.shield(self._starting)
        except RunError as error:
            self._starting = None
            raise RunError(f"the generator can't be started: {error}") from error
        try:
            return await server.answer.call_one(request, tokens=tokens), -1
        except asyncio.CancelledError:
            server.withdraw.broadcast(request.request_id)
            raise
        except Exception as error:  # noqa: BLE001 - of any kind that Monarch brings from the actor
            raise RunError(f"the generator: {cause_in(error)}") from error

    def session_closed(self, group: str) -> None: ...

    async def close(self) -> None:
        """Stop the generator, or its start."""
        if self._starting is None:
            return
        with contextlib.suppress(RunError):
            server = await self._starting
            await server.end.call_one()

    async def _start(self) -> Any:  # noqa: ANN401 - Monarch has no types
        if line := other_users_line():
            write_line(sys.stderr, printable_line(line))
        run_dir = self._folder()
        try:
            with printed_to(run_dir / MONARCH_OUTPUT):
                server = this_proc().spawn("player", ModelServer, self._plan, run_dir)
            await server.start.call_one()
        except Exception as error:  # noqa: BLE001 - of any kind that Monarch brings from the actor
            raise RunError(cause_in(error)) from error
        return server


class PlayedSession(ScriptedSession):
    """Session of a rollout whose turns a person or a model answers, a ``PolicySession``.

    A model's tokens stay as it sampled them, with its log-probabilities.
    """

    def __init__(
        self,
        player: "Player",
        index: int,
        sampling: SamplingConfig,
        stops: list[int],
        ask: Callable[[], PolicySession],
    ):
        """Open no session of a model yet.

        Args:
            stops: tokens that end a completion.
            ask: opens the model's session, when a turn first wants it.
        """
        super().__init__(player, index, sampling, stops[0])
        self._player = player
        self._stops = stops
        self._ask = ask
        self._model: PolicySession | None = None

    async def generate(
        self,
        prompt_token_ids: np.ndarray,
        *,
        max_tokens: int,
        stop: Sequence[str] = (),
        seed: int | None = None,
    ) -> Completion:
        """See PolicySession.generate.

        A model that fails or is interrupted leaves the turn to the person.
        """
        async with self._player.one_turn:  # the terminal shows one rollout at a time
            while True:
                try:
                    return await super().generate(
                        prompt_token_ids, max_tokens=max_tokens, stop=stop
                    )
                except ModelAsked:
                    pass
                completion = await self._model_answer(prompt_token_ids, max_tokens, stop)
                if completion is not None:
                    return completion

    async def _model_answer(
        self, prompt_token_ids: np.ndarray, max_tokens: int, stop: Sequence[str]
    ) -> Completion | None:
        """Return the model's completion and show it; None, with a line, if there is none."""
        player = self._player
        answering = asyncio.ensure_future(self._ask_model(prompt_token_ids, max_tokens, stop))
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, answering.cancel)
        player.say("(the model answers)")
        try:
            completion = await answering
        except (RunError, ConfigError, asyncio.CancelledError) as error:
            player.say(f"error: {printable_line(str(error) or 'it was interrupted')}")
            return None
        finally:
            loop.remove_signal_handler(signal.SIGINT)  # Ctrl-C is a KeyboardInterrupt again
        ids = completion.token_ids.tolist()
        if ids and ids[-1] in self._stops:
            ids.pop()
        text = str(player.tokenizer.decode(ids))
        self._turn += 1
        player.by_model.add((self._index, len(player.replies.get(self._index, []))))
        player.note_reply(self._index, text)
        player.say(f"model> {text}")
        return completion

    async def _ask_model(
        self, prompt_token_ids: np.ndarray, max_tokens: int, stop: Sequence[str]
    ) -> Completion:
        self._model = self._model or self._ask()
        options: dict[str, Any] = {"stop": stop} if stop else {}
        return await self._model.generate(prompt_token_ids, max_tokens=max_tokens, **options)

    def close(self) -> None:
        if self._model is not None:
            self._model.close()


def step_of_policy(folder: Path) -> int | None:
    """Return the step of a run's policy by its folder, ``policy/step-30``; None for others."""
    match = re.fullmatch(r"step-(\d+)", folder.name)
    if match is None or folder.parent.name not in (POLICY_FOLDER, OLD_POLICY_FOLDER):
        return None
    return int(match[1])


class Player(ScriptedPolicy):
    """Person at a terminal, or a model that they ask (``rollouts.policy.PolicyClient``)."""

    def __init__(
        self,
        tokenizer_path: str,
        *,
        model: Callable[[], EndpointClient | ServedModel],
        scripted: Sequence[str] = (),
        read: Callable[[], str] | None = None,
    ):
        """Make no model yet.

        Args:
            model: makes the model that answers for the person, when it is first asked. It may raise
                ConfigError.
            scripted: lines that are entered first, in order.
            read: reads a line; None reads standard input.
        """
        super().__init__(tokenizer_path, self.ask)
        self.one_turn = asyncio.Lock()
        self.replies: dict[int, list[str]] = {}
        """Replies of each rollout, by its index."""
        self.by_model: set[tuple[int, int]] = set()
        """Rollout and turn of each reply of the model's."""
        self.left = False
        """True if the person has left."""
        self.version = step_of_policy(Path(tokenizer_path)) or 0
        self._policy = Path(tokenizer_path)
        self._make_model = model
        self._scripted = list(scripted)
        self._read = read or (lambda: input())
        self._model: EndpointClient | ServedModel | None = None
        self._shown: dict[int, str] = {}
        """Prompt of each rollout that was shown last, by the rollout's index."""

    def session(
        self, *, rollout_id: str, seed: int, sampling: SamplingConfig, stop_token_ids: list[int]
    ) -> PlayedSession:
        """See ModelClient.session."""

        def ask() -> PolicySession:
            self._model = self._model or self._make_model()
            return self._model.session(
                rollout_id=rollout_id, seed=seed, sampling=sampling, stop_token_ids=stop_token_ids
            )

        return PlayedSession(self, self.index_of(rollout_id), sampling, stop_token_ids, ask)

    async def chat(
        self, messages: Sequence[Message], *, seed: int, sampling: SamplingConfig
    ) -> Reply:
        """See ChatClient.chat. The person is the judge too."""
        async with self.one_turn:
            for message in messages:
                self.say(f"── a judge is asked, {message['role']} ──\n{message['content']}")
            while True:
                try:
                    text = self._answer("")
                    return Reply(
                        message={"role": "assistant", "content": text},
                        prompt_tokens=0,
                        completion_tokens=0,
                    )
                except ModelAsked:
                    self.say("Only a turn can be the model's: answer as the judge would.")

    async def close(self) -> None:
        if self._model is not None:
            await self._model.close()

    @property
    def serves_a_model(self) -> bool:
        """True if ``/model`` has asked for a generator of this play's own."""
        return isinstance(self._model, ServedModel)

    def sampled_by(self, rollout: int) -> str:
        """Return what sampled turns of a rollout: "policy 30" of a run, or "a model".

        The text is empty if the person typed all of its turns.
        """
        if not any(index == rollout for index, _ in self.by_model):
            return ""
        step = step_of_policy(self._policy)
        if step is None or isinstance(self._model, EndpointClient):
            return "a model"
        return f"policy {step}"

    def ask(self, rollout: int, turn: int) -> str:
        """Show what is new in a rollout's prompt, and return the person's completion.

        Raises:
            Left: the person has left.
            ModelAsked: the person lets the model answer.
        """
        prompt = self.prompts[-1]
        before = self._shown.get(rollout, "")
        new = prompt[len(before) :] if before and prompt.startswith(before) else prompt
        # Nothing is new if the turn is asked for again, because the model did not answer it.
        if new and not self.left:
            if not self._shown:
                new += f"\n{help_beside(prompt)}"
            self._shown[rollout] = prompt
            title = "what is new in the prompt" if before else "the prompt"
            self.say(f"── rollout {rollout}, turn {turn}: {title} ──\n{new}")
        text = self._answer(prompt)
        self.note_reply(rollout, text)
        return text

    def note_reply(self, rollout: int, text: str) -> None:
        self.replies.setdefault(rollout, []).append(text)

    def say(self, text: str, end: str = "\n") -> None:
        print(printable(text), end=end, flush=True)

    def _answer(self, prompt: str) -> str:
        """Read lines until they are an answer.

        Raises:
            Left: the person has left.
            ModelAsked: the person lets the model answer.
        """
        while True:
            line = self._line("you> ")
            if line == "<<<":
                return "\n".join(iter(lambda: self._line("...> "), ">>>"))
            if not line.strip():
                self.say(
                    "Nothing was entered. An empty answer is an empty line between <<< and >>>."
                )
                continue
            if not line.startswith("/"):
                return line
            command, _, rest = line.partition(" ")
            if command == "/quit":
                self.left = True
            elif command == "/model":
                raise ModelAsked
            elif command == "/scripted":
                return REPLY
            elif command == "/prompt":
                self.say(prompt)
            elif command == "/call":
                name, _, arguments = rest.partition(" ")
                call = f'{{"name": "{name}", "arguments": {arguments or "{}"}}}'
                return f"<tool_call>\n{call}\n</tool_call>"
            else:
                self.say(
                    f"There is no {command}. An answer that begins with / goes between "
                    f"<<< and >>>.\n{help_beside(prompt)}"
                )

    def _line(self, prompt: str) -> str:
        """Return the next line: a scripted one, or else the person's.

        Raises:
            Left: the person has left.
        """
        if self._scripted and not self.left:
            line = self._scripted.pop(0)
            self.say(prompt + line)
            return line
        try:
            if not self.left:
                self.say(prompt, end="")
                return self._read()
        except (EOFError, KeyboardInterrupt):
            self.left = True
        raise Left(LEFT)


NO_LIMIT_S = 1e6
"""Limit in seconds of a played rollout: a person takes longer than an env may."""
OUTCOME = "played"
"""Outcome of the rollouts in the record."""


def play(
    config: RunConfig, name: str, player: Player, *, example: int, rollouts: int
) -> RolloutGroup:
    """Run a group of task ``name`` to its end, and score it.

    Args:
        example: index in the task's dataset.
    """
    task_config = config.tasks[name]
    env = replace(task_config.env, rollout_timeout_s=NO_LIMIT_S)
    task_config = replace(task_config, max_retries=0, env=env)
    task = task_config.build(name=name, context=read_policy_tokenizer(config).context)

    async def run() -> RolloutGroup:
        # asyncio's own handler would not end the wait for a line.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        await task.setup(player)
        try:
            group = await task.run_group(
                task.dataset[example],
                player,
                group_id="play",
                seed=config.seed,
                group_size=rollouts,
            )
            await task.score_group(group)
            return group
        finally:
            await task.close()
            await player.close()

    return asyncio.run(run())


def answering_model(
    config: RunConfig, server: FrozenModel | None, folder: Callable[[], Path]
) -> EndpointClient | ServedModel:
    """Return what ``/model`` asks: a server's model, or the config's own on a generator.

    A server is asked once, without further attempts: the person sees what is wrong.

    Args:
        folder: makes the folder that the play is recorded in, for the generator's logs.

    Raises:
        ConfigError: the config's model or its engine is not on this machine.
    """
    if server is not None:
        return EndpointClient(replace(server, max_retries=0))
    checks.check_model_folder(config.model)
    config.generator.engine.check_present(field="generator.engine")
    alone = replace(
        config,
        generator=replace(config.generator, replicas=1),
        provision=ProvisionConfig(device=config.provision.device),
    )
    plan = plan_of_generators(alone)
    # Without tasks no model is hosted for them: the person answers in place of all.
    plan = replace(
        plan,
        config=replace(plan.config, tasks={}),
        placement=replace(plan.placement, hosted=()),
    )
    return ServedModel(plan, folder)


def result_lines(group: RolloutGroup, player: Player) -> list[str]:
    """Return the lines of each rollout's rewards and of what would be trained."""
    lines: list[str] = []
    for index, rollout in enumerate(group.rollouts):
        record = encode_rollout(
            rollout,
            outcome=OUTCOME,
            admitted_version=group.admitted_version,
            max_bytes=sys.maxsize,
        )
        recorded = decode_rollout(record)
        typed = [turn for turn in range(len(rollout.turns)) if (index, turn) not in player.by_model]
        recorded.rollout.error = None if was_left(rollout) else rollout.error
        shown = lines_of(recorded, tokens=True, typed=typed, policy=player.sampled_by(index))
        if was_left(rollout):
            shown[0] = shown[0].replace(f" {rollout.status.value} ", " left ", 1)
        lines += map(printable, [*shown, *_sample_lines(rollout, player.tokenizer)])
    if player.left:
        lines.append("You left: a rollout that had not ended has no reward.")
    elif group.failure:
        lines.append(f"The group would not be trained on: {group.failure}")
    elif len(group.rollouts) == 1:
        lines.append(
            "A group of one has nothing to compare: --rollouts 2 shows advantages of algorithms "
            "that compare."
        )
    return lines


def was_left(rollout: Rollout) -> bool:
    """Return True if the rollout did not end because the person left."""
    return rollout.status.is_error() and str(rollout.error).endswith(LEFT)


def save(group: RolloutGroup, config: RunConfig, folder: Path) -> None:
    """Write the record and the config into an existing folder."""
    save_config(folder, config)
    recorder = replace(config.recorder, fraction=1.0).build(run_dir=folder)
    recorder.record(group, {rollout.rollout_id: OUTCOME for rollout in group.rollouts})
    recorder.close()


def _sample_lines(rollout: Rollout, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return each training sample's advantages and text, with what was sampled in brackets."""
    lines = []
    for number, sample in enumerate(rollout.samples):
        mask = sample.loss_mask
        trained = "no advantages"
        if sample.advantages is not None and mask.any():
            advantages = sample.advantages[mask]
            trained = f"advantages {advantages.min():.3g} to {advantages.max():.3g}"
        lines.append(
            f"── sample {number}: {len(sample)} tokens, the {int(mask.sum())} in [[ ]] would be "
            f"trained, {trained} ──"
        )
        lines += _bracketed(sample, tokenizer).splitlines()
    return lines


def _bracketed(sample: TrainingSample, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a sample's text with its sampled tokens in [[ ]]."""
    pairs = zip(sample.loss_mask, sample.token_ids, strict=True)
    text = ""
    for is_sampled, group in itertools.groupby(pairs, key=lambda pair: bool(pair[0])):
        part = str(tokenizer.decode([token for _, token in group]))
        text += f"[[{part}]]" if is_sampled else part
    return text
