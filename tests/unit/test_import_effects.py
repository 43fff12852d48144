"""Importing the library changes nothing in the process, beyond what importing its dependencies does."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.unit.report_runs import small_run

ROOT = Path(__file__).resolve().parents[2]

CODE = r"""
import ast, gc, importlib, json, logging, os, pkgutil, resource, signal, sys, threading, warnings
from pathlib import Path

LIBRARY = "torchtitan.experiments.rl"
folder = Path("torchtitan/experiments/rl")


def imports_at_the_top(file):
    def walk(body):
        for node in body:
            if isinstance(node, ast.Import):
                yield from ((alias.name, None) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield from ((node.module, alias.name) for alias in node.names)
            elif isinstance(node, (ast.If, ast.Try)):
                yield from walk(node.body)
    return walk(ast.parse(file.read_text()).body)


def state():
    loggers = {"root": logging.getLogger()} | {
        name: logger for name, logger in logging.root.manager.loggerDict.items() if isinstance(logger, logging.Logger)
    }
    utils = sys.modules["torchtitan.tools.utils"]
    return {
        "environment": dict(os.environ),
        "loggers": {
            # A logger that gets records by logging.getLogger(name) alone looks like this; ours may be new.
            name: [logger.level, [repr(h) for h in logger.handlers], [repr(f) for f in logger.filters], logger.propagate,
                   logger.disabled]
            for name, logger in loggers.items()
        },
        "logging": [logging.Logger.addHandler.__qualname__, repr(logging.lastResort), logging.root.manager.disable,
                    warnings.showwarning.__module__, logging.getLoggerClass().__name__],
        "signals": {str(number): repr(signal.getsignal(number)) for number in signal.valid_signals()},
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "hooks": [repr(sys.excepthook), repr(threading.excepthook), repr(sys.unraisablehook)],
        "gc": [gc.get_threshold(), gc.get_freeze_count(), gc.isenabled()],
        "cores": sorted(os.sched_getaffinity(0)),
        "limits": [resource.getrlimit(limit) for limit in (resource.RLIMIT_NOFILE, resource.RLIMIT_CORE, resource.RLIMIT_AS)],
        "torch": [torch.get_num_threads(), torch.get_num_interop_threads(), str(torch.get_default_dtype()),
                  torch.is_grad_enabled(), torch.get_float32_matmul_precision()],
        "torchtitan": [utils.device_type, utils.device_module.__name__],
        "torchstore": torchstore.api.Controller.__name__,
        "warnings": len(warnings.filters),
        "path": list(sys.path),
        "folder": os.getcwd(),
    }


for file in sorted(folder.rglob("*.py")):
    for module, name in imports_at_the_top(file):
        if not module.startswith(LIBRARY) and module.partition(".")[0] not in sys.stdlib_module_names:
            imported = importlib.import_module(module)
            if name is not None and not hasattr(imported, name):  # asking imports what is imported lazily
                importlib.import_module(f"{module}.{name}")
import torch, torchstore.api, torchtitan.tools.utils
before = state()
package = importlib.import_module(LIBRARY)
ours = [module.name for module in pkgutil.walk_packages(package.__path__, LIBRARY + ".")]
for name in ours:
    importlib.import_module(name)
after = state()
quiet = [logging.NOTSET, [], [], True, False]
for name, found in list(after["loggers"].items()):
    if name not in before["loggers"] and found == quiet:
        del after["loggers"][name]
changed = {
    what: [before[what], after[what]] if not isinstance(before[what], dict)
    else {key: [before[what].get(key), after[what].get(key)] for key in before[what].keys() | after[what].keys()
          if before[what].get(key) != after[what].get(key)}
    for what in before if before[what] != after[what]
}
print(json.dumps({"imported": ours, "changed": changed, "device": after["torchtitan"]}))
"""


def test_importing_every_module_changes_nothing_in_the_process():
    env = {name: value for name, value in os.environ.items() if not name.startswith("HYPERACTOR_")}
    env |= {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(
        [sys.executable, "-c", CODE], env=env, cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    said = json.loads(result.stdout.splitlines()[-1])
    files = [file.relative_to(ROOT) for file in (ROOT / "torchtitan/experiments/rl").rglob("*.py")]
    modules = {".".join(file.with_suffix("").parts) for file in files if file.name != "__init__.py"}
    assert modules <= set(said["imported"]), "not every module was imported"
    assert said["changed"] == {}
    assert said["device"] == ["cuda", "torch.cuda"], "some import set torchtitan's device"


def test_the_package_itself_imports_no_dependency():
    code = """import sys, torchtitan.experiments.rl
print([name for name in ("torch", "monarch", "torchstore", "vllm") if name in sys.modules])"""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60
    )
    assert result.stdout.strip() == "[]", result.stderr


def test_a_process_imports_no_package_that_it_can_do_without():
    """renderers bring a client of OpenAI's with 500 modules: two seconds of a trainer's start. Those of tasks are optional."""
    code = """import importlib, sys
for module in ("weights.reader", "generation.generator", "training.trainer"):
    importlib.import_module("torchtitan.experiments.rl." + module)
    print(module, [name for name in ("renderers", "openai", "rich") if name in sys.modules])
from torchtitan.experiments.rl import config_registry
assert "torchtitan.experiments.rl.tasks.examples.math" in sys.modules
print("configs", [name for name in ("math_verify", "datasets", "reasoning_gym") if name in sys.modules])"""
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert result.stdout.splitlines()[-4:] == [
        "weights.reader []",
        "generation.generator []",
        "training.trainer []",
        "configs []",
    ], result.stdout + result.stderr


def test_the_report_serves_every_page_without_torch(tmp_path):
    """Its import takes seconds and hundreds of megabytes; a record is arrays and texts."""
    folder = small_run(tmp_path / "run")
    code = """import sys
from torchtitan.experiments.rl.report import main
try:
    main(["--help"])
except SystemExit:
    pass
assert main([sys.argv[1], "--export", sys.argv[1] + "/run.html"]) == 0  # pages, rollouts and tokens
import torchtitan.experiments.rl.tools.report.app
print([name for name in ("torch", "transformers", "renderers", "monarch", "torchtitan.config") if name in sys.modules])"""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "-c", code, str(folder)],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.stdout.splitlines()[-1] == "[]", result.stdout + result.stderr
    assert '"advantages": [0.0, 0.0, 0.0, 0.5, 0.75]' in (folder / "run.html").read_text()
