"""Reinforcement learning of language models on Monarch actors. Start with ``types.py``, then ``rollouts/types.py``."""

import os

import torch

import torchtitan.tools.utils as _tools

if not torch.accelerator.is_available():
    # torchtitan falls back to "cuda" where it finds no accelerator, and its modules copy the name when they are imported:
    # it has to be right before the first of them.
    _tools.device_type, _tools.device_module = "cpu", torch.cpu

# Read when Monarch starts: a batch or a snapshot is one message. torchstore would set it too, with a warning on the console.
os.environ.setdefault("HYPERACTOR_CODEC_MAX_FRAME_LENGTH", str(2**40))
