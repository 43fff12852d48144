"""Contract of compat/huggingface_hub.py: what an upgrade of huggingface_hub or datasets may change."""

import datasets
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import OfflineModeIsEnabled
from huggingface_hub.utils import get_session

from torchtitan.experiments.rl.compat.huggingface_hub import hub_fault, without_hub


def test_nobody_is_asked_without_a_hub():
    before = constants.HF_HUB_OFFLINE
    with without_hub():
        assert constants.is_offline_mode() and hub_fault() == "HF_HUB_OFFLINE is set"
        with pytest.raises(OfflineModeIsEnabled):
            get_session().get("https://localhost:1")
    assert constants.HF_HUB_OFFLINE is before and datasets.config.HF_HUB_OFFLINE is before


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:1", "nonsense"])
def test_a_hub_that_does_not_answer_is_named(monkeypatch, endpoint):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    assert str(hub_fault()).startswith(f"no hub answers at {endpoint}: ")
