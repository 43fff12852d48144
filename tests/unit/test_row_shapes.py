"""Batches padded to few shapes, as on CUDA: the same numbers, and no other shape reaches the model. Flex attention, eager."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit import loss_batches
from torchtitan.experiments.rl.models.decoder import RowShapes, batch_logprobs
from torchtitan.experiments.rl.models.policy import ModelConfig, policy_spec

ROW_LENGTH, ROWS = 500, 3


@pytest.fixture(scope="module")
def policies():
    """The same random weights, with fused queries, keys and values, under the CPU's packed attention and under flex."""
    made = {}
    model_config = ModelConfig(hf_assets_path="/nowhere", flavor="qwen3/debugmodel")
    for device in ("cpu", "cuda"):
        spec = policy_spec(model_config, device=device, max_seq_len=ROW_LENGTH)
        model = made[device] = spec.model.build()
        model.init_states(buffer_device=torch.device("cpu"))
        assert any("wqkv" in name for name, _ in model.named_parameters())
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return made


@pytest.fixture
def eager():
    """Of torch's own: what is compiled runs as it is written."""
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


def batch_of(*rows: list[int], vocabulary: int = 2048):
    """Rows of samples of these lengths, padded to the longest."""
    length = max(map(sum, rows))
    filled = [[*row, length - sum(row)] for row in rows]
    positions = torch.stack(
        [torch.cat([torch.arange(size) for size in row]) for row in filled]
    ).int()
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(vocabulary, positions.shape, generator=generator, dtype=torch.int32)
    temperatures = 0.5 + torch.rand(positions.shape, generator=generator)
    return tokens, positions, temperatures, positions > 0


@torch.no_grad()
def test_eager_flex_attention_equals_the_packed_kernel_of_the_cpu_row_by_row_and_padded(
    policies, eager
):
    batch = batch_of([50, 3, 75], [128], [1, 1, 90])
    expected, entropy = policies["cpu"](*batch)
    assert expected.min() < -1
    for policy in (
        policies["cuda"],
        lambda *inputs: RowShapes.of(ROWS, ROW_LENGTH).compute(policies["cuda"], *inputs),
    ):
        values, entropies = policy(*batch)
        torch.testing.assert_close(values, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(entropies, entropy, rtol=1e-5, atol=1e-5)


def test_padding_changes_no_gradient(policies):
    batch = batch_of([50, 3, 75], [40])
    gradients = []
    for policy in (
        policies["cpu"],
        lambda *inputs: RowShapes.of(ROWS, ROW_LENGTH).compute(policies["cpu"], *inputs),
    ):
        policies["cpu"].zero_grad()
        policy(*batch)[0].sum().backward()
        gradients.append([parameter.grad.clone() for parameter in policies["cpu"].parameters()])
    for padded, plain in zip(*gradients, strict=True):
        torch.testing.assert_close(padded, plain, rtol=1e-4, atol=1e-4)


@settings(deadline=None)
@given(rows=st.integers(1, 16), row_length=st.integers(2, 20_000), data=st.data())
def test_every_batch_of_a_run_has_one_of_at_most_three_shapes(rows, row_length, data):
    shapes = RowShapes.of(rows, row_length)
    assert len(shapes.shapes) <= 3
    size = data.draw(st.tuples(st.integers(1, rows), st.integers(1, row_length)))
    seen = []

    def policy(tokens, *others):
        *rows, places, routes, real = tokens, *others
        rows += [routes[..., 0, 0], real]
        assert (routes == -1).sum() == routes.numel() - 6 * real.sum() and real.sum() == size[
            0
        ] * size[1]
        assert len(places) == 1 and int(places) == (size[0] - 1) * tokens.shape[1] + size[1] - 1, (
            "the last of the batch"
        )
        seen.extend(row.shape for row in rows)
        return tokens.float(), tokens.float()

    tokens = torch.zeros(size, dtype=torch.int32)
    last = torch.zeros(size, dtype=torch.bool)
    last[-1, -1] = True
    routes = torch.ones((*size, 3, 2), dtype=torch.int16)
    values, _ = shapes.compute(
        policy, tokens, tokens, tokens.float(), last, routes, torch.ones_like(last)
    )
    assert values.shape == size
    (shape,) = set(seen)
    assert tuple(shape) in shapes.shapes and shape[0] >= size[0] and shape[1] >= size[1]


def test_the_canary_is_padded_to_the_smallest_shape():
    assert RowShapes.of(4, 8192).smallest(1, 8) == RowShapes.of(4, 8192).smallest(4, 8) == (4, 2048)
    assert RowShapes.of(4, 8192).smallest(5, 9000) == (5, 9000), (
        "what is larger than a run's rows is left as it is"
    )
    assert RowShapes.of(4, 8192).smallest(5, 8) == (5, 8), "more rows than a shape has"


def test_the_tokens_of_every_task_are_real_and_padding_is_not():
    told = []

    def policy(tokens, positions, temperatures, needed, routes, real):
        told.append(real)
        return tokens.float(), tokens.float()

    batch = replace(loss_batches.batch_of((1, 4)), task_ids=torch.tensor([[0, 0, 1, -1]]))
    batch_logprobs(policy, batch)
    assert told[0].tolist() == [[True, True, True, False]]
