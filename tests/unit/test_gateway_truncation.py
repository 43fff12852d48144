"""An agent's rollout is truncated by a limit of the run that cut the policy, and by nothing else."""

import pytest

from tests.fakes.policy import ScriptedPolicy, ScriptedSession
from tests.unit.agents import client_of, config_of, run_agent, run_task
from torchtitan.experiments.rl.gateway import server
from torchtitan.experiments.rl.generation.references import FrozenModel
from torchtitan.experiments.rl.rollouts.types import RolloutStatus
from torchtitan.experiments.rl.tasks import AgentTask, Rubric

LONG = "one two three four five six seven eight nine ten eleven twelve"
LIMIT = 8
"""Tokens that the task samples in a turn; LONG has more, OK fewer."""
OK = "ok"
MODELS = {
    "small": "auxiliary",
    "judge": FrozenModel(name="judge", base_url="http://localhost:1/v1"),
}
TOO_LONG = "word " * 400


class Policy(ScriptedPolicy):
    """Says what the last message asks for, and so does every frozen model."""

    def session(self, **options):
        self.sessions.append(Session(self, **options))
        return self.sessions[-1]

    def frozen(self, model):
        return self


class Session(ScriptedSession):
    async def generate(self, prompt_token_ids, **options):
        prompt = self.policy.tokenizer.decode(prompt_token_ids)
        text = LONG if "at length" in prompt.rpartition("<|im_start|>user")[2] else OK
        self.policy.reply = lambda rollout_id, turn: text
        return await super().generate(prompt_token_ids, **options)


def user(content):
    return {"role": "user", "content": content}


BRIEF, AT_LENGTH = user("say it briefly"), user("say it at length")


async def answered(ask, messages, **fields):
    status, reply = await ask(messages, **fields)
    assert status == 200, reply
    return reply["choices"][0]


async def of_another_model(ask, model):
    await answered(ask, [BRIEF])
    path, body = "chat/completions", {"model": model, "messages": [AT_LENGTH], "max_tokens": 1}
    status, reply = await ask.raw(path, body)
    assert status == 200 and reply["choices"][0]["finish_reason"] == "length"


async def auxiliary_call_of_one_token(ask):
    await of_another_model(ask, "small")


async def frozen_call_of_one_token(ask):
    await of_another_model(ask, "judge")


async def auxiliary_call_cut_by_the_run(ask):
    await answered(ask, [BRIEF])
    await ask.raw("chat/completions", {"model": "small", "messages": [AT_LENGTH]})


async def stop_text_before_the_limit(ask):
    choice = await answered(ask, [AT_LENGTH], stop=["three"])
    assert choice["finish_reason"] == "stop" and choice["message"]["content"] == "one two "


async def yes_or_no_of_one_token(ask):
    await answered(ask, [BRIEF])
    assert (await answered(ask, [AT_LENGTH], max_tokens=1))["finish_reason"] == "length"


async def side_call_refused_and_caught(ask):
    await answered(ask, [BRIEF])
    assert (await ask([user(TOO_LONG)]))[0] == 400


async def longer_history_refused_and_caught(ask):
    choice = await answered(ask, [BRIEF])
    assert (await ask([BRIEF, choice["message"], user(TOO_LONG)]))[0] == 400


async def longer_history_refused_then_compacted(ask):
    await longer_history_refused_and_caught(ask)
    await answered(ask, [user("in short")])


async def longer_history_of_another_model_refused_and_caught(ask):
    await answered(ask, [BRIEF])
    body = {"model": "small", "messages": [BRIEF]}
    status, reply = await ask.raw("chat/completions", body)
    assert status == 200
    body["messages"] = [BRIEF, reply["choices"][0]["message"], user(TOO_LONG)]
    assert (await ask.raw("chat/completions", body))[0] == 400


async def cut_answer(ask):
    assert (await answered(ask, [AT_LENGTH]))["finish_reason"] == "length"


async def cut_answer_then_a_whole_side_call(ask):
    await cut_answer(ask)
    assert (await answered(ask, [BRIEF]))["finish_reason"] == "stop"


async def cut_answer_then_a_refused_call(ask):
    choice = await answered(ask, [AT_LENGTH])
    assert (await ask([AT_LENGTH, choice["message"], user(TOO_LONG)]))[0] == 400


async def cut_answer_that_the_agent_went_on_from(ask):
    choice = await answered(ask, [AT_LENGTH])
    await answered(ask, [AT_LENGTH, choice["message"], BRIEF])


async def cut_below_a_higher_limit_of_the_clients(ask):
    assert (await answered(ask, [AT_LENGTH], max_tokens=LIMIT + 1))["finish_reason"] == "length"


async def cut_at_the_run_limit_that_the_client_sent_too(ask):
    assert (await answered(ask, [AT_LENGTH], max_tokens=LIMIT))["finish_reason"] == "length"


async def refused_and_failed(ask):
    await answered(ask, [BRIEF])
    status, reply = await ask([user(TOO_LONG)])
    raise RuntimeError(reply["error"]["message"])


async def refused_then_malformed_and_failed(ask):
    await answered(ask, [BRIEF])
    assert (await ask([user(TOO_LONG)]))[0] == 400
    malformed = {"model": "policy", "messages": "no list"}
    assert (await ask.raw("chat/completions", malformed))[0] == 400
    raise RuntimeError("the agent's own fault")


async def only_refused(ask):
    assert (await ask([user(TOO_LONG)]))[0] == 400


COMPLETED, CUT = RolloutStatus.COMPLETED, RolloutStatus.TRUNCATED_LENGTH
OVERFLOW = RolloutStatus.TRUNCATED_PROMPT_OVERFLOW
ENDS = [
    (auxiliary_call_of_one_token, COMPLETED),
    (auxiliary_call_cut_by_the_run, COMPLETED),
    (frozen_call_of_one_token, COMPLETED),
    (stop_text_before_the_limit, COMPLETED),
    (yes_or_no_of_one_token, COMPLETED),
    (side_call_refused_and_caught, COMPLETED),
    (longer_history_refused_and_caught, OVERFLOW),
    (longer_history_refused_then_compacted, COMPLETED),
    (longer_history_of_another_model_refused_and_caught, COMPLETED),
    (cut_answer_that_the_agent_went_on_from, COMPLETED),
    (cut_answer, CUT),
    (cut_answer_then_a_whole_side_call, CUT),
    (cut_answer_then_a_refused_call, CUT),
    (cut_below_a_higher_limit_of_the_clients, CUT),
    (cut_at_the_run_limit_that_the_client_sent_too, CUT),
    (refused_and_failed, OVERFLOW),
    (refused_then_malformed_and_failed, RolloutStatus.ERROR),
    (only_refused, OVERFLOW),
]


@pytest.mark.parametrize(("calls", "status"), ENDS, ids=[calls.__name__ for calls, _ in ENDS])
async def test_a_rollout_is_truncated_only_where_the_run_cut_the_policy(
    calls, status, renderer, tokenizer
):
    class Agent(AgentTask):
        async def run_agent(self, sample, endpoint):
            async with client_of(endpoint) as ask:
                await calls(ask)
            return "42"

    def right(answer, row):
        return float(answer == "42")

    rubric = Rubric.Config(reward_fns=[right], truncation_reward=0.0)
    config = config_of(Agent, models=MODELS, sampled=LIMIT, tokens=256, rubric=rubric)
    (rollout,) = (await run_task(config, Policy(tokenizer), renderer)).rollouts
    assert rollout.status is status, rollout.error
    ends_refused = calls in (
        side_call_refused_and_caught,
        longer_history_of_another_model_refused_and_caught,
    )
    assert rollout.calls.get("completed_after_overflow", 0) == ends_refused
    if rollout.turns:
        assert rollout.reward == {COMPLETED: 1.0, RolloutStatus.ERROR: None}.get(status, 0.0)


async def test_a_cut_answer_that_no_client_got_truncates_nothing(renderer, tokenizer, monkeypatch):
    async def agent(sample, endpoint):
        async with client_of(endpoint) as ask:
            await ask([BRIEF])
            monkeypatch.setattr(server, "_is_open", lambda request: False)
            await ask([AT_LENGTH])

    rollout = await run_agent(agent, Policy(tokenizer), renderer, sampled=LIMIT)
    assert rollout.status is COMPLETED and rollout.calls == {"answered": 1, "undelivered": 1}


async def test_a_spent_budget_truncates_an_agent_that_asked_the_policy_for_more(
    renderer, tokenizer
):
    for model, status in (
        ("policy", RolloutStatus.TRUNCATED_MAX_TURNS),
        ("small", COMPLETED),
        ("judge", COMPLETED),
    ):

        async def agent(sample, endpoint, model=model):
            async with client_of(endpoint) as ask:
                await ask([BRIEF])
                body = {"model": model, "messages": [BRIEF]}
                assert (await ask.raw("chat/completions", body))[0] == 400

        rollout = await run_agent(agent, Policy(tokenizer), renderer, calls=1, models=MODELS)
        assert rollout.status is status, model
