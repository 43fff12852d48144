"""What the integration tests share: models on disk, a reference for log-probabilities, and this process's children."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

MODEL = Path(__file__).resolve().parents[2] / "assets" / "tiny_qwen3"
"""Tied head, as Qwen3 0.6B to 4B have it."""


@pytest.fixture(scope="session")
def tied_model() -> str:
    return str(MODEL)


@pytest.fixture(scope="session")
def untied_model(tmp_path_factory) -> str:
    """A random model with a head of its own, saved by transformers; its weights are large, its distributions far from flat."""
    path = tmp_path_factory.mktemp("untied")
    config = Qwen3Config(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        initializer_range=0.15,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).float().save_pretrained(path)
    return str(path)


def llama_folder(folder: Path, *, num_key_value_heads: int = 1, **changes) -> str:
    """A random Llama with large weights, saved by transformers, and the tiny model's tokenizer. Heads are twice as wide as
    ``hidden_size`` shared out over them."""
    config = LlamaConfig(
        vocab_size=768,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=num_key_value_heads,
        head_dim=32,
        max_position_embeddings=1024,
        initializer_range=0.15,
        rms_norm_eps=1e-5,
        **changes,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).float().save_pretrained(folder)
    for file in (*MODEL.glob("tokenizer*"), MODEL / "chat_template.jinja"):
        shutil.copy(file, folder)
    return str(folder)


@pytest.fixture(scope="session")
def llama_model(tmp_path_factory) -> str:
    """As Llama 3.2: tied head, rotary frequencies scaled; so much, and from so few positions on, that it shows in a test."""
    rope = dict(rope_type="llama3", rope_theta=1000.0, factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0)
    rope["original_max_position_embeddings"] = 64
    return llama_folder(tmp_path_factory.mktemp("llama"), tie_word_embeddings=True, rope_parameters=rope)


@pytest.fixture(scope="session")
def reference():
    """``reference(path, token_ids, temperature)``: log-probabilities by transformers, entry t of token t, entry 0 is 0."""
    loaded: dict[str, PreTrainedModel] = {}

    @torch.no_grad()
    def logprobs(path: str, token_ids: np.ndarray, temperature: float = 1.0) -> np.ndarray:
        if path not in loaded:
            loaded[path] = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        tokens = torch.from_numpy(np.asarray(token_ids, np.int64))[None]
        logits = loaded[path](tokens).logits[0, :-1].double() / temperature
        chosen = logits.log_softmax(-1).gather(1, tokens[0, 1:, None]).squeeze(1)
        return np.concatenate([[0.0], chosen.numpy()])

    return logprobs


def descendants(pid: int) -> set[int]:
    """Live processes below ``pid``, zombies not counted."""
    parents = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (stat := process_stat(int(entry))) and stat[0] != "Z":
            parents[int(entry)] = stat[1]
    found: set[int] = set()
    while more := {child for child, parent in parents.items() if (parent == pid or parent in found) and child not in found}:
        found |= more
    return found


def process_stat(pid: int) -> tuple[str, int, int] | None:
    """State, parent and session of a process; None where there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], int(fields[1]), int(fields[3])
