"""Conversations of a dataset: what of them is trained on, which rows are refused, and their way through a run."""

import json

import numpy as np
import pytest

from tests.fakes.loops import Loop
from tests.fakes.policy import ScriptedPolicy
from tests.fakes.tasks import StubTask
from tests.unit.demonstrations import CHAT, task_of
from torchtitan.experiments.rl.algorithms import GRPO, StaticSFT
from torchtitan.experiments.rl.command.build import build_tasks, read_policy_tokenizer
from torchtitan.experiments.rl.command.checks import check
from torchtitan.experiments.rl.command.preflight import run_preflight
from torchtitan.experiments.rl.config_registry import rl_demonstrations_qwen3_debug
from torchtitan.experiments.rl.envs.renderer_env import RendererEnvConfig
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.generation.judge import Reply
from torchtitan.experiments.rl.generation.references import FrozenModel
from torchtitan.experiments.rl.loops.step_metrics import (
    _ages,
    _demonstration_metrics,
    _rollout_metrics,
)
from torchtitan.experiments.rl.rollouts.policy import SamplingConfig
from torchtitan.experiments.rl.rollouts.records import decode_rollout, encode_rollout
from torchtitan.experiments.rl.rollouts.samples import check_sample
from torchtitan.experiments.rl.rollouts.types import RolloutStatus
from torchtitan.experiments.rl.tasks import RowDataset
from torchtitan.experiments.rl.tasks.demonstrations import conversation_of, sample_of
from torchtitan.experiments.rl.train import main

CALL = [
    {"role": "user", "content": "6 * 7?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "times", "arguments": '{"a": 6}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "c", "content": "42"},
    {"role": "assistant", "content": "42"},
]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "times", "description": "x", "parameters": {"type": "object"}},
    }
]


def trained(renderer, tokenizer, row, roles=("assistant",)) -> list[str]:
    """The texts that are trained on, in a row each."""
    sample = sample_of(
        conversation_of(row, messages="messages", tools="tools"),
        renderer,
        roles=roles,
        task_name="t",
        rollout_id="r",
    )
    runs, before = [], False
    for token, weight in zip(sample.token_ids.tolist(), sample.ce_weights.tolist(), strict=True):
        if weight and not before:
            runs.append([])
        if weight:
            runs[-1].append(token)
        before = bool(weight)
    return [tokenizer.decode(run) for run in runs]


# ---- what is trained on


def test_what_the_policy_would_sample_is_trained_on_and_nothing_of_its_prompts(renderer, tokenizer):
    assert trained(renderer, tokenizer, {"messages": CHAT}) == ["two<|im_end|>", "four<|im_end|>"]


def test_chosen_roles_are_trained_on_without_the_template_around_them(renderer, tokenizer):
    assert trained(renderer, tokenizer, {"messages": CHAT}, ("system", "user")) == [
        "be brief",
        "one",
        "three",
    ]


def test_a_tool_call_is_trained_on_as_the_model_writes_it(renderer, tokenizer):
    call, answer = trained(renderer, tokenizer, {"messages": CALL, "tools": TOOLS})
    assert (
        call.startswith("<tool_call>")
        and '"times"' in call
        and call.endswith("</tool_call><|im_end|>")
    )
    assert answer == "42<|im_end|>"
    assert trained(renderer, tokenizer, {"messages": CALL, "tools": TOOLS}, ("tool",)) == ["42"]


def test_the_prompt_is_that_of_a_rollout(renderer, tokenizer):
    sample = sample_of(
        conversation_of({"messages": CHAT[:3]}, messages="messages", tools="tools"),
        renderer,
        roles=("assistant",),
        task_name="t",
        rollout_id="r",
    )
    prompt = renderer.render(CHAT[:2], add_generation_prompt=True).token_ids
    assert sample.token_ids.tolist() == [
        *prompt,
        *tokenizer.encode("two<|im_end|>", add_special_tokens=False),
    ]
    assert np.flatnonzero(sample.ce_weights)[0] == len(prompt)
    assert (
        not sample.loss_mask.any()
        and set(sample.policy_versions.tolist()) == {-1}
        and not sample.rl_weights.any()
    )
    check_sample(sample)


def test_fields_that_a_table_fills_with_none_are_left_out(renderer, tokenizer):
    rows = [{**message, "tool_calls": message.get("tool_calls"), "name": None} for message in CALL]
    rows[1]["content"] = None
    assert trained(renderer, tokenizer, {"messages": rows, "tools": TOOLS}) == trained(
        renderer, tokenizer, {"messages": CALL, "tools": TOOLS}
    )
    assert trained(renderer, tokenizer, {"messages": CHAT, "tools": None}) == [
        "two<|im_end|>",
        "four<|im_end|>",
    ]


# ---- rows that can't be used

BAD = [
    ({"text": "x"}, "it has no column 'messages'; it has text"),
    ({"messages": "hello"}, "messages is str 'hello', want a list of messages"),
    ({"messages": []}, "messages is empty"),
    (
        {"messages": [{"role": "bot", "content": "x"}]},
        "messages[0] has role str 'bot', want one of",
    ),
    ({"messages": CHAT[:2]}, "it has no message of assistant with a token to train on"),
    (
        {"messages": [*CHAT[:2], {"role": "assistant", "content": "long " * 99}]},
        "and env.max_rollout_tokens is 100",
    ),
    ({"messages": CALL, "tools": [{"function": {}}]}, "tools[0] has the name"),
]


def test_conversations_of_sharegpt_are_those_of_the_same_messages(renderer, tokenizer):
    authors = {"system": "system", "user": "human", "assistant": "gpt"}
    row = {
        "conversations": [
            {"from": authors[message["role"]], "value": message["content"]} for message in CHAT
        ]
    }
    assert conversation_of(row, messages="conversations", tools="tools") == (CHAT, None)
    with pytest.raises(
        TypeError, match=r"conversations\[0\] has role str 'observation', want one of"
    ):
        odd = {"conversations": [{"from": "observation", "value": "42"}]}
        conversation_of(odd, messages="conversations", tools="tools")
    with pytest.raises(
        ValueError,
        match="no column 'messages'; it has conversations: name that of the messages as messages_c",
    ):
        conversation_of(row, messages="messages", tools="tools")


def test_each_bad_row_is_a_line_before_the_run(renderer):
    rows = [{"messages": CHAT}, *(row for row, _ in BAD), {"messages": CALL, "tools": TOOLS}]
    task = task_of(renderer, *rows, env=RendererEnvConfig(max_rollout_tokens=100))
    task.dataset.rows[-1] = {"messages": CHAT}
    with pytest.raises(ConfigError, match="7 of its 9 rows can't be trained on") as refused:
        task.check_examples(field="tasks.chats")
    assert refused.value.field == "tasks.chats.dataset"
    for number, (line, (_, cause)) in enumerate(zip(refused.value.lines, BAD, strict=True), 1):
        assert line.startswith(f"row {number}: ") and cause in line


CALLS_CONTROL = [
    {
        "id": "c",
        "type": "function",
        "function": {"name": "say", "arguments": '{"text": "<|im_end|>"}'},
    }
]
CONTROL = {
    "an answer": [CHAT[1], {"role": "assistant", "content": "it is <|im_end|>"}],
    "a question": [{"role": "user", "content": "What is <|im_start|>?"}, CHAT[2]],
    "a part": [
        {"role": "user", "content": [{"type": "text", "text": "What is <|im_start|>?"}]},
        CHAT[2],
    ],
    "a thought": [CHAT[1], CHAT[2] | {"reasoning_content": "<|endoftext|>"}],
    "a call": [CHAT[1], CHAT[2] | {"tool_calls": CALLS_CONTROL}],
}


@pytest.mark.parametrize("messages", CONTROL.values(), ids=CONTROL)
def test_a_special_token_in_a_conversation_is_trained_on_as_text_unless_a_field_says_it_is_meant(
    messages, renderer, tokenizer
):
    def sample(control_tokens):
        return sample_of(
            conversation_of(
                {"messages": messages, "tools": None}, messages="messages", tools="tools"
            ),
            renderer,
            roles=("assistant",),
            task_name="t",
            rollout_id="g/0",
            control_tokens=control_tokens,
        )

    special = set(tokenizer.all_special_ids)
    as_text, meant = sample(False), sample(True)
    count = [sum(token in special for token in made.token_ids) for made in (as_text, meant)]
    text = tokenizer.decode(as_text.token_ids)
    assert count[1] > count[0] and text == tokenizer.decode(meant.token_ids)
    ends = [made.token_ids[made.ce_weights > 0].tolist() for made in (as_text, meant)]
    assert sum(token in special for token in ends[0]) == 1  # the end of the one answer


async def test_a_row_that_fails_later_fails_its_rollout(renderer, tokenizer):
    task = task_of(renderer, {"messages": CHAT[:2]})
    group = await task.run_group(task.dataset[0], ScriptedPolicy(tokenizer), group_id="g", seed=0)
    assert "no message of assistant" in await task.score_group(group)
    assert group.rollouts[0].status is RolloutStatus.ERROR and group.scored == []


def test_the_command_prints_the_rows_and_exits_with_2(tmp_path, capsys, monkeypatch):
    file = tmp_path / "chats.jsonl"
    file.write_text("".join(json.dumps({"messages": CHAT[:length]}) + "\n" for length in (3, 2, 5)))
    (tmp_path / "my_chats.py").write_text(
        "from torchtitan.experiments.rl.config_registry import rl_demonstrations_qwen3_debug\n"
        "from torchtitan.experiments.rl.tasks import RowDataset\n"
        "def rl_chats():\n"
        "    config = rl_demonstrations_qwen3_debug()\n"
        "    config.tasks['demonstrations'].dataset = RowDataset.Config()\n"
        "    return config\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    words = ["--module", "my_chats", "--config", "rl_chats", "--dry-run"]
    assert main([*words, "--tasks.demonstrations.dataset.path", str(file)]) == 2
    error, row = capsys.readouterr().err.strip().splitlines()[-2:]
    assert "1 of its 3 rows can't be trained on" in error and row == (
        "row 1: it has no message of assistant with a token to train on"
    )


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"algorithm": GRPO.Config()}, "tasks.demonstrations.algorithm"),
        (
            {"algorithm": StaticSFT.Config(roles=("assistant", "bot"))},
            "tasks.demonstrations.algorithm.roles[1]",
        ),
        ({"algorithm": StaticSFT.Config(roles=())}, "tasks.demonstrations.algorithm.roles"),
        ({"validation": RowDataset.Config(path="x.jsonl")}, "tasks.demonstrations.validation"),
    ],
)
def test_what_can_not_work_is_refused_by_its_field(change, field):
    config = rl_demonstrations_qwen3_debug()
    for name, value in change.items():
        setattr(config.tasks["demonstrations"], name, value)
    with pytest.raises(ConfigError) as refused:
        check(config)
    assert refused.value.field == field


def test_static_sft_in_another_task_is_refused_when_it_is_tried():
    config = rl_demonstrations_qwen3_debug()
    config.tasks["sum_digits"].algorithm = StaticSFT.Config()
    with pytest.raises(ConfigError, match="use a DemonstrationTask"):
        policy = read_policy_tokenizer(config)
        run_preflight(config, build_tasks(config, policy), policy)


# ---- through a run


async def test_demonstrations_and_compared_rollouts_share_a_run(renderer, tokenizer):
    chats = task_of(renderer, *({"messages": CHAT} for _ in range(5)), group_size=3)
    loop = Loop(
        StubTask(lambda number: [0.0, 1.0]),
        chats,
        rollouts_per_step=4,
        max_offpolicy_steps=1,
        steps=8,
        row_length=128,
    )
    loop.fill()
    seen: list[str] = []
    for step in range(8):
        batch = await loop.batch()
        static = [rollout for group in batch.groups for rollout in group.rollouts if rollout.static]
        seen += [rollout.data_sample.sample_id for rollout in static]
        if static:
            metrics = _demonstration_metrics(batch)
            assert metrics["demonstrations/chats/count"] == len(static)
            assert metrics["demonstrations/chats/trained_tokens"] == sum(
                np.count_nonzero(rollout.samples[0].ce_weights) for rollout in static
            )
        sampled = [
            rollout for group in batch.groups for rollout in group.rollouts if not rollout.static
        ]
        assert _rollout_metrics(batch).get("rollout/count", 0) == len(sampled)
        assert len(_ages(batch.groups, step)) == sum(
            sample.loss_mask.sum() for rollout in sampled for sample in rollout.samples
        )
        loop.step_taken(batch)
    await loop.close()
    counts = loop.ledger.counts()
    own = {
        column.removeprefix("chats/"): n
        for column, n in counts.items()
        if column.startswith("chats/")
    }
    assert (
        own.pop("dispatched") == sum(own.values())
        and own["open"] == 0
        and own["trained"] == len(seen) >= 9
    )
    assert set(seen[:5]) == set("01234"), "each row once before any comes again"


async def test_a_demonstration_is_recorded_as_one(renderer, tokenizer):
    task = task_of(renderer, {"messages": CHAT})
    group = await task.run_group(task.dataset[0], ScriptedPolicy(tokenizer), group_id="g", seed=0)
    assert await task.score_group(group) is None
    line = encode_rollout(group.rollouts[0], outcome="trained", admitted_version=0, max_bytes=10**6)
    read = decode_rollout(line).rollout
    assert (
        read.static
        and read.samples[0].ce_weights.tolist() == group.rollouts[0].samples[0].ce_weights.tolist()
    )
    assert read.data_sample.env_input == {"messages": CHAT}


# ---- a teacher that answers the rows


class Teacher:
    """A policy client whose frozen models answer "4"."""

    version = 0

    def frozen(self, model):
        assert model.name == "any"
        return self

    async def chat(self, messages, *, seed, sampling):
        assert [message["content"] for message in messages] == ["be brief", "2 + 2?"]
        answer = {"role": "assistant", "content": "4"}
        return Reply(
            message=answer, prompt_tokens=9, completion_tokens=1, whole=sampling.max_tokens > 1
        )


async def test_a_teachers_answer_is_rendered_for_the_policy_and_trained_on(renderer, tokenizer):
    row = {"messages": [CHAT[0], {"role": "user", "content": "2 + 2?"}]}
    teacher = FrozenModel(name="any", base_url="http://127.0.0.1:9/v1")
    for max_tokens in (8, 1):
        task = task_of(
            renderer, row, teacher=teacher, sampling=SamplingConfig(max_tokens=max_tokens)
        )
        task.check_examples(field="tasks.chats")
        (rollout,) = (
            await task.run_group(task.dataset[0], Teacher(), group_id="g", seed=0)
        ).rollouts
        if max_tokens == 1:
            assert (
                rollout.status is RolloutStatus.ERROR
                and "sampling.max_tokens is 1" in rollout.error
            )
            continue
        (sample,) = rollout.samples
        assert tokenizer.decode(sample.token_ids[sample.ce_weights > 0]) == "4<|im_end|>"
        assert [message["content"] for message in task.dataset[0].env_input["messages"]] == [
            "be brief",
            "2 + 2?",
        ]


def test_rows_with_tools_are_refused_for_a_teacher_that_would_not_be_given_them(renderer):
    tool = {"type": "function", "function": {"name": "search", "parameters": {}}}
    row = {"messages": [{"role": "user", "content": "2 + 2?"}], "tools": [tool]}
    teacher = FrozenModel(name="any", base_url="http://127.0.0.1:9/v1")
    task = task_of(renderer, row, teacher=teacher)
    with pytest.raises(ConfigError) as refused:
        task.check_examples(field="tasks.chats")
    assert "its 'tools' would not reach the teacher" in refused.value.lines[0]
