"""Engines that can't serve their model are refused by field, before a process starts."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan.experiments.rl.command.engine_fit import check_cores, check_engine_fits
from torchtitan.experiments.rl.compat.vllm import set_environment
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.generation.vllm.engine import OWN_ARGUMENTS, VLLMEngineConfig
from torchtitan.experiments.rl.models.hub import HubConfig

QWEN3_8B = {
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 151936,
    "intermediate_size": 12288,
}


def fits(degree: int, **sizes) -> bool:
    engine = VLLMEngineConfig(tensor_parallel_degree=degree)
    try:
        check_engine_fits(engine, HubConfig("folder", sizes), field="generator.engine")
    except ConfigError as error:
        assert str(error).startswith(
            f"generator.engine.tensor_parallel_degree = {degree}: the model's "
        )
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
    st.dictionaries(
        st.sampled_from([*QWEN3_8B]), st.one_of(st.none(), st.text(), st.floats(), st.booleans())
    ),
)
def test_sizes_that_are_no_numbers_are_left_to_others(degree, sizes):
    assert fits(degree, **sizes)


@pytest.mark.parametrize("name", ["max_position_embeddings", "n_positions"])
def test_a_context_longer_than_the_models_is_refused(name):
    hub = HubConfig("folder", {name: 1024})
    check_engine_fits(VLLMEngineConfig(max_model_len=1024), hub, field="f.engine")
    with pytest.raises(
        ConfigError, match=r"^f.engine.max_model_len = 1025: the model has 1024 positions"
    ):
        check_engine_fits(VLLMEngineConfig(max_model_len=1025), hub, field="f.engine")


def test_each_part_of_an_engine_needs_a_core():
    check_cores(VLLMEngineConfig(tensor_parallel_degree=2), 2, field="f.engine")
    with pytest.raises(
        ConfigError,
        match=r"^f.engine.tensor_parallel_degree = 2: each part needs a CPU core, and there are 1 here",
    ):
        check_cores(VLLMEngineConfig(tensor_parallel_degree=2), 1, field="f.engine")


# ---- vLLM's own arguments


def test_vllms_own_class_checks_its_arguments_before_a_process_is_spawned():
    VLLMEngineConfig(args={"quantization": "fp8", "kv_cache_dtype": "fp8"}).validate(
        field="generator.engine"
    )
    args = {"block_size": 16, "max_num_batched_tokens": "many"}
    engine = VLLMEngineConfig(args=args)
    engine.validate(field="generator.engine")
    with pytest.raises(
        ConfigError,
        match="^generator.engine.args.max_num_batched_tokens = 'many': vLLM wants another value",
    ):
        engine.check_present(field="generator.engine")


def test_a_quantized_engine_is_warned_of():
    assert VLLMEngineConfig().warning is None
    warning = VLLMEngineConfig(args={"quantization": "fp8"}).warning
    assert warning is not None and warning.startswith(
        "args.quantization = 'fp8': the engine's weights are not compared"
    )


def test_an_argument_that_the_library_sets_is_refused_by_the_name_of_its_field():
    with pytest.raises(
        ConfigError,
        match=r"args.max_model_len = 5: is set by generator.engine.max_model_len: leave it out here$",
    ):
        VLLMEngineConfig(args={"max_model_len": 5}).validate(field="generator.engine")
    with pytest.raises(ConfigError, match="want plain values"):
        VLLMEngineConfig(args={"seed": object()}).validate(field="generator.engine")


@pytest.mark.parametrize(
    ("argument", "value"),
    [("pipeline_parallel_size", 2), ("data_parallel_size", 2), ("enable_expert_parallel", True)],
)
def test_an_engine_divided_otherwise_than_by_tensor_parallelism_is_refused(argument, value):
    message = rf"^generator.engine.args.{argument} = {value}: .*set generator.engine.tensor_parallel_degree$"
    with pytest.raises(ConfigError, match=message):
        VLLMEngineConfig(args={argument: value}).validate(field="generator.engine")


def test_an_argument_that_divides_nothing_is_accepted():
    args = {"pipeline_parallel_size": 1, "data_parallel_size": 1, "enable_expert_parallel": False}
    VLLMEngineConfig(args=args).validate(field="generator.engine")


def test_arguments_that_are_set_here_are_those_that_no_user_may_give():
    seen: dict = {}

    class Stop(Exception):
        pass

    def noted(**arguments):
        seen.update(arguments)
        raise Stop

    for device in ("cpu", "cuda"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "environ", os.environ.copy())
            set_environment(device=device)
            patch.setattr("vllm.EngineArgs", noted)
            patch.setattr(
                "torch.compiler.set_stance", lambda stance: None
            )  # it would hold for the tests after this one
            with pytest.raises(Stop):
                VLLMEngineConfig(args={"max_num_batched_tokens": 4096}).build(
                    model_path="m", device=device
                )
        assert (
            seen["async_scheduling"] is (device == "cuda")
            and seen["max_num_batched_tokens"] == 4096
        )
    free = {
        "async_scheduling",
        "max_num_batched_tokens",
        "enable_chunked_prefill",
        "block_size",
        "disable_log_stats",
    }
    free |= {"use_tqdm_on_load", "disable_hybrid_kv_cache_manager", "moe_backend"}
    assert set(seen) - free <= set(OWN_ARGUMENTS)
