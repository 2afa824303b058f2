"""Servers that run as processes of their own: started, waited for, ended; and what failed in them meanwhile.

Whoever ends a benchmark by SIGTERM (a job's time limit) ends its servers, too: one that was left behind would keep its
memory, a GPU's above all, and disturb the next measurement.

A server that a benchmark starts is asked what failed when its work is done (`count_failed`), as if all of it had failed
here, since its clients got right answers, later: no benchmark has to remember it, and `ResultOptions.show` reports no
speed with a failed blend in it.
"""

import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.request import urlopen

from cacheblend.core.config import BlendConfig
from cacheblend.core.errors import InvalidInputError
from cacheblend.core.failures import count_failure

START_S = 600
END_S = 60
DEFAULT = BlendConfig().chosen("text")  # what blends models whose tokenizer is known: a shape, without one, gets hkvd
SELECTOR = f"{DEFAULT.selector}:recency={DEFAULT.recency},correction={DEFAULT.correction}"
_started = set["subprocess.Popen[Any]"]()
_FAILED = re.compile(r'(?:vllm:)?cacheblend_failures_total\{.*?reason="([^"]*)".*\} (\S+)')


@contextmanager
def running(
    command: Sequence[str], environment: Mapping[str, str], is_ready: Callable[[], bool]
) -> Iterator["subprocess.Popen[Any]"]:
    """Runs a server while the context lasts; its process."""
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
    """Returns when a server that was started answers; its output goes to the file `words`."""
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


def failed_in(metrics: Iterable[str]) -> Counter[str]:
    """What failed by the lines of a server's metrics, vLLM's or the embedded engine's."""
    found = Counter[str]()
    for line in metrics:
        if (at := _FAILED.match(line)) is not None:
            found[at[1]] += int(float(at[2]))
    return found


def count_failed(metrics: Iterable[str]) -> None:
    for reason, count in failed_in(metrics).items():
        count_failure(reason, count)
