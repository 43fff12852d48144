"""Flex attention's kernels, compiled by Triton for GPUs that are not here, fit their shared memory."""

import subprocess
import sys

import pytest

from tests.fakes.gpus import SHARED_MEMORY

CAPABILITIES = [f"{major}.{minor}" for major, minor in SHARED_MEMORY]


def compiled(*words: str) -> tuple[int, list[str]]:
    """Return the exit code of the script, and its line of each kernel."""
    command = [sys.executable, "-m", "tests.flex_kernels", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    kernels = [line for line in done.stdout.splitlines() if "heads of" in line]
    assert kernels, done.stderr
    return done.returncode, kernels


def test_heads_of_256_with_cap_and_window_fit_a_gpu_of_capability_8_6():
    """Gemma 2 on an A10. torch's own blocks take 152,576 bytes forward and 135,680 backward."""
    words = ["--capability", "8.6", "--head-dim", "256", "--scores", "special"]
    code, (forward, backward) = compiled(*words)
    assert code == 0
    assert " 87,040 of 101,376  fits" in forward and " 65,536 of 101,376  fits" in backward


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_size_of_heads_fits_every_gpu(capability):
    code, kernels = compiled("--capability", capability)
    assert code == 0 and len(kernels) == 4 * 2 * 2, kernels
    assert all(line.endswith("  fits") for line in kernels)


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["8.6", "8.9", "12.0"])
def test_torchs_own_blocks_for_heads_of_256_would_not_fit(capability):
    words = ["--capability", capability, "--head-dim", "256", "--scores", "plain"]
    code, (_, backward) = compiled(*words, "--torchs-own")
    assert code == 1 and backward.endswith("does not fit")
