"""The client of a frozen model's server, against a server that behaves as told."""

import asyncio
import base64
import json
import logging
import re
import time

import numpy as np
import pytest
from aiohttp import web

from tests.fakes.waiting import until
from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.generation import endpoint
from torchtitan.experiments.rl.generation.endpoint import EndpointClient
from torchtitan.experiments.rl.generation.judge import Reply
from torchtitan.experiments.rl.generation.references import FrozenModel
from torchtitan.experiments.rl.rollouts.costs import counted_in
from torchtitan.experiments.rl.rollouts.policy import SamplingConfig

KEY = "sk-very-secret-0123456789"
FORMS = {
    "whole": lambda key: [key],
    "in two pieces": lambda key: [f"first {key[:12]}", f"and then {key[12:]}"],
    "masked": lambda key: [f"{key[:8]}...{key[-4:]}"],
    "reversed": lambda key: [key[::-1]],
    "spaced": lambda key: [" ".join(key)],
    "in base64": lambda key: [base64.b64encode(key.encode()).decode()],
}
"""In which a server may repeat a key."""


class FakeServer:
    """Answers /v1/completions as vLLM does: token t of a prompt has log-probability -t/10, and sampled are 5, 6 and 7.

    ``answers`` come first, each once: a status, or a body to send as it is. Beside the prompt's own token a position may name
    another one, as vLLM's do.
    """

    def __init__(self):
        self.answers: list[int | dict | str] = []
        self.requests: list[dict] = []
        self.paths: list[str] = []
        self.headers: list[dict] = []
        self.delay_s = 0.0
        self.repeat: str | None = None
        self.open = self.most_open = 0
        self.url = ""
        self.go_on = asyncio.Event()
        """Requests wait for it."""
        self.go_on.set()
        self._port = 0
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        """Listen; at the same port as before, if it has been stopped."""
        app = web.Application()
        for path in ("/v1/completions", "/v1/chat/completions"):
            app.router.add_post(path, self.handle)
        # aiohttp takes 0 for no limit.
        self._runner = web.AppRunner(app, shutdown_timeout=0.01)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self._port).start()
        self._port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self._port}/v1"

    async def stop(self) -> None:
        """Drop every connection, and refuse others."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def handle(self, request: web.Request) -> web.Response:
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        await asyncio.sleep(self.delay_s)
        await self.go_on.wait()
        self.open -= 1
        body = await request.json()
        self.paths.append(request.path)
        self.requests.append(body)
        self.headers.append(dict(request.headers))
        answer = self.answers.pop(0) if self.answers else None
        if isinstance(answer, int):
            return web.Response(
                status=answer,
                text=self.repeat or f"key was {request.headers.get('Authorization')}\nno",
            )
        if answer is not None:
            return web.Response(text=answer if isinstance(answer, str) else json.dumps(answer))
        return web.json_response({"choices": [self.choice(body)]})

    def choice(self, body: dict) -> dict:
        if "prompt_logprobs" in body:
            positions = [
                {"999": {"logprob": 0.0}, str(token): {"logprob": -t / 10}}
                for t, token in enumerate(body["prompt"])
            ]
            return {"prompt_logprobs": [None, *positions[1:]]}
        sampled = [5, 6, 7][: body["max_tokens"]]
        logprobs = {"token_logprobs": [-0.5] * len(sampled)}
        return {
            "token_ids": sampled,
            "logprobs": logprobs,
            "finish_reason": "stop" if len(sampled) == 3 else "length",
        }


@pytest.fixture
async def server():
    fake = FakeServer()
    await fake.start()
    yield fake
    await fake.stop()


@pytest.fixture
async def other():
    """A second server of the same model."""
    fake = FakeServer()
    await fake.start()
    yield fake
    await fake.stop()


@pytest.fixture
async def connect(server):
    clients = []

    def make(**changes) -> EndpointClient:
        settings = {"base_url": server.url, "backoff_s": 0.01, **changes}
        clients.append(EndpointClient(FrozenModel(name="big", **settings)))
        return clients[-1]

    yield make
    for client in clients:
        await client.close()


def tokens(*ids: int) -> np.ndarray:
    return np.array(ids, np.int32)


def session(client, **sampling):
    return client.session(
        rollout_id="r", seed=11, sampling=SamplingConfig(**sampling), stop_token_ids=[2]
    )


# ---- what is asked, and what comes back


async def test_chat_sends_messages_and_reads_the_answer_and_what_it_cost(server, connect):
    answer = {"role": "assistant", "content": "yes", "refusal": None}
    usage = {"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11}
    server.answers = [
        503,
        {"choices": [{"message": answer, "finish_reason": "stop"}], "usage": usage},
    ]
    asked = [{"role": "system", "content": "Judge."}, {"role": "user", "content": "which?"}]
    reply = await connect().chat(
        asked, seed=3, sampling=SamplingConfig(temperature=0.0, max_tokens=4)
    )
    assert reply == Reply(
        message={"role": "assistant", "content": "yes"}, prompt_tokens=9, completion_tokens=2
    )
    assert server.paths == ["/v1/chat/completions"] * 2
    wanted = {
        "model": "big",
        "messages": asked,
        "max_tokens": 4,
        "temperature": 0.0,
        "top_p": 1.0,
        "seed": 3,
    }
    assert server.requests == [wanted] * 2
    for top_k, sent in ((20, {"top_k": 20}), (0, {})):  # 0 and -1 are no limit
        server.answers = [{"choices": [{"message": answer, "finish_reason": "stop"}]}]
        narrow = SamplingConfig(temperature=0.0, max_tokens=4, top_k=top_k)
        await connect().chat(asked, seed=3, sampling=narrow)
        assert server.requests[-1] == wanted | sent
    server.answers = [
        {"choices": [{"message": answer, "finish_reason": "length"}]},
        {"choices": [{"message": {"content": None}}]},
    ]
    cut = await connect().chat(asked, seed=3, sampling=SamplingConfig())
    assert not cut.whole and cut.completion_tokens == 0
    with pytest.raises(RunError, match="'big' at http.*answered without a message of text"):
        await connect().chat(asked, seed=3, sampling=SamplingConfig())


async def test_score_reads_log_probabilities_by_token_id(server, connect):
    logprobs = await connect().score(tokens(8, 9, 999, 4))
    assert logprobs.dtype == np.float32
    np.testing.assert_allclose(logprobs, [0, -0.1, -0.2, -0.3])
    (request,) = server.requests
    assert request == {
        "model": "big",
        "prompt": [8, 9, 999, 4],
        "max_tokens": 1,
        "temperature": 0.0,
        "prompt_logprobs": 0,
    }


async def test_session_sends_tokens_and_gets_tokens_without_a_policy_version(server, connect):
    talk = session(
        connect(), temperature=0.7, top_p=0.9, max_tokens=9, stop=["END"], stop_token_ids=[4]
    )
    completion = await talk.generate(tokens(1, 2, 3), max_tokens=50)
    assert completion.token_ids.tolist() == [5, 6, 7] and completion.logprobs.tolist() == [-0.5] * 3
    assert (
        completion.policy_versions.tolist() == [-1, -1, -1] and completion.finish_reason == "stop"
    )
    assert (completion.token_ids.dtype, completion.logprobs.dtype) == (np.int32, np.float32)
    assert (await talk.generate(tokens(1, 2, 3), max_tokens=2)).finish_reason == "length"
    first, second = server.requests
    assert (first["prompt"], first["max_tokens"], second["max_tokens"]) == ([1, 2, 3], 9, 2)
    assert (first["temperature"], first["top_p"], first["stop_token_ids"]) == (0.7, 0.9, [2, 4])
    assert (first["stop"], first["include_stop_str_in_output"]) == (["END"], True)
    assert first["return_token_ids"] is True and first["seed"] != second["seed"]
    talk.close()


async def test_a_completions_own_seed_is_sent_as_it_is(server, connect):
    talk = session(connect())
    for seed in (7, -1):
        await talk.generate(tokens(1), max_tokens=3, seed=seed)
    assert [request["seed"] for request in server.requests] == [7, 2**63 - 1]


async def test_a_trailing_slash_in_the_url_changes_nothing(server):
    client = EndpointClient(FrozenModel(name="big", base_url=server.url + "/"))
    await client.score(tokens(1, 2))
    await client.close()
    assert len(server.requests) == 1


async def test_no_more_requests_are_in_flight_than_allowed(server, connect):
    server.delay_s = 0.02
    client = connect(max_concurrency=3)
    await asyncio.gather(*(client.score(tokens(1, 2)) for _ in range(12)))
    assert server.most_open == 3 and len(server.requests) == 12


# ---- failures


@pytest.mark.parametrize("failures", [[429], [500], [503, 502, 429]])
async def test_busy_and_failing_servers_are_asked_again(server, connect, failures):
    server.answers = list(failures)
    assert (await connect().score(tokens(1, 2))).tolist() == pytest.approx([0, -0.1])
    assert len(server.requests) == len(failures) + 1


async def test_waits_double_so_a_busy_server_is_left_alone(server, connect, monkeypatch):
    waits, wait_s, server.answers = [], EndpointClient._wait_s, [503] * 4
    monkeypatch.setattr(
        EndpointClient,
        "_wait_s",
        lambda client, attempt: waits.append(wait_s(client, attempt)) or waits[-1],
    )
    started = time.perf_counter()
    await connect(backoff_s=0.05).score(tokens(1, 2))
    assert time.perf_counter() - started >= 0.99 * sum(waits), "they are waited for"
    for wait, longest in zip(waits, [0.05, 0.1, 0.2, 0.4], strict=True):
        assert longest / 2 <= wait <= longest


async def test_after_the_last_retry_the_error_names_model_and_url(server, connect):
    server.answers = [503] * 3
    with pytest.raises(
        RunError,
        match=re.escape(f"frozen model 'big' at {server.url} failed 3 times, last with HTTP 503"),
    ):
        await connect(max_retries=2).score(tokens(1, 2))
    assert len(server.requests) == 3


async def test_a_server_that_is_not_there_is_tried_again_and_named():
    client = EndpointClient(
        FrozenModel(name="big", base_url="http://127.0.0.1:9/v1", max_retries=1, backoff_s=0.01)
    )
    with pytest.raises(
        RunError, match="'big' at http://127.0.0.1:9/v1 failed 2 times, last with ConnectError"
    ):
        await client.score(tokens(1, 2))
    await client.close()


async def test_an_answer_that_is_late_counts_as_a_failed_attempt(server, connect):
    server.delay_s = 0.5
    with pytest.raises(RunError, match="failed 2 times, last with ReadTimeout"):
        await connect(timeout_s=0.05, max_retries=1).score(tokens(1, 2))


@pytest.mark.parametrize("status", [400, 401, 404])
async def test_a_refusal_is_not_repeated(server, connect, status):
    server.answers = [status]
    with pytest.raises(RunError, match=f"'big' at .* refused with HTTP {status}: key was None no"):
        await connect().score(tokens(1, 2))
    assert len(server.requests) == 1


RUBBISH = {
    "no JSON": ("hello", "no completion: hello"),
    "no choice": ({"choices": []}, "no completion"),
    "no logprobs": ({"choices": [{}]}, "without prompt_logprobs of the prompt's length"),
    "too few": ({"choices": [{"prompt_logprobs": [None]}]}, "without prompt_logprobs of the prompt's length"),
    "another token": ({"choices": [{"prompt_logprobs": [None, {"3": {"logprob": -1}}]}]}, "no log-probability of token 2 at"),
}  # fmt: skip


@pytest.mark.parametrize("body, message", RUBBISH.values(), ids=RUBBISH)
async def test_rubbish_is_named_and_never_becomes_a_number(server, connect, body, message):
    server.answers = [body]
    with pytest.raises(RunError, match=message):
        await connect().score(tokens(1, 2))


async def test_a_server_that_returns_text_only_is_named(server, connect):
    server.answers = [{"choices": [{"text": "hi", "finish_reason": "stop"}]}]
    with pytest.raises(
        RunError, match="without token_ids, logprobs and finish_reason: is it a vLLM server"
    ):
        await session(connect()).generate(tokens(1), max_tokens=3)


# ---- several servers


@pytest.fixture
def connect_both(connect, server, other):
    """Gives a client of ``server`` and ``other``. A pause between attempts would never end."""

    def make(**changes) -> EndpointClient:
        return connect(base_url=(server.url, other.url), **{"backoff_s": 1e6, **changes})

    return make


def said_of_servers(caplog) -> list[str]:
    """Return the log's lines about servers that are set aside, or back."""
    return [record.message for record in caplog.records if record.levelno == logging.WARNING]


async def test_servers_are_asked_in_turn(server, other, connect_both):
    client = connect_both()
    for _ in range(6):
        await client.score(tokens(1, 2))
    assert len(server.requests) == len(other.requests) == 3


async def test_a_request_goes_where_fewest_are_in_flight(server, other, connect_both):
    client = connect_both()
    server.go_on.clear()
    slow = asyncio.create_task(client.score(tokens(1, 2)))
    await until(lambda: server.open == 1)
    for _ in range(5):
        await client.score(tokens(1, 2))
    assert len(other.requests) == 5
    server.go_on.set()
    await slow


async def test_requests_of_a_server_that_dies_are_answered_by_the_other(
    server, other, connect_both, caplog
):
    client = connect_both()
    server.go_on.clear()
    other.go_on.clear()
    costs: dict[str, float] = {}
    with counted_in(costs):
        requests = [asyncio.create_task(client.score(tokens(1, 2))) for _ in range(6)]
    await until(lambda: server.open == other.open == 3)
    await server.stop()
    other.go_on.set()
    for logprobs in await asyncio.gather(*requests):
        assert logprobs.tolist() == pytest.approx([0, -0.1])
    for _ in range(4):
        await client.score(tokens(1, 2))
    assert len(other.requests) == 10
    (line,) = said_of_servers(caplog)
    assert line.startswith(
        f"frozen model big: its server {server.url} is set aside, it failed with "
    )
    assert costs == {"frozen/servers_set_aside": 1}


@pytest.mark.parametrize("status", [500, 503])
async def test_a_server_that_fails_is_set_aside_and_the_next_asked_at_once(
    server, other, connect_both, caplog, status
):
    client = connect_both()
    server.answers = [status]
    for _ in range(3):
        await client.score(tokens(1, 2))
    assert (len(server.requests), len(other.requests)) == (1, 3)
    assert f"{server.url} is set aside, it failed with HTTP {status}" in caplog.text


async def test_a_busy_server_is_passed_over_and_not_set_aside(server, other, connect_both, caplog):
    client = connect_both()
    server.answers = [429]
    for _ in range(3):
        await client.score(tokens(1, 2))
    assert (len(server.requests), len(other.requests)) == (2, 2)
    assert said_of_servers(caplog) == []


async def test_where_all_fail_one_line_names_each_with_its_cause(server, other, connect_both):
    server.answers = [503] * 2
    await other.stop()
    with pytest.raises(RunError) as error:
        await connect_both(max_retries=1, backoff_s=0.01).score(tokens(1, 2))
    said = str(error.value)
    start = "frozen model 'big': each of its 2 servers failed 2 times, last "
    assert said.startswith(start) and "\n" not in said
    assert f"{server.url} with HTTP 503" in said and f"{other.url} with ConnectError" in said


async def test_servers_that_are_all_set_aside_are_asked_all_the_same(
    server, other, connect_both, caplog
):
    client = connect_both(max_retries=0)
    server.answers, other.answers = [503], [503]
    with pytest.raises(RunError, match="each of its 2 servers failed 1 times"):
        await client.score(tokens(1, 2))
    assert (await client.score(tokens(1, 2))).tolist() == pytest.approx([0, -0.1])


async def test_a_server_is_tried_again_by_one_request_and_brought_back(
    server, other, connect_both, caplog, monkeypatch
):
    monkeypatch.setattr(endpoint, "SET_ASIDE_S", 0.0)
    client = connect_both()
    await server.stop()
    await client.score(tokens(1, 2))
    await server.start()
    server.go_on.clear()
    costs: dict[str, float] = {}
    with counted_in(costs):
        trial = asyncio.create_task(client.score(tokens(1, 2)))
    await until(lambda: server.open == 1)
    for _ in range(3):
        await client.score(tokens(1, 2))
    assert (len(server.requests), len(other.requests)) == (0, 4), "the others do not wait for it"
    server.go_on.set()
    await trial
    for _ in range(4):
        await client.score(tokens(1, 2))
    assert (len(server.requests), len(other.requests)) == (3, 6)
    aside, back = said_of_servers(caplog)
    assert f"{server.url} is set aside" in aside
    assert back == f"frozen model big: its server {server.url} is back"
    assert costs == {"frozen/servers_back": 1}


async def test_a_trial_that_is_cancelled_leaves_its_place_to_another(
    server, other, connect_both, monkeypatch
):
    monkeypatch.setattr(endpoint, "SET_ASIDE_S", 0.0)
    client = connect_both()
    server.answers = [503]
    await client.score(tokens(1, 2))
    server.go_on.clear()
    trial = asyncio.create_task(client.score(tokens(1, 2)))
    await until(lambda: server.open == 1)
    trial.cancel()
    await asyncio.gather(trial, return_exceptions=True)
    server.go_on.set()
    await client.score(tokens(1, 2))
    assert len(other.requests) == 1


async def test_a_refusal_of_one_server_is_repeated_at_no_other_and_names_it(
    server, other, connect_both
):
    server.answers = [400]
    with pytest.raises(RunError, match=f"'big' at {server.url} refused with HTTP 400"):
        await connect_both().score(tokens(1, 2))
    assert other.requests == []


async def test_an_answer_without_log_probabilities_names_the_server_that_gave_it(
    server, other, connect_both
):
    other.answers = [{"choices": [{}]}]
    client = connect_both()
    await client.score(tokens(1, 2))
    with pytest.raises(RunError, match=f"'big' at {other.url} answered without prompt_logprobs"):
        await client.score(tokens(1, 2))


# ---- the key


async def test_the_key_is_read_at_each_request_and_sent_as_a_bearer(server, connect, monkeypatch):
    client = connect(api_key_env="TEACHER_KEY")
    for key in (KEY, "another"):
        monkeypatch.setenv("TEACHER_KEY", key)
        await client.score(tokens(1, 2))
    assert [headers["Authorization"] for headers in server.headers] == [
        f"Bearer {KEY}",
        "Bearer another",
    ]
    await connect().score(tokens(1, 2))
    assert "Authorization" not in server.headers[-1]


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("status", [None, 401, 503])
async def test_nothing_that_a_server_says_is_shown_where_it_was_sent_a_key(
    server, connect, monkeypatch, caplog, form, status
):
    monkeypatch.setenv("TEACHER_KEY", KEY)
    said = " ".join(form(KEY))
    server.repeat = said
    server.answers = [status or said] * 2  # a refusal, a failure, and what is no JSON
    client = connect(api_key_env="TEACHER_KEY", max_retries=1)
    with caplog.at_level(logging.DEBUG), pytest.raises(RunError) as error:
        await client.score(tokens(1, 2))
    text = caplog.text + repr(client.model) + str(error.value) + repr(vars(client))
    assert not any(piece in text for piece in form(KEY))
    assert str(error.value).startswith("frozen model 'big' at http://127.0.0.1:")
    assert ("HTTP" if status else "no completion: (its words are left out") in str(error.value)


async def test_what_a_server_says_is_shown_where_no_key_is_sent_and_where_a_switch_asks_for_it(
    server, connect, monkeypatch
):
    monkeypatch.setenv("TEACHER_KEY", KEY)
    monkeypatch.setenv("TORCHTITAN_RL_SERVER_TEXT", "1")
    server.answers = [401]
    with pytest.raises(RunError, match=f"refused with HTTP 401: key was Bearer {KEY} no$"):
        await connect(api_key_env="TEACHER_KEY").score(tokens(1, 2))


async def test_a_finish_reason_of_a_servers_own_words_is_not_recorded(server, connect):
    server.answers = [
        {
            "choices": [
                {"token_ids": [5], "logprobs": {"token_logprobs": [-1]}, "finish_reason": KEY}
            ]
        }
    ]
    with pytest.raises(
        RunError, match="answered without token_ids, logprobs and finish_reason"
    ) as error:
        await session(connect()).generate(tokens(1), max_tokens=3)
    assert KEY not in str(error.value)


async def test_a_key_that_is_not_set_is_an_error_that_names_its_variable(
    server, connect, monkeypatch
):
    monkeypatch.delenv("TEACHER_KEY", raising=False)
    with pytest.raises(
        RunError, match="'big' at .* has no key: TEACHER_KEY: this environment variable is not set"
    ):
        await connect(api_key_env="TEACHER_KEY").score(tokens(1, 2))
    assert server.requests == []
