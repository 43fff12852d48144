"""Fixtures of the unit tests: a renderer and its tokenizer."""

from pathlib import Path

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from torchtitan.experiments.rl.envs.renderer import RendererConfig, build_renderer

torch.set_num_threads(1)

ASSET = Path(__file__).resolve().parents[2] / "assets" / "tiny_qwen3"


@pytest.fixture(scope="session")
def tokenizer_path(tmp_path_factory):
    if (ASSET / "tokenizer.json").exists():
        return ASSET
    path = tmp_path_factory.mktemp("tokenizer")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens([AddedToken(token, special=True) for token in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")])
    tags = ("tool_call", "tool_response", "think")
    bpe.add_tokens([AddedToken(token, special=False) for tag in tags for token in (f"<{tag}>", f"</{tag}>")])
    PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>").save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def tokenizer(tokenizer_path):
    return AutoTokenizer.from_pretrained(str(tokenizer_path))


@pytest.fixture(scope="session")
def renderer(tokenizer_path):
    return build_renderer(RendererConfig(), tokenizer_path)
