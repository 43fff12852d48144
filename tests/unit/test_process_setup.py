"""What a process of a run is set up with, and when: a new process has its environment before anything is imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from monarch.actor import Actor, concurrent_endpoint

from torchtitan.experiments.rl.process.host import cores_on_nodes_of
from torchtitan.experiments.rl.process.setup import (
    launch_environment,
    set_up_process,
)

ROOT = Path(__file__).resolve().parents[2]


class Probe(Actor):
    @concurrent_endpoint
    async def look(self) -> dict:
        import torchtitan.tools.utils as tools

        launched = dict(
            entry.partition("=")[::2]
            for entry in Path("/proc/self/environ").read_text().split("\0")
            if entry
        )
        return {
            "launched": launched,
            "now": dict(os.environ),
            "cores": {
                core
                for thread in os.listdir("/proc/self/task")
                for core in os.sched_getaffinity(int(thread))
            },
            "threads": torch.get_num_threads(),
            "device": tools.device_type,
        }


def looks(name: str, shares: tuple[tuple[int, ...], ...], device: str) -> list[dict]:
    # A process that looks imports this file, and would import the whole library with it: 6 s each.
    from torchtitan.experiments.rl.fleet.spawn import spawn_on
    from torchtitan.experiments.rl.plan.placement import Place

    procs, _ = spawn_on(None, name, [Place(0, share) for share in shares], device)
    try:
        found = procs.spawn(f"probe_{name}", Probe).look.call().get()
        return [look for _, look in sorted(found.items(), key=lambda entry: entry[0].rank)]
    finally:
        procs.stop().get()


COUNTING = """
import os
from pathlib import Path


def recorded(function):
    def call(*arguments):
        with open(os.environ["COUNTS_FILE"], "a") as file:
            file.write(os.environ.get("CUDA_VISIBLE_DEVICES", "no mask") + "\\n")
        return function(*arguments)
    return call


class Patcher:
    def find_spec(self, name, path, target=None):
        if name == "torchtitan":  # the first that asks; torch is whole by then
            import torch
            for function in ("is_available", "device_count", "_device_count_nvml"):
                setattr(torch.cuda, function, recorded(getattr(torch.cuda, function)))
            torch.accelerator.is_available = recorded(torch.accelerator.is_available)


import sys
sys.meta_path.insert(0, Patcher())
"""
"""A sitecustomize: in each new process, whoever counts GPUs leaves the mask of that moment in a file."""


def test_a_gpu_process_is_launched_seeing_its_own_gpus_and_no_others(tmp_path, monkeypatch):
    """/proc/self/environ is what the process began with: torch and torchtitan are imported later, and count GPUs then."""
    (tmp_path / "sitecustomize.py").write_text(COUNTING)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    monkeypatch.setenv("COUNTS_FILE", str(tmp_path / "counts"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b,GPU-c,GPU-d")
    before = dict(os.environ)
    launched = [look["launched"] for look in looks("on_gpus", ((1,), (2, 3)), "cuda")]
    assert [environment["CUDA_VISIBLE_DEVICES"] for environment in launched] == [
        "GPU-b",
        "GPU-c,GPU-d",
    ]
    assert dict(os.environ) == before, "the parent's own environment was changed"
    assert set((tmp_path / "counts").read_text().split()) == {"GPU-b", "GPU-c,GPU-d"}, (
        "GPUs were counted without the mask"
    )


def test_a_cpu_process_is_launched_with_its_threads_and_without_gpus_and_set_up_on_its_nodes():
    cores = sorted(os.sched_getaffinity(0))
    shares = ((cores[0],), (cores[-1],), tuple(cores))
    before = dict(os.environ)
    found = looks("on_cores", shares, "cpu")
    for look, share in zip(found, shares, strict=True):
        launched = look["launched"]
        assert launched["CUDA_VISIBLE_DEVICES"] == "" and launched["OMP_NUM_THREADS"] == str(
            len(share)
        )
        assert (
            launched["TORCH_CPP_LOG_LEVEL"] == "ERROR" and launched["VLLM_CONFIGURE_LOGGING"] == "0"
        )
        assert (
            launched["LOCAL_RANK"] == "0"
            and int(launched["HYPERACTOR_CODEC_MAX_FRAME_LENGTH"]) >= 2**40
        )
        assert (look["threads"], look["device"]) == (len(share), "cpu")
        assert look["cores"] == set(cores_on_nodes_of(share))
        assert {name: look["now"][name] for name in launched} == launched, (
            "something changed the environment after the launch"
        )
    assert dict(os.environ) == before


def test_what_the_parents_environment_says_is_kept_and_a_launchers_rank_is_not(monkeypatch):
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "INFO")
    monkeypatch.setenv("HYPERACTOR_CODEC_MAX_FRAME_LENGTH", "123456789")
    monkeypatch.setenv("LOCAL_RANK", "3")
    environment = launch_environment((0, 1), "cpu")
    assert environment["TORCH_CPP_LOG_LEVEL"] == "INFO"
    assert environment["HYPERACTOR_CODEC_MAX_FRAME_LENGTH"] == "123456789"
    assert environment["LOCAL_RANK"] == "0" and environment["OMP_NUM_THREADS"] == "2"


def test_setting_a_process_up_keeps_what_its_environment_says(monkeypatch):
    monkeypatch.setenv("HYPERACTOR_CODEC_MAX_FRAME_LENGTH", "5")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    set_up_process()
    assert (
        os.environ["HYPERACTOR_CODEC_MAX_FRAME_LENGTH"] == "5" and os.environ["LOCAL_RANK"] == "0"
    )


MY_TASKS = """
import torchtitan.models.qwen3, torchtitan.distributed.utils, torchtitan.components.metrics
import monarch.actor
from torchtitan.experiments.rl.config_registry import rl_grpo_qwen3_debug


def mine():
    "A config of my own."
    import atexit, sys
    atexit.register(lambda: print(sorted({m.device_type for n, m in sys.modules.items()
                                          if n.startswith("torchtitan.") and "device_type" in vars(m)}), file=sys.stderr))
    return rl_grpo_qwen3_debug()
"""


@pytest.mark.parametrize(
    "first",
    [
        pytest.param("", marks=pytest.mark.slow),
        "import torchtitan.models.qwen3, torchtitan.distributed.utils; ",
    ],
)
def test_the_command_plans_for_cpu_whatever_a_users_module_imports_first(first, tmp_path):
    (tmp_path / "my_tasks.py").write_text(MY_TASKS)
    code = f"{first}import sys; from torchtitan.experiments.rl.train import main; sys.exit(main(sys.argv[1:]))"
    words = ["--module", "my_tasks", "--config", "mine", "--dry-run"]
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)]),
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = (
        [sys.executable, "-c", code]
        if first
        else [sys.executable, "-m", "torchtitan.experiments.rl.train"]
    )
    result = subprocess.run(
        [*command, *words], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr.splitlines()[-1] == "['cpu']"


def run_python(code: str, folder: Path) -> str:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "-c", code, str(folder)],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_log_leaves_out_a_line_for_every_request(tmp_path):
    code = """
import logging, sys
from torchtitan.experiments.rl.process.logs import set_up_logging
path = set_up_logging(sys.argv[1], "controller")
for library in ("httpx", "httpx2", "openai._base_client", "anthropic._base_client"):
    logging.getLogger(library).info("POST"); logging.getLogger(library).warning("odd")
print(path.read_text().count("POST"), path.read_text().count("odd"))
"""
    assert run_python(code, tmp_path).split() == ["0", "4"]


def test_a_command_ends_with_its_code_after_its_functions_for_exit():
    code = (
        "import atexit, sys\n"
        "from torchtitan.experiments.rl.process.entry import run_command\n"
        "class Dear:\n"
        "    def __del__(self): print('finalized')\n"
        "dear = Dear()\n"
        "def main():\n"
        "    atexit.register(print, 'a function of the user')\n"
        "    sys.stdout.write('kept ')\n"
        "    return 3\n"
        "run_command(main)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert (done.returncode, done.stdout, done.stderr) == (3, "kept a function of the user\n", "")


@pytest.mark.parametrize("stopped", [True, False])
def test_a_process_that_is_stopped_runs_its_functions_for_exit_and_no_finalization(stopped):
    code = (
        "import atexit\n"
        "from torchtitan.experiments.rl.process import finalization\n"
        "finalization.may_end_without_finalizing()\n"
        "atexit.register(print, 'a function of the user')\n"
        "class Dear:\n"
        "    def __del__(self): print('finalized')\n"
        "dear = Dear()\n"
        f"{stopped} and finalization.end_without_finalizing()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["a function of the user"] + (
        [] if stopped else ["finalized"]
    )
