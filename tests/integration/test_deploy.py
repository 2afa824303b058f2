"""The command of the base, run as the manifest has it: on the model that ships, with keys, until it is told to end."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cacheblend.serve.keys import add_key
from deployment import Container, containers, needs_kubectl, rendered
from lab.servers.processes import free_port

pytestmark = [needs_kubectl, pytest.mark.slow(3)]
START_S = 300


@dataclass
class Pod:
    """A container's process, and what a cluster knows of it."""

    container: Container
    process: "subprocess.Popen[bytes]"
    url: str
    key: str
    metrics_key: str

    def get(self, path: str, key: str = "", body: Any = None) -> tuple[int, bytes]:
        headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
        data = None if body is None else json.dumps(body).encode()
        try:
            with urllib.request.urlopen(urllib.request.Request(self.url + path, data, headers), timeout=60) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def probe(self, name: str) -> int:
        return self.get(self.container.spec[name]["httpGet"]["path"])[0]


@pytest.fixture(scope="module")
def pod(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pod]:
    """Mounts become folders and the port a free one; all else is the manifest's."""
    root = tmp_path_factory.mktemp("pod")
    server = containers(rendered("base"))["server"]
    for mount in server.spec["volumeMounts"]:
        (root / mount["mountPath"].lstrip("/")).mkdir(parents=True)
    keys = {
        name: add_key(root / f"etc/cacheblend/{name}/keys.json", "alice" if name == "keys" else "prometheus")
        for name in ("keys", "metrics")
    }
    port = free_port()
    arguments = [each.replace("=/etc/", f"={root}/etc/") for each in server.args]
    command = [sys.executable, "-m", "cacheblend", *arguments, f"--port={port}", "--host=127.0.0.1"]
    with (root / "log").open("wb") as log:
        process = subprocess.Popen(command, env={**os.environ, **server.env}, stdout=log, stderr=log)
        made = Pod(server, process, f"http://127.0.0.1:{port}", keys["keys"], keys["metrics"])
        try:
            wait(made, root / "log")
            yield made
        finally:
            process.kill()
            process.wait()


def wait(pod: Pod, log: Path) -> None:
    end = time.monotonic() + START_S
    while True:
        try:
            if pod.probe("startupProbe") == 200:
                return
        except OSError:
            pass
        assert pod.process.poll() is None and time.monotonic() < end, log.read_text()[-2000:]
        time.sleep(0.2)


def test_probes_need_no_key_everything_else_does_and_any_name_of_the_service_is_answered(pod: Pod) -> None:
    assert [pod.probe(name) for name in ("startupProbe", "livenessProbe", "readinessProbe")] == [200, 200, 200]
    assert pod.get("/v1/models")[0] == pod.get("/metrics")[0] == 401
    status, text = pod.get("/metrics", pod.metrics_key)
    assert status == 200 and b"cacheblend_requests_waiting 0.0" in text
    assert pod.get("/v1/models", pod.metrics_key)[0] == pod.get("/metrics", pod.key)[0] == 401
    body = {"model": "nano", "prompt": "Where is the anchor?", "max_tokens": 2}
    status, answer = pod.get("/v1/completions", pod.key, body)
    assert status == 200, answer
    assert json.loads(answer)["usage"]["completion_tokens"] >= 1
    request = urllib.request.Request(f"{pod.url}/v1/models", headers={"host": "cacheblend.default.svc"})
    request.add_header("authorization", f"Bearer {pod.key}")
    with urllib.request.urlopen(request, timeout=60) as answered:
        assert answered.status == 200


def test_it_ends_on_the_signal_of_the_kubelet_before_it_is_killed(pod: Pod) -> None:
    pod.process.send_signal(signal.SIGTERM)
    left = pod.process.wait(pod.container.pod["terminationGracePeriodSeconds"])
    assert left == 0
