"""The token view: the streams of a training sample, and the texts of its tokens by the tokenizer of the run's model."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from torchtitan.experiments.rl.checkpointing.folder import policies
from torchtitan.experiments.rl.config.saved_command import read_config
from torchtitan.experiments.rl.report.run import ReportedRun
from torchtitan.experiments.rl.rollouts.records import decode_rollout
from torchtitan.experiments.rl.types import ROLES, STREAMS

TOKENIZER_FILE = "tokenizer.json"
MOST_TOKENS = 4_000
"""Of one answer of the token view."""


class TokenTexts:
    """Looks for the tokenizer in the run's folder (its final policy), then in the model's, which its config names."""

    def __init__(self, run_dir: Path):
        self._tokenizer = _found(run_dir)
        added = {} if self._tokenizer is None else self._tokenizer.get_added_tokens_decoder()
        self._special = {token for token, entry in added.items() if entry.special}

    def of(self, ids: Sequence[int]) -> list[str] | None:
        """A text for each id, special tokens too. None: there is no tokenizer."""
        if self._tokenizer is None:
            return None
        return [self._tokenizer.decode([token], skip_special_tokens=False) for token in ids]

    def special(self, ids: Sequence[int]) -> list[bool]:
        """Whether each is a special token."""
        return [token in self._special for token in ids]


def _found(run_dir: Path) -> Tokenizer | None:
    model: Any = (read_config(run_dir) or {}).get("model")
    folders = policies(run_dir)
    if isinstance(model, dict) and isinstance(model.get("hf_assets_path"), str):
        folders.append(Path(model["hf_assets_path"]))
    for folder in folders:
        if (folder / TOKENIZER_FILE).is_file():
            try:
                return Tokenizer.from_file(str(folder / TOKENIZER_FILE))
            except Exception:  # the library's own type, for a file of any content
                continue
    return None


def token_streams(run: ReportedRun, place: int, line: int, sample: int, offset: int, texts: TokenTexts) -> dict[str, Any]:
    """A part of the token streams of one training sample of a rollout.

    Raises:
        LookupError: there is no such sample.
    """
    recorded = decode_rollout(run.index.record(place, line))
    samples = recorded.rollout.samples
    if not 0 <= sample < len(samples):
        raise LookupError(f"the rollout has {len(samples)} training samples")
    chosen = samples[sample]
    part = slice(max(0, offset), max(0, offset) + MOST_TOKENS)
    ids = [int(token) for token in chosen.token_ids[part]]
    streams = {name: _plain(getattr(chosen, name), part) for name in STREAMS if name != "token_ids"}
    if (roles := streams.get("role_ids")) is not None:
        streams["role_ids"] = [ROLES[role] if role >= 0 else None for role in roles]
    if streams.get("rl_weights") is None and chosen.advantages is not None:
        streams["rl_weights"] = [float(member) for member in chosen.loss_mask[part]]
    if chosen.trainer_logprobs is not None:
        streams["trainer_logprobs"] = _plain(chosen.trainer_logprobs, part)
        with np.errstate(over="ignore"):
            ratios = np.exp(chosen.trainer_logprobs.astype(np.float64) - chosen.generator_logprobs)
        streams["ratio"] = _plain(np.where(chosen.loss_mask, ratios, np.nan), part)
    return {
        "length": len(chosen),
        "offset": part.start,
        "ids": ids,
        "texts": texts.of(ids),
        "special": texts.special(ids),
        "streams": {name: values for name, values in streams.items() if values is not None},
        "temperature": chosen.temperature,
    }


def _plain(values: Any, part: slice) -> list[Any] | None:
    if values is None:
        return None
    return [
        None if isinstance(value, float) and not np.isfinite(value) else value for value in np.asarray(values)[part].tolist()
    ]
