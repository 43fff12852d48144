"""Random conversations, rendered as many model families do: what was sampled is what is trained, all the way to the batch.

Completions are texts as models write them (thoughts, tool calls, cut off in the middle), any tokens at all, and nothing. Each
sampled token has a log-probability of its own, which follows it wherever it goes.
"""

import asyncio
import itertools
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.batches import STREAMS, unpack
from tests.unit.renderer_families import SETTINGS, family_renderer, family_tokenizer
from torchtitan.experiments.rl.algorithms import Echo
from torchtitan.experiments.rl.batching.batcher import Batcher
from torchtitan.experiments.rl.envs.message_env import MessageEnv, ResetOutput, StepOutput
from torchtitan.experiments.rl.envs.renderer_env import RendererEnv, RendererEnvConfig
from torchtitan.experiments.rl.rollouts.samples import samples_from_turns
from torchtitan.experiments.rl.rollouts.types import Completion, Rollout, RolloutStatus
from torchtitan.experiments.rl.types import ROLES

ADD = {
    "name": "add",
    "description": "Adds.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
TOOLS = [{"type": "function", "function": ADD}]
FORGOTTEN = {"role": "assistant", "content": "I said something."}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(
    [
        "the sum is 12",
        " ",
        "\n\n",
        "<think>",
        "</think>\n\n",
        "<|im_end|>",
        "<|user|>",
        "e\u0301 \U0001f600 你好",
        CALL,
        CALL[:20],
    ]
)


@dataclass
class Said:
    """One completion."""

    text: str | None
    """None: ``ids`` are sampled as they are."""
    ids: list[int]
    """Into the vocabulary, modulo its size."""
    finish_reason: str


@dataclass
class Script(MessageEnv):
    """A conversation: what the model says in each turn, what the env answers, and when the renderer loses its memory."""

    opening: list[dict]
    tools: list[dict]
    said: list[Said]
    answers: list[list[dict]]
    forgets: set[int]
    """Turns after which the prompt no longer says what the model said."""
    prompts: list[list[int]] = field(default_factory=list)
    """As the generator was given them."""
    step: int = 0

    async def reset(self):
        return ResetOutput(messages=self.opening, tools=self.tools)

    async def step_message(self, message):
        self.step += 1
        return StepOutput(
            env_messages=self.answers[self.step - 1], done=self.step == len(self.said)
        )


def said() -> st.SearchStrategy[Said]:
    thought = st.none() | TEXTS
    texts = st.builds(
        lambda thought, text, call: ("" if thought is None else f"<think>\n{thought}\n</think>\n\n") + text + call,
        thought, TEXTS, st.sampled_from(["", "", CALL, "\n" + CALL + "\n" + CALL]),
    )  # fmt: skip
    finish = st.sampled_from(["stop"] * 8 + ["length", "abort"])
    ids = st.lists(st.integers(0, 10_000), max_size=6)
    return st.builds(Said, text=texts | st.none(), ids=ids, finish_reason=finish)


def messages(*roles: str) -> st.SearchStrategy[dict]:
    return st.builds(
        lambda role, text: {"role": role, "content": text},
        st.sampled_from(roles),
        TEXTS.map(lambda text: text + "."),
    )


@st.composite
def scripts(draw) -> Script:
    turns = draw(st.integers(1, 5))
    opening = draw(st.lists(messages("system"), max_size=1)) + [draw(messages("user"))]
    return Script(
        opening=opening,
        tools=draw(st.sampled_from([[], TOOLS])),
        said=draw(st.lists(said(), min_size=turns, max_size=turns)),
        answers=draw(
            st.lists(
                st.lists(messages("user", "tool"), min_size=1, max_size=2),
                min_size=turns,
                max_size=turns,
            )
        ),
        forgets=draw(st.sets(st.integers(1, 4), max_size=2)) if draw(st.booleans()) else set(),
    )


class WatchedRenderer:
    """A family's renderer that remembers what it rendered and, after some turns, what the model said."""

    def __init__(self, renderer, script: Script):
        self._renderer, self._script = renderer, script
        self.rendered = None
        self.bridged = False

    def __getattr__(self, name):
        return getattr(self._renderer, name)

    @property
    def forgetful(self) -> bool:
        return self._script.step in self._script.forgets

    def bridge_to_next_turn(self, *args, **kwargs):
        self.rendered = (
            None if self.forgetful else self._renderer.bridge_to_next_turn(*args, **kwargs)
        )
        self.bridged = self.rendered is not None
        return self.rendered

    def render(self, messages, **kwargs):
        if self.forgetful:
            messages = [
                FORGOTTEN if message["role"] == "assistant" else message for message in messages
            ]
        self.rendered = self._renderer.render(messages, **kwargs)
        return self.rendered

    def roles(self) -> list[int]:
        """Of each token of the last prompt, as in TrainingSample.role_ids. A tokenizer's own template doesn't know them."""
        known, roles = bool(self.rendered.is_content), self.rendered.message_roles
        indices = self.rendered.message_indices if known else [-1] * len(self.rendered.token_ids)
        return [ROLES.index(roles[index]) if index >= 0 else -1 for index in indices]


@dataclass
class Played:
    rollout: Rollout
    prompts: list[list[int]]
    chains: list[list[int]]
    """Role ids of prompts and completions, by an account of our own: a list for each run of prompts that extend each other."""
    forks: int
    """Prompts that do not start with all that was before them."""


async def play(script: Script, family: str, folder, *, first_token: int = 0) -> Played:
    """Run the script as a task does; token n of all that are sampled, in order, has log-probability -(n + 1) / 4096."""
    renderer = WatchedRenderer(family_renderer(family, folder), script)
    tokenizer = family_tokenizer(SETTINGS[family]["name"])
    stop = renderer.get_stop_token_ids()[0]
    numbers = itertools.count(first_token + 1)
    env = RendererEnv(
        message_env=script, renderer=renderer, config=RendererEnvConfig(max_rollout_tokens=10**5)
    )
    await env.initial_prompt()
    before: list[int] = []
    prompts, chains, forks = [], [[]], 0
    for words in script.said:
        if env.status.is_terminal():
            break
        prompt = env.prompt_token_ids.tolist()
        prompts.append(prompt)
        if words.text is not None:
            ids = tokenizer.encode(words.text, add_special_tokens=False)
        else:
            ids = [token % len(tokenizer) for token in words.ids]
        ids += [stop] * (words.finish_reason == "stop" and bool(words.text or len(words.ids) % 2))
        if prompt[: len(before)] == before:
            chains[-1] += renderer.roles()[len(before) :]
        else:
            forks += 1
            # A bridge may keep less than all: a completion that says more after the end of its turn is cut there.
            same = [new == old for new, old in zip(prompt, before, strict=False)]
            kept = (same + [False]).index(False) if renderer.bridged else 0
            chains.append(chains[-1][:kept] + renderer.roles()[kept:])
        chains[-1] += [ROLES.index("assistant")] * len(ids)
        before = prompt + ids
        sampled = Completion(
            token_ids=np.asarray(ids, np.int32),
            logprobs=np.asarray([-next(numbers) / 4096 for _ in ids], np.float32),
            policy_versions=np.full(len(ids), len(prompts), np.int32),
            finish_reason=words.finish_reason,
        )
        await env.step_completion(sampled)
    assert env.status.is_terminal() and env.status not in (
        RolloutStatus.ERROR,
        RolloutStatus.TIMEOUT,
    ), env.error
    rollout = Rollout(
        group_id="g",
        index_in_group=first_token,
        task_name="talk",
        turns=env.turns,
        status=env.status,
    )
    rollout.samples = samples_from_turns(
        env.turns, task_name="talk", rollout_id=rollout.rollout_id, temperature=0.5
    )
    return Played(rollout=rollout, prompts=prompts, chains=chains, forks=forks)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tokenizers")


def sampled_of(rollout: Rollout, stream: str) -> list:
    return [value for turn in rollout.turns for value in getattr(turn.completion, stream).tolist()]


def masked(samples, stream: str) -> list:
    return [
        value for sample in samples for value in getattr(sample, stream)[sample.loss_mask].tolist()
    ]


@pytest.mark.parametrize("family", SETTINGS)
@settings(max_examples=30)
@given(script=scripts())
def test_trained_tokens_are_the_sampled_tokens_each_once_behind_the_prompt_it_was_sampled_from(
    family, folder, script
):
    played = asyncio.run(play(script, family, folder))
    rollout, samples = played.rollout, played.rollout.samples
    assert len(rollout.turns) == len(played.prompts)

    assert masked(samples, "token_ids") == sampled_of(rollout, "token_ids")
    assert masked(samples, "generator_logprobs") == sampled_of(rollout, "logprobs")
    assert masked(samples, "policy_versions") == sampled_of(rollout, "policy_versions")

    # Each turn's prompt and completion are, as they were, a beginning of the sample they are in.
    where = {
        logprob: (sample, at)
        for sample in samples
        for at, logprob in enumerate(sample.generator_logprobs.tolist())
    }
    for turn, prompt in zip(rollout.turns, played.prompts, strict=True):
        assert turn.prompt_token_ids.tolist() == prompt
        if len(turn.completion.token_ids):
            sample, at = where[turn.completion.logprobs[0].item()]
            assert (
                sample.token_ids[: at + len(turn.completion.token_ids)].tolist()
                == prompt + turn.completion.token_ids.tolist()
            )

    for sample in samples:
        assert not sample.loss_mask[0] and sample.loss_mask[-1]
        assert not sample.generator_logprobs[~sample.loss_mask].any()
        assert (sample.policy_versions[~sample.loss_mask] == -1).all()


@pytest.mark.parametrize("family", SETTINGS)
@settings(max_examples=20)
@given(script=scripts())
def test_rewritten_history_starts_a_sample_and_every_token_keeps_its_role(family, folder, script):
    played = asyncio.run(play(script, family, folder))
    samples = played.rollout.samples
    if all(len(turn.completion.token_ids) for turn in played.rollout.turns):
        assert len(samples) == 1 + played.forks
        assert [sample.role_ids.tolist() for sample in samples] == played.chains
    assert all(
        (sample.role_ids[sample.loss_mask] == ROLES.index("assistant")).all() for sample in samples
    )


@settings(max_examples=40)
@given(data=st.data())
def test_streams_stay_with_their_tokens_through_packing_and_batching(folder, data):
    first_token, samples, sampled = 0, [], []
    for _ in range(data.draw(st.integers(1, 5))):
        family = data.draw(st.sampled_from(sorted(SETTINGS)))
        rollout = asyncio.run(
            play(data.draw(scripts()), family, folder, first_token=first_token)
        ).rollout
        count = len(sampled_of(rollout, "logprobs"))
        rollout.assign_advantages([logprob * 2 for logprob in sampled_of(rollout, "logprobs")])
        sampled += zip(
            sampled_of(rollout, "token_ids"), sampled_of(rollout, "logprobs"), strict=True
        )
        samples += rollout.samples
        first_token += count
    longest = max(map(len, samples), default=1)
    batcher = Batcher.Config(
        row_length=longest + data.draw(st.integers(0, 300)), rows_per_microbatch=2
    ).build()
    plan = batcher.plan(samples, data.draw(st.integers(1, 3)))

    # A sample is known by its first sampled token.
    expected = {sample.generator_logprobs[sample.loss_mask][0].item(): sample for sample in samples}
    trained = []
    for batch in itertools.chain(*plan.microbatches):
        for piece in unpack(batch)[0]:
            mask = piece["loss_mask"]
            sample = expected.pop(piece["generator_logprobs"][mask][0].item())
            for name in STREAMS:
                absent = {"rl_weights": sample.loss_mask}.get(name, np.zeros(len(sample)))
                want = getattr(sample, name)
                np.testing.assert_array_equal(
                    piece[name], absent if want is None else want, err_msg=name
                )
            assert (piece["advantages"][mask] == piece["generator_logprobs"][mask] * 2).all()
            assert set(piece["temperatures"].tolist()) == {0.5}
            trained += zip(
                piece["token_ids"][mask].tolist(),
                piece["generator_logprobs"][mask].tolist(),
                strict=True,
            )
    assert not expected and sorted(trained) == sorted(sampled)


@pytest.mark.parametrize(
    "family",
    ["qwen3, thoughts kept", "qwen3, thoughts stripped", "llama-3", "deepseek-v3", "default"],
)
@settings(max_examples=25)
@given(script=scripts(), roles=st.sets(st.sampled_from(["tool", "user", "system"]), min_size=1))
def test_echo_weighs_nothing_but_what_the_env_said_in_its_roles(family, folder, script, roles):
    algorithm = Echo.Config(alpha=dict.fromkeys(roles, 0.25)).build()
    played = asyncio.run(play(script, family, folder))
    asyncio.run(algorithm.score_rollout(played.rollout))
    tokenizer = family_tokenizer(SETTINGS[family]["name"])
    # In the order in which they were said; a rewritten history starts a sample, whose prompt has no weight.
    said = "".join(
        message["content"]
        for answer in [script.opening, *script.answers]
        for message in answer
        if message["role"] in roles
    )
    for sample in played.rollout.samples:
        weighed = sample.ce_weights != 0
        assert set(sample.ce_weights.tolist()) <= {0.0, 0.25}
        assert not (weighed & sample.loss_mask).any()
        assert not weighed[: sample.loss_mask.argmax()].any()
        assert {ROLES[role] for role in sample.role_ids[weighed].tolist()} <= roles
        if family.startswith("qwen3"):
            # A message's first line break may be one token with the template's before it; whose that is is a matter of taste.
            weighed_text = "".join(tokenizer.decode(sample.token_ids[weighed]).split())
            assert weighed_text in "".join(normalised(said, tokenizer).split())


def normalised(text: str, tokenizer) -> str:
    return tokenizer.decode(tokenizer.encode(text, add_special_tokens=False))


def test_thoughts_stripped_from_the_history_give_two_samples_and_thoughts_kept_one(folder):
    def script():
        return Script(
            opening=[{"role": "user", "content": "1 2"}],
            tools=[],
            said=[
                Said("<think>\nadd\n</think>\n\n3", [], "stop"),
                Said("<think>\nagain\n</think>\n\n7", [], "stop"),
            ],
            answers=[[{"role": "user", "content": "3 4"}], []],
            forgets=set(),
        )

    tokenizer = family_tokenizer("qwen3")
    (whole,) = asyncio.run(play(script(), "qwen3, thoughts kept", folder)).rollout.samples
    first, second = asyncio.run(play(script(), "qwen3, thoughts stripped", folder)).rollout.samples
    opening = "<|im_start|>user\n1 2<|im_end|>\n<|im_start|>assistant\n"
    next_turn = "<|im_start|>user\n3 4<|im_end|>\n<|im_start|>assistant\n"
    thought, again = (
        "<think>\nadd\n</think>\n\n3<|im_end|>",
        "<think>\nagain\n</think>\n\n7<|im_end|>",
    )
    assert tokenizer.decode(whole.token_ids) == opening + thought + "\n" + next_turn + again
    assert tokenizer.decode(whole.token_ids[whole.loss_mask]) == thought + again
    assert tokenizer.decode(first.token_ids) == opening + thought
    assert tokenizer.decode(first.token_ids[first.loss_mask]) == thought
    assert tokenizer.decode(second.token_ids) == opening + "3<|im_end|>\n" + next_turn + again
    assert tokenizer.decode(second.token_ids[second.loss_mask]) == again
