"""Servers of a benchmark do not outlive it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lab.checkout import environment

BENCHMARK = """
import sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from lab.servers.processes import running

folder = Path(sys.argv[1])
SERVER = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)"

def server(name):
    path = folder / name
    return running([sys.executable, "-c", SERVER, str(path)], {}, lambda: path.exists() and path.read_text())

def ask(process):
    process.wait()  # as a request that the server does not answer

def measure():
    with server("one") as one, server("two") as two, ThreadPoolExecutor() as clients:
        asked = [clients.submit(ask, each) for each in (one, two)]
        (folder / "asked").touch()
        [each.result() for each in asked]

if sys.argv[2] == "a thread":
    threading.Thread(target=measure, daemon=True).start()
    time.sleep(600)
measure()
"""


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def wait_until(holds: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_servers_end_with_the_benchmark(number: signal.Signals, tmp_path: Path) -> None:
    """While requests to them are under way, and two run at a time."""
    command = [sys.executable, "-c", BENCHMARK, str(tmp_path), "the main thread"]
    process = subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE)
    try:
        wait_until((tmp_path / "asked").exists)
        servers = [int((tmp_path / name).read_text()) for name in ("one", "two")]
        assert all(map(is_alive, servers))
        if number == signal.SIGINT:  # as a terminal sends it, to all of them
            for pid in servers:
                os.kill(pid, number)
        process.send_signal(number)
        process.communicate(timeout=60)
        assert process.returncode not in (0, -signal.SIGKILL)
        assert not any(map(is_alive, servers))
    finally:
        process.kill()


def test_a_benchmark_in_a_thread_leaves_signals_alone(tmp_path: Path) -> None:
    command = [sys.executable, "-c", BENCHMARK, str(tmp_path), "a thread"]
    process = subprocess.Popen(command, env=environment())
    try:
        wait_until((tmp_path / "asked").exists)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == -signal.SIGTERM  # as without a benchmark
    finally:
        process.kill()
        for name in ("one", "two"):
            os.kill(int((tmp_path / name).read_text()), signal.SIGKILL)
