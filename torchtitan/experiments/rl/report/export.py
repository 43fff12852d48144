"""One HTML file with the curves of the runs and a sample of their rollouts, which needs no server."""

import base64
import hashlib
import json
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote, urlencode

from torchtitan.experiments.rl.report import overview, rollouts
from torchtitan.experiments.rl.report.evaluations import Evaluation, changes, recorded
from torchtitan.experiments.rl.report.files import SCRIPTS, STATIC
from torchtitan.experiments.rl.report.pages import PAGES
from torchtitan.experiments.rl.report.run import ReportedRun
from torchtitan.experiments.rl.report.tokens import TokenTexts, token_streams

EXPORTED_CHANGES = 10
"""Examples won, and lost, whose rollouts are in the file."""


def exported(runs: Sequence[ReportedRun], *, sample: int) -> str:
    """
    Args:
        sample: rollouts of each run: half of the highest and half of the lowest rewards, the newest of each.
    """
    held = answers(runs, sample)
    # In a script element only "<" could end it or begin a comment.
    data = json.dumps(held).replace("<", "\\u003c")
    script = "\n".join((STATIC / name).read_text(encoding="utf-8") for name in SCRIPTS)
    style = (STATIC / "report.css").read_text(encoding="utf-8")
    page = (STATIC / "page.html").read_text(encoding="utf-8")
    policy = (
        f"default-src 'none'; script-src 'sha256-{_digest(script)}'; style-src 'sha256-{_digest(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    page = page.replace('<link rel="stylesheet" href="report.css">', f"<style>{style}</style>")
    for name in SCRIPTS:
        page = page.replace(f'<script src="{name}" defer></script>\n', "")
    page = page.replace(
        '<meta charset="utf-8">', f'<meta charset="utf-8">\n<meta http-equiv="Content-Security-Policy" content="{policy}">'
    )
    scripts = f'<script type="application/json" id="data">{data}</script>\n<script>{script}</script>\n'
    return page.replace("</body>", f"{scripts}</body>")


def answers(runs: Sequence[ReportedRun], sample: int) -> dict[str, Any]:
    """What the server would answer, by the address that the page asks for."""
    held: dict[str, Any] = {
        "api/runs": {
            "runs": [{"number": n, "name": run.name, "state": run.state(), "tasks": run.tasks()} for n, run in enumerate(runs)],
            "config": overview.config_differences(runs),
        }
    }
    for number, run in enumerate(runs):
        base = f"api/runs/{number}"
        for name, page in PAGES.items():
            held[f"{base}/page/{name}"] = page(run)
        for metric in {*overview.metric_names(run), "validation/reward", "rollout/reward_mean"}:
            held[f"{base}/metrics?name={quote(metric, safe='')}"] = {"points": overview.chart_line(run, metric)}
        chosen: dict[str, dict[str, Any]] = {}
        for order in ("highest", "lowest"):
            for row in rollouts.listed(run, rollouts.Wanted(sort=order, limit=max(1, sample // 2)))["rows"]:
                chosen[row["key"]] = row
        listed = {"rows": list(chosen.values()), "total": len(chosen), "next": None, "choices": rollouts.choices(run)}
        held[f"{base}/rollouts?"] = listed
        for example in _add_changes(held, run, number):
            chosen |= {key: dict(zip(("place", "line"), map(int, key.split("-")), strict=True)) for key in example["keys"]}
        texts = TokenTexts(run.folder)
        for row in chosen.values():
            _add_rollout(held, base, run, row["place"], row["line"], texts)
    return held


def _add_changes(held: dict[str, Any], run: ReportedRun, number: int) -> list[dict[str, Any]]:
    """What the page Evaluations compares at first; returns the attempts that it then links to."""
    if len(labels := [one["label"] for one in recorded(run)]) < 2:
        return []
    pair = [Evaluation(run=run, number=number, label=label) for label in (labels[0], labels[-1])]
    found = changes(*pair)
    for kind in ("won", "lost"):
        found[kind] = found[kind][:EXPORTED_CHANGES]
    query = {"before_run": number, "before": labels[0], "after_run": number, "after": labels[-1]}
    held[f"api/changes?{urlencode(query)}"] = found
    return [row[side] for kind in ("won", "lost") for row in found[kind] for side in ("before", "after")]


def _add_rollout(held: dict[str, Any], base: str, run: ReportedRun, place: int, line: int, texts: TokenTexts) -> None:
    one = rollouts.rollout(run, place, line)
    held[f"{base}/rollouts/{place}-{line}"] = one
    held[f"{base}/rollouts/{place}-{line}/raw"] = json.loads(rollouts.raw(run, place, line))
    held[f"{base}/groups/{place}"] = rollouts.group(run, place)
    for number in range(len(one["samples"])):
        part = token_streams(run, place, line, number, 0, texts)
        held[f"{base}/rollouts/{place}-{line}/tokens?sample={number}&offset=0"] = part


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
