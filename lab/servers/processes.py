"""Servers that run as processes of their own: started, waited for, ended. Knows no server.

Whoever ends a benchmark by SIGTERM (a job's time limit) ends its servers, too: one that was left behind would keep its
memory, a GPU's above all, and disturb the next measurement.
"""

import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.request import urlopen

from cacheblend.core.errors import InvalidInputError

START_S = 600
END_S = 60
_started = set["subprocess.Popen[Any]"]()


@contextmanager
def running(
    command: Sequence[str], environment: Mapping[str, str], is_ready: Callable[[], bool]
) -> Iterator["subprocess.Popen[Any]"]:
    """Runs a server while the context lasts; its process.

    Args:
        command: that starts it.
        environment: its variables.
        is_ready: it answers.

    Raises:
        InvalidInputError: it ended, or took too long to start; with the end of its output.
    """
    with tempfile.TemporaryFile("w+") as words, _ended_by_sigterm():
        process = subprocess.Popen(command, env=dict(environment), stdout=words, stderr=subprocess.STDOUT)
        _started.add(process)
        try:
            wait_until(is_ready, process, words)
            yield process
        finally:
            process.terminate()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            _started.discard(process)


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """SIGTERM ends the servers at once, so that nobody goes on waiting for their answers, and then this process."""
    if threading.current_thread() is not threading.main_thread():  # only there can signals be taken
        yield
        return

    def leave(number: int, _: object) -> None:
        for process in list(_started):  # threads may start more meanwhile
            process.terminate()
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def wait_until(is_ready: Callable[[], bool], process: "subprocess.Popen[Any]", words: Any) -> None:
    """Returns when a server that was started answers.

    Args:
        is_ready: it answers.
        process: the server's.
        words: the file that its output goes to.

    Raises:
        InvalidInputError: see `running`.
    """
    end = time.monotonic() + START_S
    while not is_ready():
        if process.poll() is not None or time.monotonic() > end:
            words.seek(0)
            raise InvalidInputError(f"the server did not start:\n{words.read()[-3000:]}")
        time.sleep(0.2)


def answers(url: str) -> bool:
    """Something answers there without an error."""
    try:
        with urlopen(url, timeout=5):
            return True
    except OSError:
        return False


def free_port() -> int:
    """A port of the loopback address that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
