"""The connector that shares a prompt's last block, against a cache of token ids in place of keys and values."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

BLOCK = 4
BLOCKS = 64


@pytest.fixture(scope="module")
def connector_type():
    from torchtitan.experiments.rl.generation.vllm.last_block import LastBlocks

    return LastBlocks


def connector(connector_type, *, at_once=100, share=1.0):
    config = SimpleNamespace(
        cache_config=SimpleNamespace(block_size=BLOCK),
        scheduler_config=SimpleNamespace(max_num_seqs=at_once),
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config={"kept_share": share}),
    )
    return connector_type(config, None, SimpleNamespace(num_blocks=BLOCKS))


def request(tokens, *, salt="0", adapter=0, skip=False, sampled=0):
    """With the attributes of vLLM's. A block's hash stands for the salt and all tokens up to the block's end."""
    return SimpleNamespace(
        prompt_token_ids=list(tokens),
        num_prompt_tokens=len(tokens),
        num_output_tokens=sampled,
        cache_salt=salt,
        lora_request=SimpleNamespace(lora_int_id=adapter) if adapter else None,
        skip_reading_prefix_cache=skip,
        block_hashes=[
            (salt, *tokens[: end + BLOCK]) for end in range(0, len(tokens) - BLOCK + 1, BLOCK)
        ],
    )


class Engine:
    """A scheduler and a worker. Each request gets blocks of its own; the full ones that vLLM would share are filled for it."""

    def __init__(self, connector):
        self.connector = connector
        self.cache = torch.full((BLOCKS, BLOCK), -1)
        connector.register_kv_caches({"layer": self.cache})
        self.full: set[tuple] = set()
        """Hashes of the full blocks that vLLM has cached."""
        self.computed: list[int] = []
        """Prompt tokens computed by each request, in the order in which they ran."""

    def step(self, waiting: list) -> list:
        """Run what can run; returns the requests that wait on."""
        free, left, running = iter(range(BLOCKS)), [], []
        for each in waiting:
            end = each.num_prompt_tokens - 1
            cached = 0
            while cached + BLOCK <= end and each.block_hashes[cached // BLOCK] in self.full:
                cached += BLOCK
            copied, later = self.connector.get_num_new_matched_tokens(each, cached)
            assert not later
            if copied is None:
                left.append(each)
                continue
            if each.skip_reading_prefix_cache:
                copied = cached = 0
            blocks = [next(free) for _ in range(end // BLOCK + 1)]
            self.full.update(each.block_hashes)  # when they are given to a request, as vLLM does
            self.connector.update_state_after_alloc(
                each, SimpleNamespace(get_block_ids=lambda blocks=blocks: (blocks,)), copied
            )
            running.append((each, blocks, cached, copied))
        metadata = self.connector.build_connector_meta(SimpleNamespace())
        self.connector.bind_connector_metadata(metadata)
        for each, blocks, cached, _ in running:
            for start in range(0, cached, BLOCK):
                self.cache[blocks[start // BLOCK]] = torch.tensor(
                    each.prompt_token_ids[start : start + BLOCK]
                )
            self.cache[blocks[cached // BLOCK]] = -1
        self.connector.start_load_kv(None)
        for each, blocks, cached, copied in running:
            assert 0 <= copied < BLOCK and cached + copied < each.num_prompt_tokens
            rows = self.cache[blocks].flatten()
            assert rows[: cached + copied].tolist() == each.prompt_token_ids[: cached + copied], (
                "what is not computed is right"
            )
            for position in range(cached + copied, each.num_prompt_tokens):
                self.cache[blocks[position // BLOCK], position % BLOCK] = each.prompt_token_ids[
                    position
                ]
            self.computed.append(each.num_prompt_tokens - cached - copied)
        self.connector.wait_for_save()
        return left


@pytest.mark.parametrize("length", range(1, 14))
def test_a_group_computes_its_prompt_once_and_then_one_token_each(connector_type, length):
    engine = Engine(connector(connector_type))
    group = [request(range(10, 10 + length)) for _ in range(5)]
    left = engine.step(group)
    shares = (length - 1) % BLOCK > 0
    assert len(left) == (4 if shares else 0), "the others wait for a step, if it saves anything"
    assert engine.step(left) == []
    assert engine.computed[0] == length and len(engine.computed) == 5
    assert engine.computed[1:] == [1] * 4


def test_two_groups_are_computed_side_by_side_and_a_later_request_waits_for_nothing(connector_type):
    engine = Engine(connector(connector_type))
    left = engine.step(
        [request([1, 2, 3]), request([1, 2, 3]), request([1, 2, 4]), request([1, 5, 3])]
    )
    # [1, 2] is the same prefix for the first three: only a prompt's last token may differ.
    assert [each.prompt_token_ids for each in left] == [[1, 2, 3], [1, 2, 4]]
    assert engine.step([*left, request([1, 5, 9])]) == []
    assert engine.computed == [3, 3, 1, 1, 1]


@pytest.mark.parametrize(
    "other",
    [dict(salt="1"), dict(adapter=1), dict(skip=True), dict(sampled=1)],
    ids=["other weights", "an adapter", "prompt log-probabilities", "preempted"],
)
def test_what_must_not_or_can_not_be_shared_is_computed(connector_type, other):
    engine = Engine(connector(connector_type))
    assert engine.step([request([1, 2, 3])]) == []
    assert engine.step([request([1, 2, 3], **other), request([1, 2, 3], **other)]) in (
        [],
        [request([1, 2, 3], **other)],
    )
    assert engine.computed[1] == 3


def test_a_prompt_after_the_same_last_tokens_but_other_first_ones_is_not_taken_for_it(
    connector_type,
):
    engine = Engine(connector(connector_type))
    for first in (range(4), range(4, 8)):
        assert engine.step([request([*first, 20, 21, 22])]) == []
    assert engine.computed == [7, 7]
    assert engine.step([request([*range(4), 20, 21, 23])]) == []
    assert engine.computed[-1] == 1
    engine.full.remove(("0", 0, 1, 2, 3))
    engine.step([request([*range(4), 20, 21, 22])])
    assert engine.computed[-1] == 7, "without its full blocks the last one is of no use"


@pytest.mark.parametrize("limits", [dict(at_once=2), dict(share=2 / BLOCKS)])
def test_the_longest_unused_prompt_makes_room(connector_type, limits):
    engine = Engine(connector(connector_type, **limits))
    for tokens in ([1, 2], [3, 4], [1, 2], [5, 6], [1, 2], [3, 4]):
        engine.step([request(tokens)])
    assert engine.computed == [2, 2, 1, 2, 1, 2]


def test_of_more_prompts_in_a_step_than_are_kept_each_place_gets_one_block(connector_type):
    engine = Engine(connector(connector_type, at_once=2))
    engine.step([request([first, 2]) for first in range(10, 15)])
    places = [place for _, place in engine.connector._copies.save]
    assert sorted(places) == [0, 1]
    engine.step([request([13, 2]), request([14, 2])])
    assert engine.computed == [2] * 5 + [1, 1], "the last two are kept"


prompts = st.lists(st.sampled_from([1, 2]), min_size=1, max_size=11)


@given(
    steps=st.lists(
        st.lists(st.tuples(prompts, st.sampled_from("01"), st.booleans()), max_size=6), max_size=12
    ),
    capacity=st.integers(1, 4),
)
@settings(max_examples=200, deadline=None)
def test_whatever_comes_every_request_runs_and_no_wrong_token_is_copied(
    connector_type, steps, capacity
):
    engine = Engine(connector(connector_type, at_once=capacity))
    waiting: list = []
    for arrivals in [*steps, [], []]:
        waiting = engine.step(
            [*waiting, *(request(tokens, salt=salt, skip=skip) for tokens, salt, skip in arrivals)]
        )
    assert waiting == [] and len(engine.computed) == sum(map(len, steps))


def test_a_cache_of_another_engine_or_layout_is_refused(connector_type):
    with pytest.raises(AssertionError, match="the first dimension counts 64 blocks"):
        connector(connector_type).register_kv_caches({"layer": torch.zeros(2, BLOCKS)})
    taken = connector(connector_type)
    taken.register_kv_caches({"layer": torch.zeros(BLOCKS, BLOCK)})
    with pytest.raises(AssertionError, match="close the other engine"):
        taken.register_kv_caches({"layer": torch.zeros(BLOCKS, BLOCK)})
