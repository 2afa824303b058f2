"""A Redis server of one's own on a free loopback port, for the tests that need one."""

import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import pytest

from lab.servers.processes import free_port

needs_redis = pytest.mark.skipif(
    shutil.which("redis-server") is None or find_spec("redis") is None,
    reason="needs redis-server (Debian's package of that name) and redis-py",
)


class RedisServer:
    """A server that can be killed and started again on the same port."""

    def __init__(self) -> None:
        self.port = free_port()
        while self.port > 55_000:  # a cluster's nodes talk to each other 10,000 higher
            self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *options: str) -> None:
        command = ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", *options]
        self._process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=tempfile.gettempdir()
        )
        end = time.monotonic() + 30
        while time.monotonic() < end:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.02)
        raise RuntimeError("redis-server did not start within 30 s")

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@contextmanager
def redis_server(*options: str) -> Iterator[RedisServer]:
    """A running server; skips the test where it cannot be."""
    if needs_redis.args[0]:
        pytest.skip(needs_redis.kwargs["reason"])
    server = RedisServer()
    server.start(*options)
    try:
        yield server
    finally:
        server.kill()
