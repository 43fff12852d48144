"""One rollout of an agent: what its calls are answered with, and what becomes of them.

A call is matched against what the rollout has said (`chains.py`), rendered, sampled, and answered. It is one turn of the
rollout, whoever asked. A turn is trained if its answer was delivered, and if the model that was asked for is the trained one.
"""

import asyncio
import contextlib
import hashlib
import logging
import re
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
from torchtitan.experiments.rl.envs.renderer import control_token_in
from torchtitan.experiments.rl.envs.renderer_env import RendererEnvConfig
from torchtitan.experiments.rl.errors import (
    RunError,
    UserCodeError,
    UserCodeTimeout,
    users_traceback,
)
from torchtitan.experiments.rl.gateway.chains import Chains, Match
from torchtitan.experiments.rl.gateway.request import (
    MODEL_FAILED,
    TASKS_OWN,
    WISHES,
    ModelReply,
    ModelRequest,
    Refusal,
    cut_at_stop,
    is_unmet,
    reply_of,
    unavailable,
)
from torchtitan.experiments.rl.printable import shown
from torchtitan.experiments.rl.rollouts.policy import PolicySession, SamplingConfig
from torchtitan.experiments.rl.rollouts.types import Completion, RolloutStatus, RolloutTurn

logger = logging.getLogger(__name__)

POLICY, AUXILIARY = "policy", "auxiliary"
"""What the names of models that an agent asks for may stand for: the policy, and the policy in calls that are not trained."""

UNDELIVERED = "undelivered"
CLOSE_S = 1.0
"""How long the end of a rollout waits for calls that are cancelled, and for answers that are being sent."""
KEEP_S = 15.0
"""Seconds that a call goes on after its last reader has left. A client that timed out asks again, OpenAI's and Anthropic's own
within 8 s."""
CONTEXT_EXCEEDED = "context_length_exceeded"
BUDGET_EXCEEDED = "call_budget_exceeded"
LIMITS = {
    CONTEXT_EXCEEDED: RolloutStatus.TRUNCATED_PROMPT_OVERFLOW,
    BUDGET_EXCEEDED: RolloutStatus.TRUNCATED_MAX_TURNS,
}
"""Status of a rollout that ended because a call was refused with this code."""


class Sampler(PolicySession, Protocol):
    """The policy, for one rollout: a session, and more of them beside it."""

    sampling: SamplingConfig
    """Sampling settings of the rollout: the task's, or those of a validation."""

    def branch(self, key: str) -> PolicySession:
        """Another session of the same rollout. Its seed follows from the rollout's and the key."""

    def branch_seed(self, key: str) -> int:
        """Return the seed that a branch with this key has."""


@dataclass(eq=False, slots=True)
class Call:
    """A request that is being answered, or was."""

    answer: "asyncio.Task[tuple[Said, ModelReply]]" = field(init=False)
    readers: int = 1
    """Connections that wait for it, or are being sent it."""
    delivered: bool = False
    """True if a client was sent all of the answer."""
    prompted: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the model is asked, or the call has ended. Until then a request may be refused for what it says."""
    end: asyncio.TimerHandle | None = None
    """Timer that ends the call, started when the last reader left."""

    def join(self) -> None:
        """Add a reader."""
        self.readers += 1
        if self.end is not None:
            self.end.cancel()


@dataclass(eq=False, slots=True)
class Said:
    """A turn, and what goes on from it."""

    call: Call
    turn: RolloutTurn
    chain: int
    conversation: Conversation | None
    """As it stands after the turn; None: a request has gone on from it."""
    session: PolicySession
    cut: bool = False
    """True if a limit of the run cut the policy's answer, and the client did not ask for that."""

    @property
    def is_cut_for_a_client(self) -> bool:
        """True if a client has the cut answer, or is being sent it."""
        return self.cut and (self.call.delivered or self.call.readers > 0)


class AgentRollout:
    """Takes calls from ``open`` to ``close``."""

    def __init__(
        self,
        sample: Any,
        *,
        renderer: Renderer,
        config: RendererEnvConfig,
        max_sampled_tokens: int | None,
        models: Mapping[str, str],
        frozen: Callable[[str, int], PolicySession],
        noise: Mapping[str, str],
        group: GroupPrompts,
        refused_fields: Sequence[str] = (),
    ):
        """
        Args:
            sample: the example it is of.
            config: ``max_turns`` is how many answers it may have, ``max_rollout_tokens`` how long each chain may be.
            max_sampled_tokens: of all calls together; None: as many as the calls give.
            models: what the names that an agent asks for stand for: POLICY, AUXILIARY, or else a name that ``frozen`` is called
                with. Others stand for the policy.
            frozen: opens a session of the frozen model of this name, with this seed.
            noise: patterns by name; what they match in a system message is left out.
            refused_fields: those of request.WISHES that are refused.
        """
        self.sample = sample
        self.status = RolloutStatus.ONGOING
        self.error: str | None = None
        self.traceback = ""
        """See Rollout."""
        self.answer: Any = None
        self.counts: Counter[str] = Counter()
        """See Rollout.calls."""
        self._renderer, self._config, self._group = renderer, config, group
        self._max_sampled_tokens = max_sampled_tokens
        self._models, self._frozen = models, frozen
        self._refused_fields = refused_fields
        self._noise = {name: re.compile(pattern) for name, pattern in noise.items()}
        self._chains: Chains[Said] = Chains()
        self._calls: dict[bytes, Call] = {}
        """By digest of the body, the last of each."""
        self._policy: Sampler | None = None
        self._sampling: SamplingConfig | None = None
        self._keys: Counter[str] = Counter()
        self._open_calls: set[Call] = set()
        self._begun = self._answered_calls = self._sampled = self._chain_count = 0
        self._began_at = 0.0
        self._refusal_code = ""
        """Code that the last call was refused with; "" if it was answered."""
        self._budget_spent = False
        """True if a call to the policy was refused because the rollout's budget was spent."""
        self._sessions: list[PolicySession] = []
        self._readers = 0
        """Of all calls together."""
        self._left = asyncio.Event()
        """Set when the last of them has left."""

    @property
    def turns(self) -> list[RolloutTurn]:
        """Chain by chain, so that a turn follows the one that it extends."""
        return [node.value.turn for node in self._chains.in_order()]

    @property
    def was_asked(self) -> bool:
        """True if a call has reached the rollout."""
        return self._begun > 0 or bool(self.counts["refused"])

    @property
    def max_prompt_tokens(self) -> int:
        """Of a prompt that leaves room for an answer."""
        return self._config.max_rollout_tokens - 1

    def open(self, policy: Sampler) -> None:
        """Take calls from now on."""
        self._policy = policy
        self._sampling = policy.sampling
        self._began_at = time.perf_counter()

    def finish(
        self, status: RolloutStatus, error: str | None = None, *, traceback: str = ""
    ) -> None:
        """The first terminal status stays."""
        if not self.status.is_terminal():
            self.status, self.error, self.traceback = status, error, traceback

    def ended(self, failure: UserCodeError | None) -> None:
        """Set the status of a rollout whose agent has returned or failed (docs/agents.md says when it is truncated)."""
        limit = LIMITS.get(self._refusal_code) if failure is not None else self._truncation()
        if isinstance(failure, UserCodeTimeout):
            self.finish(RolloutStatus.TIMEOUT, str(failure))
        elif failure is not None and limit is None:
            self.finish(RolloutStatus.ERROR, str(failure), traceback=users_traceback(failure))
        elif not self._begun:
            self.finish(RolloutStatus.ERROR, "the agent ended and had not asked the model anything")
        elif limit is None and not self.turns:
            self.finish(
                RolloutStatus.ERROR, "the agent ended, and none of its calls had been answered"
            )
        else:
            self.finish(limit or RolloutStatus.COMPLETED)

    def _truncation(self) -> RolloutStatus | None:
        """Return how the run's limits cut short an agent that has returned; None if they did not.

        An agent that went on from a cut answer has dealt with it, and so has one that caught a refusal
        and had an answer of the policy's already.
        """
        nodes = list(self._chains.in_order())
        if any(node.value.is_cut_for_a_client and not node.children for node in nodes):
            return RolloutStatus.TRUNCATED_LENGTH
        if self._budget_spent:
            return RolloutStatus.TRUNCATED_MAX_TURNS
        if any(node.value.turn.untrained in (None, UNDELIVERED) for node in nodes):
            return None
        return LIMITS.get(self._refusal_code)

    async def close(self) -> None:
        """Take no more calls. Those that are open end in the engine, and are not trained."""
        open_calls = [call.answer for call in self._open_calls]
        self._policy = None
        for call in self._open_calls:
            call.answer.cancel()
            if call.end is not None:
                call.end.cancel()
        if open_calls:
            await asyncio.wait(open_calls, timeout=CLOSE_S)
        # An agent may end with its last answer in hand, before the server has seen that it was delivered.
        if self._readers:
            self._left.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._left.wait(), CLOSE_S)
        self._calls.clear()
        for node in self._chains.in_order():
            node.value.conversation = None
        for session in self._sessions:
            session.close()
        self._sessions.clear()

    # ---- what the server calls

    def begin(self, request: ModelRequest, *, digest: bytes, retry: bool, dialect: str) -> Call:
        """Return a new call, or the one that a client repeats.

        A repeat joins the equal call before it if the client says that it is one, or if that call's answer
        has reached nobody and nobody waits for it: its client has gone, and asks again.

        Raises:
            Refusal: the rollout takes no more calls.
        """
        known = self._calls.get(digest)
        if known is not None and (_failed(known.answer) or known.answer.cancelling()):
            known = None
        if known is not None and (retry or not (known.readers or known.delivered)):
            self.counts["retried"] += 1
            known.join()
            self._readers += 1
            return known
        if self._policy is None:
            raise Refusal("the rollout of this key has ended", status=401, code="rollout_ended")
        spent = self._spent_budget()
        if spent is not None:
            self._budget_spent |= self._models.get(request.model, POLICY) == POLICY
            raise self._refused(Refusal(f"the rollout has {spent}", code=BUDGET_EXCEEDED))
        self._begun += 1
        self._readers += 1
        call = Call()
        call.answer = asyncio.create_task(
            self._answered(call, request, dialect, first=self._begun == 1)
        )
        call.answer.add_done_callback(lambda answer: self._has_ended(call))
        self._open_calls.add(call)
        self._calls[digest] = call
        return call

    def _has_ended(self, call: Call) -> None:
        """Take a call from the open ones, and count it against ``env.max_turns`` unless it was refused or cancelled."""
        self._open_calls.discard(call)
        call.prompted.set()
        if call.answer.cancelled():
            return
        failure = call.answer.exception()
        if not (isinstance(failure, Refusal) and failure.status < 500):
            self._answered_calls += 1

    def leave(self, call: Call, *, delivered: bool) -> None:
        """Take note that a connection has been sent the answer, or has gone."""
        call.readers -= 1
        call.delivered |= delivered
        self._readers -= 1
        if not self._readers:
            self._left.set()
        if not call.answer.done():
            if not call.readers:
                call.end = asyncio.get_running_loop().call_later(KEEP_S, call.answer.cancel)
        elif not _failed(call.answer):
            said, _ = call.answer.result()
            if said.turn.untrained != UNDELIVERED:
                return
            if delivered:
                said.turn.untrained = None
                self.counts[UNDELIVERED] -= 1
                self.counts["answered"] += 1

    async def count_tokens(self, request: ModelRequest) -> int:
        """Of the request's prompt."""
        conversation = Conversation(self._renderer, max_tokens=self._config.max_rollout_tokens)
        try:
            await conversation.open(self._quiet(request.messages), request.tools)
        except UserCodeError as error:
            raise Refusal(str(error)) from error
        return (
            len(conversation.prompt.ids) if conversation.prompt else self._config.max_rollout_tokens
        )

    async def _answered(
        self, call: Call, request: ModelRequest, dialect: str, *, first: bool
    ) -> tuple[Said, ModelReply]:
        about = {
            "at_s": round(time.perf_counter() - self._began_at, 4),
            "dialect": dialect,
            "model": request.model,
        }
        try:
            return await self._sampled_for(call, request, about, first=first)
        except asyncio.CancelledError:
            self.counts["aborted"] += 1
            raise
        except Refusal as refusal:
            self._refused(refusal)
            raise
        except UserCodeError as error:
            self.counts["lost"] += 1
            raise Refusal(str(error), status=500, code="generation_failed") from error
        except RunError as error:  # of a frozen model, which has tried its servers again
            self.counts["lost"] += 1
            raise Refusal(str(error), status=MODEL_FAILED, code="model_failed") from error

    async def _sampled_for(
        self, call: Call, request: ModelRequest, about: dict[str, Any], *, first: bool
    ) -> tuple[Said, ModelReply]:
        kind = self._models.get(request.model, POLICY)
        self._check_fields(request, kind)
        messages = self._quiet(request.messages)
        match = self._chains.match((kind, request.tools), messages)
        new = messages[match.known :]
        self._count_control_tokens(new)
        conversation, session, chain = await self._prompted(match, new, request)
        prompt = conversation.prompt
        assert prompt is not None
        if session is None:
            chain, self._chain_count = self._chain_count, self._chain_count + 1
            session = self._session(kind, prompt.token_ids, first=first)
        room = conversation.max_completion_tokens
        wanted = min(room, request.max_tokens or room)
        options: dict[str, Any] = {} if request.seed is None else {"seed": request.seed}
        if request.stop:
            _check_stop(request, session)
            options["stop"] = request.stop
        call.prompted.set()
        completion = await session.generate(prompt.token_ids, max_tokens=wanted, **options)
        self._sampled += len(completion.token_ids)
        self._refusal_code = ""
        # What was sampled is in the record whatever comes next: parsing may fail, and the client go meanwhile.
        untrained = "aborted"
        answer = None
        shown_answer = None
        try:
            turn = await conversation.add_completion(completion)
            if completion.finish_reason == "abort":
                raise UserCodeError("the generator aborted the completion")
            # Until the answer has left, where it would be trained at all.
            untrained = {POLICY: UNDELIVERED, AUXILIARY: AUXILIARY}.get(kind, "frozen model")
            self.counts[untrained] += 1
            answer = turn.assistant_message
            seen, stopped_at = cut_at_stop(
                answer["content"], request.stop, at_text=self._ended_at_text(completion)
            )
            shown_answer = cast(Message, answer | {"content": seen})
        except UserCodeError:
            untrained = "lost"
            raise
        finally:
            turn = conversation.turns[-1]
            turn.untrained = untrained
            turn.call = about | {
                "chain": chain,
                "depth": len(match.node.path()) if match.node else 0,
            }
            said = Said(call, turn, chain, conversation, session)
            self._chains.add(match, new, shown_answer, said, extends=prompt.extends, kept=answer)
        reply = reply_of(
            shown_answer,
            stopped_at=stopped_at,
            length=completion.finish_reason == "length",
            request=request,
            id=uuid.uuid4().hex,
            created=int(time.time()),
            prompt_tokens=len(prompt.ids),
            completion_tokens=len(completion.token_ids),
        )
        self._count_wishes(request, reply)
        if kind == POLICY and reply.finish == "length":
            assert self._sampling is not None
            said.cut = wanted >= min(room, self._sampling.max_tokens)
        return said, reply

    async def _prompted(
        self, match: "Match[Said]", new: list[Message], request: ModelRequest
    ) -> tuple[Conversation, PolicySession | None, int]:
        """The conversation up to this call's prompt, and the session and number of the chain that it goes on with.

        Raises:
            Refusal: the prompt leaves no room for an answer, or can't be rendered.
        """
        node, session, chain = match.node, None, -1
        try:
            if node is None:
                conversation = Conversation(
                    self._renderer, max_tokens=self._config.max_rollout_tokens, group=self._group
                )
                fits = await conversation.open(list(new), request.tools)
            else:
                said = node.value
                if not node.taken:
                    node.taken, session, chain = True, said.session, said.chain
                if said.conversation is None:
                    turns = [before.turn for before in node.path()]
                    conversation = Conversation.after(
                        turns, self._renderer, max_tokens=self._config.max_rollout_tokens
                    )
                else:
                    conversation, said.conversation = said.conversation, None
                conversation.messages.extend(new)
                fits = await conversation.add_messages(new)
        except UserCodeError as error:
            raise Refusal(str(error), field="messages") from error
        if not fits:
            tokens = len(conversation.prompt.ids) if conversation.prompt else 0
            seen = f"{tokens} tokens" if tokens > self.max_prompt_tokens else "more tokens"
            cure = "compact the conversation, or begin a new one"
            message = f"{seen} > {self.max_prompt_tokens} maximum (env.max_rollout_tokens): {cure}"
            raise Refusal(message, code=CONTEXT_EXCEEDED, field="messages")
        return conversation, session, chain

    def _session(self, kind: str, prompt: np.ndarray, *, first: bool) -> PolicySession:
        """For a chain that begins. Its seed follows from what it begins with: calls side by side come in any order."""
        assert self._policy is not None
        if first and kind == POLICY:
            return self._policy
        key = hashlib.blake2b(prompt.tobytes(), digest_size=8).hexdigest()
        self._keys[key] += 1
        key = f"{key}/{self._keys[key]}"
        if kind in (POLICY, AUXILIARY):
            return self._policy.branch(key)
        self._sessions.append(self._frozen(kind, self._policy.branch_seed(f"{kind}/{key}")))
        return self._sessions[-1]

    def _check_fields(self, request: ModelRequest, kind: str) -> None:
        """Raise Refusal if the client wants another sampling than the task's."""
        if request.seed is not None and kind in (POLICY, AUXILIARY):
            cure = "leave it out: the seeds of the policy follow from the run's"
            raise Refusal(f"seed = {request.seed}: {cure}", code="unsupported_value", field="seed")
        for name, value in request.sampling.items():
            if value != self._own_value(name, value):
                raise unavailable(name, value, TASKS_OWN[name][1])
        for name in self._refused_fields:
            value = request.wishes.get(name)
            if value is not None and value != self._own_value(name, value):
                raise unavailable(name, value, WISHES[name][1])

    def _count_control_tokens(self, new: list[Message]) -> None:
        """Count a call whose messages have a text that the prompt holds as a control token, and log the first one.

        A tool's answer or a web page with "<|im_end|>" ends its message early and may write the assistant's. The call is
        answered all the same: an agent shows the policy's own words again, and the policy can sample such tokens.
        """
        said = [message for message in new if message["role"] in ("user", "tool")]
        if (token := control_token_in(said, self._renderer)) is not None:
            if not self.counts["control_tokens"]:
                cure = "change the text before the agent sends it"
                logger.warning(
                    "an agent's message has %r, which becomes a control token of the prompt: %s",
                    token,
                    cure,
                )
            self.counts["control_tokens"] += 1

    def _count_wishes(self, request: ModelRequest, reply: ModelReply) -> None:
        for name, value in request.wishes.items():
            if value != self._own_value(name, value):
                self.counts[f"wish/{name}"] += 1
                self.counts[f"unmet/{name}"] += is_unmet(name, value, reply)

    def _own_value(self, name: str, value: Any) -> Any:
        """Return the rollout's own value of a field of TASKS_OWN or WISHES, or None where it has none.

        The field of a template's arguments holds several: their own values come back for the keys of ``value``.
        """
        settings = getattr(self._renderer, "config", None)
        if name == "chat_template_kwargs":
            return (
                {key: getattr(settings, key, None) for key in value}
                if isinstance(value, dict)
                else {}
            )
        return getattr(self._sampling, name, getattr(settings, name, None))

    def _ended_at_text(self, completion: Completion) -> bool:
        """Return whether a text ended the completion, and not the model's own end of turn."""
        last = completion.token_ids[-1:]
        return (
            completion.finish_reason == "stop"
            and not np.isin(last, self._renderer.get_stop_token_ids()).any()
        )

    def _quiet(self, messages: list[Message]) -> list[Message]:
        """The messages without what the task calls noise."""
        if not self._noise:
            return messages
        quiet = list(messages)
        for index, message in enumerate(messages):
            for name, pattern in (
                self._noise.items() if message["role"] in ("system", "developer") else ()
            ):
                rest, count = pattern.subn("", quiet[index]["content"])
                if count:
                    if not self.counts[f"noise/{name}"]:
                        logger.info(
                            "noise %r: left out %s", name, shown(pattern.search(message["content"]))
                        )
                    self.counts[f"noise/{name}"] += count
                    quiet[index] = quiet[index] | {"content": rest}
        return quiet

    def _spent_budget(self) -> str | None:
        """Return which budget of the rollout is spent; None if it may make another call."""
        calls = self._answered_calls + len(self._open_calls)
        if calls >= self._config.max_turns:
            return f"made its {calls} calls (env.max_turns)"
        if self._max_sampled_tokens is not None and self._sampled >= self._max_sampled_tokens:
            return f"sampled its {self._sampled} tokens (max_sampled_tokens)"
        return None

    def _refused(self, refusal: Refusal) -> Refusal:
        self.counts["refused"] += 1
        self._refusal_code = refusal.code
        return refusal


def _check_stop(request: ModelRequest, session: PolicySession) -> None:
    """Raise Refusal if the engine of the model that is asked does not look for the client's stop texts."""
    if not session.stops_at_texts:
        cure = "the run's engine does not look for texts: leave it out, or name tokens in the task's sampling.stop_token_ids"
        name = request.stop_field
        raise Refusal(
            f"{name} = {shown(request.stop)}: {cure}", code="unsupported_value", field=name
        )


def _failed(answer: "asyncio.Task[Any]") -> bool:
    return answer.done() and (answer.cancelled() or answer.exception() is not None)
