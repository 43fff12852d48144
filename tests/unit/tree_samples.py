"""Training samples that share prefixes, with and without routes, for the tests of prefix trees."""

import numpy as np
from hypothesis import strategies as st

from torchtitan.experiments.rl.types import TrainingSample

ABSENT = 255
"""Expert of a token whose route is not known."""


def tree_sample(token_ids, seed: int = 0, **fields) -> TrainingSample:
    """Return a sample with random streams of every component, other ones for each seed.

    The first token is a member of nothing.
    """
    rng = np.random.default_rng(seed)
    tokens = np.array(token_ids, np.int32)
    length = len(tokens)

    def weights(share: float) -> np.ndarray:
        values = np.where(rng.random(length) < share, rng.uniform(0.5, 2, length), 0).astype(
            np.float32
        )
        values[:1] = 0
        return values

    mask = (rng.random(length) < 0.6) & (np.arange(length) > 0)
    streams = dict(
        token_ids=tokens,
        loss_mask=mask,
        generator_logprobs=np.where(mask, rng.uniform(-5, -3, length), 0).astype(np.float32),
        policy_versions=np.where(mask, rng.integers(0, 3, length), -1).astype(np.int32),
        role_ids=rng.integers(-1, 5, length).astype(np.int8),
        advantages=rng.normal(size=length).astype(np.float32),
        rl_weights=weights(0.7),
        ce_weights=weights(0.5),
        ref_kl_weights=weights(0.4) * mask,
        ref_logprobs=rng.uniform(-5, -3, length).astype(np.float32),
        task_name=f"task{seed % 2}",
        rollout_id=str(seed),
    )
    return TrainingSample(**(streams | fields))


def random_tree(seed: int, count: int, longest: int, vocabulary: int = 64) -> list[list[int]]:
    """Return sequences of 1 to ``longest`` tokens.

    Most go on from any token of an earlier one: forks of forks, prefixes, and the same again. Some
    new tokens agree by chance.
    """
    rng = np.random.default_rng(seed)
    sequences: list[list[int]] = []
    for _ in range(count):
        begin: list[int] = []
        if sequences and rng.random() < 0.8:
            other = sequences[rng.integers(len(sequences))]
            begin = other[: rng.integers(0, len(other) + 1)]
        new = rng.integers(
            0, rng.choice([2, vocabulary]), rng.integers(0 if begin else 1, longest + 1)
        ).tolist()
        sequences.append([*begin, *new][:longest])
    return sequences


@st.composite
def trees_of_samples(draw, *, most: int = 12, longest: int = 20) -> list[TrainingSample]:
    seed, count = draw(st.integers(0, 2**32)), draw(st.integers(1, most))
    temperatures = draw(st.sampled_from([(1.0,), (0.7, 1.3)]))
    rng = np.random.default_rng(seed)
    return [
        tree_sample(tokens, seed + index, temperature=float(rng.choice(temperatures)))
        for index, tokens in enumerate(random_tree(seed, count, longest))
    ]


def routes_of(tokens, layers: int = 3, k: int = 2, *, salt: int = 0) -> np.ndarray:
    """Return routes [L, layers, k] that differ by token, place and ``salt``."""
    places = (
        np.arange(len(tokens))[:, None, None] * 7 + np.asarray(tokens)[:, None, None] * 3 + salt
    )
    return ((places + np.arange(layers)[:, None] + np.arange(k) * 4) % 8).astype(np.uint8)


def random_routed(seed: int, count: int, layers: int = 3) -> list[TrainingSample]:
    """Return samples that begin alike in their tokens.

    Their routes part at random depths, or are marked as not known.
    """
    rng, samples = np.random.default_rng(seed), []
    for index, tokens in enumerate(random_tree(seed, count, 16)):
        routes = routes_of(tokens, layers)
        if rng.random() < 0.6:
            routes[rng.integers(len(tokens)) :] = routes_of(
                tokens, layers, salt=int(rng.integers(1, 8))
            )[-1]
        if rng.random() < 0.5:
            routes[-1] = ABSENT
        if rng.random() < 0.2:
            routes[: rng.integers(len(tokens))] = ABSENT
        samples.append(tree_sample(tokens, seed + index, routes=routes))
    return samples
