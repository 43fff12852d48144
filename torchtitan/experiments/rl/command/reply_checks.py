"""Replies that the preflight tries beside the first, to warn of what would teach the model nothing.

known answers   each of the first rows' own answers, which should earn more than an empty reply
tool call       a call of the first tool, with made-up arguments
thought         a reply with a thought, if a reward function looks for one in the completion

Nothing here refuses a config: a model makes replies up too. Each check returns a line for a person.
"""

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchtitan.experiments.rl.data.rows import RowDataset
from torchtitan.experiments.rl.envs.tool_calls import call_ids, example_call
from torchtitan.experiments.rl.printable import printable_line, text_of
from torchtitan.experiments.rl.rollouts.types import DataSample, Rollout, RolloutStatus, RolloutTurn
from torchtitan.experiments.rl.rubrics.rubric import looks_for_thoughts
from torchtitan.experiments.rl.tasks.scripted_policy import ScriptedPolicy
from torchtitan.experiments.rl.tasks.task import Task

REPLY = "The answer is 42."
"""Reply of the scripted model, wherever no other is tried."""
THOUGHT = "<think>\nBy heart.\n</think>\n\n42"
MAX_ANSWERS = 100
"""Maximum number of rows whose answer is tried as the reply."""
ANSWERS_S = 3.0
"""Seconds after which no further row's answer is tried, so that a slow judge does not hold up the
run."""
ANSWER_FORMS = ("{}", "\\boxed{{{}}}", "<answer>{}</answer>", "Answer: {}")
"""Usual forms of a reply that is an answer. The first is the answer alone."""
SHOWN_ROWS = 5
"""Maximum number of rows that a warning names."""
SHOWN_LENGTH = 200
"""Maximum number of characters that a warning shows of the env's answer to a call."""


class NotScored(Exception):
    """Failure of a reply's rollout, by its cause in one line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswersTried:
    """Outcome of trying the rows' own answers as replies."""

    count: int
    faults: dict[str, str]
    """Reason why a row's answer teaches nothing, by the row's location in its file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplyChecks:
    """Checks of one task by single replies."""

    task: Task
    field: str
    """Path of the task's config, such as "tasks.sum_digits"."""
    tokenizer: Any
    seed: int
    announce: Callable[[str], None]
    """Function that is told what is tried next, for the error if that fails or hangs."""

    def thoughts_warning(self, prompt_token_ids: Sequence[int] | np.ndarray) -> str | None:
        """Warn of reward functions that look for a thought where this renderer leaves none."""
        functions = self.task.rubric.functions
        names = [name for name, entry in functions.items() if looks_for_thoughts(entry)]
        if not names:
            return None
        reply = self.tokenizer.encode(THOUGHT, add_special_tokens=False)
        prompt = [int(token) for token in prompt_token_ids]
        parsed = self.task.renderer.parse_response(reply, prompt_ids=prompt)
        if "<think>" in parsed.content:
            return None
        return (
            f"{self.field}.rubric: {', '.join(names)}: looks for <think> in the completion, which "
            'is the reply without its thought: RewardFn(fn, takes="rollout") gives it the rollout, '
            'whose turns[-1].assistant_message has the thought as "reasoning_content"'
        )

    async def try_answers(self) -> AnswersTried | None:
        """Try the answer of each of the first rows as the reply.

        Return None if the task compares rollouts or runs and scores them in its own way, so that a
        single reply has no reward.
        """
        task = self.task
        if _runs_itself(task) or _scores_itself(task) or task.rubric.compares_group:
            return None
        loop = asyncio.get_running_loop()
        end_s = loop.time() + ANSWERS_S
        count = 0
        faults: dict[str, str] = {}
        for index in range(min(len(task.dataset), MAX_ANSWERS)):
            sample = task.dataset[index]
            answer = task.known_answer(sample)
            if answer is None:
                continue
            location = self._location(index)
            self.announce(f"the reward of the answer of {location}")
            try:
                fault = await self._fault_of_answer(sample, answer)
            except NotScored as error:
                fault = str(error)
            if fault is not None:
                faults[location] = fault
            count += 1
            if loop.time() > end_s:
                break
        return AnswersTried(count=count, faults=faults)

    def answers_warning(self, tried: AnswersTried) -> str | None:
        """Warn of the rows whose own answer is not rewarded."""
        if not tried.faults:
            return None
        locations = list(tried.faults)
        more = ", ..." if len(locations) > SHOWN_ROWS else ""
        functions = ", ".join(self.task.rubric.names) or type(self.task.rubric).__name__
        return (
            f"{self.field}.rubric: of the first {tried.count:,} rows {len(locations):,} are not "
            f"rewarded for their own answer ({', '.join(locations[:SHOWN_ROWS])}{more}); "
            f"{locations[0]}: {tried.faults[locations[0]]}; see to the row's answer, and to how "
            f"{functions} compares it with a text"
        )

    def _location(self, index: int) -> str:
        dataset = self.task.dataset
        return dataset.rows.location(index) if isinstance(dataset, RowDataset) else f"row {index}"

    async def _fault_of_answer(self, sample: DataSample, answer: str) -> str | None:
        """Return why replies with the answer teach nothing.

        None if one of the usual forms earns more than an empty reply, or if the limits of the
        rollout cut off the empty reply or the answer alone.

        Raises:
            NotScored: the rollout of a reply failed.
        """
        empty = await self._earned(sample, "")
        alone = None if empty is None else await self._earned(sample, answer)
        if empty is None or alone is None or alone > empty:
            return None
        for form in ANSWER_FORMS[1:]:
            reward = await self._earned(sample, form.format(answer))
            if reward is not None and reward > empty:
                return None
        return f"the reply {text_of(answer)!r} earns {alone:g}, and an empty reply {empty:g}"

    async def _earned(self, sample: DataSample, reply: str) -> float | None:
        """Return the reward of a rollout with this reply in each turn; None if it was cut off.

        Raises:
            NotScored: the rollout failed.
        """
        rollout = await self._run(sample, lambda turn: reply)
        if rollout.status.is_error():
            raise NotScored(str(rollout.error))
        return None if rollout.status.is_truncated() else rollout.reward

    async def tool_warning(self, turn: RolloutTurn) -> str | None:
        """Have the scripted model call the first tool once, and warn if that fails.

        Args:
            turn: first turn of the task's first example.
        """
        if _runs_itself(self.task) or not turn.tools:
            return None
        name, arguments = example_call(turn.tools[0])
        call = f"{name}({printable_line(json.dumps(arguments))})"
        self.announce(f"the call {call}")
        ids = call_ids(self.task.renderer, turn.prompt_messages, turn.tools, name, arguments)
        if ids is None:
            return (
                f"{self.field}: no tool was tried: the renderer does not write the call {call} so "
                "that it is read again"
            )
        reply = str(self.tokenizer.decode(ids))
        rollout = await self._run(self.task.dataset[0], lambda turn: reply if turn == 0 else REPLY)
        return self._fault_of_call(call, rollout)

    def _fault_of_call(self, call: str, rollout: Rollout) -> str | None:
        if rollout.status.is_error():
            cause = str(rollout.error).removeprefix(f"task {self.task.name}: ")
            return (
                f"{self.field}: after the call {call} the rollout ended as "
                f"{rollout.status.name}: {cause}"
            )
        if rollout.status is RolloutStatus.TRUNCATED_LENGTH:
            return (
                f"{self.field}: no tool was tried: the call {call} takes more tokens than an "
                "answer may have"
            )
        first = rollout.turns[0]
        if any(first.reward_components.get(name) for name in ("bad_calls", "failed_calls")):
            answer = text_of(first.env_messages[0]["content"], SHOWN_LENGTH)
            return f"{self.field}: the call {call} was answered with {answer!r}"
        return None

    async def _run(self, sample: DataSample, reply: Callable[[int], str]) -> Rollout:
        """Run and reward one rollout of a sample.

        Args:
            reply: returns the scripted model's reply in a turn, of which the first is 0.
        """
        policy = ScriptedPolicy(self.tokenizer, lambda rollout, turn: reply(turn))
        group = await self.task.run_group(
            sample, policy, group_id="preflight", seed=self.seed, group_size=1
        )
        (rollout,) = group.rollouts
        if not rollout.status.is_error() and not _scores_itself(self.task):
            await self.task.score_rewards(group)
        return rollout


def _runs_itself(task: Task) -> bool:
    """Return True if the task runs groups in its own way, which may not take a size."""
    return type(task).run_group is not Task.run_group


def _scores_itself(task: Task) -> bool:
    """Return True if the task gives rewards and credit in its own way."""
    return type(task).score_group is not Task.score_group
