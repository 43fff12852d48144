"""Answers the question of row.json with mini-swe-agent, in the mode that the first argument names."""

import json
import os
import sys
from pathlib import Path

os.environ["MSWEA_SILENT_STARTUP"] = "1"

import yaml
from litellm import ContextWindowExceededError
from minisweagent import package_dir
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel
from minisweagent.models.litellm_textbased_model import LitellmTextbasedModel

TOO_LONG = "x" * 30_000_000


def solve(mode: str, question: str) -> str:
    file = "mini_textbased.yaml" if mode == "text" else "mini.yaml"
    settings = yaml.safe_load((package_dir / "config" / file).read_text())
    kind = LitellmTextbasedModel if mode == "text" else LitellmModel
    known = {**settings.get("model", {}), "cost_tracking": "ignore_errors"}
    model = kind(model_name="openai/policy", **known)
    templates = {name: settings["agent"][name] for name in ("system_template", "instance_template")}
    return DefaultAgent(model, LocalEnvironment(), **templates).run(question)["submission"]


def main(mode: str, question: str) -> None:
    if mode == "too long a prompt":
        try:
            solve(mode, TOO_LONG)
        except ContextWindowExceededError:  # after one call, and no waits
            pass
    print(solve(mode, question))


main(sys.argv[1], json.loads(Path("row.json").read_text())["question"])
