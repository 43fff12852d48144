"""Pictures of the report of a run, by Chromium. Those of README, taken anew:

    .venv/bin/python -m torchtitan.experiments.rl.train --config rl_guess_number_qwen3_debug --steps 40 \
        --recorder.trainer-logprobs --run-dir outputs/pictures
    .venv/bin/python -m tests.browser.pictures outputs/pictures

`make test-browser` installs what it needs. With --all FOLDER: every page, 1280 and 390 pixels wide, light and dark.
"""

import argparse
import os
import shutil
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn
from playwright.sync_api import Browser, Page, sync_playwright

from torchtitan.experiments.rl.tools.report.app import report_app
from torchtitan.experiments.rl.tools.report.run import ReportedRun

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("overview", "ledger", "rollouts", "evaluations", "timeline", "runs")
SIZES = ((1280, 800), (390, 800))
_OPENED: dict[str, list[Page]] = {}
"""Pages by the address of the report that they show."""


@contextmanager
def chromium() -> Iterator[Browser]:
    path = (
        shutil.which("chromium")
        or shutil.which("chromium-browser")
        or shutil.which("google-chrome")
    )
    assert path, "no Chromium: on Debian, apt-get install chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=path, args=["--no-sandbox"] if os.getuid() == 0 else []
        )
        yield browser
        browser.close()


@contextmanager
def served(runs: Sequence[ReportedRun]) -> Iterator[str]:
    """The address of a report of the runs."""
    bound = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(report_app(runs), log_level="warning"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
    thread.start()
    address = f"http://127.0.0.1:{bound.getsockname()[1]}/"
    yield address
    for page in _OPENED.pop(address, []):  # else it would ask a server that has gone
        if not page.is_closed():
            page.goto("about:blank")
    server.should_exit = True
    thread.join()


def opened(page: Page, address: str, route: str, run: int = 0) -> Page:
    _OPENED.setdefault(address, []).append(page)
    page.goto("about:blank")  # else a page of the same name that is shown already would do
    page.goto(f"{address}#/{run}/{route}")
    page.wait_for_selector(f'main[data-page="{route.split("/")[0].split("?")[0]}"] h1')
    return page


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--all", type=Path, metavar="FOLDER")
    options = parser.parse_args()
    runs = [ReportedRun(folder) for folder in options.runs]
    for run in runs:
        while not run.refresh():
            pass
    with chromium() as browser, served(runs) as address:
        if options.all is None:
            pictures_of_readme(browser, address, runs[0])
        else:
            pictures_of_all(browser, address, runs[0], options.all)


def pictures_of_readme(browser: Browser, address: str, run: ReportedRun) -> None:
    page = new_page(browser, width=1200, height=640, color_scheme="light")
    opened(page, address, "overview").screenshot(path=ROOT / "docs/report-overview.png")
    with_tokens(page, address, run)
    page.get_by_role("heading", name="Training sample").first.evaluate(
        "heading => heading.scrollIntoView()"
    )
    page.locator(".tokens span[style*=rgba]").nth(4).hover()
    page.screenshot(path=ROOT / "docs/report-tokens.png")


def pictures_of_all(browser: Browser, address: str, run: ReportedRun, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    place = longest(run)["place"]
    for width, height in SIZES:
        for scheme in ("light", "dark"):
            page = new_page(browser, width=width, height=height, color_scheme=scheme)
            for name in PAGES:
                opened(page, address, name).screenshot(
                    path=folder / f"{name}-{width}-{scheme}.png", full_page=True
                )
            opened(page, address, f"group/{place}").screenshot(
                path=folder / f"group-{width}-{scheme}.png", full_page=True
            )
            with_tokens(page, address, run).screenshot(
                path=folder / f"rollout-{width}-{scheme}.png", full_page=True
            )


def new_page(browser: Browser, *, width: int, height: int, color_scheme: Any) -> Page:
    return browser.new_context(
        viewport={"width": width, "height": height}, color_scheme=color_scheme
    ).new_page()


def with_tokens(page: Page, address: str, run: ReportedRun) -> Page:
    row = longest(run)
    opened(page, address, f"rollout/{row['place']}-{row['line']}")
    page.get_by_role("button", name="Show the tokens").first.click()
    page.locator(".tokens span").last.hover()
    return page


def key_of(run: ReportedRun, rollout_id: str) -> str:
    (row,) = run.rows("SELECT place, line FROM rollouts WHERE rollout_id = ?", (rollout_id,))
    return f"{row['place']}-{row['line']}"


def longest(run: ReportedRun) -> Any:
    """The rollout of most turns and tokens that was trained."""
    return run.rows(
        "SELECT place, line FROM rollouts WHERE outcome = 'trained' ORDER BY turns DESC, tokens DESC LIMIT 1"
    )[0]


if __name__ == "__main__":
    main()
