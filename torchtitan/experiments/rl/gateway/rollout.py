"""One rollout of an agent: what its calls are answered with, and what becomes of them.

    begin(request) ─▶ match a turn ─▶ render ─▶ sample ─▶ parse, record as a turn ─▶ reply
    leave(call)    ◀─ a connection was sent the reply, or has gone

1. The turns of a rollout are a tree (`chains.py`). The turn that a request goes on from is found
   there, and the request's new messages are rendered behind that turn's own tokens.
2. A path in the tree that one session samples is a chain. The session is with the model that was
   asked for: the policy, or a frozen model. A request begins a chain if it goes on from no turn, or
   from one that another request has gone on from.
3. Whatever was sampled is a turn of the rollout. It is trained on if its answer was delivered, and
   if the model that was asked for is the trained one.
4. A repeated request gets the answer of the call before it, open or ended, if the client marks it
   as a retry, or if that answer has reached nobody and nobody waits for it (`begin`).
"""

import asyncio
import contextlib
import hashlib
import logging
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import numpy as np
from renderers import Message, Renderer

from torchtitan.experiments.rl.envs.conversation import Conversation
from torchtitan.experiments.rl.envs.prompt import GroupPrompts
from torchtitan.experiments.rl.envs.renderer_env import RendererEnvConfig
from torchtitan.experiments.rl.errors import (
    RunError,
    UserCodeError,
    UserCodeTimeout,
    cause_text,
    users_traceback,
)
from torchtitan.experiments.rl.gateway.chains import Match, TurnTree
from torchtitan.experiments.rl.gateway.request import (
    BUDGET_EXCEEDED,
    CONTEXT_EXCEEDED,
    MODEL_FAILED,
    ModelReply,
    ModelRequest,
    PromptTooLong,
    Refusal,
    cut_at_stop,
    reply_of,
)
from torchtitan.experiments.rl.gateway.rules import Notices, RequestRules, check_stop
from torchtitan.experiments.rl.printable import one_sentence
from torchtitan.experiments.rl.rollouts.policy import PolicySession, SamplingConfig
from torchtitan.experiments.rl.rollouts.samples import checked_completion
from torchtitan.experiments.rl.rollouts.types import (
    Completion,
    DataSample,
    RolloutStatus,
    RolloutTurn,
)

logger = logging.getLogger(__name__)

POLICY = "policy"
"""Model that is trained."""
AUXILIARY = "auxiliary"
"""The policy, in calls that are not trained."""

UNDELIVERED = "undelivered"
"""Reason why a turn is not trained: its answer has reached no client."""
FAILED_CALLS = ("aborted", "lost")
"""Reasons why a turn is not trained: its call was cancelled, or its completion can't be parsed."""
CLOSE_S = 1.0
"""Seconds that the end of a rollout waits for cancelled calls, and for answers on their way."""
EVENTS_OF_A_RESET = 3
"""Iterations of the event loop in which it reads that a connection was reset, and says so. A client
that has ended may have reset its own before."""
KEEP_S = 15.0
"""Seconds that a call goes on after its last reader has left. A client that timed out asks again,
OpenAI's and Anthropic's own within 8 s."""
MAX_REFUSALS = 8
"""Maximum number of different texts of refusals that a rollout keeps."""
LIMITS = {
    CONTEXT_EXCEEDED: RolloutStatus.TRUNCATED_PROMPT_OVERFLOW,
    BUDGET_EXCEEDED: RolloutStatus.TRUNCATED_MAX_TURNS,
}
"""Status of a rollout that ended because a call was refused with this code."""


class BranchingSession(PolicySession, Protocol):
    """Session of a rollout with the policy, which opens more of them beside itself."""

    sampling: SamplingConfig
    """Sampling settings of the rollout: the task's, or those of a validation."""

    def branch(self, key: str) -> PolicySession:
        """Return another session of the rollout, with a seed of the rollout's and the key."""

    def branch_seed(self, key: str) -> int:
        """Return the seed that a branch with this key has."""


@dataclass(eq=False, slots=True)
class AgentCall:
    """A request that is being answered, or was."""

    task: "asyncio.Task[SampledReply]" = field(init=False)
    """Task that answers the request. Its readers shield it: it may have several."""
    readers: int = 1
    """Number of connections that wait for the answer, or are being sent it."""
    deliveries: int = 0
    """Number of connections that were sent all of the answer."""
    prompted: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the model is asked, or the call has ended. Until then the request may be refused for
    what it says, so a streamed reply begins no earlier: a refusal has an HTTP status of its own."""
    end: asyncio.TimerHandle | None = None
    """Timer that cancels the call, started when the last reader left."""

    def join(self) -> None:
        """Add a reader, and stop the timer that would cancel the call."""
        self.readers += 1
        if self.end is not None:
            self.end.cancel()

    @property
    def delivered(self) -> bool:
        """True if a client was sent all of the answer."""
        return self.deliveries > 0

    @property
    def has_failed(self) -> bool:
        """True if the call has ended without an answer."""
        task = self.task
        return task.done() and (task.cancelled() or task.exception() is not None)


@dataclass(eq=False, slots=True)
class SampledTurn:
    """A turn in the tree of the rollout, and what a request needs to go on from it."""

    call: AgentCall
    turn: RolloutTurn
    chain: int
    """Number of the turn's chain: turns that one session sampled."""
    conversation: Conversation | None
    """Conversation as it stands after the turn; None once a request has gone on from the turn, or
    the rollout is closed."""
    session: PolicySession
    is_cut: bool = False
    """True if a limit of the run cut the policy's answer, and the client did not ask for that."""

    @property
    def is_cut_for_a_client(self) -> bool:
        """True if a client has the cut answer, or is being sent it."""
        return self.is_cut and (self.call.delivered or self.call.readers > 0)


@dataclass(frozen=True, slots=True)
class SampledReply:
    """Reply to a call, with the turn that was sampled for it."""

    sampled: SampledTurn
    reply: ModelReply


@dataclass(kw_only=True, slots=True)
class _Branch:
    """Place in the tree where a request is answered, with its prompt rendered."""

    model: str
    """POLICY, AUXILIARY or the name of a frozen model."""
    match: "Match[SampledTurn]"
    """Turn that the request goes on from."""
    new: list[Message]
    """Messages of the request that no turn before it has."""
    conversation: Conversation
    """Conversation up to the prompt that is sampled from."""
    session: PolicySession
    chain: int


class AgentRollout:
    """Rollout of an agent. It takes calls from `open` to `close`."""

    def __init__(  # noqa: PLR0913 - what a task decides for a rollout
        self,
        sample: DataSample,
        *,
        renderer: Renderer,
        config: RendererEnvConfig,
        max_sampled_tokens: int | None,
        models: Mapping[str, str],
        frozen: Callable[[str, int], PolicySession],
        noise: Mapping[str, str],
        group: GroupPrompts,
        refused_fields: Sequence[str] = (),
        notices: Notices | None = None,
    ):
        """Take no calls yet.

        Args:
            sample: example that the agent works on.
            config: ``max_turns`` is the maximum number of calls (`_call_ended` says which count),
                ``max_rollout_tokens`` the maximum number of tokens of each chain.
            max_sampled_tokens: number of tokens of all answers together from which on calls are
                refused; None for no such limit. Calls that have begun may exceed it.
            models: model by the name that an agent asks for: POLICY, AUXILIARY, or a name that
                ``frozen`` is called with. Other names stand for the policy.
            frozen: opens a session with the frozen model of this name, with this seed.
            noise: see `RequestRules`.
            group: prompts that were rendered for other rollouts of the group.
            refused_fields: see `RequestRules`.
            notices: kinds that other rollouts of the task have logged.
        """
        self.sample = sample
        self.status = RolloutStatus.ONGOING
        self.error: str | None = None
        """Cause of a status that is an error, in one line."""
        self.traceback = ""
        """See `Rollout.traceback`."""
        self.answer: Any = None
        """Value that the agent returned. The models' answers to its calls are `SampledReply`."""
        self.counts: Counter[str] = Counter()
        """See `Rollout.calls`."""
        self.refusals: dict[str, int] = {}
        """See `Rollout.refusals`."""
        self._notices = notices or Notices()
        self._renderer = renderer
        self._config = config
        self._group = group
        self._max_sampled_tokens = max_sampled_tokens
        self._models = models
        self._frozen = frozen
        self._rules = RequestRules(
            renderer=renderer,
            noise=noise,
            refused_fields=refused_fields,
            counts=self.counts,
            notices=self._notices,
        )

        self._policy: BranchingSession | None = None
        """The policy while the rollout is open."""
        self._opened_at = 0.0
        self._frozen_sessions: list[PolicySession] = []
        """Sessions with frozen models, which the rollout closes."""
        self._session_keys: Counter[str] = Counter()
        """Number of sessions that began with a prompt, by its digest."""

        self._tree: TurnTree[SampledTurn] = TurnTree()
        self._chain_count = 0

        self._calls: dict[bytes, AgentCall] = {}
        """Latest call with each body, by the body's digest."""
        self._open_calls: set[AgentCall] = set()
        self._begun_calls = 0
        self._ended_calls = 0
        """Number of ended calls that count against ``max_turns``; see `_call_ended`."""
        self._sampled_tokens = 0
        self._refusal_code = ""
        """Code that the last call was refused with; empty if it was answered."""
        self._refused_after_answer = False
        """True if that call was to go on from an answer of the policy."""
        self._budget_spent = False
        """True if a call to the policy was refused because the rollout's budget was spent."""

        self._readers = 0
        """Number of readers of all calls together."""
        self._all_left = asyncio.Event()
        """Set when the last of them has left."""
        self._is_closed = False
        """True once `close` has returned, or is about to: the turns change no more."""

    @property
    def turns(self) -> list[RolloutTurn]:
        """Turns chain by chain, so that a turn follows the one that it extends."""
        return [node.value.turn for node in self._tree.in_order()]

    @property
    def was_asked(self) -> bool:
        """True if a call has reached the rollout."""
        return self._begun_calls > 0 or bool(self.counts["refused"])

    @property
    def max_prompt_tokens(self) -> int:
        """Maximum number of tokens of a prompt that leaves room for an answer."""
        return self._config.max_rollout_tokens - 1

    # Life of the rollout, which the task calls.

    def open(self, policy: BranchingSession) -> None:
        """Take calls from now on."""
        self._policy = policy
        self._rules.sampling = policy.sampling
        self._opened_at = time.perf_counter()

    def finish(
        self, status: RolloutStatus, error: str | None = None, *, traceback: str = ""
    ) -> None:
        """End the rollout. The first terminal status stays.

        Raises:
            ValueError: there is no such status.
        """
        if not self.status.is_terminal():
            self.status = RolloutStatus(status)
            self.error = None if error is None else cause_text(error)
            self.traceback = traceback

    def ended(self, failure: UserCodeError | None) -> None:
        """Set the status of a rollout whose agent has returned or failed.

        An agent that failed, but was not late, counts as truncated if its last call was refused at
        a limit. docs/agents.md lists every case.
        """
        limit = LIMITS.get(self._refusal_code) if failure is not None else self._truncation()
        if isinstance(failure, UserCodeTimeout):
            self.finish(RolloutStatus.TIMEOUT, str(failure))
        elif failure is not None and limit is None:
            self.finish(RolloutStatus.ERROR, str(failure), traceback=users_traceback(failure))
        elif limit is None and all(turn.untrained in FAILED_CALLS for turn in self.turns):
            self.finish(RolloutStatus.ERROR, self._unanswered())
        else:
            if limit is None and self._refusal_code == CONTEXT_EXCEEDED:
                self.counts["completed_after_overflow"] += 1
            self.finish(limit or RolloutStatus.COMPLETED)

    def _unanswered(self) -> str:
        """Return why the model has answered nothing that an agent asked."""
        refused = self.counts["refused"]
        if not self.was_asked:
            return (
                "the agent ended and had not asked the model anything; if its framework keeps "
                "answers, switch this cache off (dspy: cache=False)"
            )
        others = self.counts["aborted"] + self.counts["lost"]
        if not refused:
            return "the agent ended, and none of its calls had been answered"
        first = next(iter(self.refusals))
        if not others:
            which = "its call was" if refused == 1 else f"all of its {refused} calls were"
            return f"the agent ended, and {which} refused: {first}"
        return (
            f"the agent ended, and none of its calls had been answered; {refused} of "
            f"{refused + others} were refused: {first}"
        )

    def _truncation(self) -> RolloutStatus | None:
        """Return how the run's limits cut short an agent that has returned; None if they did not.

        A cut answer that the agent went on from has not cut the agent short. Nor has a refusal that
        it caught, if the policy had answered it before, unless the refused call asked the policy
        for more than the rollout's budget, or was the last and was to go on from an answer.
        """
        nodes = list(self._tree.in_order())
        if any(node.value.is_cut_for_a_client and not node.children for node in nodes):
            return RolloutStatus.TRUNCATED_LENGTH
        if self._budget_spent:
            return RolloutStatus.TRUNCATED_MAX_TURNS
        was_answered = any(node.value.turn.untrained in (None, UNDELIVERED) for node in nodes)
        if was_answered and not self._refused_after_answer:
            return None
        return LIMITS.get(self._refusal_code)

    async def close(self) -> None:
        """Refuse calls from now on, and cancel those that are open, which are not trained.

        Wait for at most ``CLOSE_S`` until the cancelled calls have ended, and for as long again
        until connections have sent the answers that are on their way.
        """
        self._policy = None
        for _ in range(EVENTS_OF_A_RESET):
            await asyncio.sleep(0)
        answers = [call.task for call in self._open_calls]
        for call in self._open_calls:
            call.task.cancel()
            if call.end is not None:
                call.end.cancel()
        if answers:
            await asyncio.wait(answers, timeout=CLOSE_S)
        if self._readers:
            # An agent may end with its last answer in hand, before the server has seen that it was
            # delivered.
            self._all_left.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._all_left.wait(), CLOSE_S)
        self._is_closed = True
        self._calls.clear()
        for node in self._tree.in_order():
            node.value.conversation = None
        for session in self._frozen_sessions:
            session.close()
        self._frozen_sessions.clear()

    # Calls, which the server begins and leaves.

    def begin(
        self, request: ModelRequest, *, digest: bytes, retry: bool, dialect: str
    ) -> AgentCall:
        """Return a new call, or the one that a client repeats.

        A repeat joins the equal call before it if the client says that it is one, or if that call's
        answer has reached nobody and nobody waits for it: its client has gone, and asks again.

        Args:
            digest: digest of the request's path and body.
            retry: True if the client says that it repeats a request.
            dialect: name of the dialect, for the turn's record.

        Raises:
            Refusal: the rollout takes no more calls.
        """
        self._forget_refusal()
        known = self._calls.get(digest)
        if known is not None and not (known.has_failed or known.task.cancelling()):
            reached_nobody = not (known.readers or known.delivered)
            if retry or reached_nobody:
                self.counts["retried"] += 1
                self._readers += 1
                known.join()
                return known
        self._check_open(request)
        self._begun_calls += 1
        self._readers += 1
        call = AgentCall()
        call.task = asyncio.create_task(
            self._serve(call, request, dialect, is_first=self._begun_calls == 1)
        )
        call.task.add_done_callback(lambda _: self._call_ended(call))
        self._open_calls.add(call)
        self._calls[digest] = call
        return call

    def _check_open(self, request: ModelRequest) -> None:
        """Raise Refusal if the rollout has ended, or has spent its calls or its tokens."""
        if self._policy is None:
            raise Refusal("the rollout of this key has ended", status=401, code="rollout_ended")
        calls = self._ended_calls + len(self._open_calls)
        if calls >= self._config.max_turns:
            spent = f"made its {calls} calls (env.max_turns)"
        elif (
            self._max_sampled_tokens is not None
            and self._sampled_tokens >= self._max_sampled_tokens
        ):
            spent = f"sampled its {self._sampled_tokens} tokens (max_sampled_tokens)"
        else:
            return
        if self._model_of(request) == POLICY:
            self._budget_spent = True
        refusal = Refusal(f"the rollout has {spent}", code=BUDGET_EXCEEDED)
        self.count_refusal(refusal)
        raise refusal

    def _call_ended(self, call: AgentCall) -> None:
        """Take a call from the open ones, and count it against ``max_turns``.

        A cancelled call does not count, nor does a request that was refused for what it says. A
        Refusal of status 500 or above means that a model failed: such a call counts.
        """
        self._open_calls.discard(call)
        call.prompted.set()
        if call.task.cancelled():
            return
        failure = call.task.exception()
        was_refused = isinstance(failure, Refusal) and failure.status < 500
        if not was_refused:
            self._ended_calls += 1

    def leave(self, call: AgentCall, *, delivered: bool) -> None:
        """Note that a connection was sent the answer, or has gone.

        The first delivery of the policy's answer lets its turn be trained, unless the rollout was
        closed before: its samples are made without the turn. An open call that nobody
        reads any more is cancelled after ``KEEP_S``, unless a repeat joins it.
        """
        call.readers -= 1
        call.deliveries += delivered
        self._readers -= 1
        if not self._readers:
            self._all_left.set()
        if not call.task.done():
            if not call.readers:
                call.end = asyncio.get_running_loop().call_later(KEEP_S, call.task.cancel)
        elif delivered and not call.has_failed and not self._is_closed:
            turn = call.task.result().sampled.turn
            if turn.untrained == UNDELIVERED:
                turn.untrained = None
                self.counts[UNDELIVERED] -= 1
                self.counts["answered"] += 1

    def take_back(self, call: AgentCall) -> None:
        """Note that a client was sent the answer and has not read it, so that it is not trained.

        A turn that another call has gone on from was read by someone.
        """
        call.deliveries -= 1
        sampled = call.task.result().sampled
        went_on = sampled.conversation is None  # or the rollout is closed
        if call.delivered or went_on or sampled.turn.untrained is not None:
            return
        sampled.turn.untrained = UNDELIVERED
        self.counts["answered"] -= 1
        self.counts[UNDELIVERED] += 1

    async def count_tokens(self, request: ModelRequest) -> int:
        """Return the number of tokens of the request's prompt.

        A prompt that is too long to be tokenised counts as the most that a rollout may have.

        Raises:
            Refusal: the prompt can't be rendered.
        """
        conversation = Conversation(self._renderer, max_tokens=self._config.max_rollout_tokens)
        try:
            messages = self._rules.without_noise(request.messages, counted=False)
            await conversation.open(messages, request.tools)
        except UserCodeError as error:
            raise Refusal(str(error)) from error
        if conversation.prompt is None:
            return self._config.max_rollout_tokens
        return len(conversation.prompt.ids)

    # Answering a call.

    async def _serve(
        self, call: AgentCall, request: ModelRequest, dialect: str, *, is_first: bool
    ) -> SampledReply:
        """Answer a request, and count the call's outcome (`Rollout.calls`).

        Raises:
            Refusal: the request is refused, or no model answered it.
        """
        about = {
            "at_s": round(time.perf_counter() - self._opened_at, 4),
            "dialect": dialect,
            "model": request.model,
        }
        try:
            branch = await self._open_branch(request, is_first=is_first)
            check_stop(request, branch.session)
            call.prompted.set()
            completion = await self._sample(branch, request)
            sampled, message, stopped_at = await self._record(
                call, branch, completion, request, about
            )
        except asyncio.CancelledError:
            self.counts["aborted"] += 1
            raise
        except Refusal as refusal:
            self.count_refusal(refusal)
            raise
        except UserCodeError as error:
            self.counts["lost"] += 1
            raise Refusal(str(error), status=500, code="generation_failed") from error
        except RunError as error:  # of a frozen model, which has tried its servers again
            self.counts["lost"] += 1
            raise Refusal(str(error), status=MODEL_FAILED, code="model_failed") from error
        reply = reply_of(
            message,
            stopped_at=stopped_at,
            length=completion.finish_reason == "length",
            request=request,
            id=uuid.uuid4().hex,
            created=int(time.time()),
            prompt_tokens=len(sampled.turn.prompt_token_ids),
            completion_tokens=len(completion.token_ids),
        )
        self._rules.count_wishes(request, reply)
        if branch.model == POLICY and reply.finish == "length":
            sampled.is_cut = not self._asked_for_less(request, sampled.turn)
        return SampledReply(sampled, reply)

    def _model_of(self, request: ModelRequest) -> str:
        return self._models.get(request.model, POLICY)

    async def _open_branch(self, request: ModelRequest, *, is_first: bool) -> _Branch:
        """Find the request's place in the tree, and render its prompt there.

        Raises:
            Refusal: a field wants another sampling than the rollout's, or the prompt leaves no room
                for an answer or can't be rendered.
        """
        model = self._model_of(request)
        self._rules.check_fields(request, asks_policy=model in (POLICY, AUXILIARY))
        messages = self._rules.without_noise(request.messages)
        match = self._tree.match((model, request.tools), messages)
        new = messages[match.known :]
        self._rules.count_special_texts(new)
        self._rules.count_ignored(request)

        # The first request that goes on from a turn continues the turn's session and chain. Any
        # other begins a chain, with a session of its own.
        node = match.node
        goes_on = node is not None and not node.taken
        if node is not None:
            node.taken = True
        try:
            conversation = await self._render(match, new, request)
        except (Refusal, asyncio.CancelledError) as error:
            if node is not None and goes_on:
                node.taken = False  # a corrected request may go on from the turn
            if isinstance(error, PromptTooLong) and node is not None:
                was_trained = node.value.turn.untrained in (None, UNDELIVERED)
                self._refused_after_answer = was_trained
            raise
        if node is not None and goes_on:
            session = node.value.session
            chain = node.value.chain
        else:
            assert conversation.prompt is not None
            chain = self._chain_count
            self._chain_count += 1
            session = self._new_session(model, conversation.prompt.token_ids, is_first=is_first)
        return _Branch(
            model=model,
            match=match,
            new=new,
            conversation=conversation,
            session=session,
            chain=chain,
        )

    async def _render(
        self, match: "Match[SampledTurn]", new: list[Message], request: ModelRequest
    ) -> Conversation:
        """Return the conversation up to the request's prompt.

        Raises:
            Refusal: the prompt leaves no room for an answer, or can't be rendered.
        """
        try:
            if match.node is None:
                conversation = Conversation(
                    self._renderer, max_tokens=self._config.max_rollout_tokens, group=self._group
                )
                fits = await conversation.open(list(new), request.tools)
            else:
                conversation = self._conversation_after(match)
                conversation.extend(new)
                fits = await conversation.add_messages(new)
        except UserCodeError as error:
            raise Refusal(str(error), field="messages") from error
        if not fits:
            tokens = len(conversation.prompt.ids) if conversation.prompt else 0
            raise PromptTooLong(
                tokens if tokens > self.max_prompt_tokens else None,
                self._config.max_rollout_tokens,
            )
        return conversation

    def _conversation_after(self, match: "Match[SampledTurn]") -> Conversation:
        """Return the conversation as it stands after the turn that a request goes on from.

        The first request takes the turn's own; for another one it is made again from the turns.
        """
        assert match.node is not None
        before = match.node.value
        if before.conversation is not None:
            conversation = before.conversation
            before.conversation = None
            return conversation
        turns = [sampled.turn for sampled in match.node.path()]
        return Conversation.after(turns, self._renderer, max_tokens=self._config.max_rollout_tokens)

    def _new_session(self, model: str, prompt: np.ndarray, *, is_first: bool) -> PolicySession:
        """Return the session of a chain that begins.

        Its seed follows from the prompt, because calls side by side come in any order.
        """
        assert self._policy is not None
        if is_first and model == POLICY:
            return self._policy
        digest = hashlib.blake2b(prompt.tobytes(), digest_size=8).hexdigest()
        self._session_keys[digest] += 1
        key = f"{digest}/{self._session_keys[digest]}"
        if model in (POLICY, AUXILIARY):
            return self._policy.branch(key)
        session = self._frozen(model, self._policy.branch_seed(f"{model}/{key}"))
        self._frozen_sessions.append(session)
        return session

    async def _sample(self, branch: _Branch, request: ModelRequest) -> Completion:
        """Ask the model for the completion of the prompt.

        Raises:
            UserCodeError: the policy's generator failed.
            RunError: a frozen model failed, or returned no valid completion.
        """
        prompt = branch.conversation.prompt
        assert prompt is not None
        options: dict[str, Any] = {}
        if request.seed is not None:
            options["seed"] = request.seed
        if request.stop:
            options["stop"] = request.stop
        room = branch.conversation.max_completion_tokens
        completion = await branch.session.generate(
            prompt.token_ids, max_tokens=min(room, request.max_tokens or room), **options
        )
        try:
            completion = checked_completion(completion)  # the policy's is checked already
        except ValueError as error:
            raise RunError(f"model {branch.model!r}: {error}") from error
        self._sampled_tokens += len(completion.token_ids)
        self._forget_refusal()  # of a call that was begun while this one was served
        return completion

    async def _record(
        self,
        call: AgentCall,
        branch: _Branch,
        completion: Completion,
        request: ModelRequest,
        about: dict[str, Any],
    ) -> tuple[SampledTurn, Message, str | None]:
        """Record a completion as a turn of the rollout.

        The turn is in the tree also if the completion can't be parsed or the call is cancelled
        meanwhile, because its tokens were sampled.

        Returns:
            The turn, its message without the client's stop text, and that text if one ended it.

        Raises:
            UserCodeError: the completion can't be parsed, or the generator aborted it.
        """
        conversation = branch.conversation
        assert conversation.prompt is not None
        extends = conversation.prompt.extends
        untrained = "aborted"
        whole: Message | None = None
        without_stop: Message | None = None
        stopped_at: str | None = None
        try:
            turn = await conversation.add_completion(completion)
            if completion.finish_reason == "abort":
                raise UserCodeError("the generator aborted the completion")
            # The policy's turn is undelivered until `leave` notes that a client has the answer.
            reasons = {POLICY: UNDELIVERED, AUXILIARY: AUXILIARY}
            untrained = reasons.get(branch.model, "frozen model")
            self.counts[untrained] += 1
            whole = turn.assistant_message
            content, stopped_at = cut_at_stop(
                whole["content"], request.stop, at_text=self._ended_at_text(completion)
            )
            without_stop = cast(Message, whole | {"content": content})
        except UserCodeError:
            untrained = "lost"
            raise
        finally:
            turn = conversation.turns[-1]
            turn.untrained = untrained
            node = branch.match.node
            depth = len(node.path()) if node is not None else 0
            turn.call = about | {"chain": branch.chain, "depth": depth}
            sampled = SampledTurn(call, turn, branch.chain, conversation, branch.session)
            self._tree.add(
                branch.match,
                branch.new,
                without_stop,
                sampled,
                extends=extends,
                whole_answer=whole,
            )
        assert without_stop is not None, "the completion was parsed"
        return sampled, without_stop, stopped_at

    def _ended_at_text(self, completion: Completion) -> bool:
        """Return True if a text ended the completion, and not the model's own end of turn."""
        last = completion.token_ids[-1:]
        ended_itself = np.isin(last, self._renderer.get_stop_token_ids()).any()
        return completion.finish_reason == "stop" and not ended_itself

    def _asked_for_less(self, request: ModelRequest, turn: RolloutTurn) -> bool:
        """Return True if the client's own limit of tokens is below the limits of the run."""
        assert self._rules.sampling is not None
        room = self._config.max_rollout_tokens - len(turn.prompt_token_ids)
        return (request.max_tokens or room) < min(room, self._rules.sampling.max_tokens)

    def count_refusal(self, refusal: Refusal) -> None:
        """Count a refused call, and remember why it was refused: it may be the agent's last."""
        self.counts["refused"] += 1
        self._refusal_code = refusal.code
        text = one_sentence(str(refusal))
        if text in self.refusals or len(self.refusals) < MAX_REFUSALS:
            self.refusals[text] = self.refusals.get(text, 0) + 1
        self._notices.refused(refusal)

    def _forget_refusal(self) -> None:
        self._refusal_code = ""
        self._refused_after_answer = False
