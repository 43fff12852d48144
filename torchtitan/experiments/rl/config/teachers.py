"""Whether the models that an algorithm exchanges token ids with have the policy's tokenizer. By another one the same ids are
other texts: their scores are nonsense, and ids beyond the smaller vocabulary end a process."""

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from torchtitan.experiments.rl.config.run_config import RunConfig
from torchtitan.experiments.rl.config.user_faults import user_code
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.generation.judge import Judge
from torchtitan.experiments.rl.generation.references import FrozenModel, HostedModel, find_references
from torchtitan.experiments.rl.generation.served import PROBE, check_served_tokenizer

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
)
"""What tokenizers divide differently."""


def check_teachers(config: RunConfig, *, ask_servers: bool) -> None:
    """Compare the tokenizer of every model that an algorithm names with the policy's. Judges are asked in messages: theirs may
    be any. A folder that is not there is another check's.

    Args:
        ask_servers: a server that does not answer, or can't be asked for tokens, is passed over.

    Raises:
        ConfigError: naming the model's field, and what differs.
    """
    policy = config.model.hf_assets_path
    for name, task in config.tasks.items():
        for field, reference in find_references(task.algorithm, field=f"tasks.{name}.algorithm", beside=(Judge.Config,)):
            cure = f"the policy's, in {policy}, differs, and they exchange token ids: name a model with the policy's tokenizer"
            if isinstance(reference, FrozenModel) and ask_servers:
                check_served_tokenizer(reference, f"{field}.base_url", policy, cure=cure)
            elif isinstance(reference, HostedModel) and Path(reference.path).is_dir():
                with user_code(f"{field}.path", reference.path, "its tokenizer can't be loaded"):
                    theirs, ours = (
                        AutoTokenizer.from_pretrained(path, local_files_only=True) for path in (reference.path, policy)
                    )
                if (found := difference(theirs, ours)) is not None:
                    raise ConfigError(f"{field}.path", reference.path, f"its tokenizer {found}; {cure}")


def difference(theirs: Any, ours: Any) -> str | None:
    """What one tokenizer has and the other has not, in words; None: they are equal in vocabulary and on TEXTS."""
    of_theirs, of_ours = theirs.get_vocab(), ours.get_vocab()
    if len(of_theirs) != len(of_ours):
        return f"has {len(of_theirs):,} tokens, and not {len(of_ours):,}"
    for token, index in of_ours.items():
        if of_theirs.get(token) != index:
            return f"has no {token!r} with the id {index}"
    for text in TEXTS:
        if theirs.encode(text, add_special_tokens=False) != ours.encode(text, add_special_tokens=False):
            return f"divides {text[:30]!r} into other tokens"
    return None
