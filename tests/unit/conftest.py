"""Fixtures of the unit tests: the tiny checkpoint's tokenizer and its renderer."""

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from torchtitan.experiments.rl.envs.renderer import RendererConfig, build_renderer

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tokenizer_path():
    return Path(__file__).resolve().parents[2] / "assets" / "tiny_qwen3"


@pytest.fixture(scope="session")
def tokenizer(tokenizer_path):
    return AutoTokenizer.from_pretrained(str(tokenizer_path))


@pytest.fixture(scope="session")
def renderer(tokenizer_path):
    return build_renderer(RendererConfig(), tokenizer_path)
