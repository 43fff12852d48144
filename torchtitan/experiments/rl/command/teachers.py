"""Compares the models that a run asks beside the policy: their tokenizers, and their servers.

An algorithm and its teacher exchange token ids, so their tokenizers have to be the policy's.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from torchtitan.experiments.rl.config.run_config import RunConfig
from torchtitan.experiments.rl.errors import ConfigError, user_code
from torchtitan.experiments.rl.generation.endpoint import (
    PROBE,
    check_same_model,
    check_served_tokenizer,
)
from torchtitan.experiments.rl.generation.judge import Judge
from torchtitan.experiments.rl.generation.references import (
    FrozenModel,
    HostedModel,
    find_references,
)

TEXTS = (
    PROBE,
    "What is 19 + 9?",
    "1234567890 3.14159 -2e-10 1,000,000 0x1F",
    "def f(x):\n    return x  # twice\n\n\n\tx *= 2\n",
    '{"name": "add", "arguments": {"a": [1, 2], "b": null}}',
    "<think>\nno\n</think>\n\n<tool_call>",
    "\\boxed{\\frac{1}{2}} $x^2 \\leq 4$",
    "Zwölf Boxkämpfer jagen Viktor quer über den Sylter Deich",
    "いろはにほへと ちりぬるを 数学",
    "Съешь же ещё этих мягких французских булок",
    "👩‍👩‍👧 🇺🇳 é e\u0301 \u200b\u00a0",
    "AAAAAAAA        aaaa\r\n\r\n...---!!!???",
    "don't we'll I'VE they're O'Neill's",
    "https://example.org/a_b?c=%20d&e=f#g user@example.org",
    "SELECT \"a\" FROM t WHERE b <> 'c'; -- d",
    "| a | b |\n|---|:-:|\n| **1** | `2` |",
    "antidisestablishmentarianism supercalifragilistic xqzjkvb",
    "مرحبا بالعالم שלום עולם नमस्ते",
    "½ ² Ⅷ ① ﬁ Å Ω ™ → ≠ ∑",
    " leading, trailing and  double   spaces ",
)
"""Texts that tokenizers divide differently."""


def check_teachers(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, *, ask_servers: bool
) -> None:
    """Compare the tokenizer of every model that an algorithm names with the policy's.

    Judges are asked in messages: theirs may be any. A folder that is not there is another check's.

    Args:
        tokenizer: tokenizer of the policy.
        ask_servers: True if servers are asked too. One that does not answer, or can't be asked for
            tokens, is passed over.

    Raises:
        ConfigError: naming the model's field, and what differs.
    """
    policy = config.model.hf_assets_path
    for name, task in config.tasks.items():
        for field, reference in find_references(
            task.algorithm, field=f"tasks.{name}.algorithm", beside=(Judge.Config,)
        ):
            cure = (
                f"the policy's, in {policy}, differs, and they exchange token ids: name a model "
                "with the policy's tokenizer"
            )
            if isinstance(reference, FrozenModel) and ask_servers:
                check_served_tokenizer(reference, f"{field}.base_url", policy, cure=cure)
            elif isinstance(reference, HostedModel) and Path(reference.path).is_dir():
                with user_code(f"{field}.path", reference.path, "its tokenizer can't be loaded"):
                    theirs = AutoTokenizer.from_pretrained(reference.path, local_files_only=True)
                if (found := difference(theirs, tokenizer)) is not None:
                    raise ConfigError(
                        f"{field}.path", reference.path, f"its tokenizer {found}; {cure}"
                    )


def check_servers(config: RunConfig) -> None:
    """Ask the servers of each frozen model that has several, whether they serve the same model.

    Raises:
        ConfigError: naming the field of the server that serves another one.
    """
    for field, reference in find_references(config.tasks, field="tasks"):
        if isinstance(reference, FrozenModel) and len(reference.urls) > 1:
            check_same_model(reference, field)


def difference(theirs: PreTrainedTokenizerBase, ours: PreTrainedTokenizerBase) -> str | None:
    """Return in words what two tokenizers differ in; None if they are equal.

    Compared are their vocabularies, special tokens, merges and what they make of TEXTS.
    """
    for text, facts in _COMPARED.items():
        if facts(theirs) != facts(ours):
            return text
    return None


def _merges(tokenizer: Any) -> object:  # noqa: ANN401 - slow tokenizers have no backend
    """Return the merges of byte-pair encoding, in order; None if the tokenizer has none."""
    if not tokenizer.is_fast:
        return None
    return json.loads(tokenizer.backend_tokenizer.to_str())["model"].get("merges")


_COMPARED: dict[str, Callable[[Any], object]] = {
    "has another number of tokens": len,
    "has other tokens, or other ids of them": lambda tokenizer: tokenizer.get_vocab(),
    "treats other ids as special tokens": lambda tokenizer: {
        index for index, token in tokenizer.added_tokens_decoder.items() if token.special
    },
    "merges characters into tokens by other rules": _merges,
    "divides texts into other tokens": lambda tokenizer: [
        tokenizer.encode(text, add_special_tokens=False) for text in TEXTS
    ],
}
