"""What is asked of a server that an option names, and how what is wrong with it is said: one line with option and cure."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from transformers import AutoTokenizer

from torchtitan.experiments.rl.algorithms import OPD
from torchtitan.experiments.rl.command.teachers import check_servers, check_teachers
from torchtitan.experiments.rl.config_registry import (
    TINY_MODEL,
    rl_judge_qwen3_debug,
    rl_opd_qwen3_debug,
)
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.generation.endpoint import PROBE, served_model
from torchtitan.experiments.rl.generation.references import FrozenModel

KEY = "sk-very-secret"


class Server:
    """Answers as told, by path: a status and what the body holds."""

    def __init__(self) -> None:
        tokens = AutoTokenizer.from_pretrained(TINY_MODEL).encode(PROBE, add_special_tokens=False)
        self.answers: dict[str, tuple[int, object]] = {
            "/v1/models": models("tiny"),
            "/tokenize": (200, {"tokens": tokens}),
        }
        self.key: str | None = None
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                status, body = server.answers.get(self.path, (404, {"detail": "Not Found"}))
                if (
                    server.key is not None
                    and self.headers.get("Authorization") != f"Bearer {server.key}"
                ):
                    status, body = 401, {"error": f"not with {self.headers.get('Authorization')}"}
                sent = body.encode() if isinstance(body, str) else json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(sent)))
                self.end_headers()
                self.wfile.write(sent)

            do_POST = do_GET

            def log_message(self, *args: object) -> None: ...

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.root = f"http://127.0.0.1:{self.http.server_port}"

    def stop(self) -> None:
        """Free the port. A thread that still waited for connections would take one more."""
        self.http.shutdown()
        self.http.server_close()


def models(*names: str) -> tuple[int, object]:
    return 200, {"object": "list", "data": [{"id": name} for name in names]}


@contextmanager
def serving() -> Iterator[Server]:
    server = Server()
    thread = threading.Thread(target=server.http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.stop()
    thread.join()


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as server:
        yield server


@pytest.fixture
def other() -> Iterator[Server]:
    """A second server of the same model."""
    with serving() as server:
        yield server


def ask(url: str, **changes):
    return served_model(
        url,
        **{
            "field": "--against",
            "name": None,
            "key_env": None,
            "tokenizer_path": TINY_MODEL,
            **changes,
        },
    )


def refused(url: str, **changes) -> str:
    with pytest.raises(ConfigError) as caught:
        ask(url, **changes)
    assert "\n" not in str(caught.value) and KEY not in str(caught.value)
    return str(caught.value)


def test_the_servers_only_model_needs_no_name(server):
    assert ask(f"{server.root}/v1").name == "tiny" == ask(f"{server.root}/v1/", name="tiny").name


def test_a_model_that_the_server_has_not_is_refused_with_those_it_has(server):
    server.answers["/v1/models"] = models("big", "\x1bsmall")
    assert refused(f"{server.root}/v1", name="tiny").startswith(
        "--endpoint-model = 'tiny': the server at http"
    )
    assert "has 2 models (big, " in refused(f"{server.root}/v1")
    server.answers["/v1/models"] = models()
    assert "it lists no models (HTTP 200" in refused(f"{server.root}/v1")


def test_a_server_without_a_list_is_used_where_its_model_is_named(server):
    """Some have only the paths that a completion needs."""
    server.answers.clear()
    assert ask(f"{server.root}/v1", name="tiny").name == "tiny"


@pytest.mark.parametrize(
    "answer", [(404, "no"), (500, {}), (200, "<html>"), (200, {"data": 3}), (200, [1]), (200, {})]
)
def test_an_address_that_is_no_api_is_refused_with_what_it_answered(server, answer):
    server.answers["/v1/models"] = answer
    message = refused(f"{server.root}/v1")
    assert message.startswith(
        f"--against = '{server.root}/v1': it lists no models (HTTP {answer[0]} at {server.root}/v1/models)"
    )
    assert 'such as "http://localhost:8000/v1"' in message


def test_nobody_there_is_said_as_such(server):
    server.stop()
    assert "no server answers there (ConnectError): start it" in refused(f"{server.root}/v1")


def test_keys_are_sent_and_never_shown(server, monkeypatch):
    server.key = KEY
    assert "it wants a key (HTTP 401): name the environment variable" in refused(
        f"{server.root}/v1"
    )
    monkeypatch.setenv("MINE", KEY[:-1])
    assert "it refuses the key in MINE (HTTP 401)" in refused(f"{server.root}/v1", key_env="MINE")
    monkeypatch.setenv("MINE", KEY)
    assert ask(f"{server.root}/v1", key_env="MINE").api_key() == KEY
    monkeypatch.delenv("MINE")
    assert refused(f"{server.root}/v1", key_env="MINE").startswith(
        "--endpoint-key-env = 'MINE': is not set"
    )
    assert refused(f"{server.root}/v1", key_env=KEY).startswith("--endpoint-key-env = '(hidden)'")
    assert refused(f"http://me:{KEY}@localhost/v1").startswith("--against = '(hidden)'")
    monkeypatch.setenv("MINE", KEY)
    server.answers["/v1/models"] = models(f"first {KEY[:6]}", f"and then {KEY[6:]}")
    assert "the server has 2 models ((its words are left out" in refused(
        f"{server.root}/v1", key_env="MINE"
    )


def test_a_server_with_another_tokenizer_is_refused(server):
    server.answers["/tokenize"] = (200, {"tokens": [1, 2, 3]})
    message = refused(f"{server.root}/v1")
    assert (
        "its model 'tiny' has another tokenizer than" in message
        and "--model.hf-assets-path" in message
    )


@pytest.mark.parametrize("answer", [(404, {}), (200, "?"), (200, {"count": 4}), (500, "down")])
def test_a_server_that_cannot_say_how_it_divides_text_is_used(server, answer):
    server.answers["/tokenize"] = answer
    assert ask(f"{server.root}/v1").name == "tiny"


# ---- several servers


def test_an_option_names_several_servers_with_commas(server, other):
    model = ask(f"{server.root}/v1,{other.root}/v1/")
    assert (model.name, model.urls) == ("tiny", [f"{server.root}/v1", f"{other.root}/v1"])


def test_an_option_whose_servers_differ_is_refused_by_the_one_that_does(server, other):
    both = f"{server.root}/v1,{other.root}/v1"
    other.answers["/tokenize"] = (200, {"tokens": [1, 2, 3]})
    assert refused(both).startswith(
        f"--against = '{other.root}/v1': its model 'tiny' has another tokenizer than"
    )
    other.answers["/v1/models"] = models("big")
    wanted = (
        f"--endpoint-model = 'tiny': the server at {other.root}/v1 has no such model; it has big"
    )
    assert refused(both).startswith(wanted)
    other.stop()
    assert refused(both).startswith(f"--against = '{other.root}/v1': no server answers there")


def config_with_a_teacher(*servers: Server):
    config = rl_opd_qwen3_debug()
    teacher = FrozenModel(name="tiny", base_url=tuple(f"{server.root}/v1" for server in servers))
    config.tasks["sum_digits"].algorithm = OPD.Config(teacher=teacher)
    return config


def config_with_a_judge(*servers: Server):
    config = rl_judge_qwen3_debug()
    (task,) = config.tasks.values()
    urls = tuple(f"{server.root}/v1" for server in servers)
    task.rubric.judge.model = FrozenModel(name="tiny", base_url=urls)
    return config


def test_every_server_of_a_teacher_is_compared_with_the_policys_tokenizer(server, other):
    config = config_with_a_teacher(server, other)
    tokenizer = AutoTokenizer.from_pretrained(config.model.hf_assets_path)
    check_teachers(config, tokenizer, ask_servers=True)
    other.answers["/tokenize"] = (200, {"tokens": [1, 2, 3]})
    with pytest.raises(ConfigError) as caught:
        check_teachers(config, tokenizer, ask_servers=True)
    wanted = f"tasks.sum_digits.algorithm.teacher.base_url = '{other.root}/v1': its model 'tiny' has another tokenizer"
    assert str(caught.value).startswith(wanted)


@pytest.mark.parametrize("config_of", [config_with_a_teacher, config_with_a_judge])
def test_servers_of_one_reference_that_differ_are_refused_by_name(server, other, config_of):
    config = config_of(server, other)
    check_servers(config)
    other.answers["/tokenize"] = (200, {"tokens": [1, 2, 3]})
    shown = rf"base_url\[1\] = '{other.root}/v1': its model 'tiny' has another tokenizer than that of {server.root}/v1"
    with pytest.raises(
        ConfigError,
        match=f"tasks.sum_digits.*{shown}: every server of base_url must serve the same",
    ):
        check_servers(config)
    other.answers["/v1/models"] = models("big")
    with pytest.raises(
        ConfigError, match=r"base_url\[1\] = .*has no model 'tiny'; it has big: every server"
    ):
        check_servers(config)


@pytest.mark.parametrize("answer", [(404, {}), (200, "?"), (500, "down")])
def test_a_server_beside_others_that_cannot_be_asked_is_used(server, other, answer):
    config = config_with_a_judge(other, server)
    other.answers = {"/v1/models": answer, "/tokenize": answer}
    check_servers(config)
    other.stop()
    check_servers(config)


def test_a_single_server_is_not_asked_for_its_models(server):
    server.answers["/v1/models"] = models("big")
    config = config_with_a_judge(server)
    check_servers(config)
