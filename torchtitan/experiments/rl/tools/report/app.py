"""The server: pages that are plain files, and a JSON API over runs that are named by their number.

Nothing in a request is ever a path: a run is a number, a rollout is its place in the records, a trace is one of a list.
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
from typing import Annotated, Any
from urllib.parse import quote, urlencode

import httpx
from fastapi import Depends, FastAPI, HTTPException, Query, Request, Response
from fastapi.responses import FileResponse, RedirectResponse
from fastapi.staticfiles import StaticFiles

from torchtitan.experiments.rl.tools.report import pages, rollouts
from torchtitan.experiments.rl.tools.report.rollouts import MOST_TEXT, token_streams, tokenizer_of
from torchtitan.experiments.rl.tools.report.run import Json, ReportedRun

STATIC = Path(__file__).parent / "static"
SCRIPTS = ("charts.js", "pages.js", "evaluations.js", "rollouts.js", "report.js")
"""In the order that they are loaded in."""
PAGES: dict[str, Callable[[ReportedRun], Json]] = {
    "overview": pages.overview,
    "ledger": pages.ledger,
    "evaluations": pages.evaluations,
    "timeline": pages.timeline,
}
HEADERS = {
    # Whatever a model or env said, the browser runs and loads nothing but the two files of this server.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
LOCAL_NAMES = {"127.0.0.1", "localhost", "[::1]"}
COOKIE = "report-token"
EXPORTED_CHANGES = 10
"""Examples won, and lost, whose rollouts are in the file."""


def report_app(runs: Sequence[ReportedRun], *, token: str | None = None) -> FastAPI:
    """
    Args:
        token: asked of every request. None: every request is answered that names this host as a local one, which a page of
            another site in the same browser can't.
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

    # Plain functions: FastAPI calls each in a thread, and one that reads a large file holds up no other.
    @app.get("/api/runs")
    def all_runs() -> Response:
        shown = [
            {"number": n, "name": run.name, "state": run.state(), "tasks": run.tasks()}
            for n, run in enumerate(runs)
        ]
        return answered({"runs": shown, "config": pages.config_differences(runs)})

    @app.get("/api/runs/{number}/page/{name}")
    def page(run: Run, name: str) -> Response:
        if name not in PAGES:
            raise HTTPException(404, f"pages: {', '.join(PAGES)}")
        return answered(PAGES[name](run))

    @app.get("/api/runs/{number}/metrics")
    def metrics(run: Run, name: Text) -> Response:
        return answered({"points": pages.chart_line(run, name)})

    @app.get("/api/changes")
    def between(before_run: int, after_run: int, before: Text, after: Text) -> Response:
        return answered(
            pages.changes(
                (run_of(before_run), before_run, before), (run_of(after_run), after_run, after)
            )
        )

    @app.get("/api/runs/{number}/rollouts")
    def list_rollouts(run: Run, wanted: Annotated[rollouts.Wanted, Query()]) -> Response:
        return answered(rollouts.listed(run, wanted) | {"choices": rollouts.choices(run)})

    @app.get("/api/runs/{number}/groups/{place}")
    def one_group(run: Run, place: int) -> Response:
        return answered(rollouts.group(run, place))

    @app.get("/api/runs/{number}/rollouts/{place}-{line}")
    def one_rollout(run: Run, place: int, line: int, whole: bool = False) -> Response:
        return answered(rollouts.rollout(run, place, line, whole=whole))

    @app.get("/api/runs/{number}/rollouts/{place}-{line}/raw")
    def raw(run: Run, place: int, line: int) -> Response:
        return Response(run.record(place, line), media_type="application/json")

    @app.get("/api/runs/{number}/rollouts/{place}-{line}/tokens")
    def tokens(
        run: Run, place: int, line: int, sample: int = 0, offset: rollouts.Count = 0
    ) -> Response:
        return answered(token_streams(run, place, line, sample, offset, tokenizer(run)))

    @app.get("/api/runs/{number}/traces/{name}")
    def trace(run: Run, name: str) -> Response:
        for path in pages.traces(run.folder):
            if path.name == name:
                return FileResponse(path, media_type="application/json", filename=path.name)
        raise HTTPException(404, "no such trace")

    app.mount("/", StaticFiles(directory=STATIC, html=True))
    return app


def answered(value: Any) -> Response:
    """JSON in ASCII, because a model may say half a character; a number that JSON does not have is null."""
    try:
        text = json.dumps(value, allow_nan=False)
    except ValueError:
        text = json.dumps(json.loads(json.dumps(value), parse_constant=lambda constant: None))
    return Response(text, media_type="application/json")


def _refusal(request: Request, token: str | None) -> Response | None:
    """None: the request is answered."""
    if token is None:
        local = re.sub(r":\d+$", "", request.headers.get("host", "")) in LOCAL_NAMES
        return None if local else Response("this report answers on the loopback address only", 400)
    given = request.query_params.get("token")
    if given is not None and hmac.compare_digest(given.encode(), token.encode()):
        # Into a cookie, and out of the address that is seen and shared.
        response = RedirectResponse(request.url.path, 303)
        response.set_cookie(COOKIE, token, httponly=True, samesite="strict")
        return response
    if hmac.compare_digest(request.cookies.get(COOKIE, "").encode(), token.encode()):
        return None
    return Response("open the address with ?token= that the command has printed", 401)


def exported(runs: Sequence[ReportedRun], *, sample: int) -> str:
    """
    Args:
        sample: rollouts of each run: half of the highest and half of the lowest rewards, the newest of each.
    """
    held = asyncio.run(answers(runs, sample))
    # In a script element only "<" could end it or begin a comment.
    data = json.dumps(held).replace("<", "\\u003c")
    page, style, *scripts = (
        (STATIC / name).read_text(encoding="utf-8")
        for name in ("index.html", "report.css", *SCRIPTS)
    )
    script = "\n".join(scripts)
    policy = (
        f"default-src 'none'; script-src 'sha256-{_digest(script)}'; style-src 'sha256-{_digest(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    charset = '<meta charset="utf-8">'
    instead = {
        charset: f'{charset}\n<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<link rel="stylesheet" href="report.css">': f"<style>{style}</style>",
        **{f'<script src="{name}" defer></script>\n': "" for name in SCRIPTS},
        "</body>": f'<script type="application/json" id="data">{data}</script>\n<script>{script}</script>\n</body>',
    }
    for tag, new in instead.items():
        page = page.replace(tag, new)
    return page


async def answers(runs: Sequence[ReportedRun], sample: int) -> Json:
    """What the server answers, by the address that the page asks for."""
    held: Json = {}
    transport = httpx.ASGITransport(report_app(runs))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:

        async def hold(address: str) -> Any:
            held[address] = (await client.get(address)).json()
            return held[address]

        await hold("api/runs")
        for number, run in enumerate(runs):
            base = f"api/runs/{number}"
            metrics = {*pages.metric_names(run), "validation/reward", "rollout/reward_mean"}
            for page in (
                *(f"metrics?name={quote(metric, safe='')}" for metric in metrics),
                *(f"page/{name}" for name in PAGES),
            ):
                await hold(f"{base}/{page}")
            some = f"limit={min(max(1, sample // 2), rollouts.MOST_ROWS)}"
            lists = [
                await hold(f"{base}/rollouts?sort={order}&{some}")
                for order in ("highest", "lowest")
            ]
            rows = {row["key"]: row for one in lists for row in one["rows"]}
            held[f"{base}/rollouts?"] = lists[0] | {
                "rows": list(rows.values()),
                "total": len(rows),
                "next": None,
            }
            keys = set(rows)
            if (
                len(labels := [one["label"] for one in pages.recorded(run)]) > 1
            ):  # what the page Evaluations compares at first
                query = {
                    "before_run": number,
                    "before": labels[0],
                    "after_run": number,
                    "after": labels[-1],
                }
                found = await hold(f"api/changes?{urlencode(query)}")
                for kind in ("won", "lost"):
                    found[kind] = found[kind][:EXPORTED_CHANGES]
                    keys |= {
                        key
                        for row in found[kind]
                        for side in ("before", "after")
                        for key in row[side]["keys"]
                    }
            for key in keys:
                one = await hold(f"{base}/rollouts/{key}")
                tokens = [
                    f"rollouts/{key}/tokens?sample={sample}&offset=0"
                    for sample in range(len(one["samples"]))
                ]
                for place in (f"rollouts/{key}/raw", f"groups/{key.partition('-')[0]}", *tokens):
                    await hold(f"{base}/{place}")
    return held


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
