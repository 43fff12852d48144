"""The build context of tests, whose model may have any token ids."""

from typing import Any

from torchtitan.experiments.rl.configurable import BuildContext

ANY_VOCABULARY = 1 << 31
"""Size of a vocabulary that has every token id a test uses."""


def context_of(renderer: Any, *, seed: int = 0, vocab_size: int = ANY_VOCABULARY) -> BuildContext:
    """Return the context with which a test builds its tasks, filters and algorithms."""
    return BuildContext(renderer=renderer, vocab_size=vocab_size, seed=seed)
