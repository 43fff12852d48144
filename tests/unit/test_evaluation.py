"""One evaluation of a server's model, from its start to whatever ends it."""

import asyncio
import json
import signal
import sys
from asyncio.subprocess import PIPE
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web
from transformers import AutoTokenizer

from tests.fakes.waiting import until
from torchtitan.experiments.rl.config_registry import TINY_MODEL, rl_grpo_qwen3_debug
from torchtitan.experiments.rl.generation.references import FrozenModel
from torchtitan.experiments.rl.rollouts.recorder import ROLLOUTS_FILE, read_rollouts
from torchtitan.experiments.rl.tools.evaluate import (
    Candidate,
    Evaluation,
    checked_plan,
    evaluated_config,
)

ROOT = Path(__file__).resolve().parents[2]


class Adder:
    """Answers each question with the right sum. Questions of more than ``quick`` digits wait until ``go`` is set."""

    def __init__(self) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)
        self.quick, self.status, self.go = 5, 200, asyncio.Event()
        self.waiting = 0

    async def handle(self, request: web.Request) -> web.Response:
        body = await request.json()
        text = self.tokenizer.decode(body["prompt"])
        digits = text.rpartition("digits: ")[2].partition("<|im_end|>")[0].split()
        if len(digits) > self.quick:
            self.waiting += 1
            await self.go.wait()
        if self.status != 200:
            return web.Response(status=self.status, text="no such \x1b[31mmodel")
        ids = [*self.tokenizer.encode(str(sum(map(int, digits)))), body["stop_token_ids"][0]]
        choice = {
            "token_ids": ids,
            "logprobs": {"token_logprobs": [-0.5] * len(ids)},
            "finish_reason": "stop",
        }
        return web.json_response({"choices": [choice]})


@asynccontextmanager
async def serving(adder: Adder):
    app = web.Application()
    app.router.add_post("/v1/completions", adder.handle)
    app.router.add_get("/v1/models", lambda _: web.json_response({"data": [{"id": "adder"}]}))
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    adder.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    yield adder
    adder.go.set()
    await runner.cleanup()


@pytest.fixture
async def adder():
    async with serving(Adder()) as adder:
        yield adder


def evaluation(adder: Adder, folder, *, examples: int = 16) -> Evaluation:
    config = rl_grpo_qwen3_debug()
    config.validation.examples = examples
    config = evaluated_config(config, tasks=[], attempts=None)
    model = FrozenModel(name="adder", base_url=adder.url, max_retries=0)
    plan, sizes = checked_plan(config, model)
    return Evaluation(Candidate(config, plan, model, folder, sizes))


async def test_a_servers_answers_are_rewarded_and_recorded(adder, tmp_path):
    result = await evaluation(adder, tmp_path).run()
    assert result.metrics["validation/reward"] == 1.0 and result.causes == {}
    assert len(result.examples["sum_digits"]) == 16
    assert len(list(read_rollouts(tmp_path, kind="validation"))) == 16


async def test_an_evaluation_that_is_stopped_keeps_what_was_measured(adder, tmp_path):
    adder.quick = 4
    running = evaluation(adder, tmp_path)
    ended = asyncio.create_task(running.run())
    file = tmp_path / ROLLOUTS_FILE
    await until(lambda: adder.waiting > 0 and file.exists() and file.stat().st_size > 0)
    running.stop()
    result = await ended
    records = list(read_rollouts(tmp_path, kind="validation"))
    assert result.metrics is None and 0 < len(records) == len(result.examples["sum_digits"]) < 16
    assert {record.rollout.reward for record in records} == {1.0}


async def test_where_every_attempt_fails_the_cause_is_kept_and_nothing_becomes_a_number(
    adder, tmp_path, capsys
):
    adder.status = 404
    result = await evaluation(adder, tmp_path).run()
    assert (
        "validation/reward" not in result.metrics
        and result.metrics["validation/sum_digits/failed"] == 16
    )
    cause = result.causes["sum_digits"]
    assert "'adder' at http://127.0.0.1" in cause and "refused with HTTP 404: no such" in cause
    (line,) = capsys.readouterr().err.splitlines()
    assert (
        line.startswith("a rollout failed: ")
        and line.endswith("logs/evaluator.jsonl has all")
        and "\x1b" not in line
    )
    assert [record.rollout.reward for record in read_rollouts(tmp_path, kind="validation")] == [
        None
    ] * 16


async def test_a_token_that_the_model_does_not_have_fails_the_attempt(adder, tmp_path):
    adder.tokenizer.encode = lambda text: [5, 99_999]
    result = await evaluation(adder, tmp_path, examples=2).run()
    assert (
        "a completion has the token id 99999, and the model has 768 ids"
        in result.causes["sum_digits"]
    )


async def start(folder, *words: str) -> asyncio.subprocess.Process:
    """Start the command in a process of its own."""
    command = [sys.executable, "-m", "torchtitan.experiments.rl.evaluate", *words]
    command += ["--config", "rl_grpo_qwen3_debug", "--validation.examples", "6"]
    command += ["--run-dir", str(folder)]
    return await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=PIPE, stderr=PIPE)


async def end(process: asyncio.subprocess.Process) -> tuple[int, str, str]:
    """Wait for a command, and return its exit code and what it printed."""
    async with asyncio.timeout(600):
        out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


async def test_the_command_compares_two_servers_on_the_same_examples(adder, tmp_path):
    async with serving(Adder()) as other:
        words = ("--endpoint", adder.url, "--against", other.url)
        code, out, err = await end(await start(tmp_path / "both", *words, "--json"))
        assert code == 0, err
        result = json.loads(out)
        assert [model["metrics"]["validation/reward"] for model in result["models"]] == [1.0, 1.0]
        assert result["comparison"]["sum_digits"]["difference"] == 0.0
        assert json.loads((tmp_path / "both" / "evaluation.json").read_text()) == result


async def test_a_command_that_is_stopped_says_what_it_has_measured(adder, tmp_path):
    adder.quick = 0
    process = await start(tmp_path / "run", "--endpoint", adder.url)
    await until(lambda: adder.waiting > 0)
    process.send_signal(signal.SIGINT)
    code, out, err = await end(process)
    assert (code, out) == (130, "")
    assert "stopping; once more stops at once" in err
    assert f"stopped: 0 examples of it were measured, recorded in {tmp_path / 'run'}" in err
