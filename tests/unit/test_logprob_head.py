"""The log-probability head against plain log_softmax, and what it never holds."""

import math
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchtitan.experiments.rl.models import logprob_head
from torchtitan.experiments.rl.models.logprob_head import LogprobHead, VocabularyShard
from torchtitan.experiments.rl.models.policy import ModelConfig, policy_spec

torch.set_num_threads(1)

WIDTH, VOCABULARY, TOKENS = 12, 50, 37


def head_of(
    dtype=torch.float64, *, vocabulary=VOCABULARY, width=WIDTH, chunk_tokens=1024, scale=1.0
) -> LogprobHead:
    init = {"weight": torch.nn.init.zeros_, "bias": torch.nn.init.zeros_}
    head = LogprobHead.Config(
        in_features=width, out_features=vocabulary, param_init=init, chunk_tokens=chunk_tokens
    ).build()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        head.weight.copy_(torch.randn(vocabulary, width, generator=generator) * scale)
    return head.to(dtype)


def inputs_of(
    tokens: int, dtype=torch.float64, *, temperature=None, width=WIDTH, vocabulary=VOCABULARY
):
    generator = torch.Generator().manual_seed(1)
    hidden = (
        torch.randn(tokens, width, generator=generator, dtype=torch.float64)
        .to(dtype)
        .requires_grad_()
    )
    targets = torch.randint(vocabulary, (tokens,), generator=generator, dtype=torch.int32)
    temperatures = 0.3 + 2 * torch.rand(tokens, generator=generator)
    if temperature is not None:
        temperatures = torch.full((tokens,), temperature)
    upstream = torch.randn(tokens, generator=generator, dtype=torch.float64).to(dtype)
    return hidden, targets, temperatures.to(dtype), upstream


def plain(head, hidden, targets, temperatures):
    """Full logits and torch's own log_softmax."""
    logprobs = torch.log_softmax(hidden @ head.weight.T / temperatures[:, None], -1)
    return logprobs.gather(1, targets[:, None].long()).squeeze(1), -(logprobs.exp() * logprobs).sum(
        -1
    )


@pytest.mark.parametrize(
    "temperature", [None, 0.1, 0.7, 1.0, 5.0], ids=lambda t: f"temperature {t or 'per token'}"
)
@pytest.mark.parametrize("chunk", [1, 2, 5, 36, 37, 38, 1000])
def test_log_probabilities_entropy_and_gradients_are_those_of_log_softmax(chunk, temperature):
    results = []
    for forward in (lambda head, *args: head(*args, chunk_tokens=chunk), plain):
        head, (hidden, targets, temperatures, upstream) = (
            head_of(),
            inputs_of(TOKENS, temperature=temperature),
        )
        logprobs, entropy = forward(head, hidden, targets, temperatures)
        (logprobs * upstream).sum().backward()
        results.append((logprobs.detach(), entropy.detach(), hidden.grad, head.weight.grad))
    for ours, reference in zip(*results, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-9, atol=1e-9)


def test_compiled_chunks_are_the_eager_ones_to_rounding_and_one_length_whatever_the_tokens():
    head, seen = head_of(torch.float32, chunk_tokens=8), set()
    compiled_of = logprob_head._compiled

    def noting(function):
        compiled = compiled_of(function)
        return lambda *of: seen.add(of[0].shape) or compiled(*of)

    for tokens in (0, 3, 8, 21):
        hidden, targets, temperatures, upstream = inputs_of(tokens, torch.float32)
        found = []
        for head.compile_chunks in (False, True):
            inputs = hidden.detach().clone().requires_grad_()
            head.weight.grad = None
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(logprob_head, "_compiled", noting)
                logprobs, entropy = head(inputs, targets, temperatures)
            (logprobs * upstream).sum().backward()
            found.append((logprobs, entropy, inputs.grad, head.weight.grad))
        for compiled, plain in zip(*reversed(found), strict=True):
            torch.testing.assert_close(compiled, plain, rtol=1e-5, atol=1e-5)
    assert {shape[0] for shape in seen} == {8}


def test_chunk_size_of_the_config_is_the_most_at_once():
    head, (hidden, targets, temperatures, _) = head_of(chunk_tokens=3), inputs_of(TOKENS)
    with Largest(
        watched=lambda tensor: tensor.shape[1:] == (VOCABULARY,) and len(tensor) != WIDTH
    ) as seen:
        head(hidden, targets, temperatures)
        head(hidden, targets, temperatures, chunk_tokens=20)
    assert seen.elements == 3 * VOCABULARY


def test_large_logits_neither_overflow_nor_lose_the_gradient():
    head, (hidden, targets, _, upstream) = head_of(scale=500.0), inputs_of(TOKENS)
    temperatures = torch.full((TOKENS,), 0.05, dtype=torch.float64)
    logprobs, entropy = head(hidden, targets, temperatures, chunk_tokens=4)
    (logprobs * upstream).sum().backward()
    expected, _ = plain(head, hidden, targets, temperatures)
    torch.testing.assert_close(logprobs, expected, rtol=1e-9, atol=1e-6)
    assert all(t.isfinite().all() for t in (logprobs, entropy, hidden.grad, head.weight.grad))
    assert (entropy >= -1e-6).all()


def test_no_token_gives_empty_outputs_that_still_carry_a_gradient_of_zero():
    head, (hidden, targets, temperatures, _) = head_of(), inputs_of(0)
    logprobs, entropy = head(hidden, targets, temperatures)
    assert logprobs.shape == entropy.shape == (0,) and logprobs.dtype == torch.float64
    logprobs.sum().backward()
    assert hidden.grad.shape == (0, WIDTH) and torch.equal(
        head.weight.grad, torch.zeros_like(head.weight)
    )


def test_entropy_carries_no_gradient():
    head, (hidden, targets, temperatures, _) = head_of(), inputs_of(5)
    _, entropy = head(hidden, targets, temperatures)
    assert not entropy.requires_grad


def test_bfloat16_weights_give_float32_log_probabilities():
    head, (hidden, targets, temperatures, upstream) = (
        head_of(torch.bfloat16),
        inputs_of(TOKENS, torch.bfloat16),
    )
    logprobs, entropy = head(hidden, targets, temperatures.float(), chunk_tokens=7)
    assert logprobs.dtype == entropy.dtype == torch.float32
    (logprobs * upstream).sum().backward()
    assert hidden.grad.dtype == head.weight.grad.dtype == torch.bfloat16
    # The product is rounded to bfloat16 as the generator's is; everything after it is not.
    logits = (hidden @ head.weight.T).float() / temperatures.float()[:, None]
    expected = torch.log_softmax(logits, -1).gather(1, targets[:, None].long()).squeeze(1)
    torch.testing.assert_close(logprobs, expected, rtol=1e-5, atol=1e-5)


def test_uniform_distribution_has_the_log_of_the_vocabulary():
    head = head_of(scale=0.0)
    hidden, targets, temperatures, _ = inputs_of(4)
    logprobs, entropy = head(hidden, targets, temperatures)
    assert logprobs.tolist() == pytest.approx([-math.log(VOCABULARY)] * 4)
    assert entropy.tolist() == pytest.approx([math.log(VOCABULARY)] * 4)


# ---- what it never holds


class Largest(TorchDispatchMode):
    """Elements of the largest tensor any operation makes or is given, of those ``watched`` says yes to."""

    def __init__(self, watched=lambda tensor: True):
        super().__init__()
        self._watched = watched
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, kwargs, result)):
            if isinstance(tensor, torch.Tensor) and self._watched(tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


@pytest.mark.parametrize("row_length", [16, 64, 500])
def test_no_tensor_of_a_row_holds_its_logits_in_the_head(row_length):
    vocabulary = 997
    head = head_of(torch.float32, vocabulary=vocabulary, width=4)
    hidden, targets, temperatures, upstream = inputs_of(
        row_length - 1, torch.float32, vocabulary=vocabulary, width=4
    )
    with Largest() as seen:
        logprobs, _ = head(hidden, targets, temperatures, chunk_tokens=max(1, row_length // 4))
        (logprobs * upstream).sum().backward()
    assert seen.elements < row_length * vocabulary
    assert seen.elements >= row_length // 4 * vocabulary, "the check sees the chunks"


class Products(TorchDispatchMode):
    """Counts the matrix products that read a tensor of so many elements."""

    def __init__(self, elements: int):
        super().__init__()
        self._elements, self.count = elements, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.count += any(
                tensor.numel() == self._elements
                for tensor in tree_leaves(args)
                if isinstance(tensor, torch.Tensor)
            )
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("length, readings", [(8, 1), (33, 1), (34, 2), (160, 4)])
def test_a_short_row_reads_the_heads_weight_once(policy, length, readings):
    tokens = torch.randint(policy.config.vocab_size, (1, length))
    positions = torch.arange(length)[None]
    with Products(policy.config.vocab_size * policy.config.dim) as seen, torch.no_grad():
        policy(tokens, positions, torch.ones(1, length), positions != 0)
    assert seen.count == readings


def saved_elements(run) -> int:
    """Elements of the largest tensor autograd keeps for the backward pass of ``run``."""
    largest = 0

    def keep(tensor):
        nonlocal largest
        largest = max(largest, tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        run()
    return largest


@pytest.fixture(scope="module")
def policy(tokenizer_path):
    """The tiny policy with a vocabulary much wider than anything else in it."""
    spec = policy_spec(
        ModelConfig(hf_assets_path=str(tokenizer_path)), device="cpu", max_seq_len=512
    )
    spec.model.vocab_size = spec.model.tok_embeddings.num_embeddings = (
        spec.model.lm_head.out_features
    ) = 4096
    model = spec.model.build()
    model.init_states(buffer_device=torch.device("cpu"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02)
    return model


@pytest.mark.parametrize("rows, length", [(1, 24), (1, 200), (3, 64)])
def test_no_tensor_of_the_whole_policy_holds_a_rows_logits_forward_or_backward(
    policy, rows, length
):
    vocabulary = policy.config.vocab_size
    tokens = torch.randint(vocabulary, (rows, length))
    positions = torch.arange(length).expand(rows, length)
    needed = positions != 0  # the worst case: every token but the first is trained

    def forward():
        logprobs, _ = policy(tokens, positions, torch.ones(rows, length), needed)
        return logprobs

    def parameter_shaped(tensor):
        return any(tensor.numel() == parameter.numel() for parameter in policy.parameters())

    with Largest(watched=lambda tensor: not parameter_shaped(tensor)) as seen:
        forward().sum().backward()
    assert seen.elements < length * vocabulary
    weight = vocabulary * policy.config.dim
    assert saved_elements(forward) <= max(weight, rows * length * policy.config.dim * 4)
    policy.zero_grad()


# ---- ranks that share the vocabulary. They are threads here


CHUNK = 7


class Threads:
    """A process group whose ranks are threads of this process."""

    def __init__(self, size: int):
        self.size, self._barrier, self._given = (
            size,
            threading.Barrier(size),
            [torch.empty(0)] * size,
        )

    def all_reduce(self, rank: int, tensor: torch.Tensor, largest: bool) -> None:
        self._given[rank] = tensor.clone()
        self._barrier.wait(60)
        stacked = torch.stack(self._given)
        tensor.copy_(stacked.amax(0) if largest else stacked.sum(0))
        self._barrier.wait(60)


@pytest.fixture(autouse=True)
def thread_groups(monkeypatch):
    def all_reduce(tensor, op=dist.ReduceOp.SUM, group=None):
        threads, rank = group
        threads.all_reduce(rank, tensor, op == dist.ReduceOp.MAX)

    monkeypatch.setattr(logprob_head.dist, "all_reduce", all_reduce)
    monkeypatch.setattr(logprob_head.dist, "get_world_size", lambda group: group[0].size)
    monkeypatch.setattr(logprob_head.dist, "get_rank", lambda group: group[1])


def part_of(whole: LogprobHead, rank: int, threads: Threads) -> LogprobHead:
    """The rank's rows of the weight, divided as DTensor divides them."""
    vocabulary = whole.weight.shape[0]
    part = head_of(whole.weight.dtype, vocabulary=vocabulary)
    rows = torch.chunk(whole.weight.detach(), threads.size)
    part.weight = torch.nn.Parameter(
        rows[rank].clone() if rank < len(rows) else whole.weight.detach()[:0].clone()
    )
    part._shard = VocabularyShard.of(vocabulary, (threads, rank))
    return part


@pytest.mark.parametrize("vocabulary, ranks", [(50, 2), (50, 4), (51, 2), (5, 4), (3, 2)])
def test_ranks_that_share_a_vocabulary_give_what_one_rank_gives_alone(vocabulary, ranks):
    whole = head_of(vocabulary=vocabulary, scale=3.0)
    hidden, targets, temperatures, upstream = inputs_of(TOKENS, vocabulary=vocabulary)
    expected, expected_entropy = whole(hidden, targets, temperatures, chunk_tokens=CHUNK)
    (expected * upstream).sum().backward()
    threads = Threads(ranks)

    def compute(rank: int):
        own, part = hidden.detach().clone().requires_grad_(), part_of(whole, rank, threads)
        logprobs, entropy = part(own, targets, temperatures, chunk_tokens=CHUNK)
        (logprobs * upstream).sum().backward()
        return logprobs.detach(), entropy, own.grad, part.weight.grad

    with ThreadPoolExecutor(ranks) as pool:
        results = list(pool.map(compute, range(ranks)))
    for logprobs, entropy, _, _ in results:
        torch.testing.assert_close(logprobs, expected.detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(entropy, expected_entropy, rtol=1e-10, atol=1e-10)
    # The gradient of the hidden states is a sum over the ranks; that of the weight lies side by side.
    torch.testing.assert_close(
        sum(hidden_grad for _, _, hidden_grad, _ in results), hidden.grad, rtol=1e-10, atol=1e-12
    )
    torch.testing.assert_close(
        torch.cat([grad for *_, grad in results]), whole.weight.grad, rtol=1e-10, atol=1e-12
    )


def test_no_tensor_of_a_rank_is_as_wide_as_the_vocabulary(monkeypatch):
    """What a rank holds grows with its own part: with four times the vocabulary on four times the ranks it is the same."""
    sizes = {}
    for ranks in (1, 4):
        vocabulary = 400 * ranks
        whole = head_of(torch.float32, vocabulary=vocabulary)
        monkeypatch.setattr(logprob_head.dist, "all_reduce", lambda *arguments, **options: None)
        part = part_of(whole, 0, Threads(ranks))
        hidden, targets, temperatures, upstream = inputs_of(
            TOKENS, torch.float32, vocabulary=vocabulary
        )
        with Largest() as seen:
            logprobs, _ = part(hidden, targets, temperatures, chunk_tokens=20)
            (logprobs * upstream).sum().backward()
        sizes[ranks] = seen.elements
    assert sizes[1] == sizes[4] == 20 * 400 > 400 * WIDTH
