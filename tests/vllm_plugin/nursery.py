"""Imports vLLM once, and runs every program of the tests in a fork of itself: importing takes several times as long as
most of them.

`python` is a stand-in for the interpreter: whatever is started with it (`-m module`, `-c code`, a file) runs in such a
fork with the arguments, environment, folder and open files that it was started with, and so does what a program starts
with its own `sys.executable`: vLLM's engine and ranks. A program ends with its stand-in, and the other way round.

`--job PROGRAM JOB` runs `main(JOB)` of a module beside this one, ends without waiting for vLLM's threads, and writes
what failed in it and was mended beside the job, as `JOB.failed`.
"""

import atexit
import fcntl
import gc
import importlib
import json
import multiprocessing
import os
import runpy
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
import types
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

sys.path.append(str(Path(__file__).parents[1]))

import failing
import vision

MODULES = (
    "vllm.v1.engine.llm_engine",
    "vllm.v1.engine.core",
    "vllm.v1.engine.async_llm",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.executor.multiproc_executor",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.model_loader.default_loader",
    "vllm.entrypoints.launchers.cli_args",
    "vllm.entrypoints.launchers.api_server.entry",
    "vllm.entrypoints.launchers.api_server.routers",
    "compressed_tensors.quantization",
    "transformers.models.llama.modeling_llama",
    "cacheblend.engines.vllm.connector",
    "cacheblend.engines.vllm.scheduler.scheduler",
    "cacheblend.engines.vllm.worker.worker",
)
"""What programs would import first of all; none of them starts a thread or reads the environment of one program."""

ABOVE = 500
"""No program's open files have numbers from here on."""

ENDED, GONE, ASKED, CLOSED = range(4)
"""What happens: a program ended, its stand-in did, one is asked for, all is over. A stand-in that was killed and
started again finds its program ended."""


class Nursery:
    """The programs that run; `asked`: the socket to which stand-ins connect, `python`: their file."""

    def __init__(self, asked: socket.socket, python: str) -> None:
        self._asked, self._python, self._selector = asked, python, selectors.PollSelector()
        self._selector.register(self._asked, selectors.EVENT_READ, (ASKED, 0))
        self._selector.register(sys.stdin, selectors.EVENT_READ, (CLOSED, 0))
        self._running: dict[int, tuple[int, socket.socket]] = {}  # pid: descriptor of its process, stand-in

    def serve(self) -> None:
        """Runs what is asked for until standard input is closed."""
        while True:
            for event, pid in sorted(key.data for key, _ in self._selector.select()):
                if event == ASKED:
                    self._start()
                elif event == CLOSED:
                    for each in list(self._running):
                        self._end(each)
                    return
                elif pid in self._running:
                    self._end(pid)

    def _end(self, pid: int) -> None:
        """Tells a stand-in how its program ended; kills the program, and what it started, if it has not."""
        ended, stand_in = self._running.pop(pid)
        known, status = os.waitpid(pid, os.WNOHANG)
        if not known:
            os.kill(pid, signal.SIGKILL)
            with suppress(ProcessLookupError):  # it has not come so far as to have a group
                os.killpg(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
        with suppress(OSError):
            stand_in.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
        for each in (ended, stand_in):
            self._selector.unregister(each)
        os.close(ended)
        stand_in.close()

    def _start(self) -> None:
        stand_in, _ = self._asked.accept()
        length, files, _, _ = socket.recv_fds(stand_in, 8, 250)
        asked = stand_in.makefile("rb").read(int.from_bytes(length, "big"))
        if len(asked) < max(1, int.from_bytes(length, "big")):  # the stand-in was killed meanwhile
            stand_in.close()
        elif pid := os.fork():
            ended = os.pidfd_open(pid)
            self._running[pid] = ended, stand_in
            self._selector.register(ended, selectors.EVENT_READ, (ENDED, pid))
            self._selector.register(stand_in, selectors.EVENT_READ, (GONE, pid))
            with suppress(OSError):
                stand_in.sendall(f"{pid}\n".encode())
        else:
            os.setsid()
            for key in list(self._selector.get_map().values()):
                os.close(key.fd)
            stand_in.close()
            become(json.loads(asked), files, self._python)
        for file in files:
            os.close(file)


def become(asked: dict[str, Any], files: list[int], executable: str) -> NoReturn:
    """Runs a program in this process, and ends it."""
    moved = [fcntl.fcntl(file, fcntl.F_DUPFD, ABOVE) for file in files]
    for file in files:
        os.close(file)
    for file, number in zip(moved, asked["files"], strict=True):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(asked["environment"])
    os.chdir(asked["folder"])
    sys.executable = executable
    multiprocessing.set_executable(executable)
    gc.unfreeze = lambda: None  # what vLLM does when it ends, and a whole collection takes half a second
    if os.environ.get("TORCH_COMPILE_DISABLE"):
        import torch

        torch.compiler.set_stance("force_eager")
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [path for path in paths if path and path not in sys.path]
    code, arguments = 0, asked["arguments"]
    try:
        if arguments[0] == "--job":
            run_job(*arguments[1:])
        run(arguments)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    with suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def run(arguments: list[str]) -> None:
    """As the interpreter does that is started with these arguments."""
    while arguments[0][0] == "-" and arguments[0] not in ("-m", "-c"):  # options of the interpreter
        arguments = arguments[2 if arguments[0] == "-X" else 1 :]
    what, *others = arguments
    if what == "-m":
        sys.argv = others
        sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(others[0], run_name="__main__", alter_sys=True)
    elif what == "-c":
        sys.argv = ["-c", *others[1:]]
        sys.path.insert(0, str(Path.cwd()))
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(others[0], "<string>", "exec"), main.__dict__)
    else:
        sys.argv = [what, *others]
        sys.path.insert(0, str(Path(what).parent))
        runpy.run_path(what, run_name="__main__")


def run_job(program: str, job: str) -> NoReturn:
    """Does a job and ends the process."""
    code = 0
    try:
        importlib.import_module(program).main(Path(job))
    except BaseException:
        traceback.print_exc()
        code = 1
    failing.write(Path(job + ".failed"))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main() -> None:
    if vision.is_there():
        vision.make_importable()
    from vllm import LLM  # noqa: F401
    from vllm.distributed.device_communicators import shm_broadcast
    from vllm.platforms import current_platform

    for name in MODULES:
        with suppress(ModuleNotFoundError):  # older versions have others
            importlib.import_module(name)
    # vLLM's workers for CPUs put functions in the place of kernels, and look through all modules for these: here they
    # are in place, and what is imported later gets them.
    if hasattr(current_platform, "register_triton_kernel_overrides"):
        current_platform.register_triton_kernel_overrides()
        type(current_platform).register_triton_kernel_overrides = classmethod(lambda _: None)  # type: ignore[method-assign]
    # vLLM's processes look for the next message without a pause for a second behind each: tests run side by side.
    shm_broadcast.sched_yield = lambda: time.sleep(0.0002)
    with suppress(ImportError):  # engines set up hundreds of loggers, unless they are set up alike
        from vllm.config.logging import LoggingConfig
        from vllm.logger import configure_logging

        configure_logging(LoggingConfig())
    failing.observe()
    gc.collect()
    gc.freeze()  # a program's collections, and vLLM asks for several, need not look at what all of them share
    Nursery(socket.socket(fileno=int(sys.argv[1])), sys.argv[2]).serve()
    os._exit(0)


if __name__ == "__main__":
    main()
