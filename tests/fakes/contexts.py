"""The build context of tests, whose model may have any token ids."""

from typing import Any

from torchtitan.experiments.rl.configurable import BuildContext

ANY_VOCABULARY = 1 << 31


def context_of(renderer: Any, *, seed: int = 0, vocab_size: int = ANY_VOCABULARY) -> BuildContext:
    return BuildContext(renderer=renderer, vocab_size=vocab_size, seed=seed)
