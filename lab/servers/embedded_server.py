"""Starts `cacheblend serve` on a free port; a client that times the first tokens it streams."""

import json
import os
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cacheblend.core.errors import InvalidInputError
from lab.servers.failed import count_failed
from lab.servers.processes import START_S, answers, free_port, running

WAITING = "cacheblend_shadow_waiting"


@dataclass(frozen=True)
class Asked:
    """A prompt of token ids, and the spans of its chunks; None: nothing is said of them."""

    ids: list[int]
    spans: list[list[int]] | None


@dataclass(frozen=True)
class Got:
    """The client's time to first token, and the server's report."""

    ttft_s: float
    report: dict[str, Any]


class Client:
    """A client of a server: greedy, streamed."""

    def __init__(self, url: str, model: str, ratio: float) -> None:
        import httpx

        self.url, self._model, self._ratio = url, model, ratio
        self._http = httpx.Client(base_url=url, timeout=START_S)

    def ask(self, asked: Asked, tokens: int, mode: str) -> Got:
        """Sends one request; the time includes making its JSON.

        Raises:
            InvalidInputError: the server did not answer.
        """
        started, first = time.perf_counter(), 0.0
        report: dict[str, Any] = {}
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": asked.ids,
            "max_tokens": tokens,
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
            "cacheblend": {"mode": mode, "recompute_ratio": self._ratio},
        }
        if asked.spans is not None:
            body["cacheblend"]["chunks"] = asked.spans
        with self._http.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                raise InvalidInputError(f"the server answered {answer.status_code}: {answer.read().decode()[:500]}")
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    first = first or time.perf_counter() - started
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise InvalidInputError(f"the server ended the stream: {event['error']['message']}")
                    report = event.get("cacheblend") or report
        return Got(first, report)

    def metric_lines(self) -> list[str]:
        """The server's metrics as it gives them."""
        text: str = self._http.get("/metrics").text
        return text.splitlines()

    def shadow_metrics(self) -> dict[str, float]:
        """The server's metrics of the shadow check, with their labels."""
        found = [line.rsplit(" ", 1) for line in self.metric_lines() if line.startswith("cacheblend_shadow")]
        return {name: float(value) for name, value in found}

    def settle(self) -> None:
        """Returns when no answer waits to be compared."""
        while any(value for name, value in self.shadow_metrics().items() if name.startswith(WAITING)):
            time.sleep(0.1)

    def store(self, chunks: list[list[int]]) -> None:
        """Makes the server compute and store chunks.

        Raises:
            InvalidInputError: the server refused.
        """
        body = {"chunks": [{"token_ids": ids} for ids in chunks]}
        answer = self._http.post("/v1/chunks", json=body)
        if answer.status_code != 200:
            raise InvalidInputError(f"the server answered {answer.status_code}: {answer.text[:500]}")


@contextmanager
def serving(
    folder: Path,
    ratio: float,
    clients: int,
    *,
    shadow: float = 0.0,
    discover: bool = False,
    store: str = "memory://?max_bytes=8GiB",
) -> Iterator[Client]:
    """`cacheblend serve` on a free port; stopped at the end, and asked before what failed in it (`servers.failed`).

    Args:
        folder: of the model.
        ratio: recompute ratio.
        clients: requests under way at once.
        shadow: share of the answers that is checked.
        store: its URL.
        discover: text that nobody marked is found, learnt and stored; otherwise requests store nothing.

    Raises:
        InvalidInputError: the server did not start; with the end of its output.
    """
    port = free_port()
    arguments = [sys.executable, "-c", "from cacheblend.cli import main; main()", "serve", "--model", str(folder)]
    arguments += ["--port", str(port), "--store", store, "--active", str(clients)]
    arguments += ["--waiting", "1000", "--ratio", str(ratio), "--no-playground", "--drain", "1"]
    arguments += ["--shadow", str(shadow)]
    arguments += ["--discover", "--capture"] if discover else ["--no-discover", "--no-capture"]
    url = f"http://127.0.0.1:{port}"
    with running(arguments, os.environ, lambda: answers(f"{url}/v1/models")):
        with urllib.request.urlopen(f"{url}/v1/models") as response:
            name = json.loads(response.read())["data"][0]["id"]
        client = Client(url, name, ratio)
        yield client
        count_failed(client.metric_lines())
