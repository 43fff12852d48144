"""How configs name frozen models: what is refused, what is found, and that one path is one mesh."""

import json
from dataclasses import dataclass, field

import pytest

from torchtitan.experiments.rl import config_registry
from torchtitan.experiments.rl.algorithms import OPD, SFT
from torchtitan.experiments.rl.bounds import check_config
from torchtitan.experiments.rl.command.checks import check, plan_run
from torchtitan.experiments.rl.command.command_line import load_config, parse_command
from torchtitan.experiments.rl.command.resume import resolved_config
from torchtitan.experiments.rl.errors import ConfigError, RunError
from torchtitan.experiments.rl.generation.endpoint import FrozenClients
from torchtitan.experiments.rl.generation.references import (
    FrozenModel,
    HostedModel,
    LivePolicy,
    find_references,
    hosted_models,
)
from torchtitan.experiments.rl.generation.vllm.engine import VLLMEngineConfig
from torchtitan.experiments.rl.plan.placement import Place, needed_gpus, place
from torchtitan.experiments.rl.rubrics.rubric import Rubric
from torchtitan.experiments.rl.train import main

URL = "http://localhost:8000/v1"


@dataclass(kw_only=True, slots=True)
class Judged(Rubric.Config):
    judge: HostedModel = field(default_factory=lambda: HostedModel(path="judge"))


def two_tasks(first: HostedModel, second: HostedModel):
    config = config_registry.rl_opd_qwen3_debug()
    config.tasks["sum_digits"].algorithm.teacher = first
    other = config_registry.rl_opd_qwen3_debug().tasks["sum_digits"]
    other.algorithm.teacher = second
    config.tasks["other"] = other
    return config


# ---- refused


REFUSED = {
    "no such port": (
        FrozenModel(name="m", base_url="http://localhost:99999/v1"),
        "t.base_url = .*99999.*server's root",
    ),
    "no name": (FrozenModel(name="", base_url=URL), "t.name = ''.*GET /v1/models"),
    "no scheme": (
        FrozenModel(name="m", base_url="localhost:8000"),
        "t.base_url = 'localhost:8000'.*server's root",
    ),
    "no server": (
        FrozenModel(name="m", base_url=()),
        "t.base_url = .*names no server: want at least one URL",
    ),
    "a list": (FrozenModel(name="m", base_url=[URL]), "t.base_url = .*must be a text or a tuple"),
    "no text": (
        FrozenModel(name="m", base_url=(URL, 8000)),
        r"t.base_url\[1\] = 8000: must be a text",
    ),
    "one wrong": (
        FrozenModel(name="m", base_url=(URL, "gpu7:8000")),
        r"t.base_url\[1\] = 'gpu7:8000'.*server's root",
    ),
    "one twice": (
        FrozenModel(name="m", base_url=(URL, URL + "/")),
        r"t.base_url\[1\] = .*is named twice: name each",
    ),
    "no places": (
        FrozenModel(name="m", base_url=URL, max_concurrency=0),
        "t.max_concurrency = 0: must be at least 1",
    ),
    "negative retries": (FrozenModel(name="m", base_url=URL, max_retries=-1), "t.max_retries = -1"),
    "no time": (
        FrozenModel(name="m", base_url=URL, timeout_s=0),
        "t.timeout_s = 0: must be above 0",
    ),
    "no path": (HostedModel(path=""), "t.path = ''"),
    "no replica": (HostedModel(path="m", replicas=0), "t.replicas = 0: must be at least 1"),
    "no sequences": (
        HostedModel(path="m", engine=VLLMEngineConfig(max_num_seqs=0)),
        "t.engine.max_num_seqs = 0",
    ),
}


@pytest.mark.parametrize("model, message", REFUSED.values(), ids=REFUSED)
def test_a_reference_that_can_not_work_is_refused(model, message):
    with pytest.raises(ConfigError, match=message):
        check_config(model, field="t")


@pytest.mark.parametrize(
    "secret, changes",
    [
        ("sk-abc", dict(api_key_env="sk-abc")),
        ("hunter2", dict(base_url="http://me:hunter2@localhost/v1")),
        ("hunter2", dict(base_url="http://localhost/v1?key=hunter2")),
        ("hunter2", dict(base_url=(URL, "http://me:hunter2@localhost/v1"))),
    ],
)
def test_a_secret_where_none_belongs_is_refused_and_not_repeated(secret, changes):
    with pytest.raises(ConfigError) as error:
        FrozenModel(**(dict(name="m", base_url=URL) | changes)).validate(field="t")
    assert secret not in str(error.value) and "t." in str(error.value)


def test_every_reference_is_checked_wherever_it_is():
    config = config_registry.rl_grpo_qwen3_debug()
    config.tasks["sum_digits"].rubric = Judged(judge=HostedModel(path="judge", replicas=0))
    with pytest.raises(ConfigError, match="tasks.sum_digits.rubric.judge.replicas = 0"):
        check(config)


def test_missing_checkpoints_and_keys_are_refused_before_a_run_and_noted_in_a_plan(
    capsys, monkeypatch, tmp_path
):
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    (tmp_path / "absent.py").write_text(
        "from torchtitan.experiments.rl.config_registry import rl_opd_qwen3_debug\n"
        "from torchtitan.experiments.rl.generation.references import FrozenModel, HostedModel\n"
        "def unhosted():\n"
        "    config = rl_opd_qwen3_debug()\n"
        "    config.tasks['sum_digits'].algorithm.teacher.path = '/nowhere'\n"
        "    return config\n"
        "def keyless():\n"
        "    config = rl_opd_qwen3_debug()\n"
        f"    teacher = FrozenModel(name='m', base_url='{URL}', api_key_env='NO_SUCH_KEY')\n"
        "    config.tasks['sum_digits'].algorithm.teacher = teacher\n"
        "    return config\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for name, message in (
        ("unhosted", "tasks.sum_digits.algorithm.teacher.path = '/nowhere': has no config.json"),
        (
            "keyless",
            "tasks.sum_digits.algorithm.teacher.api_key_env = 'NO_SUCH_KEY': this environment variable is not set",
        ),
    ):
        assert main(["--module", "absent", "--config", name]) == 2
        assert f"error: {message}" in capsys.readouterr().err
        assert main(["--module", "absent", "--config", name, "--dry-run"]) == 0
        assert f"before a run   {message}" in capsys.readouterr().out


WITH_A_SERVER = (
    "from torchtitan.experiments.rl.config_registry import rl_opd_qwen3_debug\n"
    "from torchtitan.experiments.rl.generation.references import FrozenModel\n"
    "def served():\n"
    "    config = rl_opd_qwen3_debug()\n"
    f"    config.tasks['sum_digits'].algorithm.teacher = FrozenModel(name='m', base_url='{URL}')\n"
    "    return config\n"
)


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ([], URL),
        (["http://a/v1"], "http://a/v1"),
        (["http://a/v1", "http://b/v1"], ("http://a/v1", "http://b/v1")),
    ],
)
def test_the_command_line_names_one_server_or_several(config_module, words, wanted):
    name, _ = config_module(WITH_A_SERVER)
    option = ["--tasks.sum-digits.algorithm.teacher.base-url", *words] if words else []
    config = load_config(
        parse_command(["--module", name, "--config", "served", *option, "--steps", "3"])
    )
    teacher = config.tasks["sum_digits"].algorithm.teacher
    assert teacher.base_url == wanted and config.steps == 3
    check_config(teacher, field="teacher")


# ---- found


def test_references_are_found_in_every_corner_of_a_config():
    model = HostedModel(path="a")
    tree = {
        "t": [LivePolicy(), {"x": model}],
        "algorithm": OPD.Config(teacher=model),
        "n": 3,
        "cls": HostedModel,
    }
    assert [(where, reference) for where, reference in find_references(tree, field="tasks")] == [
        ("tasks.t[0]", LivePolicy()),
        ("tasks.t[1].x", model),
        ("tasks.algorithm.teacher", model),
    ]


def test_tasks_that_name_one_path_share_one_mesh_and_must_agree_on_it():
    assert list(hosted_models(two_tasks(HostedModel(path="a"), HostedModel(path="a")).tasks)) == [
        "a"
    ]
    assert list(hosted_models(two_tasks(HostedModel(path="a"), HostedModel(path="b")).tasks)) == [
        "a",
        "b",
    ]
    with pytest.raises(
        ConfigError,
        match="tasks.other.algorithm.teacher.*tasks.sum_digits.algorithm.teacher names the same path",
    ):
        hosted_models(two_tasks(HostedModel(path="a"), HostedModel(path="a", replicas=2)).tasks)


def test_the_plan_counts_the_processes_of_hosted_models():
    config = two_tasks(HostedModel(path="a", replicas=3), HostedModel(path="b"))
    plan = plan_run(config)
    assert plan.processes == 6
    assert (
        "6 on CPU cores: 1 trainer rank(s), 1 generator(s) of 1, 4 for hosted models"
        in plan.lines()[4]
    )


def test_hosted_models_have_gpus_of_their_own_and_share_the_generators_cores():
    hosted = [
        HostedModel(path="a", replicas=2),
        HostedModel(path="b", engine=VLLMEngineConfig(tensor_parallel_degree=2)),
    ]
    config = two_tasks(*hosted)
    config.trainer.ranks, config.generator.engine.tensor_parallel_degree = 2, 2
    placement = place(config, "cuda", hosts=[list(range(9))])
    assert placement.trainer == (Place(0, (0,)), Place(0, (1,))) and placement.generators == (
        Place(0, (2, 3)),
    )
    assert placement.hosted == ((Place(0, (4,)), Place(0, (5,))), (Place(0, (6, 7)),))
    with pytest.raises(
        ConfigError, match="and 2 hosted model.s. the run needs 8 GPUs and this host has 7"
    ):
        place(config, "cuda", hosts=[list(range(7))])
    shared = ((Place(0, (0,)), Place(0, (1,))), (Place(0, (0, 1)),))
    assert place(config, "cpu", hosts=[[0, 1, 2, 3]]).hosted == shared
    config = two_tasks(*hosted)
    assert needed_gpus(config) == 2 + 4


# ---- reached


async def test_equal_references_are_one_client_and_a_model_nobody_named_is_none():
    hosted = HostedModel(path="a")
    clients = FrozenClients({"a": hosted}, lockstep=False)
    endpoint = clients.find(FrozenModel(name="m", base_url=URL))
    assert clients.find(FrozenModel(name="m", base_url=URL)) is endpoint
    assert clients.find(FrozenModel(name="n", base_url=URL)) is not endpoint
    both = clients.find(FrozenModel(name="m", base_url=(URL, "http://other/v1")))
    assert (
        clients.find(FrozenModel(name="m", base_url=(URL, "http://other/v1")))
        is both
        is not endpoint
    )
    assert clients.find(HostedModel(path="a")) is clients.find(hosted)
    with pytest.raises(RunError, match="does not host 'b'"):
        clients.find(HostedModel(path="b"))
    with pytest.raises(RunError, match="LivePolicy is no frozen model"):
        clients.find(LivePolicy())
    await clients.close()


async def test_hosted_scores_wait_their_turn_and_a_dead_mesh_fails_them_all():
    clients = FrozenClients({"a": HostedModel(path="a")}, lockstep=False)
    clients.fail(RunError("a process of the run died"))
    with pytest.raises(RunError, match="hosted model 'a': a process of the run died"):
        await clients.find(HostedModel(path="a")).score([1, 2])
    await clients.close()


# ---- saved


def test_a_saved_config_names_the_keys_variable_and_never_its_value(monkeypatch):
    monkeypatch.setenv("TEACHER_KEY", "sk-very-secret")
    config = SFT.Config(teacher=FrozenModel(name="m", base_url=URL, api_key_env="TEACHER_KEY"))
    saved = json.dumps(resolved_config(config))
    assert "TEACHER_KEY" in saved and "sk-very-secret" not in saved and "FrozenModel" in saved
