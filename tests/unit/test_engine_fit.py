"""Engines that can't serve their model are refused by field, before a process starts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan.experiments.rl.config.checks import check_cores, check_engine_fits
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.generation.vllm.engine import VLLMEngineConfig
from torchtitan.experiments.rl.models.hub import HubConfig

QWEN3_8B = {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 151936, "intermediate_size": 12288}


def fits(degree: int, **sizes) -> bool:
    engine = VLLMEngineConfig(tensor_parallel_degree=degree)
    try:
        check_engine_fits(engine, HubConfig("folder", sizes), field="generator.engine")
    except ConfigError as error:
        assert str(error).startswith(f"generator.engine.tensor_parallel_degree = {degree}: the model's ")
        return False
    return True


def test_degrees_of_a_known_model():
    # 32 heads, 8 key-value heads: up to 8 they are divided, above they are copied.
    assert [degree for degree in range(1, 65) if fits(degree, **QWEN3_8B)] == [1, 2, 4, 8, 16, 32]


def test_key_value_heads_are_divided_or_copied():
    assert fits(4, num_attention_heads=12, num_key_value_heads=2)  # each of the two in two parts
    assert not fits(4, num_attention_heads=12, num_key_value_heads=3)
    assert not fits(2, num_attention_heads=12, num_key_value_heads=3)


def test_the_vocabulary_is_divided_as_engines_fill_it_up():
    assert fits(2, vocab_size=151)  # 192
    assert fits(3, vocab_size=151) and not fits(5, vocab_size=151)


def test_sizes_of_a_model_that_reads_images_too_are_found():
    assert not fits(3, text_config={"num_attention_heads": 4})


@given(
    st.integers(1, 64),
    st.dictionaries(st.sampled_from([*QWEN3_8B]), st.one_of(st.none(), st.text(), st.floats(), st.booleans())),
)
def test_sizes_that_are_no_numbers_are_left_to_others(degree, sizes):
    assert fits(degree, **sizes)


@pytest.mark.parametrize("name", ["max_position_embeddings", "n_positions"])
def test_a_context_longer_than_the_models_is_refused(name):
    hub = HubConfig("folder", {name: 1024})
    check_engine_fits(VLLMEngineConfig(max_model_len=1024), hub, field="f.engine")
    with pytest.raises(ConfigError, match=r"^f.engine.max_model_len = 1025: the model has 1024 positions"):
        check_engine_fits(VLLMEngineConfig(max_model_len=1025), hub, field="f.engine")


def test_each_part_of_an_engine_needs_a_core():
    check_cores(VLLMEngineConfig(tensor_parallel_degree=2), 2, field="f.engine")
    with pytest.raises(
        ConfigError, match=r"^f.engine.tensor_parallel_degree = 2: each part needs a CPU core, and there are 1 here"
    ):
        check_cores(VLLMEngineConfig(tensor_parallel_degree=2), 1, field="f.engine")
