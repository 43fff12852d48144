"""Nothing that a model, an env or a server says acts on a terminal."""

import json
import logging
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan.experiments.rl import train
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.observability.console import Console
from torchtitan.experiments.rl.printable import printable, printable_json, printable_line
from torchtitan.experiments.rl.process.logs import set_up_logging

ACTS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\u200e\u200f\u061c\u2028\u2029\ud800-\udfff]"
)
ATTACK = "\x1b[2J\x1b]0;owned\x07 \x9b31m \u202eevil\u202c \ud83d end"


def test_controls_become_visible_escapes_and_text_stays():
    assert printable("a\x1b[31mb") == r"a\x1b[31mb"
    assert printable("x\x9by\u202ez") == r"x\x9by\u202ez"
    assert printable("half \ud83d") == r"half \ud83d"
    assert printable("naïve 数学 😀\n\tindented") == "naïve 数学 😀\n\tindented"
    assert printable_line("one\ntwo\tthree\x00") == r"one two three\x00"


@given(st.text(st.characters(codec=None, exclude_categories=()), max_size=60))
def test_whatever_the_text_nothing_that_acts_is_left(text):
    assert not ACTS.search(printable(text))
    assert not ACTS.search(printable_line(text)) and "\n" not in printable_line(text)
    printable(text).encode()


@given(st.text(st.characters(codec=None, exclude_categories=()), max_size=60))
def test_json_decodes_to_the_same_text(text):
    safe = printable_json(json.dumps(text, ensure_ascii=False))
    assert json.loads(safe) == text and not ACTS.search(safe)


def test_console_prints_a_configs_words_safely(capsys, tmp_path):
    console = Console()
    console.note(ATTACK)
    console.header(tmp_path, config=ATTACK, model=ATTACK, sizes={ATTACK: ATTACK})
    assert not ACTS.search(capsys.readouterr().out)


@pytest.fixture
def root_logger_put_back():
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def test_log_lines_are_safe_on_the_terminal_and_in_the_file(capsys, tmp_path, root_logger_put_back):
    path = set_up_logging(tmp_path, "controller")
    logging.getLogger("torchtitan.experiments.rl.test").warning("env said %s", ATTACK)
    line = path.read_text(encoding="utf-8").splitlines()[-1]
    assert not ACTS.search(capsys.readouterr().err) and not ACTS.search(line)
    assert json.loads(line)["message"].endswith(
        f"env said {ATTACK}"
    )  # Monarch may name its actor before it


def test_error_lines_of_the_command_are_safe(capsys, monkeypatch):
    def refuse(command):
        raise ConfigError("tasks", ATTACK, "x\x1b[0m")

    monkeypatch.setattr(train, "load_config", refuse)
    assert train.main(["--config", "rl_grpo_qwen3_debug"]) == 2
    assert not ACTS.search(capsys.readouterr().err)
