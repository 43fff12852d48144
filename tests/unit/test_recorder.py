"""Rollouts on disk: read again they are what they were, bit for bit, and recording never holds up or ends a run."""

import base64
import gzip
import json
import threading
import time
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tests.fakes.contexts import context_of
from tests.fakes.disk import fill_disk
from tests.fakes.policy import ScriptedPolicy
from tests.fakes.rollouts import completed_rollout, group_of, turn_of
from tests.fakes.tasks import TalkTask
from tests.fakes.waiting import LIMIT_S
from tests.unit.records import assert_same, write
from torchtitan.experiments.rl.algorithms import GRPO
from torchtitan.experiments.rl.data.dataset import Dataset
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.rollouts import recorder as recorder_module
from torchtitan.experiments.rl.rollouts.record_file import read_group, read_groups
from torchtitan.experiments.rl.rollouts.recorder import (
    ROLLOUTS_FILE,
    RolloutRecorder,
    read_rollouts,
)
from torchtitan.experiments.rl.rollouts.records import (
    ExampleFields,
    PromptArrays,
    RolloutFields,
    TurnFields,
    decode_rollout,
    encode_rollout,
)
from torchtitan.experiments.rl.rollouts.types import DataSample, Rollout, RolloutStatus, RolloutTurn
from torchtitan.experiments.rl.types import TrainingSample


def lines_in(folder: Path) -> list[bytes]:
    """What a person sees with zcat."""
    return gzip.decompress((folder / ROLLOUTS_FILE).read_bytes()).splitlines()


def round_trip(folder: Path, rollout: Rollout):
    (folder / ROLLOUTS_FILE).unlink(missing_ok=True)
    write(folder, group_of(rollout))
    (record,) = read_rollouts(folder)
    return record


# ---- what is read is what was written


class Questions(Dataset):
    def __len__(self):
        return 1

    def __getitem__(self, index):
        return DataSample(sample_id="a", env_input={"question": "héllo 你好", "digits": [1, 2]})


async def test_group_that_was_run_and_scored_is_read_as_it_was(tmp_path, renderer, tokenizer):
    config = TalkTask.Config(
        algorithm=GRPO.Config(), dataset=Questions.Config(), turns=3, role="tool"
    )
    task = config.build(name="talk", context=context_of(renderer))
    replies = [
        "first",
        'hm\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
        "<think>\nso\n</think>\n\n",
    ]

    def reply(rollout_id, turn):
        return (
            RuntimeError("the engine fell over")
            if rollout_id.startswith("talk-7/3") and turn == 1
            else replies[turn]
        )

    group = await task.run_group(
        task.dataset[0], ScriptedPolicy(tokenizer, reply), group_id="talk-7", seed=0, group_size=4
    )
    assert await task.score_group(group) is None
    outcomes = {f"talk-7/{index}": "trained" for index in range(3)} | {"talk-7/3": "failed/error"}
    recorder = RolloutRecorder.Config().build(run_dir=tmp_path)
    recorder.record(group, outcomes)
    recorder.close()

    records = list(read_rollouts(tmp_path))
    assert [record.outcome for record in records] == ["trained"] * 3 + ["failed/error"]
    assert {record.admitted_version for record in records} == {3} and recorder.recorded == 4
    assert [len(record.rollout.turns) for record in records] == [3, 3, 3, 1]
    assert "the engine fell over" in records[3].rollout.error
    assert (
        records[0].rollout.turns[1].assistant_message["tool_calls"][0]["function"]["name"] == "add"
    )
    for record, rollout in zip(records, group.rollouts, strict=True):
        assert_same(record.rollout, rollout)
        assert all(turn.generate_s > 0 and turn.env_s > 0 for turn in record.rollout.turns[:2])


def test_every_field_of_a_rollout_is_in_its_record():
    written = {
        Rollout: {*RolloutFields.__struct_fields__, "data_sample", "turns", "samples"},
        DataSample: {*ExampleFields.__struct_fields__},
        RolloutTurn: {
            *TurnFields.__struct_fields__,
            *PromptArrays.__struct_fields__,
            "completion",
        },
    }
    assert written == {kind: {field.name for field in fields(kind)} for kind in written}


def test_a_reward_of_numpy_is_a_number(tmp_path):
    rollout = completed_rollout(reward=np.float32(0.5))
    assert round_trip(tmp_path, rollout).rollout.reward == 0.5


def test_streams_an_algorithm_wrote_are_read_again_and_derived_ones_are_not_written(tmp_path):
    rollout = completed_rollout()
    (sample,) = rollout.samples
    rollout.assign_advantages([0.1, -0.2, 1e-30])
    sample.ce_weights = np.array([0, 0, 0, 0, 0.1, 0], np.float32)
    sample.ref_logprobs = np.array([0, -1, np.nan, np.inf, -np.inf, -0.0], np.float32)
    assert_same(round_trip(tmp_path, rollout).rollout, rollout)
    (line,) = lines_in(tmp_path)
    (written,) = json.loads(line)["samples"]
    assert written.keys() == {"temperature", "streams"}
    assert written["streams"].keys() == {"advantages", "ce_weights", "ref_logprobs"}


def test_a_person_reads_a_line_with_json_and_numpy_alone(tmp_path):
    write(tmp_path, group_of(completed_rollout()))
    (line,) = lines_in(tmp_path)
    record = json.loads(line)
    assert (record["rollout_id"], record["outcome"], record["rollout"]["reward"]) == (
        "t-0/0",
        "trained",
        0.1,
    )
    assert [turn["fields"]["assistant_message"] for turn in record["turns"]] == [
        turn_of([1], [2]).assistant_message
    ] * 2
    # The second turn's prompt is 1 2 3 4 9, of which the first turn gives 1 2 3 4.
    assert record["turns"][1]["kept"]["prompt_token_ids"] == 4
    ((dtype, text),) = record["turns"][1]["arrays"]["prompt_token_ids"].items()
    assert np.frombuffer(base64.b64decode(text), dtype).tolist() == [9] and dtype == "<i4"


@pytest.mark.parametrize(
    "change",
    [
        {"loss_mask": np.array([False, False, True, False, False, True])},
        {"role_ids": None},
        {"token_ids": np.array([1, 2, 3, 4, 9, 7], np.int32)},
        {"generator_logprobs": np.array([0, 0, -0.0, -1, 0, -1], np.float32)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_sample_that_is_not_what_its_turns_give_is_written_as_it_is(tmp_path, change):
    rollout = completed_rollout()
    for name, value in change.items():
        setattr(rollout.samples[0], name, value)
    assert_same(round_trip(tmp_path, rollout).rollout, rollout)


def test_samples_with_no_counterpart_in_the_turns_are_written_as_they_are(tmp_path):
    rollout = completed_rollout()
    rollout.samples += completed_rollout(turns=[turn_of([7], [8, 9])]).samples
    rollout.samples[0].reference_ids = np.array([5, 8, 9], np.int32)
    rollout.samples[1].trainer_logprobs = np.array([0, -0.0, -1.25], np.float32)
    assert_same(round_trip(tmp_path, rollout).rollout, rollout)
    rollout.turns = []
    assert_same(round_trip(tmp_path, rollout).rollout, rollout)


@given(arrays.arrays(np.int32, st.integers(0, 50)))
def test_every_float32_and_every_nan_survives_text(bits):
    values = bits.view(np.float32)
    streams = dict.fromkeys(("generator_logprobs", "advantages", "ref_logprobs"), values)
    ids = np.arange(len(bits), dtype=np.int32)
    sample = TrainingSample(
        token_ids=ids,
        loss_mask=ids > 3,
        policy_versions=bits,
        **streams,
        task_name="t",
        rollout_id="t-0/0",
    )
    line = encode_rollout(
        completed_rollout(turns=[], samples=[sample]),
        outcome=None,
        admitted_version=0,
        max_bytes=2**20,
    )
    assert_same(decode_rollout(line).rollout.samples, [sample])


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 2), max_size=6),
            st.lists(st.integers(0, 2), max_size=4),
            st.integers(0, 30),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_turns_that_extend_or_rewrite_each_other_are_read_exactly(tmp_path_factory, drawn):
    """A prompt is some part of all before it and then other tokens: token alphabets this small meet by chance, too."""
    turns, history = [], []
    for new, sampled, kept in drawn:
        prompt = history[:kept] + new
        turn = turn_of(
            prompt, sampled, logprobs=[-0.1] * len(sampled), versions=[len(turns)] * len(sampled)
        )
        turn.prompt_role_ids = np.array([[2, -1, 4][token] for token in prompt], np.int8)
        turn.prompt_is_content = np.array(prompt, bool)
        if len(sampled) != 1:  # as of a turn whose messages are not known
            turn.prompt_message_indices = np.array(
                [[0, -1, 3][token] for token in prompt], np.int16
            )
        turns.append(turn)
        history = prompt + sampled
    rollout = completed_rollout(turns=turns)
    assert_same(round_trip(tmp_path_factory.getbasetemp(), rollout).rollout, rollout)


def test_long_conversation_is_written_once_not_once_a_turn(tmp_path):
    def conversation(length):
        turns, history, messages = [], [1] * 50, [{"role": "user", "content": "x" * 200}]
        for _ in range(length):
            turn = turn_of(history, [2] * 50)
            turn.prompt_messages, turn.env_messages = (
                list(messages),
                [{"role": "user", "content": "x" * 200}],
            )
            turns.append(turn)
            messages += [turn.assistant_message, *turn.env_messages]
            history = history + [2] * 50 + [3] * 50
        return completed_rollout(turns=turns)

    lengths, sizes = [], []
    for length in (20, 40):
        assert_same(round_trip(tmp_path, conversation(length)).rollout, conversation(length))
        lengths.append(len(lines_in(tmp_path)[0]))
        sizes.append((tmp_path / ROLLOUTS_FILE).stat().st_size)
    assert lengths[1] < 2.1 * lengths[0] and sizes[1] < 2.1 * sizes[0]


class Opaque:
    def __repr__(self):
        return "Opaque(1)"


class Unprintable:
    def __repr__(self):
        raise ValueError("no")


@pytest.mark.parametrize(
    ("env_input", "read"),
    [
        (
            {"a": (1, 2), "b": np.float64(0.5), "c": np.arange(2)},
            {"a": [1, 2], "b": 0.5, "c": [0, 1]},
        ),
        ("line\nbreak \u2028 \x00 \U0001f600", "line\nbreak \u2028 \x00 \U0001f600"),
        ("half a character \ud83d", "half a character \ud83d"),
        (Opaque(), "Opaque(1)"),
        ({"deep": [Opaque()]}, "{'deep': [Opaque(1)]}"),
        ({(1, 2): "tuples are no keys"}, "{(1, 2): 'tuples are no keys'}"),
        (float("nan"), "nan"),
        (Unprintable(), "<Unprintable, whose repr raised ValueError>"),
    ],
)
def test_env_input_is_json_where_it_can_be_and_its_repr_where_not(tmp_path, env_input, read):
    assert (
        round_trip(tmp_path, completed_rollout(env_input=env_input)).rollout.data_sample.env_input
        == read
    )


def test_what_users_put_into_messages_and_rewards_never_breaks_a_line(tmp_path):
    endless: dict = {
        "role": "user",
        "content": "hi",
        "extra": Opaque(),
        (1, 2): 3,
        "nan": float("nan"),
    }
    endless["self"] = endless
    turn = turn_of([1], [2])
    turn.prompt_messages = [endless]
    rollout = completed_rollout(turns=[turn], reward_components={"odd": float("inf"), 3: 1.0})
    record = round_trip(tmp_path, rollout)
    (message,) = record.rollout.turns[0].prompt_messages
    assert (message["content"], message["extra"], message["(1, 2)"], message["nan"]) == (
        "hi",
        "Opaque(1)",
        3,
        "nan",
    )
    assert record.rollout.reward_components == {"odd": "inf", "3": 1.0}
    assert record.rollout.turns[0].completion.token_ids.tolist() == [2]


def test_a_value_that_contains_itself_twice_is_written_at_once(tmp_path):
    twice: list = ["half \ud83d"]
    twice += [twice, twice]
    deep: list = []
    for _ in range(5000):
        deep = [deep]
    turn = turn_of([1], [2])
    turn.prompt_messages, turn.env_messages = [{"content": twice}], [{"content": deep}]
    rollout = completed_rollout(turns=[turn], env_input=twice)
    rollout.data_sample.sample_id = "half \ud83d"
    read = round_trip(tmp_path, rollout).rollout
    assert read.turns[0].prompt_messages == [{"content": ["half \ud83d", repr(twice), repr(twice)]}]
    assert (read.data_sample.sample_id, read.data_sample.env_input) == ("half \ud83d", repr(twice))


def test_turns_of_which_no_sample_can_be_made_are_recorded(tmp_path):
    rollout = completed_rollout(samples=[], status=RolloutStatus.ERROR)
    rollout.turns[1].completion.logprobs = np.zeros(3, np.float32)  # of one token
    assert_same(round_trip(tmp_path, rollout).rollout, rollout)


# ---- which, and how much


def test_chosen_groups_are_the_same_in_every_run_and_about_the_fraction():
    recorder = RolloutRecorder(RolloutRecorder.Config(fraction=0.25), run_dir=Path("unused"))
    chosen = [recorder.chosen(f"task-{number}") for number in range(4000)]
    recorder.close()
    # Binomial(4000, 0.25): 1000, standard deviation 27.
    assert abs(sum(chosen) - 1000) < 110
    assert [number for number in range(20) if chosen[number]] == FIRST_CHOSEN


FIRST_CHOSEN = [3, 6, 12, 13]


def test_every_evaluation_records_the_same_examples():
    recorder = RolloutRecorder(RolloutRecorder.Config(fraction=0.5), run_dir=Path("unused"))
    ids = [f"validation-task-{number}" for number in range(40)]
    found = {
        label: [recorder.chosen(f"{name}@{label}") for name in ids]
        for label in ("0", "20", "20.final")
    }
    of_odd_name = {recorder.chosen(f"sums@2-{number}") for number in range(40)}
    recorder.close()
    assert (
        found["0"] == found["20"] == found["20.final"]
        and len(set(found["0"])) == len(of_odd_name) == 2
    )


def test_whole_groups_are_recorded_or_none_of_a_group(tmp_path):
    groups = [
        group_of(*(completed_rollout(index, group_id=f"task-{number}") for index in range(3)))
        for number in range(20)
    ]
    write(tmp_path, *groups, fraction=0.25)
    kept = [record.rollout.rollout_id for record in read_rollouts(tmp_path)]
    assert kept == [f"task-{number}/{index}" for number in FIRST_CHOSEN for index in range(3)]


def test_fraction_0_makes_no_file_and_no_thread(tmp_path):
    threads = threading.active_count()
    recorder = RolloutRecorder(RolloutRecorder.Config(fraction=0.0), run_dir=tmp_path)
    assert threading.active_count() == threads
    recorder.record(group_of(completed_rollout()), {})
    recorder.close()
    assert list(tmp_path.iterdir()) == [] and recorder.not_recorded == 0


def test_rollout_above_its_limit_keeps_how_it_ended_and_says_what_is_missing(tmp_path):
    long = completed_rollout(1, env_input="x" * 5000, status=RolloutStatus.TRUNCATED_LENGTH)
    long.turns[0].prompt_messages = [{"role": "user", "content": "y" * 5000}]
    write(tmp_path, group_of(completed_rollout(0), long), max_rollout_bytes=2000)
    whole, cut = read_rollouts(tmp_path)
    assert whole.left_out is None and len(whole.rollout.turns) == 2
    assert "more than 2,000 bytes (recorder.max_rollout_bytes)" in cut.left_out
    assert (cut.rollout.turns, cut.rollout.samples, cut.outcome) == ([], [], "trained")
    assert (cut.rollout.status, cut.rollout.reward) == (RolloutStatus.TRUNCATED_LENGTH, 0.1)
    assert (
        cut.rollout.reward_components == {"right": 1 / 3}
        and cut.rollout.data_sample.sample_id == "s"
    )
    assert all(len(line) < 2500 for line in lines_in(tmp_path))
    last = json.loads(lines_in(tmp_path)[1])
    assert (last["turn_count"], last["completion_tokens"]) == (2, 3)


def test_a_large_row_costs_a_rollout_its_largest_columns_and_no_turn(tmp_path):
    image = {"question": "6 * 7?", "image": "x" * 5000, "mask": "y" * 4000, "answer": "42"}
    rollouts = [
        completed_rollout(0, env_input=image),
        completed_rollout(1, env_input=["x" * 5000]),
        completed_rollout(2),
    ]
    write(tmp_path, group_of(*rollouts), max_rollout_bytes=4000)
    of_columns, of_row, small = read_rollouts(tmp_path)
    left_out = "env_input.image, env_input.mask: more than 4,000 bytes (recorder.max_rollout_bytes)"
    assert of_columns.left_out == left_out and of_row.left_out.startswith("env_input: more than")
    assert of_columns.rollout.data_sample.env_input == {
        "question": "6 * 7?",
        "image": None,
        "mask": None,
        "answer": "42",
    }
    assert of_row.rollout.data_sample.env_input is None
    for record in (of_columns, of_row):
        assert len(record.rollout.turns) == len(small.rollout.turns) == 2
        assert record.rollout.turns[1].assistant_message == small.rollout.turns[1].assistant_message
        assert len(record.rollout.samples) == len(small.rollout.samples)


def test_long_turns_cost_a_rollout_its_turns_and_not_its_row(tmp_path):
    long = completed_rollout(0, env_input={"question": "6 * 7?"})
    long.turns[0].prompt_messages = [{"role": "user", "content": "y" * 5000}]
    write(tmp_path, group_of(long), max_rollout_bytes=4000)
    (cut,) = read_rollouts(tmp_path)
    assert cut.left_out.startswith("turns and samples: ") and cut.rollout.turns == []
    assert cut.rollout.data_sample.env_input == {"question": "6 * 7?"}


def test_full_file_ends_the_recording_with_one_line_in_the_log(tmp_path, caplog):
    groups = [
        group_of(
            completed_rollout(0, group_id=f"t-{number}"),
            completed_rollout(1, group_id=f"t-{number}"),
        )
        for number in range(6)
    ]
    write(tmp_path, groups[0])
    size = (tmp_path / ROLLOUTS_FILE).stat().st_size
    # What an earlier run wrote counts: one more group fits.
    recorder = write(tmp_path, *groups[1:], max_file_bytes=int(size * 2.5))
    assert [record.rollout.group_id for record in read_rollouts(tmp_path)] == [
        "t-0",
        "t-0",
        "t-1",
        "t-1",
    ]
    assert (recorder.recorded, recorder.not_recorded) == (2, 8)
    assert (
        caplog.text.count("no further rollouts are recorded") == 1
        and "recorder.max_file_bytes" in caplog.text
    )


@pytest.mark.parametrize(
    ("config", "field"),
    [({"fraction": 1.5}, "fraction"), ({"fraction": -0.1}, "fraction"), ({"fraction": float("nan")}, "fraction"),
     ({"max_rollout_bytes": 0}, "max_rollout_bytes"), ({"max_file_bytes": 0}, "max_file_bytes")],
)  # fmt: skip
def test_limits_out_of_range_are_refused(config, field, tmp_path):
    with pytest.raises(ConfigError, match=f"recorder.{field}"):
        RolloutRecorder.Config(**config).build(run_dir=tmp_path)


# ---- what goes wrong


@pytest.fixture
def slow_recorder(monkeypatch) -> threading.Event:
    """Event that the recorders' threads wait for before each rollout; two groups may wait."""
    gate = threading.Event()
    encode = recorder_module.encode_rollout
    monkeypatch.setattr(recorder_module, "QUEUED_GROUPS", 2)
    monkeypatch.setattr(
        recorder_module,
        "encode_rollout",
        lambda *args, **kwargs: gate.wait() and encode(*args, **kwargs),
    )
    return gate


def test_thread_that_cannot_keep_up_loses_groups_and_holds_up_nobody(
    tmp_path, slow_recorder, caplog
):
    recorder = RolloutRecorder.Config().build(run_dir=tmp_path)
    groups = [group_of(completed_rollout(group_id=f"t-{number}")) for number in range(9)]
    recorder.record(groups[0], {})
    while not recorder._queue.empty():  # the thread has the first
        time.sleep(0.001)
    for group in groups[1:]:
        recorder.record(group, {})  # nothing is waited for: the gate is shut
    slow_recorder.set()
    recorder.close()
    assert [record.rollout.group_id for record in read_rollouts(tmp_path)] == ["t-0", "t-1", "t-2"]
    assert (recorder.recorded, recorder.not_recorded) == (3, 6)
    assert caplog.text.count("can't keep up") == 1


def test_an_evaluation_of_more_groups_than_may_wait_is_recorded_whole(tmp_path, slow_recorder):
    recorder = RolloutRecorder.Config().build(run_dir=tmp_path)
    recorder.record_validation([group_of(completed_rollout(group_id=f"v-{n}@5")) for n in range(9)])
    size = recorder.size_by_now()
    slow_recorder.set()
    assert size.result(LIMIT_S) == (tmp_path / "rollouts.jsonl.gz").stat().st_size
    recorder.close()
    records = list(read_rollouts(tmp_path, "validation"))
    assert [record.rollout.group_id for record in records] == [f"v-{n}@5" for n in range(9)]
    assert {record.outcome for record in records} == {"validation"}
    assert (recorder.recorded, recorder.not_recorded) == (9, 0)


def test_folder_that_is_gone_ends_the_recording_not_the_run(tmp_path, caplog):
    recorder = write(
        tmp_path / "gone", group_of(completed_rollout()), group_of(completed_rollout())
    )
    assert (recorder.recorded, recorder.not_recorded) == (0, 2)
    assert caplog.text.count("no further rollouts are recorded: FileNotFoundError") == 1


def test_full_disk_leaves_whole_groups_only(tmp_path, monkeypatch, caplog):
    fill_disk(monkeypatch, room=1000, at_once=100)
    recorder = write(
        tmp_path, *(group_of(completed_rollout(group_id=f"t-{number}")) for number in range(5))
    )
    kept = [record.rollout.group_id for record in read_rollouts(tmp_path)]
    assert kept == ["t-0"] and len(lines_in(tmp_path)) == 1  # gzip refuses a torn member
    assert (recorder.recorded, recorder.not_recorded) == (1, 4)
    assert caplog.text.count("No space left on device") == 1


def test_rollout_that_cannot_be_encoded_costs_its_group_alone(tmp_path, caplog):
    broken = completed_rollout(group_id="t-1")
    broken.turns[0].prompt_token_ids = None
    recorder = write(
        tmp_path,
        group_of(completed_rollout()),
        group_of(broken),
        group_of(completed_rollout(group_id="t-2")),
    )
    assert [record.rollout.group_id for record in read_rollouts(tmp_path)] == ["t-0", "t-2"]
    assert recorder.not_recorded == 1 and "group t-1 can't be recorded" in caplog.text


def test_torn_groups_are_passed_over(tmp_path, caplog):
    path = tmp_path / ROLLOUTS_FILE
    write(
        tmp_path,
        group_of(completed_rollout(group_id="t-0")),
        group_of(completed_rollout(group_id="t-1")),
    )
    whole = path.read_bytes()
    (first, _), (second, _) = read_groups(path)
    assert first == 0
    for end in range(second + 1, len(whole)):
        path.write_bytes(whole[:end])
        assert [record.rollout.group_id for record in read_rollouts(path)] == ["t-0"]
        if end % 40:
            continue
        write(
            tmp_path, group_of(completed_rollout(group_id="t-2"))
        )  # a run that goes on in the same folder
        assert [record.rollout.group_id for record in read_rollouts(path)] == ["t-0", "t-2"]
    assert f"byte {second}" in caplog.text


@pytest.mark.parametrize("place", [0, 3, 9, 10, 200, -9, -1])
def test_a_damaged_group_costs_itself_alone(tmp_path, caplog, place):
    path = tmp_path / ROLLOUTS_FILE
    write(tmp_path, *(group_of(completed_rollout(group_id=f"t-{number}")) for number in range(3)))
    data = bytearray(path.read_bytes())
    _, (second, _), (third, _) = read_groups(path)
    data[second + place if place >= 0 else third + place] ^= 0xFF
    path.write_bytes(data)
    read = [record.rollout.group_id for record in read_rollouts(path)]
    if place == 9:  # the name of an operating system, which nothing depends on
        assert read == ["t-0", "t-1", "t-2"]
    else:
        assert read == ["t-0", "t-2"] and f"byte {second}" in caplog.text


def test_a_group_is_read_at_its_offset_without_those_before_it(tmp_path):
    groups = [
        group_of(*(completed_rollout(index, group_id=f"t-{n}") for index in range(3)))
        for n in range(4)
    ]
    write(tmp_path, *groups)
    path = tmp_path / ROLLOUTS_FILE
    offsets = [offset for offset, _ in read_groups(path)]
    data = path.read_bytes()
    path.write_bytes(bytes(offsets[2]) + data[offsets[2] :])
    with path.open("rb") as file:
        lines, end = read_group(file, offsets[2])
        assert end == offsets[3]
        with pytest.raises(ValueError, match="torn, or none begins there"):
            read_group(file, offsets[2] - 1)
    assert [decode_rollout(line).rollout.rollout_id for line in lines.splitlines()] == [
        "t-2/0",
        "t-2/1",
        "t-2/2",
    ]


def test_a_file_that_is_no_record_is_said_to_be_none(tmp_path, caplog):
    (tmp_path / "rollouts.jsonl").write_bytes(b'{"format":1}\n')
    assert (
        list(read_rollouts(tmp_path / "rollouts.jsonl")) == []
        and "none begins there" in caplog.text
    )
    line = encode_rollout(completed_rollout(), outcome=None, admitted_version=0, max_bytes=2**20)
    for old, new in (
        (b'"format":2', b'"format":1'),
        (b'"status"', b'"state"'),
        (b'"sample_id"', b'"id"'),
        (b"{", b"["),
    ):
        with pytest.raises(ValueError):
            decode_rollout(line.replace(old, new, 1))


def test_a_second_close_and_a_record_after_it_do_nothing(tmp_path):
    recorder = write(tmp_path, group_of(completed_rollout()))
    recorder.record(group_of(completed_rollout(group_id="t-1")), {})
    recorder.close()
    assert [record.rollout.group_id for record in read_rollouts(tmp_path)] == ["t-0"]
