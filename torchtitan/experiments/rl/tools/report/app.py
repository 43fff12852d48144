"""The server: pages that are plain files, and a JSON API over runs that are named by their number.

Nothing in a request is ever a path: a run is a number, a rollout is its place in the records, a trace is one of a list.
"""

import base64
import hashlib
import hmac
import json
from collections.abc import Awaitable, Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from fastapi import FastAPI, HTTPException, Query, Request, Response
from fastapi.responses import FileResponse, RedirectResponse

from torchtitan.experiments.rl.tools.report import pages, rollouts
from torchtitan.experiments.rl.tools.report.pages import (
    Evaluation,
    changes,
    evaluations,
    ledger,
    overview,
    recorded,
    timeline,
    traces,
)
from torchtitan.experiments.rl.tools.report.rollouts import TokenTexts, token_streams
from torchtitan.experiments.rl.tools.report.run import ReportedRun

STATIC = Path(__file__).parent / "static"
SCRIPTS = ("charts.js", "pages.js", "evaluations.js", "rollouts.js", "report.js")
"""In the order that they are loaded in."""
SERVED = {
    "/": ("page.html", "text/html"),
    "/report.css": ("report.css", "text/css"),
    **{f"/{name}": (name, "text/javascript") for name in SCRIPTS},
}
"""Name and type, by address."""


PAGES: dict[str, Callable[[ReportedRun], dict[str, Any]]] = {
    "overview": overview,
    "ledger": ledger,
    "evaluations": evaluations,
    "timeline": timeline,
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
MOST_TEXT = 1_000
"""Characters of a filter."""


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

    for path, (name, kind) in SERVED.items():
        app.add_api_route(path, _file(STATIC / name, kind))

    @cache
    def texts(number: int) -> TokenTexts:
        return TokenTexts(runs[number].folder)

    def run_of(number: int) -> ReportedRun:
        if not 0 <= number < len(runs):
            raise HTTPException(404, f"there are {len(runs)} runs")
        return runs[number]

    # Plain functions: FastAPI calls each in a thread, and one that reads a large file holds up no other.
    @app.get("/api/runs")
    def all_runs() -> Response:
        return answered(
            {
                "runs": [
                    {"number": n, "name": run.name, "state": run.state(), "tasks": run.tasks()} for n, run in enumerate(runs)
                ],
                "config": pages.config_differences(runs),
            }
        )

    @app.get("/api/runs/{number}/page/{name}")
    def page(number: int, name: str) -> Response:
        run = run_of(number)
        if name not in PAGES:
            raise HTTPException(404, f"pages: {', '.join(PAGES)}")
        return answered(PAGES[name](run))

    @app.get("/api/runs/{number}/metrics")
    def metrics(number: int, name: str = Query(max_length=MOST_TEXT)) -> Response:
        return answered({"points": pages.chart_line(run_of(number), name)})

    @app.get("/api/changes")
    def between(
        before_run: int,
        after_run: int,
        before: str = Query(max_length=MOST_TEXT),
        after: str = Query(max_length=MOST_TEXT),
    ) -> Response:
        pair = [(before_run, before), (after_run, after)]
        return answered(changes(*(Evaluation(run=run_of(number), number=number, label=label) for number, label in pair)))

    @app.get("/api/runs/{number}/rollouts")
    def list_rollouts(
        number: int,
        task: str | None = Query(None, max_length=MOST_TEXT),
        step: int | None = Query(None, ge=0, le=2**40),
        status: str | None = Query(None, max_length=MOST_TEXT),
        outcome: str | None = Query(None, max_length=MOST_TEXT),
        group: str | None = Query(None, max_length=MOST_TEXT),
        min_reward: float | None = None,
        max_reward: float | None = None,
        text: str | None = Query(None, max_length=MOST_TEXT),
        sort: str = Query("newest", max_length=MOST_TEXT),
        limit: int = Query(50, ge=1, le=rollouts.MOST_ROWS),
        offset: int = Query(0, ge=0, le=2**40),
    ) -> Response:
        run = run_of(number)
        wanted = rollouts.Wanted(
            task=task,
            step=step,
            status=status,
            outcome=outcome,
            group=group,
            min_reward=min_reward,
            max_reward=max_reward,
            text=text,
            sort=sort,
            limit=limit,
            offset=offset,
        )
        try:
            return answered(rollouts.listed(run, wanted) | {"choices": rollouts.choices(run)})
        except ValueError as error:
            raise HTTPException(422, str(error)) from None

    @app.get("/api/runs/{number}/groups/{place}")
    def one_group(number: int, place: int) -> Response:
        return _found(lambda: answered(rollouts.group(run_of(number), place)))

    @app.get("/api/runs/{number}/rollouts/{place}-{line}")
    def one_rollout(number: int, place: int, line: int, whole: bool = False) -> Response:
        return _found(lambda: answered(rollouts.rollout(run_of(number), place, line, whole=whole)))

    @app.get("/api/runs/{number}/rollouts/{place}-{line}/raw")
    def raw(number: int, place: int, line: int) -> Response:
        return _found(lambda: Response(rollouts.raw(run_of(number), place, line), media_type="application/json"))

    @app.get("/api/runs/{number}/rollouts/{place}-{line}/tokens")
    def tokens(number: int, place: int, line: int, sample: int = 0, offset: int = Query(0, ge=0, le=2**40)) -> Response:
        run = run_of(number)
        return _found(lambda: answered(token_streams(run, place, line, sample, offset, texts(number))))

    @app.get("/api/runs/{number}/traces/{name}")
    def trace(number: int, name: str) -> Response:
        for path in traces(run_of(number).folder):
            if path.name == name:
                return FileResponse(path, media_type="application/json", filename=path.name)
        raise HTTPException(404, "no such trace")

    return app


def answered(value: Any) -> Response:
    """JSON in ASCII, because a model may say half a character; a number that JSON does not have is null."""
    try:
        text = json.dumps(value, allow_nan=False)
    except ValueError:
        text = json.dumps(json.loads(json.dumps(value), parse_constant=lambda constant: None))
    return Response(text, media_type="application/json")


def _found(answer: Callable[[], Response]) -> Response:
    try:
        return answer()
    except LookupError as error:
        raise HTTPException(404, f"no such rollout: {error}") from None
    except (ValueError, OverflowError) as error:
        raise HTTPException(404, f"this record can't be read: {str(error)[:MOST_TEXT]}") from None


def _file(path: Path, kind: str) -> Callable[[], Response]:
    def page() -> Response:
        return Response(path.read_bytes(), media_type=kind)

    return page


def _refusal(request: Request, token: str | None) -> Response | None:
    """None: the request is answered."""
    if token is None:
        host = request.headers.get("host", "")
        name = host if host.endswith("]") else host.rpartition(":")[0] or host
        return None if name in LOCAL_NAMES else Response("this report answers on the loopback address only", 400)
    given = request.query_params.get("token")
    if given is not None and hmac.compare_digest(given.encode(), token.encode()):
        # Into a cookie, and out of the address that is seen and shared.
        response = RedirectResponse(request.url.path, 303)
        response.set_cookie(COOKIE, token, httponly=True, samesite="strict")
        return response
    if hmac.compare_digest(request.cookies.get(COOKIE, "").encode(), token.encode()):
        return None
    return Response("open the address with ?token= that the command has printed", 401)


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
            "config": pages.config_differences(runs),
        }
    }
    for number, run in enumerate(runs):
        base = f"api/runs/{number}"
        for name, page in PAGES.items():
            held[f"{base}/page/{name}"] = page(run)
        for metric in {*pages.metric_names(run), "validation/reward", "rollout/reward_mean"}:
            held[f"{base}/metrics?name={quote(metric, safe='')}"] = {"points": pages.chart_line(run, metric)}
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
