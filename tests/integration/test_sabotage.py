"""Deliveries of weights that go wrong are caught at their version.

`make test-all` runs ``python -m tests.sabotage`` with every kind of model in both precisions and more versions.
"""

import json

import pytest

from tests.forkserver import run_module


@pytest.mark.parametrize(
    ("words", "dtype", "cases"),
    [
        ("--versions 8", "bfloat16", 30),
        pytest.param("--adapters --versions 20", "float32", 16, marks=pytest.mark.slow),
        pytest.param("--experts --versions 8", "bfloat16", 40, marks=pytest.mark.slow),
    ],
)
def test_every_sabotage_is_caught_at_its_version_and_no_honest_version_is_stopped(
    tmp_path, words, dtype, cases
):
    words += f" --dtypes {dtype} --json"
    ended = run_module("tests.sabotage", *words.split(), str(tmp_path / "found"))
    assert (tmp_path / "found").exists(), ended.stderr
    found = json.loads((tmp_path / "found").read_text())
    assert {name: fault for name, fault in found.items() if fault} == {}
    assert sum(name.startswith(f"{dtype}: ") for name in found) > cases
    assert ended.returncode == 0 and ended.stdout.endswith(f"{len(found)} of {len(found)}\n")
