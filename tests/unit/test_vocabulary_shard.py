"""The head of ranks that share the vocabulary: what one rank alone computes, from parts of the logits. Ranks are threads."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from tests.unit.test_logprob_head import TOKENS, WIDTH, Largest, head_of, inputs_of
from torchtitan.experiments.rl.models import logprob_head
from torchtitan.experiments.rl.models.logprob_head import LogprobHead, VocabularyShard

CHUNK = 7


class Threads:
    """A process group whose ranks are threads of this process."""

    def __init__(self, size: int):
        self.size, self._barrier, self._given = size, threading.Barrier(size), [torch.empty(0)] * size

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
    part.weight = torch.nn.Parameter(rows[rank].clone() if rank < len(rows) else whole.weight.detach()[:0].clone())
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
    torch.testing.assert_close(sum(hidden_grad for _, _, hidden_grad, _ in results), hidden.grad, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(torch.cat([grad for *_, grad in results]), whole.weight.grad, rtol=1e-10, atol=1e-12)


def test_no_tensor_of_a_rank_is_as_wide_as_the_vocabulary(monkeypatch):
    """What a rank holds grows with its own part: with four times the vocabulary on four times the ranks it is the same."""
    sizes = {}
    for ranks in (1, 4):
        vocabulary = 400 * ranks
        whole = head_of(torch.float32, vocabulary=vocabulary)
        monkeypatch.setattr(logprob_head.dist, "all_reduce", lambda *arguments, **options: None)
        part = part_of(whole, 0, Threads(ranks))
        hidden, targets, temperatures, upstream = inputs_of(TOKENS, torch.float32, vocabulary=vocabulary)
        with Largest() as seen:
            logprobs, _ = part(hidden, targets, temperatures, chunk_tokens=20)
            (logprobs * upstream).sum().backward()
        sizes[ranks] = seen.elements
    assert sizes[1] == sizes[4] == 20 * 400 > 400 * WIDTH
