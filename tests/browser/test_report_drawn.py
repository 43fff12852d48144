"""The report's pages show a person what matters: ends of runs, steps, causes, and colours that keep their meaning."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from playwright.sync_api import Page, expect

from tests.browser.pictures import key_of, opened, served
from tests.unit.report_runs import (
    record,
    record_evaluation,
    rollout,
    small_run,
    write_ledger,
    write_metrics,
)
from torchtitan.experiments.rl.checkpointing.folder import CheckpointWriter
from torchtitan.experiments.rl.command.history import write_end, write_start
from torchtitan.experiments.rl.tools.report.app import exported
from torchtitan.experiments.rl.tools.report.run import ReportedRun

CAUSE = (
    "none of the first 100 groups teaches anything: all rollouts of a group got the same reward "
    "(0 in 100%); the last of them says '2' to example 37 and earns 0; look at the rubric"
)
TRACEBACK = "Traceback (most recent call last):\n  File \"rubric.py\", line 3\nKeyError: 'answer'"
LONG = "reward function 'raises': KeyError: " + " ".join(f"word{n}" for n in range(60)) + " end"


@pytest.fixture
def reported():
    """Makes a reported run of a folder, with all of its files read."""
    made = []

    def make(folder):
        run = ReportedRun(folder)
        run.refresh()
        made.append(run)
        return run

    yield make
    for run in made:
        run.close()


@pytest.fixture
def run(tmp_path, reported):
    return reported(small_run(tmp_path / "run"))


def failed(folder) -> None:
    """Write down that the run failed, as the command and its controller do."""
    write_start(folder, 0)
    write_end(folder, "failed", CAUSE)
    line = {"time": "2026-01-01T00:00:00.000+00:00", "level": "ERROR", "process": "controller"}
    line |= {"logger": "torchtitan.experiments.rl.controller.run", "message": "the run failed"}
    (folder / "logs").mkdir()
    text = json.dumps(line | {"exception": TRACEBACK})
    (folder / "logs/controller.jsonl").write_text(text + "\n")


def sees_why_it_failed(page: Page, address: str) -> None:
    opened(page, address, "overview")
    expect(page.locator("#state")).to_have_text("failed")
    first = page.get_by_role("list", name="What is wrong").get_by_role("listitem").first
    expect(first.locator("b")).to_have_text(CAUSE)
    expect(first).to_contain_text("start a new run: this one has no checkpoint to go on from")
    first.get_by_role("link", name="Timeline").click()
    page.wait_for_selector('main[data-page="timeline"]')
    expect(page.get_by_role("listitem").filter(has_text="command · FAILED")).to_contain_text(CAUSE)
    expect(page.get_by_text("rubric.py")).to_be_hidden()
    page.get_by_text("KeyError: 'answer'").first.click()
    expect(page.get_by_text("rubric.py")).to_be_visible()


def test_a_failed_run_says_why_word_for_word(page, run, tmp_path):
    failed(run.folder)
    with served([run]) as address:
        sees_why_it_failed(page, address)
    file = tmp_path / "run.html"
    with ThreadPoolExecutor() as threads:  # Playwright's event loop runs in this one
        file.write_text(threads.submit(exported, [run], sample=2).result(), encoding="utf-8")
    sees_why_it_failed(page, f"file://{file}")


@pytest.mark.parametrize(
    ("end", "state", "hint"),
    [
        (("stopped", "SIGINT"), "stopped", "Stopped after step 3 of 3 by Ctrl-C (SIGINT)"),
        (None, "killed", "Killed after step 3 of 3: the command ended without a word"),
    ],
)
def test_a_run_that_did_not_end_by_itself_says_what_a_resume_goes_on_from(
    page, run, end, state, hint
):
    write_start(run.folder, 0)
    if end is not None:
        write_end(run.folder, *end)
    saved = CheckpointWriter(run.folder, keep=9)
    saved.begin(2)
    saved.commit(2)
    with served([run]) as address:
        opened(page, address, "overview")
        expect(page.locator("#state")).to_have_text(state)
        item = page.get_by_role("listitem").filter(has_text=hint)
        expect(item).to_contain_text("Next: --resume with this folder goes on from step 2")


def test_a_resumed_run_has_its_first_start_and_a_mark_in_each_chart(page, run):
    write_start(run.folder, 0)
    write_start(run.folder, 2)
    with served([run]) as address:
        opened(page, address, "overview")
        state = page.locator("main p").first
        expect(state).to_contain_text("started ")
        expect(state).to_contain_text("resumed from step 2")
        figure = page.locator("figure", has_text="Reward of training rollouts")
        expect(figure.locator("line.mark")).to_have_count(1)
        expect(figure.locator("text.mark-text")).to_have_text("resumed")
        marked = figure.locator("line.mark").get_attribute("x1")
        figure.locator("svg[role=img]").focus()
        page.keyboard.press("ArrowLeft")
        page.keyboard.press("ArrowLeft")
        expect(figure.locator(".readout")).to_contain_text("step 2:")
        assert figure.locator("line.cursor").get_attribute("x1") == marked
        opened(page, address, "overview?x=time")
        expect(figure.locator("line.mark")).to_have_count(1)


def test_a_rollout_shows_the_step_that_trained_it_beside_the_version_it_was_started_at(page, run):
    """A rollout that was started at version 0 was trained in step 2."""
    with served([run]) as address:
        opened(page, address, "rollouts")
        row = cells(page, "sums-0/0")
        assert (row["Trained in step"], row["Started at version"]) == ("2", "0")
        dropped = cells(page, "words-0/0")
        assert (dropped["Trained in step"], dropped["Started at version"]) == ("–", "1")
        page.locator("input[name=step]").fill("2")
        page.get_by_role("button", name="Show").click()
        expect(page.locator("tbody tr")).to_have_count(2)
        expect(page.locator("tbody tr").first).to_contain_text("sums-0/0")
        for route in (
            f"rollout/{key_of(run, 'sums-0/0')}",
            f"group/{key_of(run, 'sums-0/0').split('-')[0]}",
        ):
            opened(page, address, route)
            expect(page.locator(".facts").first).to_contain_text("trained in step 2")
            expect(page.locator(".facts").first).to_contain_text("started at version 0")


def cells(page: Page, rollout_id: str) -> dict[str, str]:
    """Return the texts of a rollout's row by the titles of their columns."""
    titles = page.locator("thead th").all_inner_texts()
    row = page.locator("tbody tr").filter(has=page.get_by_role("link", name=rollout_id))
    return dict(zip(titles, row.locator("td").all_inner_texts(), strict=True))


@pytest.mark.parametrize("width", [1400, 390])
def test_a_cause_is_read_whole_at_any_width(page, run, width):
    record(
        run.folder, [[rollout("long-0", 0, reward=None, error=LONG)]], {"long-0/0": "failed/error"}
    )
    run.refresh()
    page.set_viewport_size({"width": width, "height": 800})
    with served([run]) as address:
        for route in ("rollouts", f"group/{key_of(run, 'long-0/0').split('-')[0]}"):
            opened(page, address, route)
            cause = page.get_by_text(LONG, exact=True).first
            box = cause.bounding_box()
            assert box is not None and box["x"] >= 0 and box["x"] + box["width"] <= width
            inside = "(e) => e.scrollWidth <= e.clientWidth && e.scrollHeight <= e.clientHeight"
            assert cause.evaluate(inside), "nothing of it is cut"


def test_a_failed_rollout_shows_its_traceback(page, run):
    one = rollout("long-0", 0, reward=None, error=LONG, traceback=TRACEBACK)
    record(run.folder, [[one]], {"long-0/0": "failed/error"})
    run.refresh()
    with served([run]) as address:
        opened(page, address, f"rollout/{key_of(run, 'long-0/0')}")
        expect(page.get_by_text("rubric.py")).to_be_visible()
        expect(page.locator("table")).to_have_count(0)  # no reward function has a value


def fail_rollouts(run: ReportedRun) -> None:
    """Record a group of five: three that fail in one way, one in another way, one that is scored."""
    causes = [
        "KeyError: '0' (r.py:3)",
        "hangs",
        "KeyError: '1' (r.py:3)",
        "KeyError: '12' (r.py:3)",
    ]
    group = [
        rollout("sums-7", n, reward=None, error=cause, traceback=TRACEBACK)
        for n, cause in enumerate(causes)
    ]
    group.append(rollout("sums-7", 4, reward=0.5))
    outcomes = {f"sums-7/{n}": "failed/error" for n in range(4)}
    outcomes["sums-7/4"] = "failed/group_too_small"
    record(run.folder, [group], outcomes)
    write_ledger(run.folder, [("sums", name, column) for name, column in outcomes.items()])
    run.refresh()


def test_the_causes_of_failures_are_counted_and_two_clicks_show_the_users_line(page, run):
    fail_rollouts(run)
    with served([run]) as address:
        opened(page, address, "overview")
        hint = page.get_by_role("listitem").filter(has_text="rollouts of sums failed")
        expect(hint.locator("b")).to_have_text(
            "71% of the rollouts of sums failed (5 of 7); most often: KeyError: '0' (r.py:3)"
        )
        hint.get_by_role("link", name="Ledger").click()
        causes = page.locator("table.causes").first.locator("tbody tr")
        expect(causes).to_have_text(["3KeyError: '0' (r.py:3)", "1hangs"])
        causes.first.get_by_role("link").click()
        expect(page.locator("h1")).to_have_text("sums-7/0")
        expect(page.get_by_text("rubric.py")).to_be_visible()


def test_a_group_says_how_many_have_no_reward_and_not_that_one_reward_ties(page, run):
    fail_rollouts(run)
    with served([run]) as address:
        key = key_of(run, "sums-7/4")
        opened(page, address, f"group/{key.split('-')[0]}")
        text = "Mean reward 0.5, standard deviation 0. 4 of 5 have no reward, and are in neither."
        expect(page.locator("main p").first).to_have_text(text)
        expect(page.locator(".side article").first).to_contain_text("sums-7/4")
        opened(page, address, f"rollout/{key}")
        expect(page.locator("p.warning")).to_have_text(
            "Not trained on: too few rollouts of its group have a reward (min_group_size)."
        )


def test_a_search_finds_errors_and_says_in_how_many_rollouts_it_looked(page, run):
    fail_rollouts(run)
    with served([run]) as address:
        opened(page, address, "rollouts")
        page.locator("input[name=text]").fill("keyerror")
        page.get_by_role("button", name="Show").click()
        expect(page.locator("main [role=status]")).to_have_text(
            "3 with the text shown, searched for in all of 9."
        )
        page.locator("select[name=outcome]").select_option("failed")
        page.get_by_role("button", name="Show").click()
        expect(page.locator("main [role=status]")).to_contain_text("in all of 6.")


def test_an_evaluation_is_no_stopped_run_and_shows_its_figures(page, reported, tmp_path):
    folder = tmp_path / "evaluate-sums"
    models = []
    for place, reward in ((folder, 1.0), (folder / "against", 0.25)):
        place.mkdir()
        record_evaluation(place, "0", {"a": [reward]}, step=0)
        (place / "config.json").write_text(json.dumps({"steps": 30}))
        metrics = {"validation/step": 0, "validation/sums/avg@1": reward}
        models.append({"model": "m", "folder": str(place), "metrics": metrics})
    (folder / "evaluation.json").write_text(json.dumps({"config": None, "models": models}))
    with served([reported(folder), reported(folder / "against")]) as address:
        opened(page, address, "overview")
        expect(page.locator("#state")).to_have_text("records")
        expect(page.locator("main")).not_to_contain_text("Stopped")
        page.locator("main").get_by_role("link", name="Evaluations").click()
        row = page.locator("table", has_text="sums/avg@1").locator("tbody tr")
        expect(row).to_have_text("001")  # version 0, reported with step 0, average 1
        expect(page.locator("main")).to_contain_text("0 won, 1 lost, 0 with the same reward")
        opened(page, address, "evaluations", run=1)
        expect(row).to_have_text("000.25")
        expect(page.locator("#run option").nth(1)).to_have_text("1: evaluate-sums/against")


def test_a_click_leaves_the_heading_below_the_menu_and_a_choice_the_reader_where_he_is(page, run):
    with served([run]) as address:
        opened(page, address, "overview")
        page.set_viewport_size({"width": 1280, "height": 300})
        page.evaluate("scrollTo(0, 90)")
        page.locator("select[name=x]").focus()
        page.keyboard.press("End")
        expect(page.locator("figure").first).to_contain_text("minutes of steps")
        assert page.evaluate("[document.activeElement.name, scrollY > 80]") == ["x", True]
        page.get_by_role("navigation").get_by_role("link", name="Ledger").click()
        heading = page.get_by_role("heading", name="Where every rollout went").bounding_box()
        menu = page.locator("header").bounding_box()
        assert heading["y"] >= menu["y"] + menu["height"]


def test_an_axis_has_two_marks_at_least(page, reported, tmp_path):
    folder = tmp_path / "narrow"
    folder.mkdir()
    write_metrics(folder, {1: {"loss/total": 0.8555}, 2: {"loss/total": 0.9414}})
    with served([reported(folder)]) as address:
        opened(page, address, "overview")
        texts = page.locator("figure svg[role=img] text").all_text_contents()
        assert texts[:3] == ["0.85", "0.90", "0.95"]


def test_an_agents_calls_say_when_after_its_start_each_was_made(page, run):
    one = rollout("agent-0", 0, reward=1.0)
    one.turns[0].call = {"dialect": "chat", "model": "policy", "depth": 0, "at_s": 21.02}
    record(run.folder, [[one]], {"agent-0/0": "trained"})
    run.refresh()
    with served([run]) as address:
        opened(page, address, f"rollout/{key_of(run, 'agent-0/0')}")
        expect(page.locator("summary", has_text="Calls")).to_have_text(
            "Calls, each at its time since the agent began"
        )
        expect(page.locator("main")).to_contain_text("turn 1  at 21.02 s  chat, policy")


def test_a_run_keeps_its_colour_where_another_lacks_the_metric(page, run, reported, tmp_path):
    folder = tmp_path / "first"
    folder.mkdir()
    write_metrics(folder, {1: {"rollout/reward_mean": 0.5}, 2: {"rollout/reward_mean": 0.75}})
    with served([reported(folder), run]) as address:
        opened(page, address, "runs")
        assert page.locator("figure").count() == 2
        looks = [
            legend_look(page.locator("figure", has_text=title), "1: run")
            for title in ("validation/reward", "rollout/reward_mean")
        ]
        assert looks[0] == looks[1]
        assert legend_look(page.locator("figure").last, "0: first") != looks[0]


def test_a_metric_keeps_its_colour_where_a_run_lacks_others_of_its_chart(
    page, run, reported, tmp_path
):
    folder = tmp_path / "waits"
    folder.mkdir()
    write_metrics(folder, {1: {"time/wait_s": 1.0, "time/step_s": 2.0}})
    with served([run, reported(folder)]) as address:
        looks = []
        for number in (0, 1):
            opened(page, address, "overview", run=number)
            looks.append(legend_look(page.locator("figure", has_text="Time of a"), "time/step_s"))
        assert looks[0] == looks[1]


def legend_look(figure, name: str) -> tuple[str, str]:
    """Return the colour and the dashes that the legend has for a line."""
    line = figure.locator(".legend li", has_text=name).first.locator("line")
    style = line.evaluate(
        "(e) => [getComputedStyle(e).stroke, getComputedStyle(e).strokeDasharray]"
    )
    return tuple(style)


def test_a_column_of_the_ledger_has_one_colour_in_all_runs_and_drawings(
    page, run, reported, tmp_path
):
    """In the second run fewer rollouts were trained than dropped, so the columns' order differs."""
    other = small_run(tmp_path / "other")
    columns = ["filtered/pre/zero_advantage"] * 3 + ["failed/error", "failed/timeout"]
    write_ledger(other, [("sums", f"sums-5/{n}", column) for n, column in enumerate(columns)])
    with served([run, reported(other)]) as address:
        looks = []
        for number in (0, 1):
            opened(page, address, "ledger", run=number)
            for figure in page.locator("figure").all():
                for name in ("trained", "filtered/pre/zero_advantage", "failed/error"):
                    if figure.locator(".legend li", has_text=name).count():
                        looks.append((name, legend_look(figure, name)))
            band = page.locator("svg.flow a").filter(has_text="failed/error").first
            fill = band.locator("rect.fill").evaluate("(e) => getComputedStyle(e).fill")
            assert fill == legend_look(page.locator("figure").nth(1 - number), "failed/error")[0]
        colours = {look[0] for _, look in looks}
        assert len(set(looks)) == 3 and len(colours) == 3
        opened(page, address, "ledger", run=1)
        figure = page.locator("figure").first
        assert len({legend_look(figure, n)[0] for n in ("failed/error", "failed/timeout")}) == 2


def test_six_lines_of_a_chart_have_colours_that_are_told_apart(page, run):
    with served([run]) as address:
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            opened(page, address, "overview")
            colours = page.evaluate(
                """() => [0, 1, 2, 3, 4, 5, 6].map((n) => getComputedStyle(document.documentElement)
                    .getPropertyValue(`--c${n}`).trim())"""
            )
            values = [[int(colour[i : i + 2], 16) for i in (1, 3, 5)] for colour in colours]
            far = [
                sum(abs(a - b) for a, b in zip(one, other, strict=True))
                for place, one in enumerate(values)
                for other in values[:place]
            ]
            assert min(far) >= 75, (scheme, colours)


@pytest.mark.parametrize(
    ("marks", "texts"),
    [
        ([0, 0.0005, 0.001], ["0", "0.0005", "0.0010"]),
        ([0, 0.00005, 0.0001, 0.00015], ["0", "0.5e-4", "1.0e-4", "1.5e-4"]),
        ([0, 0.5, 1], ["0", "0.5", "1.0"]),
        ([-0.1, -0.05, 0], ["-0.10", "-0.05", "0"]),
        ([0, 10000, 20000], ["0", "10,000", "20,000"]),
        ([0, 2e6, 4e6], ["0", "2e6", "4e6"]),
        ([0], ["0"]),
    ],
)
def test_the_numbers_of_an_axis_have_the_same_digits(page, run, marks, texts):
    with served([run]) as address:
        opened(page, address, "overview")
        assert page.evaluate("(marks) => axisTexts(marks)", marks) == texts


def test_evaluations_are_counted_apart_from_rollouts_of_training(page, run):
    record_evaluation(run.folder, "0", {"a": [1], "b": [0]}, step=0)
    run.refresh()
    with served([run]) as address:
        opened(page, address, "rollouts")
        expect(page.locator("main [role=status]")).to_have_text(
            "6 of 6 shown: 4 of training, 2 of evaluations."
        )


def test_labels_and_fields_of_a_form_stand_at_one_height(page, run):
    page.set_viewport_size({"width": 1800, "height": 800})
    with served([run]) as address:
        for route in ("rollouts", "overview", "evaluations"):
            opened(page, address, route)
            tops = page.locator("form label").evaluate_all("(all) => all.map((e) => e.offsetTop)")
            fields = page.locator("form label > :is(input:not([type=range]), select)")
            heights = fields.evaluate_all("(all) => all.map((e) => e.offsetHeight)")
            assert len(set(heights)) <= 1, (route, heights)
            if route == "rollouts":
                assert len(set(tops)) == 1, tops


def test_a_reward_has_its_functions_weights_beside_it(page, run):
    config = json.loads((run.folder / "config.json").read_text())
    fns = [{"fn": "my.right", "name": None, "weight": 3.0}, {"fn": "my.economy", "weight": 1.0}]
    config["tasks"]["sums"]["rubric"] = {"reward_fns": fns}
    (run.folder / "config.json").write_text(json.dumps(config))
    with served([run]) as address:
        key = key_of(run, "sums-0/0")
        opened(page, address, f"rollout/{key}")
        assert page.locator("tbody tr").first.locator("td").all_inner_texts() == [
            "right",
            "1",
            "3 of 4",
        ]
        opened(page, address, f"group/{key.split('-')[0]}")
        expect(page.locator("thead")).to_contain_text("right (3 of 4)")


def test_a_won_example_shows_its_question_and_both_answers(page, run):
    for label, rewards in (("0", {"a": [0]}), ("3.final", {"a": [1]})):
        record_evaluation(run.folder, label, rewards, step=3)
    write_metrics(
        run.folder,
        {3: {"validation/step": 3, "validation/sums/avg@1": 0.5, "validation/sums/pass@1": 0.5}},
    )
    run.refresh()
    with served([run]) as address:
        opened(page, address, "evaluations")
        won = page.locator("section", has=page.get_by_role("heading", name="Won", exact=True))
        row = won.locator("tbody tr").first
        assert row.locator(".said").all_inner_texts() == ["3 4", "7", "7"]


def test_avg_and_pass_of_one_attempt_are_one_line_with_both_names(page, reported, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    same = {"validation/sums/avg@1": 0.5, "validation/sums/pass@1": 0.5}
    write_metrics(folder, {0: {"validation/step": 0, **same}, 4: {"validation/step": 4, **same}})
    with served([reported(folder)]) as address:
        opened(page, address, "evaluations")
        legend = page.locator("figure .legend li")
        expect(legend).to_have_count(1)
        expect(legend).to_have_text("validation/sums/avg@1 and pass@1 0.5")


def test_the_warnings_that_are_counted_can_be_read(page, run):
    (run.folder / "logs").mkdir()
    line = {"time": "2026-01-01T00:00:00.000+00:00", "level": "WARNING", "process": "generator-0"}
    line |= {"logger": "vllm.platform", "message": "no kernel for this CPU"}
    (run.folder / "logs/generator-0.jsonl").write_text(json.dumps(line) + "\n")
    with served([run]) as address:
        opened(page, address, "timeline")
        expect(page.locator("main")).not_to_contain_text("no kernel")
        page.locator("tbody tr").filter(has_text="generator-0").get_by_role(
            "link", name="1"
        ).click()
        expect(page.locator("main")).to_contain_text("no kernel for this CPU")


def test_a_line_of_the_ledger_falls_to_0_where_no_rollout_ended_in_its_column(page, run):
    """Three ends, at versions 1, 4 and 5: the column of the first has 0 at the others."""
    ends = [
        {"rollout_id": f"sums-9/{version}", "task": "sums", "dispatched_version": 0}
        | {"column": "lost", "ended_version": version}
        for version in (4, 5)
    ]
    with (run.folder / "ledger.jsonl").open("a") as file:
        file.writelines(json.dumps(end) + "\n" for end in ends)
    run.refresh()
    with served([run]) as address:
        opened(page, address, "ledger")
        figure = page.locator("figure").first
        figure.locator("svg[role=img]").focus()
        page.keyboard.press("ArrowLeft")
        expect(figure.locator(".readout")).to_contain_text("policy version 5: ")
        expect(figure.locator(".readout")).to_contain_text("trained 0")
