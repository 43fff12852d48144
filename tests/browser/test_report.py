"""The report in a real Chromium: `make test-browser`. With REPORT_SCREENSHOTS=FOLDER it leaves a picture of each page there."""

import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import expect

from tests.browser.pictures import PAGES, key_of, opened, served
from tests.unit.report_runs import record, record_evaluation, rollout, small_run, write_metrics
from torchtitan.experiments.rl.tools.report.app import exported
from torchtitan.experiments.rl.tools.report.run import ReportedRun

WIDTHS = (1280, 390)
HOSTILE = (
    "<script>document.title='taken'</script><img src=x onerror=alert(1)>\x1b[31mred\x1b[0m\u202e"
)
FOLDER = os.environ.get("REPORT_SCREENSHOTS")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = small_run(tmp_path_factory.mktemp("report") / "run")
    hostile = [
        rollout("bad-0", 0, reward=1.0, reply=HOSTILE),
        rollout("bad-0", 1, reward=0.5, reply="y" * 2**20),
    ]
    hostile[0].samples[0].trainer_logprobs = np.array(
        [0, 0, 0, np.log(2) - 0.5, np.log(0.5) - 0.25], np.float32
    )
    record(folder, [hostile], {"bad-0/0": "trained", "bad-0/1": "trained"}, step=2)
    for label, rewards in (("0", [0, 1, 0]), ("3.final", [1, 0, 1])):
        record_evaluation(
            folder,
            label,
            {name: [reward] for name, reward in zip((HOSTILE, "b", "c"), rewards, strict=True)},
            step=3,
        )
    run = ReportedRun(folder)
    run.refresh()
    run.start()
    yield run
    run.close()


@pytest.fixture(scope="module")
def address(run):
    with served([run]) as address:
        yield address


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", [*PAGES, "group", "rollout"])
def test_each_page_opens_and_fits(page, address, run, name, width):
    page.set_viewport_size({"width": width, "height": 800})
    key = key_of(run, "sums-0/0")
    route = {"group": f"group/{key.split('-')[0]}", "rollout": f"rollout/{key}"}.get(name, name)
    opened(page, address, route)
    expect(page.locator("main h1")).not_to_have_text(re.compile("can't be shown"))
    if name == "rollout":
        page.get_by_role("button", name="Show the tokens").click()
        page.wait_for_selector(".tokens span")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    if FOLDER:
        Path(FOLDER).mkdir(parents=True, exist_ok=True)
        page.screenshot(path=f"{FOLDER}/{name}-{width}.png", full_page=True)


def test_links_lead_through_the_pages(page, address):
    opened(page, address, "overview")
    page.get_by_role("navigation").get_by_role("link", name="Ledger").click()
    page.wait_for_selector('main[data-page="ledger"]')
    page.locator("svg a").filter(has_text="failed/error").click()
    page.wait_for_selector('main[data-page="rollouts"] table')
    expect(page.locator("tbody tr:not(.below)")).to_have_count(1)
    expect(page.locator("tbody tr.below")).to_have_text("it broke")
    page.get_by_role("link", name="words-0/1").click()
    page.wait_for_selector('main[data-page="rollout"]')
    expect(page.locator("main")).to_contain_text("it broke")
    page.get_by_role("link", name="group words-0").click()
    page.wait_for_selector('main[data-page="group"]')
    expect(page.locator(".side article")).to_have_count(2)


def test_filters_are_in_the_address_and_in_the_form(page, address):
    opened(page, address, "rollouts")
    page.locator("select[name=task]").select_option("sums")
    page.locator("select[name=outcome]").select_option("trained")
    page.locator("input[name=max_reward]").fill("0.2")
    page.get_by_role("button", name="Show").click()
    page.wait_for_url("**/#/0/rollouts?*")
    expect(page.locator("tbody tr")).to_have_count(1)
    page.reload()
    expect(page.locator("input[name=max_reward]")).to_have_value("0.2")
    expect(page.locator("tbody tr")).to_contain_text("sums-0/1")


def test_what_a_model_said_is_shown_and_does_nothing(page, address, run):
    opened(page, address, f"rollout/{key_of(run, 'bad-0/0')}")
    expect(page.locator(".message.assistant")).to_contain_text(
        "<script>document.title='taken'</script>"
    )
    assert page.title() != "taken" and page.locator("main img, main script").count() == 0
    opened(page, address, f"rollout/{key_of(run, 'bad-0/1')}")
    expect(page.locator(".message.assistant")).to_contain_text("1,028,576 characters more")


def test_examples_won_and_lost_lead_to_both_rollouts(page, address):
    opened(page, address, "evaluations")
    expect(page.locator("main")).to_contain_text("2 won, 1 lost, 0 with the same reward")
    lost = page.locator("section", has=page.get_by_role("heading", name="Lost", exact=True))
    expect(lost.locator("tbody tr")).to_have_count(1)
    expect(page.locator("section").filter(has_text="Won").first).to_contain_text("<script>")
    page.locator("select[name=before]").select_option("0:3.final")
    page.locator("select[name=after]").select_option("0:0")
    page.get_by_role("button", name="Compare").click()
    expect(page.locator("main")).to_contain_text("1 won, 2 lost")
    page.locator("section", has=page.get_by_role("heading", name="Won", exact=True)).get_by_role(
        "link"
    ).last.click()
    page.wait_for_selector('main[data-page="rollout"]')
    expect(page.locator("h1")).to_have_text("validation-sums-1@0/0")


def test_keys_move_along_charts_and_tokens(page, address, run):
    opened(page, address, "overview")
    figure = page.locator("figure", has_text="Reward of training rollouts")
    figure.locator("svg[role=img]").focus()
    page.keyboard.press("ArrowLeft")
    expect(figure.locator(".readout")).to_contain_text("step 3: rollout/reward_mean 0.75")
    page.keyboard.press("ArrowLeft")
    expect(figure.locator(".readout")).to_contain_text("step 2: rollout/reward_mean 0.5")
    opened(page, address, f"rollout/{key_of(run, 'sums-0/0')}")
    page.get_by_role("button", name="Show the tokens").click()
    page.locator(".tokens span").first.focus()
    for _ in range(4):
        page.keyboard.press("ArrowRight")
    expect(page.locator(".tokendetail")).to_contain_text("token 4: id 5")
    expect(page.locator(".tokendetail")).to_contain_text("advantages 0.75")


def test_tokens_are_coloured_by_the_ratio_of_trainer_and_generator(page, address, run):
    opened(page, address, f"rollout/{key_of(run, 'bad-0/0')}")
    page.get_by_role("button", name="Show the tokens").click()
    page.get_by_label("Coloured by").select_option("ratio")
    colours = page.locator(".tokens span").evaluate_all(
        "spans => spans.map((span) => span.style.background)"
    )
    assert colours == [
        "",
        "",
        "",
        "rgba(0, 114, 178, 0.65)",
        "rgba(213, 94, 0, 0.65)",
    ]  # twice, and half
    expect(page.locator("main")).to_contain_text("0.5 to 2; blue above 1")
    page.locator(".tokens span").nth(0).hover()
    expect(page.locator(".tokendetail")).to_contain_text("ratio –")


def test_a_run_that_goes_on_is_followed(page, address, run):
    opened(page, address, "ledger")
    page.get_by_role("link", name="Overview").click()  # what is clicked has the focus
    expect(page.locator("main")).to_contain_text("step 3 of 3")
    write_metrics(run.folder, {4: {"rollout/reward_mean": 0.875}}, resume_step=3)
    expect(page.locator("main")).to_contain_text("step 4 of 3")
    expect(
        page.locator("figure", has_text="Reward of training").locator(".legend")
    ).to_contain_text("0.875")


def test_an_exported_file_needs_no_server(page, run, tmp_path):
    file = tmp_path / "run.html"
    with ThreadPoolExecutor() as threads:  # Playwright's event loop runs in this one
        file.write_text(threads.submit(exported, [run], sample=10).result(), encoding="utf-8")
    opened(page, f"file://{file}", "overview")
    opened(page, f"file://{file}", "rollouts")
    page.get_by_role("link", name="bad-0/0").click()
    page.wait_for_selector('main[data-page="rollout"]')
    expect(page.locator(".message.assistant")).to_contain_text("<script>document.title")
    assert page.title() != "taken"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_stand_out_in_light_and_dark(browser, address, scheme):
    """The contrast of text and links is at least 4.5 (WCAG AA)."""
    context = browser.new_context(color_scheme=scheme)
    page = opened(context.new_page(), address, "overview")
    colours = page.evaluate(
        """() => { const style = getComputedStyle(document.documentElement);
        return Object.fromEntries(["text", "quiet", "link", "error", "warning", "good", "page", "raised"]
            .map((name) => [name, style.getPropertyValue("--" + name).trim()])); }"""
    )
    for name in ("text", "quiet", "link", "error", "warning", "good"):
        for ground in ("page", "raised"):
            assert contrast(colours[name], colours[ground]) >= 4.5, (scheme, name, ground)
    context.close()


def contrast(first: str, second: str) -> float:
    bright, dark = sorted((luminance(first), luminance(second)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_any_metric_gets_a_chart_which_stays_in_the_address(page, address):
    opened(page, address, "overview")
    page.locator("input[name=metric]").fill("no such metric")
    page.get_by_role("button", name="Add").click()
    assert "metric=" not in page.url
    page.locator("input[name=metric]").fill("time/step_s")
    page.get_by_role("button", name="Add").click()
    own = page.locator("figure").first
    expect(own.locator("figcaption")).to_contain_text("time/step_s")
    page.reload()
    expect(own.locator("figcaption")).to_contain_text("time/step_s")
    page.get_by_role("button", name="Remove own charts").click()
    expect(own.locator("figcaption")).to_contain_text("Reward of training rollouts")


def test_curves_are_smoothed_and_drawn_along_the_time(page, address):
    opened(page, address, "overview?smooth=0.5&x=time")
    figure = page.locator("figure", has_text="Reward of training rollouts")
    expect(figure.locator("path.faint")).to_have_count(1)
    figure.locator("svg[role=img]").focus()
    page.keyboard.press("ArrowLeft")
    # Of 0.25, 0.5, 0.75: (0.125 * 0.25 + 0.25 * 0.5 + 0.5 * 0.75) / 0.875, after three steps of 2 seconds.
    expect(figure.locator(".readout")).to_contain_text(
        "minutes of steps 0.1: rollout/reward_mean 0.6071"
    )


def test_a_part_of_a_chart_is_shown_larger_until_all_of_it_is_asked_for(page, address):
    opened(page, address, "overview")
    figure = page.locator("figure", has_text="Reward of training rollouts")
    box = figure.locator("svg[role=img]").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.4, box["y"] + 40)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.99, box["y"] + 40)
    page.mouse.up()
    figure.locator("svg[role=img]").focus()
    for _ in range(4):
        page.keyboard.press("ArrowLeft")
    expect(figure.locator(".readout")).to_contain_text("step 2:")
    figure.get_by_role("button", name="Whole").click()
    expect(figure.get_by_role("button", name="Whole")).to_have_count(0)


def test_the_menu_stays_in_view_and_labels_stay_in_their_charts(page, address):
    opened(page, address, "overview")
    page.set_viewport_size({"width": 1280, "height": 300})
    assert page.evaluate("window.scrollTo(0, 400), window.scrollY") > 300
    assert page.locator("header").bounding_box()["y"] == 0
    for text in page.locator("figure svg[role=img] text").all():
        inside, outside = text.bounding_box(), text.locator("xpath=..").bounding_box()
        assert inside["x"] + inside["width"] <= outside["x"] + outside["width"] + 0.5


def test_the_list_shows_how_each_rollout_begins_and_says_that_it_searches(page, address):
    opened(page, address, "rollouts")
    row = page.locator("tbody tr").filter(has_text="bad-0/0")
    expect(row).to_contain_text("<script>document.title")
    rows = page.locator("tbody tr").all_inner_texts()
    kinds = ["validation" in text for text in rows]
    assert kinds == sorted(kinds) and True in kinds, "training rollouts come first"
    page.route(
        "**/api/runs/0/rollouts?*", lambda route: (page.wait_for_timeout(300), route.continue_())
    )
    page.locator("input[name=text]").fill("broke")
    page.get_by_role("button", name="Show").click()
    expect(page.locator("main [role=status]").first).to_contain_text("Searching the texts")
    expect(page.locator("main [role=status]").first).to_contain_text("1 with the text shown")
    page.unroute_all(behavior="wait")


def test_a_ribbon_is_as_thick_as_its_share(page, address):
    opened(page, address, "overview")
    heights = page.evaluate(
        """() => [...flow({ from: "all", total: 10000, boxes: [{ name: "most", count: 9997 }, { name: "few", count: 3 }] })
            .querySelectorAll("g rect")].map((rect) => Number(rect.getAttribute("height")))"""
    )
    assert heights[0] == pytest.approx(239.928) and heights[1] == 1.5


def test_a_groups_prompt_is_open_and_its_odd_one_comes_first(page, address, run):
    place = key_of(run, "bad-0/0").split("-")[0]
    opened(page, address, f"group/{place}")
    expect(page.locator("details").first).to_have_attribute("open", "")
    assert page.evaluate("document.querySelector('.side').getBoundingClientRect().top") < 800


def test_two_runs_have_their_curves_in_one_chart(page, run):
    with served([run, run]) as address:
        opened(page, address, "runs")
        expect(
            page.locator("figure", has_text="rollout/reward_mean").locator(".legend li")
        ).to_have_count(2)
