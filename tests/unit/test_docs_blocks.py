"""Every block of code in README and docs is run: here, or by the test that is named here.

A block of commands is read word by word by the command's own parser, which checks each field that it names; the commands for
data of one's own go through ``--dry-run``. Commands of other programs are named here.
"""

import importlib
import json
import re
import shlex
import sys
from pathlib import Path
from types import ModuleType

import pytest

from scripts import gpu_smoke
from torchtitan.experiments.rl import export, script, simulate
from torchtitan.experiments.rl.bounds import walk
from torchtitan.experiments.rl.command.build import build_tasks, read_policy_tokenizer
from torchtitan.experiments.rl.command.checks import check
from torchtitan.experiments.rl.command.command_line import load_config, parse_command
from torchtitan.experiments.rl.config_registry import rl_math_qwen3, rl_questions_qwen3_debug
from torchtitan.experiments.rl.tasks import question_task
from torchtitan.experiments.rl.train import main

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)

AGENTS = "test_docs_agents.py::test_the_agents_and_tools_of_the_page_earn_their_reward"
HUBS = "test_docs_agents.py::test_the_hubs_of_the_page_are_tasks_and_their_rewards_are_read"
PYTHON = {
    "# my_agent.py": AGENTS,
    "# my_command.py": AGENTS,
    "# my_tools.py": AGENTS,
    "# my_sums_v1.py": HUBS,
    "# my_verifiers.py": HUBS,
    "# my_env_agent.py": HUBS,
    "# synchronous.py": "test_docs_gpu.py::test_an_engine_without_asynchronous_scheduling_is_configured_as_shown",
    "# my_openenv.py": HUBS,
    "# my_game.py": "test_docs_agents.py::test_the_game_of_the_page_is_played",
    "# mine.py": "test_docs_blocks.py::test_data_of_ones_own_passes_a_dry_run_as_shown",
    "# my_tasks.py": "test_readme.py::test_the_task_in_twenty_lines_runs_and_scores",
    "# a vLLM server anywhere": "test_docs_algorithms.py::test_the_frozen_models_shown_are_valid",
    "# in a function that makes a config": "test_docs_blocks.py::test_the_demonstrations_shown_are_a_task_that_is_checked",
    "# my_loss.py": "test_docs_algorithms.py::test_the_loss_shown_caps_its_ratio_and_reports_it",
    "# my_algorithms.py": "test_docs_algorithms.py::test_the_algorithm_in_twenty_lines_gives_its_credit",
    "# judged.py": "test_docs_algorithms.py::test_the_judge_shown_grades_answers_and_an_unread_verdict_fails_the_rollout",
    "# reward_model.py": "test_docs_algorithms.py::test_the_reward_model_shown_scores_an_answer_as_the_classifier_does",
    "# my_filters.py": "test_docs_algorithms.py::test_the_filter_shown_drops_what_it_matches",
    "# trl_rewards.py": "test_docs_blocks.py::test_a_reward_function_of_trl_is_wrapped_as_shown",
    "# phonebook.py": "test_docs_tasks.py::test_the_tests_of_the_task_pass",
    "# test_phonebook.py": "test_docs_tasks.py::test_the_tests_of_the_task_pass",
    "# short_phonebook.py": "test_docs_tasks.py::test_the_shorter_task_has_less_than_thirty_lines_and_is_the_same",
    "# my_sums.py": "test_docs_blocks.py::test_the_sums_on_the_way_to_a_real_task_are_trained_as_shown",
    "# train_my_sums.py": "test_docs_blocks.py::test_the_sums_on_the_way_to_a_real_task_are_trained_as_shown",
    "# kinds.py": "test_docs_tasks.py::test_functions_for_rows_of_several_kinds_judge_their_own",
    "# sandboxes.py": "test_docs_tasks.py::test_sandboxes_are_lent_to_one_env_at_a_time_and_come_back_whatever_happens",
    "# any_reply.py": "test_docs_blocks.py::test_the_reward_of_noise_varies",
    "# slow_tools.py": "test_docs_tasks.py::test_what_was_said_can_be_read_as_shown",
}
"""Of each block of Python, by its first line, the test that runs it."""

NO_CODE = ('["', "starting ", "16/100 [", "Controller (one actor)")
"""Beginnings of blocks that show printed lines or a drawing. Other such blocks are marked as text."""

OTHER_PROGRAMS = (
    r"make (demo|real|test)\b.*",  # Makefile; the tests are under way
    r"pip install torch==2\.13\.0 && pip install --no-deps -r requirements/cpu\.txt \.",  # tests/fresh_install.py
    r"python3 -m venv \.venv",
    r"apt-get install git .*",  # tests/bare_machine.py
    r"python3\.11 -m venv hubs/\w+ && hubs/\w+/bin/pip install .*",  # tests/frameworks
    r"hubs/openenv/bin/openenv init my_env",
    r"docker (build|run) .*",  # test_dockerfile.py
    r"\.venv/bin/pip install --no-deps -r requirements/gpu\.txt( \.)?",
    r"\.venv/bin/vllm download-kernels",
    r'\.venv/bin/python -c "import torch; .*"',
    r"python scripts/get_model\.py gemma3 --accept-gemma-terms",  # test_real_models.py
    r"git clone <this repository> rl && cd rl",
    r"\.venv/bin/hf download \S+ --local-dir assets/hf/\S+",
    r"#SBATCH --requeue --signal=TERM@120",
    r"zcat outputs/RUN/rollouts\.jsonl\.gz \| jq -c .*",  # test_recorder.py reads a line
    r"tar czf report\.tar\.gz .*",
    r"python -m pytest -o asyncio_mode=auto test_phonebook\.py",  # test_docs_tasks.py calls its tests
)
"""Commands that are not the library's; most need a network or GPUs."""

SMOKE = re.compile(r"scripts/gpu_smoke\.sh(.*)")

OF_THE_LIBRARY = re.compile(
    r"(?:srun )?(?:\S*python -m torchtitan\.experiments\.rl\.|(?:\.venv/bin/)?rl-)(\S+)(.*)"
)


def blocks() -> list[tuple[str, str, str]]:
    """Page, language and text of each."""
    return [(page.name, *found) for page in PAGES for found in BLOCK.findall(page.read_text())]


def commands() -> list[tuple[str, str]]:
    """Page and command, continued lines in one."""
    texts = [
        (page, text)
        for page, language, text in blocks()
        if language in ("", "sh") and not is_no_code(text)
    ]
    return [
        (page, line.strip())
        for page, text in texts
        for line in text.replace("\\\n", " ").splitlines()
        if line.strip()
    ]


def is_no_code(text: str) -> bool:
    return text.lstrip().startswith(NO_CODE)


@pytest.fixture
def shown_files(tmp_path, monkeypatch):
    """The pages' modules, in the folder that commands are given in."""
    for _, language, text in blocks():
        if language == "python" and (name := re.match(r"# (\w+)\.py\n", text)):
            (tmp_path / f"{name[1]}.py").write_text(text)
    (tmp_path / "my_rewards.py").write_text("from mine import exact\n")
    (tmp_path / "my_module.py").write_text("from my_algorithms import BestOfGroup as MyAlgorithm\n")
    (tmp_path / "mine.jsonl").write_text('{"question": "6 * 7?", "answer": "42"}\n' * 20)
    (tmp_path / "trl.jsonl").write_text('{"prompt": "6 * 7?", "answer": "42"}\n' * 20)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for path in tmp_path.glob("*.py"):
        sys.modules.pop(path.stem, None)


def test_every_block_of_python_is_run_by_the_test_that_is_named():
    assert sorted(
        text.partition("\n")[0] for _, language, text in blocks() if language == "python"
    ) == sorted(PYTHON)
    for place in PYTHON.values():
        file, name = place.split("::")
        assert re.search(
            rf"^(async )?def {name}\(", (Path(__file__).parent / file).read_text(), re.MULTILINE
        ), place


def test_every_other_block_is_commands_output_or_a_drawing():
    assert {language for _, language, _ in blocks()} <= {"", "sh", "python", "text"}
    unknown = [
        (page, command)
        for page, command in commands()
        if not any(
            re.fullmatch(known, command) for known in (OF_THE_LIBRARY, SMOKE, *OTHER_PROGRAMS)
        )
    ]
    assert unknown == []


def test_every_command_of_the_library_is_one_that_its_parser_takes(shown_files):
    read = 0
    for page, command in commands():
        found = OF_THE_LIBRARY.fullmatch(command)
        if found is None:
            continue
        words = shlex.split(found[2], comments=True)
        read += 1
        match found[1]:
            case "train" | "grpo":
                parsed = parse_command(words)
                if parsed.config_name not in (None, "NAME"):
                    load_config(parsed)
            case "export":
                export.parser().parse_args(words)
            case (
                "evaluate" | "report" | "play"
            ):  # test_evaluate_*.py, test_report_*.py, test_play.py
                pass
            case "simulate":
                simulate.parse_options(words)
            case other:
                raise AssertionError(f"{page}: {other} is no command: {command}")
    assert read > 20


def test_the_smoke_of_gpus_is_called_with_options_and_steps_that_it_has():
    found = [words for _, command in commands() if (words := SMOKE.fullmatch(command))]
    assert found
    for words in found:
        gpu_smoke.parser().parse_args(shlex.split(words[1]))
    page = (ROOT / "docs/gpu.md").read_text()
    for words in re.findall(
        r"`scripts/gpu_smoke\.sh ([^`]*)`|`(--only [^`]*)`|`(--minutes [^`]*)`", page
    ):
        gpu_smoke.parser().parse_args(shlex.split(" ".join(words)))
    table = page.partition("| step |")[2].partition("\n\n")[0]
    first_columns = "\n".join(line.split("|")[1] for line in table.splitlines()[2:])
    named = re.findall(r"`([a-z-]+)`", first_columns)
    steps = [name for name in gpu_smoke.STEPS if not name.startswith("learner-")]
    assert sorted(named) == sorted(steps)
    with_engine = [name for name in named if name in gpu_smoke.WITH_ENGINE]
    assert with_engine == gpu_smoke.WITH_ENGINE, "in the order in which they are taken"


def test_the_demonstrations_shown_are_a_task_that_is_checked(shown_files):
    (text,) = [
        text for _, _, text in blocks() if text.startswith("# in a function that makes a config")
    ]
    config = rl_questions_qwen3_debug()
    config.tasks = {}
    exec(text, {"config": config})
    message = {"role": "user", "content": "6 * 7?"}, {"role": "assistant", "content": "42"}
    Path("chats.jsonl").write_text(json.dumps({"messages": message}) + "\n")
    check(config)
    build_tasks(config, read_policy_tokenizer(config))
    assert list(config.tasks) == ["chats"]


def test_the_sums_on_the_way_to_a_real_task_are_trained_as_shown(shown_files, capsys, monkeypatch):
    """tests/integration/test_script.py has a run that a script starts."""
    words = "--module my_sums --config rl_my_sums --dry-run"
    assert ("from_demo_to_real.md", f"rl-train {words}") in commands()
    assert main(words.split()) == 0 and "=<|im_end|>" in capsys.readouterr().out
    started = []
    # The real one changes the import path of this process; tests/integration/test_install.py has it.
    monkeypatch.setitem(sys.modules, "torchtitan_rl", ModuleType("torchtitan_rl"))
    monkeypatch.setattr(script, "train", lambda config, *words: started.append((config, words)))
    importlib.import_module("train_my_sums")
    ((config, words),) = started
    assert words == ("--steps", "5") and list(config.tasks) == ["sums"]


def test_what_other_libraries_words_are_called_here_is_there():
    """Each path of a table's last column is a field, and each class is one of the library's."""
    rows = re.findall(
        r"^\|.*\| (.*?) \|$", (ROOT / "docs/coming_from.md").read_text(), re.MULTILINE
    )
    words = [word for row in rows for word in re.findall(r"`([\w./<>=]+)", row)]
    fields = {path for path, *_ in walk(rl_math_qwen3())}
    paths = [
        word.replace("tasks.NAME", "tasks.math")
        for word in words
        if re.fullmatch(r"[a-z_]+(\.[a-zA-Z_]+)+", word)
    ]
    assert len(paths) > 30
    assert {path for path in paths if not path.endswith(".py")} <= fields
    source = "\n".join(
        path.read_text() for path in (ROOT / "torchtitan/experiments/rl").rglob("*.py")
    )
    classes = {word.partition("(")[0] for word in words if re.fullmatch(r"[A-Z]\w+", word)}
    assert len(classes) > 20 and [name for name in classes if f"class {name}" not in source] == []


def test_every_metric_that_other_libraries_names_lead_to_is_one_that_running_md_explains():
    page = (
        (ROOT / "docs/coming_from.md")
        .read_text()
        .partition("## Metrics by another name")[2]
        .partition("\n## ")[0]
    )
    ours = [
        name
        for row in re.findall(r"^\|.*\| (.*?) \|$", page, re.MULTILINE)
        for name in re.findall(r"`(\w+/[\w./]+)`", row)
    ]
    known = (ROOT / "docs/running.md").read_text()
    assert len(ours) > 12
    for name in ours:
        said = name.replace("TASK", "<task>").replace("NAME", "<name>").removesuffix("...")
        assert said in known or said.replace("truncated_length", "<status>") in known, name


def test_a_reward_function_of_trl_is_wrapped_as_shown(shown_files, monkeypatch):
    module = importlib.import_module("trl_rewards")
    row = {"prompt": "6 * 7?", "answer": "42"}
    assert [module.contains(text, row) for text in ("It is 42.", "It is 41.")] == [1.0, 0.0]
    config = rl_questions_qwen3_debug()
    config.tasks = {"mine": question_task("trl.jsonl", module.contains, template="{prompt}")}
    check(config)
    build_tasks(config, read_policy_tokenizer(config))

    def given(prompts, completions, answer):
        return [(*prompts, *completions, *answer)]

    monkeypatch.setattr(module, "contains_answer", given)
    own_columns = {"completion": "forty-two", "completion_ids": [1]}
    assert module.contains("41", row | own_columns) == ("6 * 7?", "41", "42")


def test_the_reward_of_noise_varies(shown_files):
    letters = importlib.import_module("any_reply").letters
    assert [letters(reply, None) for reply in ("", "a 1!", "ab")] == [0.0, 0.25, 1.0]


def test_every_link_within_the_docs_leads_to_a_page_and_its_heading():
    for page in PAGES:
        for target, anchor in re.findall(
            r"\]\((?!http)([\w./-]*)(?:#([\w-]+))?\)", page.read_text()
        ):
            found = (page.parent / target) if target else page
            assert found.exists(), (page.name, target)
            headings = re.findall(r"^#+ (.*)$", found.read_text(), re.MULTILINE) if anchor else []
            anchors = {
                re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings
            }
            assert not anchor or anchor in anchors, (page.name, target, anchor)


def test_every_file_of_the_repository_that_a_page_names_is_there():
    """Names are relative to the repository or to the library. Names without a folder are not read,
    nor those of runs, whose folder is there where someone has run one."""
    library = ROOT / "torchtitan/experiments/rl"
    folders = [ROOT, library]
    rooms = {path.name for folder in folders for path in folder.iterdir() if path.is_dir()}
    rooms.discard("outputs")
    named = [
        (page, name)
        for page in PAGES
        for name in re.findall(r"`([\w.-]+(?:/[\w.-]+)*/?)[:`]", page.read_text())
        if name.partition("/")[0] in rooms and re.search(r"(/|\.(py|sh|md|txt|toml))$", name)
    ]
    assert len(named) > 100
    missing = [
        (page.name, name)
        for page, name in named
        if not any((folder / name).exists() for folder in folders)
    ]
    assert missing == []


def test_data_of_ones_own_passes_a_dry_run_as_shown(shown_files, capsys):
    own = [
        command
        for page, command in commands()
        if page == "README.md" and re.search(r"rl_mine|mine\.jsonl", command)
    ]
    assert len(own) == 2
    for command in own:
        assert main([*shlex.split(command)[1:], "--dry-run"]) == 0
        assert "6 * 7?" in capsys.readouterr().out
