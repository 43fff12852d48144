"""The report's server: pages that are plain files, and a JSON API over runs.

    report_app   answers requests, from the runs' folders
    exported     puts the answers that a page asks for into one HTML file that needs no server

A request never names a file by its path. It names a run by its number, a rollout by its place in
the records, and a trace by its name in a list.
"""

import asyncio
import base64
import hashlib
import hmac
import json
import re
from collections.abc import Awaitable, Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated
from urllib.parse import quote, urlencode

import httpx
from fastapi import Depends, FastAPI, HTTPException, Query, Request, Response
from fastapi.responses import FileResponse, RedirectResponse
from fastapi.staticfiles import StaticFiles

from torchtitan.experiments.rl.tools.report import evaluations, pages, rollouts
from torchtitan.experiments.rl.tools.report.rollouts import MOST_TEXT, token_streams, tokenizer_of
from torchtitan.experiments.rl.tools.report.run import Json, ReportedRun
from torchtitan.experiments.rl.tools.report.series import chart_line, metric_names
from torchtitan.experiments.rl.tools.report.timeline import timeline, traces

STATIC = Path(__file__).parent / "static"
SCRIPTS = ("charts.js", "pages.js", "evaluations.js", "rollouts.js", "report.js")
"""Scripts of the page, in the order that they are loaded in."""
PAGES: dict[str, Callable[[ReportedRun], Json]] = {
    "overview": pages.overview,
    "ledger": pages.ledger,
    "evaluations": evaluations.evaluations,
    "timeline": timeline,
}
Ask = Callable[[str], Awaitable[Json]]
"""Function that asks the server for an address, and keeps the answer for the exported file."""
HEADERS = {
    # Whatever a model or env said, the browser runs and loads nothing but this server's own files.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
LOCAL_NAMES = {"127.0.0.1", "localhost", "[::1]"}
"""Names of this host that a request may have in its Host header, if no token is asked for."""
COOKIE = "report-token"
EXPORTED_CHANGES = 10
"""Number of examples that were won, and that were lost, whose rollouts are exported."""


def report_app(runs: Sequence[ReportedRun], *, token: str | None = None) -> FastAPI:
    """Return the server's application.

    Args:
        token: secret that every request has to give. None answers every request that names this
            host by a local name, which a page of another site in the same browser can't.
    """
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)

    @app.middleware("http")
    async def guard(request: Request, answer: Callable[[Request], Awaitable[Response]]) -> Response:
        response = _refusal(request, token) or await answer(request)
        response.headers.update(HEADERS)
        return response

    @app.exception_handler(LookupError)
    @app.exception_handler(OverflowError)
    @app.exception_handler(ValueError)
    def unreadable(request: Request, error: Exception) -> Response:
        return Response(f"this record can't be read: {str(error)[:MOST_TEXT]}", 404)

    def run_of(number: int) -> ReportedRun:
        if not 0 <= number < len(runs):
            raise HTTPException(404, f"there are {len(runs)} runs")
        return runs[number]

    Run = Annotated[ReportedRun, Depends(run_of)]
    tokenizer = cache(tokenizer_of)
    Text = Annotated[str, Query(max_length=MOST_TEXT)]

    # FastAPI calls a plain function in a thread: one that reads a large file holds up no other.
    @app.get("/api/runs")
    def all_runs() -> Response:
        rows = [
            {
                "number": number,
                "name": run.name,
                "state": run.state(),
                "tasks": run.tasks(),
                "columns": pages.ledger_columns(run),
            }
            for number, run in enumerate(runs)
        ]
        return as_json({"runs": rows, "config": pages.config_differences(runs)})

    @app.get("/api/runs/{number}/page/{name}")
    def page(run: Run, name: str) -> Response:
        if name not in PAGES:
            raise HTTPException(404, f"pages: {', '.join(PAGES)}")
        return as_json(PAGES[name](run))

    @app.get("/api/runs/{number}/metrics")
    def metrics(run: Run, name: Text) -> Response:
        return as_json({"points": chart_line(run, name)})

    @app.get("/api/changes")
    def between(before_run: int, after_run: int, before: Text, after: Text) -> Response:
        first = evaluations.ReportedEvaluation(run_of(before_run), before_run, before)
        second = evaluations.ReportedEvaluation(run_of(after_run), after_run, after)
        return as_json(evaluations.changes(first, second))

    @app.get("/api/runs/{number}/rollouts")
    def list_rollouts(run: Run, wanted: Annotated[rollouts.Wanted, Query()]) -> Response:
        return as_json(rollouts.listed(run, wanted) | {"choices": rollouts.choices(run)})

    @app.get("/api/runs/{number}/groups/{place}")
    def one_group(run: Run, place: int) -> Response:
        return as_json(rollouts.group(run, place))

    @app.get("/api/runs/{number}/rollouts/{place}-{line}")
    def one_rollout(run: Run, place: int, line: int, whole: bool = False) -> Response:
        return as_json(rollouts.rollout(run, place, line, whole=whole))

    @app.get("/api/runs/{number}/rollouts/{place}-{line}/raw")
    def raw(run: Run, place: int, line: int) -> Response:
        return Response(run.record(place, line), media_type="application/json")

    @app.get("/api/runs/{number}/rollouts/{place}-{line}/tokens")
    def tokens(
        run: Run, place: int, line: int, sample: int = 0, offset: rollouts.Count = 0
    ) -> Response:
        return as_json(token_streams(run, place, line, sample, offset, tokenizer(run)))

    @app.get("/api/runs/{number}/traces/{name}")
    def trace(run: Run, name: str) -> Response:
        for path in traces(run.folder):
            if path.name == name:
                return FileResponse(path, media_type="application/json", filename=path.name)
        raise HTTPException(404, "no such trace")

    app.mount("/", StaticFiles(directory=STATIC, html=True))
    return app


def as_json(value: object) -> Response:
    """Return a response of JSON in ASCII, because a model may say half a character.

    A number that JSON does not have, such as an infinite one, becomes null.
    """
    try:
        text = json.dumps(value, allow_nan=False)
    except ValueError:
        text = json.dumps(json.loads(json.dumps(value), parse_constant=lambda constant: None))
    return Response(text, media_type="application/json")


def _refusal(request: Request, token: str | None) -> Response | None:
    """Return the response to a request that is not answered; None if it is."""
    if token is None:
        local = re.sub(r":\d+$", "", request.headers.get("host", "")) in LOCAL_NAMES
        return None if local else Response("this report answers on the loopback address only", 400)
    given = request.query_params.get("token")
    if given is not None and hmac.compare_digest(given.encode(), token.encode()):
        # A cookie keeps the token from here on: the address is seen and shared.
        response = RedirectResponse(request.url.path, 303)
        response.set_cookie(COOKIE, token, httponly=True, samesite="strict")
        return response
    if hmac.compare_digest(request.cookies.get(COOKIE, "").encode(), token.encode()):
        return None
    return Response("open the address with ?token= that the command has printed", 401)


def exported(runs: Sequence[ReportedRun], *, sample: int) -> str:
    """Return the HTML file with all that its pages show.

    Args:
        sample: number of rollouts of each run: half of them with the highest and half with the
            lowest rewards, the newest of each.
    """
    answers = asyncio.run(exported_answers(runs, sample))
    # In a script element only "<" could end it or begin a comment.
    data = json.dumps(answers).replace("<", "\\u003c")
    page, style, *scripts = (
        (STATIC / name).read_text(encoding="utf-8")
        for name in ("index.html", "report.css", *SCRIPTS)
    )
    script = "\n".join(scripts)
    policy = (
        f"default-src 'none'; script-src 'sha256-{_digest(script)}'; "
        f"style-src 'sha256-{_digest(style)}'; img-src data:; base-uri 'none'; form-action 'none'"
    )
    charset = '<meta charset="utf-8">'
    replacements = {
        charset: f'{charset}\n<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<link rel="stylesheet" href="report.css">': f"<style>{style}</style>",
        **{f'<script src="{name}" defer></script>\n': "" for name in SCRIPTS},
        "</body>": f'<script type="application/json" id="data">{data}</script>\n'
        f"<script>{script}</script>\n</body>",
    }
    for tag, new in replacements.items():
        page = page.replace(tag, new)
    return page


async def exported_answers(runs: Sequence[ReportedRun], sample: int) -> Json:
    """Return what the server answers to a page, by the address that the page asks for."""
    answers: Json = {}
    transport = httpx.ASGITransport(report_app(runs))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:

        async def ask(address: str) -> Json:
            answers[address] = (await client.get(address)).json()
            return answers[address]

        await ask("api/runs")
        for number, run in enumerate(runs):
            base = f"api/runs/{number}"
            for metric in {*metric_names(run), "validation/reward", "rollout/reward_mean"}:
                await ask(f"{base}/metrics?name={quote(metric, safe='')}")
            for name in PAGES:
                await ask(f"{base}/page/{name}")
            listed = await _sampled_rollouts(ask, base, sample)
            answers[f"{base}/rollouts?"] = listed
            keys = {row["key"] for row in listed["rows"]}
            failures = answers[f"{base}/page/evaluations"]["failures"]
            keys |= {row["key"] for row in failures if row["key"] is not None}
            for task in answers[f"{base}/page/ledger"]["tasks"]:
                keys |= {cause["key"] for cause in task["causes"]}
            for key in keys | await _changed_rollouts(ask, run, number):
                await _ask_for_rollout(ask, base, key)
    return answers


async def _sampled_rollouts(ask: Ask, base: str, sample: int) -> Json:
    """Return the list of the exported rollouts, as the server's list of all."""
    limit = min(max(1, sample // 2), rollouts.MOST_ROWS)
    highest = await ask(f"{base}/rollouts?sort=highest&limit={limit}")
    lowest = await ask(f"{base}/rollouts?sort=lowest&limit={limit}")
    rows = {row["key"]: row for row in [*highest["rows"], *lowest["rows"]]}
    evaluated = sum(row["evaluation"] is not None for row in rows.values())
    sampled = {"rows": list(rows.values()), "total": len(rows), "evaluated": evaluated}
    return highest | sampled | {"next": None}


async def _changed_rollouts(ask: Ask, run: ReportedRun, number: int) -> set[str]:
    """Return the keys of rollouts behind what the page Evaluations compares at first."""
    labels = [evaluation["label"] for evaluation in evaluations.recorded(run)]
    if len(labels) < 2:
        return set()
    query = {
        "before_run": number,
        "before": labels[0],
        "after_run": number,
        "after": labels[-1],
    }
    changes = await ask(f"api/changes?{urlencode(query)}")
    keys: set[str] = set()
    for kind in ("won", "lost"):
        changes[kind] = changes[kind][:EXPORTED_CHANGES]
        for row in changes[kind]:
            keys |= {*row["before"]["keys"], *row["after"]["keys"]}
    return keys


async def _ask_for_rollout(ask: Ask, base: str, key: str) -> None:
    """Ask for all that the page of one rollout shows."""
    rollout = await ask(f"{base}/rollouts/{key}")
    await ask(f"{base}/rollouts/{key}/raw")
    await ask(f"{base}/groups/{key.partition('-')[0]}")
    for sample in range(len(rollout["samples"])):
        await ask(f"{base}/rollouts/{key}/tokens?sample={sample}&offset=0")


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
