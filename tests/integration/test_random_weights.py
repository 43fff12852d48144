"""A made-up folder of random weights takes a step with the words of docs/models.md."""

import re
import shlex
import shutil

from tests.fakes.hub_families import write_family
from tests.integration.command_runs import ROOT
from tests.integration.models import MODEL


def test_folder_of_random_weights_takes_a_step_as_the_page_says(start, tmp_path):
    page = (ROOT / "docs/models.md").read_text()
    (reward,) = re.findall(r"```python\n(# any_reply.py\n.*?)```", page, re.DOTALL)
    file_of_reward = tmp_path / "any_reply.py"
    file_of_reward.write_text(reward)
    folder = write_family("olmo2", tmp_path / "olmo2")
    for file in (*MODEL.glob("tokenizer*"), MODEL / "chat_template.jinja"):
        shutil.copy(file, folder)
    (shown,) = re.findall(r"```\nrl-train ([^`]*any_reply[^`]*)\n```", page, re.DOTALL)
    shown = shown.replace("\\\n", " ").replace("any_reply.py", str(file_of_reward))
    words = shlex.split(shown.replace("FOLDER", str(folder)))
    run = start(*words[2:], config=words[1]).ended_well()
    assert "1 of 1 in" in run.out, run.out
    assert run.steps[-1]["rollout/groups_all_equal"] < 0.5 and run.steps[-1]["train/grad_norm"] > 0
