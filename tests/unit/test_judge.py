"""Judges: what they ask, whose answers are shared, and that their failure is no reward."""

import asyncio
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.contexts import context_of
from tests.fakes.policy import ScriptedPolicy
from torchtitan.experiments.rl.algorithms import GRPO
from torchtitan.experiments.rl.config_registry import TINY_MODEL
from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.generation.judge import Judge, JudgeFailed, Reply
from torchtitan.experiments.rl.generation.references import FrozenModel, HostedModel
from torchtitan.experiments.rl.loops.step_metrics import costs
from torchtitan.experiments.rl.rollouts.costs import counted_in
from torchtitan.experiments.rl.rollouts.policy import SamplingConfig
from torchtitan.experiments.rl.rollouts.types import DataSample, RolloutStatus
from torchtitan.experiments.rl.rubrics.rubric import win_shares
from torchtitan.experiments.rl.tasks.examples.sum_digits import JudgedSumDigitsRubric, SumDigitsTask

SERVER = FrozenModel(name="big", base_url="http://localhost:1/v1")
ASKED = [{"role": "user", "content": "which?"}]


class Server:
    """The policy's client and the judge's: answers by ``answer``, which may raise, wait, or return a text or a Reply."""

    def __init__(self, answer: Callable[[list], object] = lambda messages: "yes"):
        self.answer, self.asked, self.seeds = answer, [], []
        self.open = self.most_open = 0

    def frozen(self, model):
        assert model == SERVER
        return self

    async def chat(self, messages, *, seed, sampling):
        if messages == [{"role": "user", "content": "Hello"}]:  # at setup
            return Reply(
                message={"role": "assistant", "content": "Hi"}, prompt_tokens=1, completion_tokens=1
            )
        self.asked.append(messages)
        self.seeds.append(seed)
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            answer = self.answer(messages)
            answer = await answer if asyncio.iscoroutine(answer) else answer
        finally:
            self.open -= 1
        if isinstance(answer, Reply):
            return answer
        return Reply(
            message={"role": "assistant", "content": answer}, prompt_tokens=7, completion_tokens=2
        )


async def judge_of(server: Server, **config) -> Judge:
    judge = Judge.Config(**{"model": SERVER, "name": "grader", "backoff_s": 0.0} | config).build()
    await judge.setup(server)
    return judge


async def test_equal_conversations_share_one_call_and_its_answer():
    release = asyncio.Event()

    async def slow(messages):
        await release.wait()
        return "yes"

    server = Server(slow)
    judge = await judge_of(server)
    spent: dict[str, float] = {}
    with counted_in(spent):
        asking = [asyncio.create_task(judge.chat(ASKED)) for _ in range(3)]
        await asyncio.sleep(0)
        asking[0].cancel()  # one who stops waiting takes the answer from no other
        release.set()
        answers = await asyncio.gather(*asking[1:], judge.chat([*ASKED]))
        with pytest.raises(TypeError, match="read-only"):  # the others have the same answer
            answers[0]["content"] = "changed"
        again = await judge.chat(ASKED)
    assert len(server.asked) == 1 and again == {"role": "assistant", "content": "yes"} == answers[1]
    assert spent.pop("judge/grader/seconds") > 0
    assert spent == {"judge/grader/calls": 1, "judge/grader/cached": 4} | {
        "judge/grader/prompt_tokens": 7,
        "judge/grader/completion_tokens": 2,
    }


async def test_only_so_many_answers_are_kept_the_last_used_ones():
    server = Server()
    judge = await judge_of(server, cache_size=2)
    for text in "abacab":
        await judge.chat([{"role": "user", "content": text}])
    # c took the place of b, whose next use took that of c or a: a was used after c.
    assert [messages[0]["content"] for messages in server.asked] == ["a", "b", "c", "b"]
    forgetful = await judge_of(Server(), cache_size=0)
    await forgetful.chat(ASKED)
    await forgetful.chat(ASKED)
    assert len(forgetful._client.asked) == 2


async def test_no_more_calls_are_open_than_the_limit():
    server = Server(lambda messages: asyncio.sleep(0.001, "yes"))
    judge = await judge_of(server, max_concurrency=3)
    await asyncio.gather(
        *(judge.chat([{"role": "user", "content": str(number)}]) for number in range(20))
    )
    assert server.most_open == 3 and len(server.asked) == 20


def failing(times: int, error: Exception):
    left = [error] * times

    def answer(messages):
        if left:
            raise left.pop()
        return "yes"

    return answer


async def test_a_failure_is_tried_again_with_another_seed_and_is_not_kept():
    server = Server(failing(2, RunError("the model is gone")))
    judge = await judge_of(server, max_retries=2)
    assert (await judge.chat(ASKED))["content"] == "yes" and len(set(server.seeds)) == 3
    server = Server(failing(3, RunError("the model is gone")))
    judge = await judge_of(server, max_retries=2)
    spent: dict[str, float] = {}
    with (
        counted_in(spent),
        pytest.raises(JudgeFailed, match="judge 'grader' failed, last with: the model is gone"),
    ):
        await judge.chat(ASKED)
    assert spent["judge/grader/calls"] == 3 and spent["judge/grader/failed"] == 1
    assert (await judge.chat(ASKED))["content"] == "yes"


async def test_an_attempt_that_takes_too_long_and_an_answer_that_is_cut_off_are_failures():
    judge = await judge_of(
        Server(lambda messages: asyncio.Event().wait()), timeout_s=0.01, max_retries=1
    )
    with pytest.raises(
        JudgeFailed, match="'grader' failed, last with: no answer within timeout_s = 0.01"
    ):
        await judge.chat(ASKED)
    half = Reply(
        message={"role": "assistant", "content": "ye"},
        prompt_tokens=1,
        completion_tokens=2,
        whole=False,
    )
    judge = await judge_of(
        Server(lambda messages: half), sampling=SamplingConfig(temperature=0.0, max_tokens=2)
    )
    with pytest.raises(
        JudgeFailed,
        match="'grader' failed, last with: its answer was cut off at sampling.max_tokens = 2",
    ):
        await judge.chat(ASKED)
    assert len(judge._client.asked) == 1, "a greedy answer would be cut off again"


async def test_a_judge_without_setup_says_so():
    with pytest.raises(JudgeFailed, match="'judge' was asked before its setup"):
        await Judge.Config(model=SERVER).build().chat(ASKED)


async def test_a_hosted_judge_is_asked_in_tokens_by_its_own_template(tokenizer):
    class Host(ScriptedPolicy):
        def frozen(self, model):
            assert model == HostedModel(path=TINY_MODEL)
            return self

    host = Host(tokenizer, "<think>\nhm\n</think>\n\nyes")
    judge = Judge.Config(model=HostedModel(path=TINY_MODEL)).build()
    await judge.setup(host)
    spent: dict[str, float] = {}
    with counted_in(spent):
        answer = await judge.chat(ASKED)
    assert answer == {"role": "assistant", "content": "yes", "reasoning_content": "hm"}
    (session,) = host.sessions
    assert tokenizer.decode(session.prompts[0]).startswith(
        "<|im_start|>user\nwhich?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert session.sampling.temperature == 0 and session.closed
    assert spent["judge/judge/prompt_tokens"] == len(session.prompts[0])


# ---- a task whose rewards a judge decides


async def judged_group(renderer, tokenizer, server: Server, replies: list[str], **config):
    """A group of sums of 4 and 8, with these replies."""

    class Replying(ScriptedPolicy):
        def frozen(self, model):
            return server

    judge = Judge.Config(model=SERVER, name="grader", backoff_s=0.0, max_retries=0)
    task = SumDigitsTask.Config(
        algorithm=GRPO.Config(),
        group_size=len(replies),
        rubric=JudgedSumDigitsRubric.Config(judge=judge, **config),
    ).build(name="judged", context=context_of(renderer))
    policy = Replying(
        tokenizer, lambda rollout_id, turn: replies[int(rollout_id.rpartition("/")[2])]
    )
    await task.setup(policy)
    group = await task.run_group(
        DataSample(sample_id="0", env_input=[4, 8]), policy, group_id="g", seed=0
    )
    await task.score_group(group)
    return group


async def test_the_judges_answer_decides_the_reward_and_the_truth_is_only_recorded(
    renderer, tokenizer
):
    server = Server(lambda messages: "13")  # wrong
    group = await judged_group(renderer, tokenizer, server, ["12", "13", "13", "x"])
    assert server.asked == [[{"role": "user", "content": "Sum of the digits: 4 8"}]]
    assert group.rewards == [0.0, 1.0, 1.0, 0.0]
    assert [rollout.reward_components["correct"] for rollout in group.rollouts] == [
        1.0,
        0.0,
        0.0,
        0.0,
    ]
    assert group.costs["judge/grader/calls"] == 1 and group.costs["judge/grader/cached"] == 3
    found = costs([group, group])
    assert (
        found["judge/grader/calls"] == 2
        and found["time/judge/grader_s"] == 2 * group.costs["judge/grader/seconds"]
    )
    assert not any(name.endswith("/seconds") for name in found)


async def test_a_pairwise_judges_rewards_are_shares_of_comparisons(renderer, tokenizer):
    group = await judged_group(
        renderer, tokenizer, Server(lambda messages: "12"), ["12", "1", "12", "2"], mode="pairwise"
    )
    # A right reply ties with the other right one and beats two; a wrong one ties with the other and loses to two.
    assert group.rewards == pytest.approx([2.5 / 3, 0.5 / 3, 2.5 / 3, 0.5 / 3])


@pytest.mark.parametrize("mode", ["each", "pairwise"])
async def test_a_judge_that_fails_gives_no_reward_and_the_rollout_names_it(
    renderer, tokenizer, mode
):
    server = Server(failing(99, RunError("no such model")))
    group = await judged_group(renderer, tokenizer, server, ["12", "13"], mode=mode)
    assert group.rewards == [] and group.failure is not None
    for rollout in group.rollouts:
        assert (
            rollout.status is RolloutStatus.ERROR
            and "judge 'grader' failed, last with: no such model" in rollout.error
        )


@given(st.lists(st.integers(0, 3), min_size=1, max_size=6))
def test_win_shares_sum_to_half_of_all_and_equal_answers_have_equal_ones(answers):
    async def prefers(first, second):
        return 0.5 + 0.5 * ((answers[first] > answers[second]) - (answers[first] < answers[second]))

    shares = asyncio.run(win_shares(len(answers), prefers))
    assert sum(shares) == pytest.approx(len(answers) / 2)
    others = max(len(answers) - 1, 1)
    for answer, share in zip(answers, shares, strict=True):
        ties = answers.count(answer) - 1
        wins = sum(other < answer for other in answers)
        assert share == pytest.approx((wins + ties / 2) / others if len(answers) > 1 else 0.5)


def test_a_judges_liking_for_a_place_cancels():
    async def first_wins(first, second):
        return 1.0

    assert asyncio.run(win_shares(4, first_wins)) == [0.5] * 4
