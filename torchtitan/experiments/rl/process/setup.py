"""Sets up a process of a run: its environment, cores, threads, device and log. No import does any of it.

1. The command calls ``set_up_process`` before it imports a config. So does a script that uses the learner by itself.
2. The command launches each other process with ``launch_environment``, because torch, Monarch and torchtitan read it at their
   first import. In the new process ``set_up_spawned_process`` follows.
3. Each actor calls ``set_up_logging`` when it is made.
"""

import atexit
import contextlib
import ctypes
import errno
import functools
import gc
import io
import json
import locale
import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any, NoReturn

from torchtitan.experiments.rl.compat import monarch
from torchtitan.experiments.rl.errors import ConfigError, users_traceback
from torchtitan.experiments.rl.printable import (
    one_sentence,
    printable,
    printable_json,
    printable_line,
)
from torchtitan.experiments.rl.process.host import (
    Device,
    cores_near,
    cores_on_nodes_of,
    mask_of,
    pci_addresses,
)
from torchtitan.experiments.rl.process.output import print_to, printed_file, tell

ENVIRONMENT = {
    **monarch.ENVIRONMENT,
    # torchtitan asks for it. A process sees its own devices only, and takes the first.
    "LOCAL_RANK": "0",
}
"""Of every process."""
SPAWNED_ENVIRONMENT = {
    # torch's C++ side warns of its memory binding at every start.
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    # vLLM prints some hundred lines on stdout otherwise.
    "VLLM_CONFIGURE_LOGGING": "0",
    # oneDNN keeps a kernel for each batch size that it has met, of up to 1 MB: 1,024 by default. A generator meets new ones at
    # most steps, and makes a kernel in less time than it computes with it.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
    # OpenMP's threads sleep while they wait for each other. By default they spin: where another process has one of the cores,
    # an engine of 135M parameters then took 70 s for replies of 5 s.
    "OMP_WAIT_POLICY": "passive",
}
"""Of the processes the command launches, where the command's own environment does not say otherwise."""
_exit_code: int | None = None
"""Of this process, which ends with it and without Python's finalization; None: Python finalizes it."""
OURS = "torchtitan.experiments.rl"
LOG_BYTES = 64 * 2**20
"""Of one file. What the run needs itself it reads from no log: a resumed run does not cut logs back."""
_FULL = (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT))
_said_full = False


ENDS_THE_RUN = {"ends_the_run": True}
"""``extra`` of the log record of an error that ends the run. The terminal shows only the traceback
of such a record, because the command prints the error as its last line (controller/signals.py)."""
MOST_TRACEBACKS = 20
"""Maximum number of tracebacks of the user's code that a process writes to the terminal."""


class RunFileHandler(RotatingFileHandler):
    """A file that grows to LOG_BYTES, and the one before it, which is named ``<name>.jsonl.1``.

    ``set_up_logging`` knows its handlers by their class: a second call removes what the first one made, and no other.
    """

    _failed = False

    def __init__(self, path: Path, process_name: str):
        # A lone surrogate (half a character, in a model's output) can't be UTF-8; escaped, it stays valid JSON.
        super().__init__(
            path, maxBytes=LOG_BYTES, backupCount=1, encoding="utf-8", errors="backslashreplace"
        )
        self._process_name = process_name

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "process": self._process_name,
            "message": _message(record),
        }
        if record.exc_info:
            line["exception"] = logging.Formatter().formatException(record.exc_info)
        return printable_json(json.dumps(line, ensure_ascii=False))

    def handleError(self, record: logging.LogRecord) -> None:
        """One line on the terminal; Python's own handler would print a traceback for each record."""
        if not self._failed:
            self._failed = True
            line = (
                f"WARNING the log {self.baseFilename} can't be written: {_text(sys.exc_info()[1])}"
            )
            if worth_a_line(line):
                with contextlib.suppress(OSError, ValueError):
                    tell(printable_line(one_sentence(line)))


class NoteHandler(logging.Handler):
    """Tells people what they are to see of the log: a line for each record, and the frames of the
    user's code."""

    def __init__(self, path: Path, process_name: str):
        super().__init__()
        self._path = path
        self._process_name = process_name
        self._shown: set[str] = set()
        """Tracebacks that were told."""
        self.addFilter(worth_a_note)

    def format(self, record: logging.LogRecord) -> str:
        line = f"{record.levelname} {self._process_name}: {one_sentence(_message(record))}"
        if record.exc_info and record.exc_info[0] is not None:
            line += f" ({record.exc_info[0].__name__}: {one_sentence(_text(record.exc_info[1]))}; traceback in {self._path})"
        return printable_line(" ".join(line.split()))

    def emit(self, record: logging.LogRecord) -> None:
        line = self.format(record)
        if not worth_a_line(line):
            return
        lines = [] if hasattr(record, "ends_the_run") else [line]
        try:
            if traceback := self._traceback(record):
                lines.append(traceback)
            if lines:
                tell("\n".join(lines))
        except Exception:
            self.handleError(record)

    def _traceback(self, record: logging.LogRecord) -> str:
        """Return the frames of the user's code behind a record's error, the first time that they are shown."""
        error = record.exc_info[1] if record.exc_info else None
        shown = "" if error is None else printable(users_traceback(monarch.original(error)))
        if not shown or shown in self._shown or len(self._shown) >= MOST_TRACEBACKS:
            return ""
        self._shown.add(shown)
        return shown


def worth_a_line(line: str) -> bool:
    """Not where it says once more that the disk is full: every part of each process meets that. The command says it."""
    global _said_full
    if not any(full in line for full in _FULL):
        return True
    first, _said_full = not _said_full, True
    return first and not printed_file()


def _message(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except (
        Exception
    ):  # arguments that don't fit the format: logging would print a traceback to the terminal
        return f"{record.msg} {record.args}"


def _text(error: BaseException | None) -> str:
    try:
        return str(error)
    except Exception:  # the exception's class may be anyone's
        return "its message can't be read"


def worth_a_note(record: logging.LogRecord) -> bool:
    ours = record.name == "__main__" or record.name == OURS or record.name.startswith(OURS + ".")
    return record.levelno >= (logging.WARNING if ours else logging.ERROR)


def restart_with_utf8() -> None:
    """Start this command again in Python's UTF-8 mode, in the same process, unless text files are UTF-8 here already.

    torch and other libraries open their own files in the locale's encoding, and fail where that is ASCII. Python takes the mode
    by itself for ``LC_ALL=C``, unless PYTHONUTF8 or another locale prevents it.
    """
    if locale.getpreferredencoding(False).lower().replace("-", "") == "utf8":
        return
    os.environ["PYTHONUTF8"] = "1"
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def escape_unencodable_output() -> None:
    """Have stdout and stderr print a character that their encoding lacks as its escape, instead of raising."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a test or a launcher may have put anything there
            stream.reconfigure(errors="backslashreplace")


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """Log nothing and show no Python warning in the block. Before a run has a log file, they would go to the terminal."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


GC_THRESHOLDS = (50_000, 20, 20)
"""Objects made between two garbage collections. By Python's own 700, 10 and 10, collections take a
seventh of the processor time of importing torch, torchtitan and vLLM, which each process does."""


def set_up_process() -> None:
    """Set up the process that starts a run, or a script's own. Variables that are set already stay. May be called again."""
    gc.set_threshold(*GC_THRESHOLDS)
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from torchtitan.experiments.rl.compat.torchtitan import use_cpu_without_accelerator

    use_cpu_without_accelerator()


def add_import_folder(folder: Path) -> None:
    """Import modules from ``folder`` too, in this process and in those it launches."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
        inherited = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = f"{inherited}{os.pathsep}{folder}" if inherited else str(folder)


def launch_environment(
    share: tuple[int, ...], device: Device, gpus: Sequence[str] | None = None
) -> dict[str, str]:
    """What to launch a process with that is to see only ``share``: cores on "cpu", indices of ``visible_gpus`` on "cuda".

    Args:
        gpus: what CUDA_VISIBLE_DEVICES calls each GPU of the process's host. None: it is this host.
    """
    if device == "cpu":
        own = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": str(len(share))}
    elif gpus is not None:
        own = {"CUDA_VISIBLE_DEVICES": ",".join(gpus[index] for index in share)}
    else:
        own = {"CUDA_VISIBLE_DEVICES": mask_of(share)}
    inherited = {
        name: os.environ.get(name, value)
        for name, value in (monarch.ENVIRONMENT | SPAWNED_ENVIRONMENT).items()
    }
    return ENVIRONMENT | inherited | own


def set_up_spawned_process(
    shares: tuple[tuple[int, ...], ...], device: Device, output: str | None = None
) -> None:
    """Set up the new process of rank r for ``shares[r]``, before any actor is made in it.

    On "cpu" it computes with a thread for each core of its share, and stays on their NUMA nodes: a core that another process
    leaves idle runs these threads too. With GPUs it stays on the nodes of those. What it prints goes to the file
    ``<output>.txt``, to ``<output>-<r>.txt`` where ``output`` does not end with a number; None: to where its parent's goes.
    """
    may_end_without_finalizing()
    gc.set_threshold(*GC_THRESHOLDS)
    from monarch.actor import current_rank

    if output is not None:
        print_to(
            Path(f"{output}.txt" if output[-1].isdigit() else f"{output}-{current_rank().rank}.txt")
        )
    import torch

    from torchtitan.experiments.rl.compat.torchstore import use_async_controller
    from torchtitan.experiments.rl.compat.torchtitan import use_cpu_without_accelerator

    ignore_signals_of_the_command()
    if device == "cpu":
        share = shares[current_rank().rank]
        torch.set_num_threads(len(share))
        near = cores_on_nodes_of(share)
    else:
        near = cores_near(pci_addresses())
    if near:
        _stay_on(near)
    use_cpu_without_accelerator()
    # Here, before actors are made in several threads: torchstore's modules import each other in a circle, and two threads that
    # import them at once see half of them.
    use_async_controller()


def set_up_isolated_process() -> None:
    """Set up a child process that runs a user's function. It has no log file: libraries' errors alone reach the terminal."""
    logging.getLogger().setLevel(logging.ERROR)


HTTP_CLIENTS = ("httpx", "httpx2", "openai", "anthropic")
"""Libraries that log every request, or every retry of one: thousands of lines a step."""


def set_up_logging(run_dir: Path | str, process_name: str) -> Path:
    """Send this process's log to `<run_dir>/logs/<process_name>.jsonl`, and return that path.

    The file holds every record from INFO on, Python warnings and exceptions that end a thread included. The terminal
    gets one line each for our warnings and for other libraries' errors; tracebacks stay in the file, but for the frames of the
    user's code, which the terminal shows once. Libraries that print their
    log to the terminal by handlers of their own (vLLM, monarch, torchstore, transformers) lose those handlers, and their
    records go to the same file and terminal.

    A second call replaces what the first one set up. Call it again after importing a library that prints its own log: it then
    removes the handlers that the library has made.
    """
    path = Path(run_dir) / "logs" / f"{process_name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    for logger in [logging.getLogger(), *logging.root.manager.loggerDict.values()]:
        if isinstance(logger, logging.Logger):  # the dict also holds placeholders
            _take_terminal_from(logger)
    for library in HTTP_CLIENTS:
        logging.getLogger(library).setLevel(logging.WARNING)
    root = logging.getLogger()
    for handler in root.handlers[:]:
        if isinstance(handler, (RunFileHandler, NoteHandler)):
            root.removeHandler(handler)
            handler.close()
    for handler in (RunFileHandler(path, process_name), NoteHandler(path, process_name)):
        root.addHandler(handler)
        monarch.keep_messages_as_written(handler)
    root.setLevel(logging.INFO)

    logging.captureWarnings(True)
    threading.excepthook = _log_thread_exception
    return path


def ignore_signals_of_the_command(ignored: bool = True) -> None:
    """A terminal that closes and many schedulers signal every process of a job. The command ends the others, with a checkpoint.

    By libc, because Python's own call works in the main thread alone, and Monarch calls this in another. ``ignored=False``
    before Monarch stops the process: it sends SIGTERM, and SIGKILL only 20 s later.
    """
    libc = ctypes.CDLL(None)
    for number in (signal.SIGTERM, signal.SIGHUP):
        libc.signal(int(number), ctypes.c_void_p(signal.SIG_IGN if ignored else signal.SIG_DFL))


def of_command(*failures: type[Exception]) -> Callable[[Callable[[Any], int]], Callable[..., int]]:
    """Makes a command of ``main``, which gets its words; None: those of this process. Of a ConfigError, and of these failures,
    a line is printed, with the frames of the user's code where it failed there, and the exit code is 2. Of Ctrl-C it is 130.
    """

    known: tuple[type[Exception], ...] = (ConfigError, *failures)

    def wrap(main: Callable[[Any], int]) -> Callable[..., int]:
        @functools.wraps(main)
        def command_of(arguments: Sequence[str] | None = None) -> int:
            escape_unencodable_output()
            try:
                return main(arguments)
            except known as error:
                for line in [
                    f"error: {error}",
                    *getattr(error, "lines", ()),
                    *users_traceback(error).splitlines(),
                ]:
                    print(printable_line(line), file=sys.stderr)
                return 2
            except KeyboardInterrupt:  # a run that has begun takes signals itself
                return 130

        return command_of

    return wrap


def run_command(main: Callable[[], int]) -> NoReturn:
    """This process is the command ``main``: run it, and end with its exit code."""
    restart_with_utf8()
    may_end_without_finalizing()
    code = main()
    end_without_finalizing(code)
    sys.exit(code)


def may_end_without_finalizing() -> None:
    """Call it before anything else asks to be called when the process ends: what is asked for first is called last."""
    atexit.register(_exit_unless_finalizing)


def end_without_finalizing(code: int = 0) -> None:
    """This process is to end once its functions for exit have run. It has called ``may_end_without_finalizing``.

    What Python does after them, for nobody, takes seconds where torch and an engine are loaded.
    """
    global _exit_code
    _exit_code = code


def _exit_unless_finalizing() -> None:
    if _exit_code is not None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(_exit_code)


def _stay_on(cores: tuple[int, ...]) -> None:
    # Linux keeps affinity for each thread. Monarch has started some by now, and calls actors in another one than this.
    for thread in os.listdir("/proc/self/task"):
        try:
            os.sched_setaffinity(int(thread), cores)
        except ProcessLookupError:  # it has ended meanwhile
            pass


def _take_terminal_from(logger: logging.Logger) -> None:
    streams = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    for handler in logger.handlers[:]:
        if type(handler) is logging.StreamHandler and handler.stream in streams:
            logger.removeHandler(handler)
            logger.propagate = True


def _log_thread_exception(args: threading.ExceptHookArgs) -> None:
    if issubclass(
        args.exc_type, SystemExit
    ):  # how a thread ends itself; Python's own hook is silent about it too
        return
    thread = args.thread.name if args.thread is not None else "unknown"
    logging.getLogger(OURS).error(
        "thread %s ended by an exception", thread, exc_info=args.exc_value
    )
