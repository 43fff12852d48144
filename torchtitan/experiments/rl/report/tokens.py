"""Texts of token ids, by the tokenizer of the run's model."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from torchtitan.experiments.rl.config.saved_command import read_config

TOKENIZER_FILE = "tokenizer.json"


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
    folders = sorted((run_dir / "checkpoint").glob("step-*"))
    if isinstance(model, dict) and isinstance(model.get("hf_assets_path"), str):
        folders.append(Path(model["hf_assets_path"]))
    for folder in folders:
        if (folder / TOKENIZER_FILE).is_file():
            try:
                return Tokenizer.from_file(str(folder / TOKENIZER_FILE))
            except Exception:  # the library's own type, for a file of any content
                continue
    return None
